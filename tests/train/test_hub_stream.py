"""Blocks streamed from a data set on the hub, for which a local server stands in."""

import json

import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet

from coca_hf import CocaError, tokens
from coca_hf.train import data
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe
from tests.hub import serving_data_set
from tests.train.corpora import corpus_of, make_corpus, tokens_of
from tests.train.results import log_lines, record

REPO = "somebody/lines"
SEQ_LEN = 20
FILES = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]


def as_parquet(rows, path):
    parquet.write_table(pyarrow.table({"code": rows}), path, row_group_size=2)
    return path.read_bytes()


@pytest.fixture
def hub(texts, tmp_path, monkeypatch):
    """The rows of `digits.jsonl` in two parquet files, in `server.local` and on the server."""
    rows = [json.loads(line)["code"] for line in (texts / "digits.jsonl").read_text().splitlines()]
    (tmp_path / "files").mkdir()
    parts = zip(FILES, (rows[:4], rows[4:]), strict=True)
    files = {name: as_parquet(part, tmp_path / "files" / name) for name, part in parts}
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries
    with serving_data_set(REPO, files, tmp_path, monkeypatch) as server:
        server.local = tmp_path / "files"
        yield server


def test_the_blocks_are_those_of_the_files_on_disk(hub, tiny_tokenizer, tmp_path):
    streamed, local = (
        make_corpus([source], tiny_tokenizer, SEQ_LEN, tmp_path / "prepared", 3).prepare(200)
        for source in (
            Source(path=path, weight=1, column="code") for path in (REPO, str(hub.local))
        )
    )  # several passes
    assert tokens_of(streamed) == tokens_of(local)
    assert torch.equal(streamed.held_out, local.held_out)
    assert any("/resolve/" in path for path in hub.asked)


@pytest.fixture
def recipe_of(recipe_tree, hub, tmp_path):
    """The recipe of one stage of 12 steps, from the hub or from the same files on disk."""

    def recipe_of(path, *settings):
        recipe_tree["data"]["sources"] = [{"path": str(path), "weight": 1, "column": "code"}]
        recipe_tree["data"]["prepared"] = str(tmp_path / "prepared")
        recipe_tree["stages"] = [{"name": "k", "train": ["t_proj"], "max_steps": 12}]
        (tmp_path / "hub.yaml").write_text(yaml.safe_dump(recipe_tree))
        return load_recipe(tmp_path / "hub.yaml", settings)

    return recipe_of


def assert_trained_on_the_files_on_disk(out, recipe_of, hub):
    ours, local = (corpus_of(recipe_of(path)) for path in (REPO, hub.local))
    assert tokens_of(ours.blocks()) == tokens_of(local.prepare(48))
    assert [line["step"] for line in log_lines(out / "1-k")] == [*range(1, 13)]


def test_a_network_that_fails_in_the_middle_is_one_line_and_the_run_continues_at_the_same_commit(
    hub, recipe_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "SHUFFLE_TOKENS", 4 * SEQ_LEN)  # a row is asked for when it is needed
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 100)
    recipe, out = recipe_of(REPO), tmp_path / "out"
    hub.lost = FILES[1]
    with pytest.raises(CocaError) as caught:
        run_recipe(recipe, out)
    assert "somebody/lines: the hub gave nothing after row 3" in str(caught.value)
    assert "with --resume" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("\n", "\\n", "Traceback"))
    assert 0 < len(corpus_of(recipe).blocks()) < 48
    hub.lost = None
    hub.commits["2" * 40] = {FILES[0]: hub.commits["1" * 40][FILES[1]]}
    run_recipe(recipe_of(REPO), out, resume=True)
    assert_trained_on_the_files_on_disk(out, recipe_of, hub)
    (source,) = record(out / "1-k")["stages"][0]["sources"]
    assert (source["on_hub"], source["commit"]) == (True, "1" * 40)


def test_a_hub_that_does_not_answer_is_one_line_and_nothing_is_written(hub, recipe_of, tmp_path):
    hub.commits.clear()
    message = "somebody/lines: no such file here, and not readable as a data set on the hub"
    with pytest.raises(CocaError, match=message):
        run_recipe(recipe_of(REPO), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prepared_blocks_are_trained_on_without_the_hub(hub, recipe_of, tmp_path):
    recipe = recipe_of(REPO)
    corpus_of(recipe).prepare(recipe.num_blocks(1))
    hub.asked.clear()
    hub.commits.clear()
    run_recipe(recipe_of(REPO), tmp_path / "out")
    assert not hub.asked
    assert_trained_on_the_files_on_disk(tmp_path / "out", recipe_of, hub)


def test_a_preparation_is_extended_at_the_commit_that_it_began_at(hub, recipe_of):
    corpus_of(recipe_of(REPO)).prepare(10)
    hub.commits["2" * 40] = {FILES[0]: hub.commits["1" * 40][FILES[1]]}
    prolonged = corpus_of(recipe_of(REPO)).prepare(150)
    local = corpus_of(recipe_of(hub.local)).prepare(150)
    assert tokens_of(prolonged) == tokens_of(local)
