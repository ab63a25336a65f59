"""A source on the hub: what is downloaded, and how repositories without weights are refused."""

import json
import re
import shutil
import tempfile

import huggingface_hub
import pytest
import safetensors.torch
from huggingface_hub import ModelCard

from coca_hf import convert_checkpoint
from coca_hf.models.hub import without_paths
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_weights,
    files_of,
    record_of,
    refuses,
    weights_of,
)
from tests.convert.test_pickle import save_sharded
from tests.convert.test_quantized import quantized_by_bitsandbytes
from tests.hub import serving_commits
from tests.test_card import FRONT_MATTER, TRAINING

REPO, OLD, NEW = "owner/model", "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch, tiny_llama_dir):
    """The hub of this process, whose only repository is `tiny_llama_dir`."""
    files = files_of(tiny_llama_dir)
    commits = {OLD: files, NEW: files}
    cache, tags = tmp_path / "cache", {"v1": OLD}
    with serving_commits(REPO, commits, cache, monkeypatch, tags=tags) as server:
        yield server


def shard(files, name):
    """Rename the weights among `files`, and add an index."""
    names = safetensors.torch.load(files["model.safetensors"])
    files[name] = files.pop("model.safetensors")
    index = {"weight_map": dict.fromkeys(names, name)}
    files["model.safetensors.index.json"] = json.dumps(index).encode()


UNREAD = """
    consolidated.safetensors original/consolidated.00.pth original/tokenizer.model onnx/model.onnx
    onnx/model.safetensors checkpoint-5/model.safetensors pytorch_model.bin model.fp16.safetensors
    onnx/config.json onnx/tokenizer.json tf_model.h5 modeling_evil.py optimizer.pt q4.gguf
"""


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_is_read_is_downloaded(hub, tmp_path, tiny_llama_dir, sharded):
    files = hub.commits[NEW]
    expected = set(files) | {"LICENSE", "additional_chat_templates/rag.jinja"}
    files |= {"LICENSE": b"mine", "additional_chat_templates/rag.jinja": b"rag"}
    files |= dict.fromkeys(UNREAD.split(), b"x")
    if sharded:
        shard(files, "weights[1].safetensors")
        expected |= {"weights[1].safetensors", "model.safetensors.index.json"}
        expected -= {"model.safetensors"}
    record = convert_checkpoint(REPO, tmp_path / "dst")
    assert sorted(hub.downloaded) == sorted(expected)
    assert record["source"] == record["base"]["model"] == REPO
    assert record["source_commit"] == NEW
    convert_checkpoint(tiny_llama_dir, tmp_path / "direct")
    assert_same_weights(tmp_path / "dst", tmp_path / "direct")
    assert (tmp_path / "dst" / "additional_chat_templates" / "rag.jinja").read_bytes() == b"rag"


def test_the_requested_revision_is_converted_and_recorded(hub, tmp_path, converts, refusal):
    hub.commits[OLD] = hub.commits[OLD] | {"LICENSE": b"old"}
    for revision in ("v1", OLD):
        converts(REPO, tmp_path / "dst", "--revision", revision, "--overwrite")
        assert (tmp_path / "dst" / "LICENSE").read_bytes() == b"old"
        assert record_of(tmp_path / "dst")["source_commit"] == OLD
    printed = refusal(REPO, tmp_path / "other", "--revision", "v2")
    assert "owner/model: no such directory, and not on the hub within reach" in printed
    assert "Revision Not Found" in printed


def test_a_coca_model_brings_records_and_its_bases_card_and_licence(hub, tmp_path, tiny_llama_dir):
    base = shutil.copytree(tiny_llama_dir, tmp_path / "base")
    (base / "README.md").write_text(FRONT_MATTER)
    (base / "LICENSE").write_text("Do no harm.")
    made = convert_checkpoint(base, tmp_path / "coca")
    (tmp_path / "coca/training.json").write_text(json.dumps(TRAINING))
    hub.commits[NEW] = files_of(tmp_path / "coca")
    record = convert_checkpoint(REPO, tmp_path / "dst", ntk_length=128)
    assert (record["source"], record["source_format"]) == (REPO, "safetensors, CoCA")
    assert record["base"] == made["base"]
    assert record["base"]["license_name"] == "llama3"
    assert (tmp_path / "dst/LICENSE").read_text() == "Do no harm."
    assert record_of(tmp_path / "dst", "training.json") == without_paths(TRAINING)
    card = ModelCard.load(tmp_path / "dst/README.md")
    assert (card.data.license, card.data.license_name) == ("other", "llama3")
    assert "Tokens seen in CoCA training: 41." in card.text


@pytest.mark.parametrize("sharded", [False, True])
def test_a_dry_run_from_the_hub_downloads_no_weights_and_leaves_the_cache_as_it_is(
    hub, tmp_path, converts, monkeypatch, sharded
):
    files = hub.commits[NEW]
    size = len(files["model.safetensors"])
    if sharded:
        shard(files, "a.safetensors")
    (tmp_path / "real").mkdir()
    (tmp_path / "tmp").symlink_to("real")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    before = files_of(tmp_path)
    plan = convert_checkpoint(REPO, tmp_path / "dst", dry_run=True)
    assert files_of(tmp_path) == before
    assert plan["read"]["files"] == 1
    assert plan["read"]["bytes"] == pytest.approx(size, rel=0.01)
    assert (plan["source_commit"], plan["numbers_checked"]) == (NEW, False)
    printed = converts(REPO, tmp_path / "dst", "--dry-run")
    assert f"{REPO} at commit {NEW}: safetensors" in printed
    assert "not checked           the numbers of the weights, which only the hub has" in printed
    assert " of memory (from the shapes) and an unknown time" in printed

    record = convert_checkpoint(REPO, tmp_path / "dst")
    assert plan["parameters"] == record["parameters"]
    before, hub.downloaded[:] = files_of(tmp_path), []
    plan = convert_checkpoint(REPO, tmp_path / "other", dry_run=True)
    assert plan["numbers_checked"]
    assert hub.downloaded == []
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("head", ["other", "equal"])
def test_a_dry_run_leaves_open_if_the_head_is_tied(hub, tmp_path, tiny_llama_dir, converts, head):
    edited = shutil.copytree(tiny_llama_dir, tmp_path / "edited")
    edit_config(edited, tie_word_embeddings=True)
    if head == "equal":
        embedding = "model.embed_tokens.weight"
        edit_weights(edited, lambda w: w.update({"lm_head.weight": w[embedding].clone()}))
    hub.commits[NEW] = files_of(edited)
    said = "not decided           whether lm_head.weight is the embedding, as tie_word_embeddings"
    assert said in converts(REPO, tmp_path / "dst", "--dry-run")
    convert_checkpoint(REPO, tmp_path / "dst")
    assert ("lm_head.weight" in weights_of(tmp_path / "dst")) is (head == "other")
    assert said not in converts(REPO, tmp_path / "again", "--dry-run")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_dry_run_refuses_four_bits_on_the_hub_whose_headers_have_no_shapes_and_plans_eight(
    hub, tmp_path, tiny_llama_dir, bits
):
    options = {f"load_in_{bits}bit": True}
    quantized = quantized_by_bitsandbytes(tiny_llama_dir, tmp_path / "quantized", **options)
    hub.commits[NEW] |= files_of(quantized)
    if bits == 4:
        message = r"shapes are known once .* run `hf download owner/mod"
        refuses(message, REPO, tmp_path / "dst", dry_run=True)
    else:
        plan = convert_checkpoint(REPO, tmp_path / "dst", dry_run=True)
        convert_checkpoint(REPO, tmp_path / "dst")
        written = weights_of(tmp_path / "dst").values()
        assert plan["written"]["bytes"] == sum(tensor.nbytes for tensor in written)


def test_pickles_on_the_hub_are_downloaded_with_the_flag_alone(hub, tmp_path, tiny_llama_dir):
    directory = tmp_path / "pickles"
    directory.mkdir()
    save_sharded(directory, weights_of(tiny_llama_dir))
    del hub.commits[NEW]["model.safetensors"]
    hub.commits[NEW] |= files_of(directory)
    for options in ({}, {"allow_pickle": True, "dry_run": True}):
        message = "pass --allow-pickle" if not options else "run `hf download owner/model` first"
        refuses(message, REPO, tmp_path / "dst", **options)
        assert not {name for name in hub.downloaded if name.endswith(".bin")}
    convert_checkpoint(REPO, tmp_path / "dst", allow_pickle=True)
    assert {"pytorch_model-1.bin", "pytorch_model-2.bin"} < set(hub.downloaded)
    convert_checkpoint(tiny_llama_dir, tmp_path / "direct")
    assert_same_weights(tmp_path / "dst", tmp_path / "direct")


def test_earlier_downloads_suffice_without_the_hub(hub, tmp_path, monkeypatch):
    convert_checkpoint(REPO, tmp_path / "dst")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    convert_checkpoint(REPO, tmp_path / "again")
    assert_same_weights(tmp_path / "dst", tmp_path / "again")


@pytest.mark.parametrize("lacks", ["tokenizer_config.json", "conversion.json"])
def test_a_cache_that_has_the_model_alone_is_refused_without_the_hub(
    hub, tmp_path, monkeypatch, tiny_llama_dir, lacks
):
    if lacks == "conversion.json":
        convert_checkpoint(tiny_llama_dir, tmp_path / "coca")
        hub.commits[NEW] = files_of(tmp_path / "coca")
    options = {"ntk_length": 128} if lacks == "conversion.json" else {}
    for name in hub.commits[NEW]:  # as from_pretrained does
        if not name.startswith(lacks.partition("_")[0]):
            huggingface_hub.hf_hub_download(REPO, name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = (
        f"got no {lacks} in its cache, and the hub does not answer; run `hf download owner/mod"
    )
    refuses(message, REPO, tmp_path / "dst", **options)
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    convert_checkpoint(snapshot, tmp_path / "dst", **options)


def test_a_snapshot_in_the_cache_is_not_overwritten(hub, tmp_path):
    convert_checkpoint(REPO, tmp_path / "dst")
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    refuses("is the source itself or holds it", REPO, snapshot, overwrite=True)


REPOSITORIES = {
    "got only pickled weights (pytorch_model.bin)": ["pytorch_model.bin", "training_args.bin"],
    "got an adapter of owner/base, expected a whole model": ["adapter_model.safetensors"],
    "hf download owner/model q4.gguf --local-dir DIR": ["q4.gguf", "q8.gguf"],
}


@pytest.mark.parametrize("message", REPOSITORIES)
def test_a_repository_without_readable_weights_is_refused_by_what_it_has(hub, tmp_path, message):
    del hub.commits[NEW]["model.safetensors"]
    hub.commits[NEW] |= dict.fromkeys(REPOSITORIES[message], b"x")
    if "adapter" in message:
        hub.commits[NEW]["adapter_config.json"] = b'{"base_model_name_or_path": "owner/base"}'
    refuses(re.escape(message), REPO, tmp_path / "dst")
    assert not {"pytorch_model.bin", "q4.gguf"} & set(hub.downloaded)
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}
