"""Quantized sources: FP8 is read by blocks, and other methods are refused with what to do."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coca_hf import convert_checkpoint
from tests.convert.test_adapter import assert_same_bits
from tests.convert.test_bad_input import edit_config, edit_weights

Q1 = "model.layers.1.self_attn.q_proj.weight"


def quantize_(directory, block, dtype=torch.float32):
    """Write the projections of a checkpoint in FP8. block: rows and columns of a scale, or None."""
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name]
        rows, columns = block or weight.shape
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i, row in enumerate(weight.split(rows)):
            for j, piece in enumerate(row.split(columns, dim=1)):
                scales[i, j] = piece.abs().max() / 448
                piece.div_(scales[i, j])
        weights[name] = weight.to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = (scales if block else scales[0, 0]).to(dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    edit_config(directory, quantization_config=method)
    return directory


@pytest.fixture
def source(tmp_path, tiny_llama_dir):
    return shutil.copytree(tiny_llama_dir, tmp_path / "source")


def dequantized(source, directory):
    """What transformers makes of it, as a plain checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert model.dtype == torch.bfloat16
    shutil.copytree(source, directory)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=...)
    return directory


@pytest.mark.parametrize("block", [[16, 8], None], ids=["blocks", "one scale"])
def test_fp8_converts_to_the_bits_of_the_model_that_transformers_dequantizes(
    source, tmp_path, convert, block
):
    edit_config(source, dtype="bfloat16")
    edit_weights(source, lambda w: w.update({n: t.bfloat16() for n, t in w.items()}))
    code, _ = convert(quantize_(source, block), tmp_path / "dst")
    assert code == 0
    convert_checkpoint(dequantized(source, tmp_path / "plain"), tmp_path / "expected")
    assert_same_bits(tmp_path / "dst", tmp_path / "expected")


def test_blocks_at_the_edge_may_be_smaller_and_scales_in_bfloat16(source, tmp_path):
    """Sizes 48 and 80 in blocks of 32; the numbers are the stored ones times their scale."""
    edit_config(source, dtype="float32")
    quantize_(source, [32, 32], torch.bfloat16)
    record = convert_checkpoint(source, tmp_path / "dst")
    assert (record["source_format"], record["dtype"]) == ("safetensors, FP8", "float32")
    stored = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "dst" / "model.safetensors")
    for name in (Q1, "model.layers.2.mlp.down_proj.weight"):
        weight, scales = stored[name].float(), stored[f"{name}_scale_inv"].float()
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                weight[row, column] *= scales[row // 32, column // 32]
        assert torch.equal(written[name], weight)


def test_a_calibration_of_fp8_is_that_of_the_dequantized_model(source, tmp_path):
    edit_config(source, dtype="bfloat16")
    edit_weights(source, lambda w: w.update({n: t.bfloat16() for n, t in w.items()}))
    quantize_(source, [16, 16])
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {number}\n" for number in range(1000)))
    options = {"calibrate_on": str(text), "calibrate_tokens": 128, "calibrate_block": 32}
    options |= {"calibrate_passes": 2, "device": "cpu"}
    convert_checkpoint(source, tmp_path / "dst", **options)
    plain = dequantized(source, tmp_path / "plain")
    convert_checkpoint(plain, tmp_path / "expected", **options)
    assert_same_bits(tmp_path / "dst", tmp_path / "expected")


REFUSED = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4},
        "quantized by gptq, expected plain ones, or FP8 with a scale for each block; convert the "
        "checkpoint that it was quantized from, and quantize the result",
    ),
    "awq": ({"quant_method": "awq"}, "quantized by awq, expected plain ones, or FP8 with a scale "),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "quantized by bitsandbytes, expected plain ones, or FP8 with a scale for each block; load "
        "it with transformers, dequantize it and save it first: AutoModelForCausalLM.from_pre",
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        "quantized by compressed-tensors, expected plain ones, or FP8 with a scale for each block; "
        "convert the checkpoint that it was quantized from",
    ),
    "a block of three": (
        {"quant_method": "fp8", "weight_block_size": [1, 2, 3]},
        "quantized by fp8, expected plain ones, or FP8 with a scale for each block",
    ),
    "a block of nothing": (
        {"quant_method": "fp8", "weight_block_size": [0, 2]},
        "quantized by fp8, expected plain ones, or FP8 with a scale for each block",
    ),
}


@pytest.mark.parametrize(("method", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_another_method_is_refused_with_what_to_do(source, tmp_path, convert, method, message):
    edit_config(source, quantization_config=method)
    code, printed = convert(source, tmp_path / "dst")
    assert (code, printed.count("\n")) == (2, 1)
    assert f"config.json: got weights {message}" in printed


DAMAGE = {
    "no scales": (
        lambda w: w.pop(f"{Q1}_scale_inv"),
        f"tensor {Q1}: got shape (48, 48) and scales of shape None, expected (3, 3)",
    ),
    "other scales": (
        lambda w: w.update({f"{Q1}_scale_inv": torch.ones(2, 3)}),
        f"tensor {Q1}: got shape (48, 48) and scales of shape (2, 3), expected (3, 3)",
    ),
    "a weight of no rows": (
        lambda w: w.update({Q1: torch.empty(0, 48).to(torch.float8_e4m3fn)}),
        f"tensor {Q1}: got shape (0, 48) and scales of shape (3, 3), expected (0, 3)",
    ),
    "scales of bytes": (
        lambda w: w.update({f"{Q1}_scale_inv": torch.ones(3, 3, dtype=torch.uint8)}),
        f"tensor {Q1}_scale_inv has dtype U8, expected one of F64, F32, F16, BF16",
    ),
    "a scale alone": (
        lambda w: w.update({Q1: w[Q1].float()}),
        f"tensor {Q1}_scale_inv is not understood",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_scales_that_do_not_fit_are_one_line_and_exit_code_2(
    source, tmp_path, convert, damage, message
):
    edit_weights(quantize_(source, [16, 16]), damage)
    code, printed = convert(source, tmp_path / "dst")
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
