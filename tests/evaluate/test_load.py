import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config

from coca_hf.errors import CocaError
from coca_hf.evaluate.load import load_subject
from coca_hf.evaluate.rows import subject_settings


@pytest.fixture
def checkpoint(tiny_llama_dir, tmp_path):
    """A copy of the tiny LLaMA to spoil."""
    return shutil.copytree(tiny_llama_dir, tmp_path / "copy")


def test_a_model_is_called_by_its_directory_or_as_asked(checkpoint):
    subject = load_subject(str(checkpoint) + "/")
    assert (subject.name, subject.path, subject.tokens_seen) == ("copy", str(checkpoint), None)
    assert load_subject(str(checkpoint), name="mine").name == "mine"


def test_a_model_on_the_hub_is_that_of_its_revision_and_has_its_commit(checkpoint, tmp_path, monkeypatch):
    """Two commits of one repository, as the hub's cache keeps them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commits = tmp_path / "models--somebody--tiny", {"main": "1" * 40, "step-7": "2" * 40}
    (repo / "refs").mkdir(parents=True)
    for revision, commit in commits.items():
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(checkpoint, repo / "snapshots" / commit)
    later = repo / "snapshots" / commits["step-7"] / "model.safetensors"
    weights = load_file(later)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, later, metadata={"format": "pt"})
    main, step = load_subject("somebody/tiny"), load_subject("somebody/tiny", revision="step-7")
    assert (main.name, main.commit) == ("tiny", commits["main"])
    assert (step.name, step.commit) == ("tiny@step-7", commits["step-7"])
    torch.testing.assert_close(step.model.lm_head.weight, main.model.lm_head.weight + 1)
    assert main.fingerprint != step.fingerprint
    assert subject_settings(step)["model_commit"] == commits["step-7"]


def test_a_revision_of_a_directory_is_refused(checkpoint):
    with pytest.raises(CocaError, match=r"--revision: got 'v1' for the directory .*copy, expected it for a hub id"):
        load_subject(str(checkpoint), revision="v1")
    assert load_subject(str(checkpoint)).commit is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(checkpoint, dtype):
    model = load_subject(str(checkpoint), dtype).model
    assert model.dtype == getattr(torch, dtype)
    assert not model.training
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_fingerprint_changes_with_the_weights_only(checkpoint):
    before = load_subject(str(checkpoint)).fingerprint
    (checkpoint / "rows.jsonl").write_text("{}\n")
    assert load_subject(str(checkpoint)).fingerprint == before
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert load_subject(str(checkpoint)).fingerprint != before


def test_tokens_seen_are_read_from_the_training_record(checkpoint):
    (checkpoint / "conversion.json").write_text("{}")
    assert load_subject(str(checkpoint)).tokens_seen == 0
    (checkpoint / "training.json").write_text(json.dumps({"tokens_seen": 123_904}))
    assert load_subject(str(checkpoint)).tokens_seen == 123_904
    assert load_subject(str(checkpoint)).trained_seq_len is None
    stages = [{"seq_len": 96}, {"seq_len": 160}]
    (checkpoint / "training.json").write_text(json.dumps({"tokens_seen": 123_904, "stages": stages}))
    assert load_subject(str(checkpoint)).trained_seq_len == 160
    for damaged in ('{"tokens": 3}', '{"tokens_seen": 1e999}', "{", "[]", "[" * 9999):
        (checkpoint / "training.json").write_text(damaged)
        with pytest.raises(CocaError, match=r"training\.json: got no whole number under 'tokens_seen'"):
            load_subject(str(checkpoint))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "./nowhere: no such directory, expected a model directory or a hub id"),
        ("nobody/nothing-here", "nobody/nothing-here: no such directory here, and as a hub id it cannot be read"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(path, message):
    with pytest.raises(CocaError, match=message) as error:
        load_subject(path)
    assert "\n" not in str(error.value)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(CocaError, match=r"got no config\.json there"):
        load_subject(str(tmp_path))


@pytest.mark.parametrize("text", ["{", '{"model_type": "nonsense"}'])
def test_a_config_that_cannot_be_read_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CocaError, match=r"copy: its config\.json cannot be read \(") as error:
        load_subject(str(checkpoint))
    assert "\n" not in str(error.value)


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path):
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    with pytest.raises(CocaError, match="got T5ForConditionalGeneration, expected a causal language model"):
        load_subject(str(tmp_path / "t5"))
    bert = BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=30)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(CocaError, match="got BertForMaskedLM, expected a causal language model"):
        load_subject(str(tmp_path / "bert"))


def test_weights_cut_short_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CocaError, match=r"copy: its weights cannot be loaded \(SafetensorError"):
        load_subject(str(checkpoint))


def test_weights_without_a_tensor_are_refused_by_name(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CocaError, match=r"weights without model\.layers\.1\.mlp\.up_proj\.weight \(1 missing in all\)"):
        load_subject(str(checkpoint))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, r"weights with model\.layers\.2\..* \(9 such in all\), which LlamaForCausalLM with"),
        ({"vocab_size": 100}, r"got lm_head\.weight of shape \[259, 48\], expected \[100, 48\] by its config"),
    ],
)
def test_weights_of_another_config_are_refused_by_name(checkpoint, change, message):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CocaError, match=message):
        load_subject(str(checkpoint))


def test_what_old_checkpoints_hold_besides_is_passed_over(checkpoint):
    plain = load_subject(str(checkpoint)).model
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    model = load_subject(str(checkpoint)).model
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_directory_without_tokenizer_is_refused(checkpoint):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CocaError, match=r"got no tokenizer that can be loaded, .* copy tokenizer\.json") as error:
        load_subject(str(checkpoint))
    assert "\n" not in str(error.value)


def test_an_unknown_dtype_is_refused(checkpoint):
    with pytest.raises(CocaError, match="--dtype: got 'int4', expected one of auto, float32, bfloat16, float16"):
        load_subject(str(checkpoint), "int4")
