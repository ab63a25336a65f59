"""Models on the hub (here in its cache): read at one commit, which is recorded."""

import json
import shutil

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from coca_hf.train import model
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.conftest import refused
from tests.train.results import assert_same_weights, changed, record, weights

FIRST, SECOND = "1" * 40, "2" * 40


def change_weights(directory):
    larger = {name: tensor * 1.01 for name, tensor in weights(directory).items()}
    save_file(larger, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def hub(tiny_coca_dir, tiny_llama_dir, tmp_path, monkeypatch):
    """`somebody/coca` and `somebody/llama`; main at FIRST, tag v2 at SECOND with other weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, checkpoint in (("coca", tiny_coca_dir), ("llama", tiny_llama_dir)):
        repository = tmp_path / f"hub/models--somebody--{name}"
        (repository / "refs").mkdir(parents=True)
        for revision, commit in (("main", FIRST), ("v2", SECOND)):
            (repository / "refs" / revision).write_text(commit)
            shutil.copytree(checkpoint, repository / "snapshots" / commit)
        (repository / "snapshots" / FIRST / "LICENSE").write_text("do good")
        change_weights(repository / "snapshots" / SECOND)
    return tmp_path / "hub"


def test_a_model_is_read_at_its_revision_and_keeps_card_and_licence(hub, train, tmp_path):
    for name, commit in (("somebody/coca", FIRST), ("somebody/coca@v2", SECOND)):
        out = tmp_path / commit
        result = train(f"model={name}", out=out)
        inputs = json.loads((out / "inputs.json").read_text())
        assert inputs["hub"] == {"model": f"somebody/coca@{commit}"}
        kept = record(result)
        assert kept["base_model"] == kept["recipe"]["model"] == f"somebody/coca@{commit}"
        theirs = weights(hub / f"models--somebody--coca/snapshots/{commit}")
        assert all("t_proj" in name for name in changed(theirs, weights(result)))
        assert (result / "conversion.json").exists()
        assert "with CoCA" in (result / "README.md").read_text()
        assert (result / "LICENSE").exists() == (commit == FIRST)


def test_everything_that_stages_hand_on_is_fetched_from_the_hub(monkeypatch, tmp_path):
    files = ["config.json", "generation_config.json", "conversion.json", "LICENSE"]
    files += ["tokenizer.model", "tekken.json"]
    fetched = []

    def download(path, revision, allow_patterns):
        names = [*files, "w.safetensors"]
        fetched.extend(filter_repo_objects(names, allow_patterns=allow_patterns))
        return tmp_path / FIRST

    monkeypatch.setattr(model, "snapshot_download", download)
    assert model.located("somebody/else") == (f"somebody/else@{FIRST}", tmp_path / FIRST)
    assert fetched == files


def test_a_branch_that_moves_does_not_change_a_run_that_resumes(hub, recipe_path, tmp_path):
    taught = ["stages.qkv.objective={distill: 1}", "stages.qkv.max_steps=2"]
    recipe = load_recipe(recipe_path, ["model=somebody/coca", "teacher=somebody/llama", *taught])
    run_recipe(recipe, tmp_path / "unmoved", stage="k")
    shutil.copytree(tmp_path / "unmoved", tmp_path / "moved")
    for out in (tmp_path / "unmoved", tmp_path / "moved"):
        run_recipe(recipe, out, stage="qkv", resume=True)
        for name in ("coca", "llama"):
            (hub / f"models--somebody--{name}/refs/main").write_text(SECOND)
    assert_same_weights(tmp_path / "moved/2-qkv", tmp_path / "unmoved/2-qkv")


def test_a_revision_that_is_not_there_is_one_line(hub, recipe_path, tmp_path):
    for key in ("model", "teacher"):
        recipe = load_recipe(recipe_path, [f"{key}=somebody/coca@v3"])
        message = "somebody/coca@v3: cannot be loaded, expected a model directory or hub id"
        refused(message, run_recipe, recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
