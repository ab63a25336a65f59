"""`--log-scale`: the checkpoint's weights and layers stay; every description names it."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM

from coca_hf import CocaLlamaConfig, convert_checkpoint
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from coca_hf.models.attention import log_factor
from tests.convert.checkpoints import assert_same_weights, record_of, refuses
from tests.models.families import tokens


def test_a_coca_checkpoint_gets_a_log_scale_and_keeps_layers(tiny_llama_dir, tmp_path, converts):
    convert_checkpoint(tiny_llama_dir, tmp_path / "coca", "strict", keep_layers=[1])
    printed = converts(tmp_path / "coca", tmp_path / "dst", "--log-scale", "0.3")
    assert "log scale             0.3\n" in printed
    dry = converts(tmp_path / "coca", tmp_path / "dry", "--log-scale", "0.3", "--dry-run")
    assert "log scale             0.3\n" in dry
    assert_same_weights(tmp_path / "coca", tmp_path / "dst")
    before, after = (record_of(tmp_path / name, "config.json") for name in ("coca", "dst"))
    assert after == before | {"coca_log_scale": 0.3}
    record = record_of(tmp_path / "dst", "conversion.json")
    assert record["log_scale"] == 0.3
    assert "log_scale" not in record_of(tmp_path / "coca", "conversion.json")
    assert "- log scale: 0.3\n" in (tmp_path / "dst" / "README.md").read_text()
    described = describe(inspect_checkpoint(tmp_path / "dst"))
    assert "the original's in layers 1; log scale 0.3" in described
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    passed = AutoModelForCausalLM.from_pretrained(tmp_path / "coca", coca_log_scale=0.3)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "coca")
    ids = tokens(1, 80)
    logits = [model(ids).logits[0] for model in (written, passed, plain)]
    assert torch.equal(logits[0], logits[1])
    # one token is the whole context of token 63, and the 65th is the first that is sharpened
    assert torch.equal(logits[0][:64], logits[2][:64])
    assert not torch.allclose(logits[0][64:], logits[2][64:])
    convert_checkpoint(tmp_path / "dst", tmp_path / "off", log_scale=0.0)
    assert record_of(tmp_path / "off", "config.json") == before


def test_the_factor_grows_with_the_logarithm_of_the_tokens_from_64_on():
    found = log_factor(torch.tensor([[0, 63, 127], [1023, 8191, 5]]), 0.05)
    expected = [
        [1, 1, 1 + 0.05 * math.log(2)],
        [1 + 0.05 * math.log(16), 1 + 0.05 * math.log(128), 1],
    ]
    torch.testing.assert_close(found, torch.tensor(expected)[:, None, :, None])


def test_an_original_may_get_one_with_its_conversion(tiny_llama_dir, tmp_path):
    assert convert_checkpoint(tiny_llama_dir, tmp_path / "dst", log_scale=0.1)["log_scale"] == 0.1


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_other_scales_are_refused(value, tiny_llama_dir, tmp_path):
    message = rf"--log-scale: got {value:g}, expected 0 to 1, such as 0\.05"
    refuses(message, tiny_llama_dir, tmp_path / "dst", log_scale=value)
    with pytest.raises(StrictDataclassClassValidationError, match="expected 0 to 1"):
        CocaLlamaConfig(coca_log_scale=value)


def test_calibration_with_one_is_refused(tiny_llama_dir, calibrating, tmp_path):
    """Its fit has no factor, and its positions are not numbers of keys."""
    options = {**calibrating, "log_scale": 0.1}
    refuses("--calibrate: got log scale 0.1", tiny_llama_dir, tmp_path / "dst", **options)


def test_what_is_passed_to_from_pretrained_is_checked(tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "coca")
    for wrong in ({"coca_log_scale": -3.0}, {"coca_content_pairs": 77}):
        with pytest.raises(StrictDataclassClassValidationError):
            AutoModelForCausalLM.from_pretrained(tmp_path / "coca", **wrong)
    with pytest.raises(TypeError, match="coca_log_scal"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "coca", coca_log_scal=0.1)
    assert CocaLlamaConfig(coca_log_scale=0).coca_log_scale == 0
