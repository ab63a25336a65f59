"""`--ntk-length`: static RoPE that equals dynamic NTK at one length."""

import logging
import re
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from coca_hf import CocaError, convert_checkpoint
from coca_hf.evaluate import loaded_model
from coca_hf.models.rotary import ntk_base
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_json,
    record_of,
    refuses,
    save_llama,
)

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0}


def logits(directory, length, **options):
    ids = torch.arange(length)[None] * 37 % 101
    return AutoModelForCausalLM.from_pretrained(directory)(ids, **options).logits


@pytest.mark.parametrize(
    ("constraint", "length", "given"),
    [
        *(("slack", 65, {}), ("strict", 96, {})),
        ("slack", 192, {"original_max_position_embeddings": 32}),
    ],
)
def test_weights_of_coca_stay_and_logits_equal_dynamic_ntk_for_that_length_everywhere(
    tmp_path, constraint, length, given
):
    fields = {"attention_bias": True, "tie_word_embeddings": True}
    save_llama(tmp_path / "src", rope_parameters=DYNAMIC | given, **fields)
    convert_checkpoint(tmp_path / "src", tmp_path / "dynamic", constraint)
    options = {"ntk_length": length, "max_shard_size": "40KB"}
    record = convert_checkpoint(tmp_path / "dynamic", tmp_path / "from-coca", **options)
    assert (record["constraint"], record["source_format"]) == (constraint, "safetensors, CoCA")
    assert "none: all weights are those of the source" in record["start"]["rule"]
    assert len(list((tmp_path / "from-coca").glob("*.safetensors"))) > 2
    assert_same_weights(tmp_path / "dynamic", tmp_path / "from-coca")
    convert_checkpoint(tmp_path / "src", tmp_path / "from-llama", constraint, ntk_length=length)
    expected = logits(tmp_path / "dynamic", length, rope_length=length)
    for name in ("from-coca", "from-llama"):
        error = (logits(tmp_path / name, length) - expected).abs().max()
        assert error < 2e-4 * expected.abs().max()
        trained = given.get("original_max_position_embeddings", 64)
        assert loaded_model.trained_length(AutoConfig.from_pretrained(tmp_path / name)) == trained
    unscaled = logits(tmp_path / "dynamic", length, rope_length=64)
    assert (unscaled - expected).abs().max() > 1e-2 * expected.abs().max()


def test_plain_rope_takes_length_over_trained_length_as_factor(tmp_path):
    save_llama(tmp_path / "src", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    record = convert_checkpoint(tmp_path / "src", tmp_path / "dst", ntk_length=256)
    base = ntk_base(5000.0, 4.0, 256, 64, 8)
    assert record["rope"] == {
        "ntk_length": 256,
        "trained_length": 64,
        "factor": 4.0,
        "rope_theta": {"before": 5000.0, "after": base},
    }
    config = record_of(tmp_path / "dst", "config.json")
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": base,
        "original_max_position_embeddings": 64,
    }
    save_llama(tmp_path / "src-dynamic", rope_parameters=DYNAMIC | {"factor": 4.0})
    convert_checkpoint(tmp_path / "src-dynamic", tmp_path / "dynamic")
    expected = logits(tmp_path / "dynamic", 256, rope_length=256)
    assert (logits(tmp_path / "dst", 256) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_a_plan_and_the_cards_of_later_conversions_name_the_base_and_the_calibration(
    tmp_path, tiny_tokenizer, text, converts
):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    save_llama(tmp_path / "src", rope_parameters=rope, vocab_size=len(tiny_tokenizer))
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    base = "made from 10,000 for 64 by dynamic NTK"
    options = "--calibrate", text, "--calibrate-tokens", "64"
    options += "--calibrate-block", "16", "--calibrate-passes", "1", "--device", "cpu"
    both = *options, "--ntk-length", "128"
    assert base in converts(tmp_path / "src", tmp_path / "plan", "--dry-run", *both)
    assert "all with the base from before; " in converts(tmp_path / "src", tmp_path / "once", *both)
    converts(tmp_path / "src", tmp_path / "calibrated", *options)
    convert_checkpoint(tmp_path / "calibrated", tmp_path / "later", ntk_length=128)
    for name in ("once", "later"):
        card = (tmp_path / name / "README.md").read_text()
        assert "fitted to the original's attention on 64 tokens of text" in card
        assert ("all with the base from before" in card) is (name == "once")
        assert base in card


def test_tokenizer_length_training_record_and_trained_length_come_along(tmp_path, tiny_coca_dir):
    source = shutil.copytree(tiny_coca_dir, tmp_path / "src")
    edit_json(source / "tokenizer_config.json", model_max_length=64)
    (source / "training.json").write_text('{"tokens_seen": 7, "versions": {}}')
    convert_checkpoint(source, tmp_path / "dst", ntk_length=128)
    assert AutoTokenizer.from_pretrained(tmp_path / "dst").model_max_length == 128
    record = record_of(tmp_path / "dst", "training.json")
    assert record == {"tokens_seen": 7, "versions": {}}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert loaded_model.trained_length(model.config) == 64
    ropes = loaded_model.parse_ropes("default")
    assert loaded_model.beyond_trained_warning(model, ropes, [128]) is None
    warning = loaded_model.beyond_trained_warning(model, ropes, [129])
    assert "lengths 129 are beyond the 128 tokens" in warning
    with pytest.raises(CocaError, match="has a RoPE base made for 128 tokens already"):
        loaded_model.check_rope(model, loaded_model.parse_ropes("dynamic:2")[0])


def test_an_export_is_not_baked_again_and_loading_it_warns_of_nothing(
    tmp_path, tiny_coca_dir, monkeypatch
):
    convert_checkpoint(tiny_coca_dir, tmp_path / "dst", ntk_length=128)
    message = "got a checkpoint with an NTK base for 128 tokens already"
    refuses(message, tmp_path / "dst", tmp_path / "twice", ntk_length=256)
    said = []
    monkeypatch.setattr(logging.Logger, "warning", lambda _, text, *rest: said.append(str(text)))
    AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert not any("rope_parameters" in text for text in said)
    LlamaConfig(rope_parameters=record_of(tmp_path / "dst", "config.json")["rope_parameters"])
    assert any("rope_parameters" in text for text in said)


NOT_BAKED = {  # --ntk-length, and what the source has
    "--ntk-length: got 64, expected more than the 64 tokens of training": (64, {}),
    "--ntk-length: got 0, expected the total number of tokens": (0, {}),
    "got 128, whose base is beyond float32; expected fewer tokens, or a smaller factor": (
        128,
        {"rope_parameters": DYNAMIC | {"factor": 1e308}},
    ),
    "whose base is beyond float32": (10**400, {}),
    "got 2 rotary dimensions, expected more than one rotary pair": (128, {"head_dim": 2}),
    "got rope_type 'linear', expected default or dynamic": (
        128,
        {"rope_parameters": DYNAMIC | {"rope_type": "linear"}},
    ),
}


@pytest.mark.parametrize("message", NOT_BAKED)
def test_what_cannot_be_baked_is_refused(tmp_path, message):
    length, fields = NOT_BAKED[message]
    src = save_llama(tmp_path / "src", **fields)
    refuses(re.escape(message), src, tmp_path / "dst", ntk_length=length)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"model_type": "coca_x"}, "got model_type 'coca_x', which this version of coca_hf does"),
        ({"rope_thetas": 5}, "rope_thetas=5 is not understood"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 4}, "is missing (and 8 more); is the checkpoint complete?"),
        ({"num_hidden_layers": 10**9}, "got num_hidden_layers=1000000000, expected no more layers"),
        ({"vocab_size": 2**62}, f"vocab_size is {2**62}, expected at least 1 and below 2^31"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 2}, "config.json makes no model"),
    ],
)
def test_coca_source_that_is_not_understood_is_refused(tmp_path, tiny_coca_dir, damage, message):
    directory = shutil.copytree(tiny_coca_dir, tmp_path / "src")
    edit_config(directory, **damage)
    refuses(re.escape(message), directory, tmp_path / "dst", ntk_length=128)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
