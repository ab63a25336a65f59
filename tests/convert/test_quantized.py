"""FP8 and bitsandbytes sources are dequantized by the weight; other methods are refused."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from coca_hf import CocaError, convert_checkpoint
from tests.convert.checkpoints import assert_same_weights, edit_config, edit_weights, record_of
from tests.convert.test_adapter import make_adapter

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


def dequantized(source, directory):
    """The model that transformers dequantizes, as a plain checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    if getattr(model, "hf_quantizer", None):  # FP8 is dequantized when it is loaded
        model.dequantize()
    assert str(model.dtype) == "torch." + record_of(source, "config.json")["dtype"]
    shutil.copytree(source, directory)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=...)
    return directory


def assert_same_as_dequantized(source, directory, **options):
    """`directory / "dst"` has the weights of the model that transformers dequantizes, converted."""
    plain = dequantized(source, directory / "plain")
    record = convert_checkpoint(plain, directory / "expected", **options)
    assert_same_weights(directory / "dst", directory / "expected")
    return record


@pytest.fixture
def bfloat16_source(source):
    edit_config(source, dtype="bfloat16")
    edit_weights(source, lambda w: w.update({n: t.bfloat16() for n, t in w.items()}))
    return source


@pytest.mark.parametrize("block", [[16, 8], None], ids=["blocks", "one scale"])
def test_fp8_converts_to_the_bits_of_the_model_that_transformers_dequantizes(
    bfloat16_source, tmp_path, converts, block
):
    converts(quantize_(bfloat16_source, block), tmp_path / "dst")
    assert_same_as_dequantized(bfloat16_source, tmp_path)


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


@pytest.mark.parametrize("fields", [{"dtype": ...}, {"dtype": None}])
def test_the_older_name_of_the_dtype_counts_if_the_newer_one_says_nothing(source, tmp_path, fields):
    quantize_(source, [16, 16])
    edit_config(source, torch_dtype="float16", **fields)
    convert_checkpoint(source, tmp_path / "dst")
    written = load_file(tmp_path / "dst" / "model.safetensors")
    assert written[Q1].dtype == torch.float16


def test_a_calibration_of_fp8_is_that_of_the_dequantized_model(
    bfloat16_source, calibrating, tmp_path
):
    quantize_(bfloat16_source, [16, 16])
    convert_checkpoint(bfloat16_source, tmp_path / "dst", **calibrating)
    assert_same_as_dequantized(bfloat16_source, tmp_path, **calibrating)


INT8 = {"load_in_8bit": True}
NF4, FP4 = ({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("nf4", "fp4"))
DOUBLE = {"bnb_4bit_use_double_quant": True}
BITS = {
    "nf4": NF4,
    "nf4, double": NF4 | DOUBLE | {"bnb_4bit_quant_storage": "bfloat16"},
    "fp4": FP4,
    "fp4, double": FP4 | DOUBLE,
    "int8": INT8,
    "int8, with its head, without layer 1": INT8 | {"llm_int8_skip_modules": ["model.layers.1"]},
}


def quantized_by_bitsandbytes(source, directory, dtype="bfloat16", **bits):
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**bits), device_map="cpu", dtype=dtype
    )
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("bits", "dtype"), [*zip(BITS.values(), ["bfloat16", "float32"] * 3, strict=True)], ids=BITS
)
def test_bitsandbytes_converts_to_the_bits_of_the_model_that_transformers_dequantizes(
    source, tmp_path, converts, bits, dtype
):
    quantized_by_bitsandbytes(source, tmp_path / "quantized", dtype, **bits)
    converts(tmp_path / "quantized", tmp_path / "dst")
    record = assert_same_as_dequantized(tmp_path / "quantized", tmp_path)
    written = record_of(tmp_path / "dst")
    assert written["source_format"] == "safetensors, bitsandbytes"
    same = ("dtype", "parameters", "source_xxh3_128", "kv_cache_bytes_per_token")
    assert [written[key] for key in same] == [record[key] for key in same]
    assert "quantization_config" not in (tmp_path / "dst" / "config.json").read_text()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_dry_run_of_four_bits_has_the_sizes_and_dtype_of_the_result(source, tmp_path, dtype):
    quantized = quantized_by_bitsandbytes(source, tmp_path / "quantized", **BITS["nf4"])
    planned = convert_checkpoint(quantized, tmp_path / "dst", dtype=dtype, dry_run=True)
    assert planned["dtype"] == {"auto": "bfloat16", "float32": "float32"}[dtype]
    convert_checkpoint(quantized, tmp_path / "dst", dtype=dtype)
    written = load_file(tmp_path / "dst" / "model.safetensors").values()
    assert planned["written"] == {"files": 1, "bytes": sum(tensor.nbytes for tensor in written)}


def test_an_adapter_is_merged_into_dequantized_weights(source, tmp_path, converts):
    quantized_by_bitsandbytes(source, tmp_path / "quantized", **BITS["nf4, double"])
    lora = make_adapter(source, tmp_path / "lora")
    converts(tmp_path / "quantized", tmp_path / "dst", "--adapter", lora)
    assert_same_as_dequantized(tmp_path / "quantized", tmp_path, adapter=lora)


def test_pickled_weights_of_four_bits_convert_to_the_bits_of_safetensors(source, tmp_path):
    quantized = quantized_by_bitsandbytes(source, tmp_path / "quantized", **BITS["fp4, double"])
    convert_checkpoint(quantized, tmp_path / "expected")
    file = quantized / "model.safetensors"
    torch.save(load_file(file), quantized / "pytorch_model.bin")
    file.unlink()
    convert_checkpoint(quantized, tmp_path / "dst", allow_pickle=True)
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")


def test_without_bitsandbytes_its_weights_are_refused(source, tmp_path, refusal, monkeypatch):
    edit_config(source, quantization_config={"load_in_8bit": True})  # older than quant_method
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    printed = refusal(source, tmp_path / "dst")
    assert "bitsandbytes, which is not installed: pip install 'coca-hf[qlora]'" in printed


REMEDY = "convert the checkpoint that it was quantized from, and quantize the result"
REFUSED = [
    *({"quant_method": method} for method in ("gptq", "awq", "compressed-tensors")),
    *({"quant_method": "fp8", "weight_block_size": size} for size in ([1, 2, 3], [0, 2])),
]


@pytest.mark.parametrize("method", REFUSED, ids=str)
def test_another_method_is_refused_with_what_to_do(source, tmp_path, refusal, method):
    edit_config(source, quantization_config=method)
    expected = "expected plain ones, FP8 with a scale for each block, or bitsandbytes"
    message = f"got weights quantized by {method['quant_method']}, {expected}; {REMEDY}"
    assert f"config.json: {message}" in refusal(source, tmp_path / "dst")


def put(tensor, name=Q1):
    """A damage: another tensor of this name."""
    return lambda weights: weights.update({name: tensor})


SCALES = f"{Q1}_scale_inv"
OF_Q1 = f"tensor {Q1}: got shape"
DAMAGE = {
    f"{OF_Q1} (48, 48) and scales of shape None, expected": lambda w: w.pop(SCALES),
    f"{OF_Q1} (48, 48) and scales of shape (2,": put(torch.ones(2, 3), SCALES),
    f"{OF_Q1} (0, 48) and scales of shape (3, 3), expected (0, 3)": (
        put(torch.empty(0, 48).to(torch.float8_e4m3fn))
    ),
    f"tensor {SCALES} has dtype U8, expected one of F64, F32, F16, BF16": (
        put(torch.ones(3, 3, dtype=torch.uint8), SCALES)
    ),
    f"tensor {SCALES} is not understood": put(torch.ones(48, 48)),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_scales_that_do_not_fit_are_one_line_and_exit_code_2(source, tmp_path, refusal, message):
    edit_weights(quantize_(source, [16, 16]), DAMAGE[message])
    assert message in refusal(source, tmp_path / "dst")


def test_a_refused_source_is_closed(source, tmp_path):
    def open_files():
        links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [path for path in map(os.readlink, links) if str(source) in path]

    edit_weights(quantize_(source, [16, 16]), lambda w: w.pop(SCALES))
    with pytest.raises(CocaError) as refused:  # its traceback would keep an open file alive
        convert_checkpoint(source, tmp_path / "dst")
    assert "and scales of shape None" in str(refused.value)
    assert open_files() == []


STATE = f"{Q1}.quant_state.bitsandbytes__nf4"


def described(**changes):
    """A damage: other values in the JSON that describes the weight `Q1`."""

    def change(weights):
        state = json.loads(bytes(weights[STATE].tolist())) | changes
        weights[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def odd_block(weights):
    described(blocksize=48)(weights)
    put(torch.ones(48), f"{Q1}.absmax")(weights)


SCB, ORDER, TABLE = Q1.replace("weight", "SCB"), f"{Q1}_format", f"{Q1}.nested_quant_map"
NOT_DESCRIBED = f"tensor {STATE}: does not describe a weight; {REMEDY}: "
BAD_BITS = {
    "nf4": {
        f"tensor {Q1}: got 1152 bytes, expected 1128, four bits for each number of (47, 48); conv": (
            described(shape=[47, 48])
        ),
        f"tensor {Q1} has shape (24, 96), expected (48, 48) from config.json": (
            described(shape=[24, 96])
        ),
        f"{NOT_DESCRIBED}got sizes (48, 48, 0, 1)": described(blocksize=0),
        f"{NOT_DESCRIBED}got dtype int8": described(dtype="int8"),
        f"tensor {Q1}: bitsandbytes does not dequantize it: invalid blocksize 48": odd_block,
        f"{NOT_DESCRIBED}more than 10000 bytes": described(comment="x" * 10_000),
        f"tensor {Q1}: got 0 bytes, expected 1152": lambda w: w.pop(Q1),
    },
    "nf4, double": {
        f"tensor {Q1}.absmax: got ('U8', (36,)), expected ('U8', (3600,)); {REMEDY}": (
            described(shape=[4800, 48])
        ),
        f"tensor {TABLE}: got ('F32', (255,)), expected ('F32', (256,));": (
            put(torch.ones(255), TABLE)
        ),
    },
    "int8": {
        f"tensor {ORDER} is not understood": lambda w: w.pop(SCB),
        f"tensor {SCB}: got ('F32', (47,)), expected ('F32', (48,)); {REMEDY}": (
            put(torch.ones(47), SCB)
        ),
        f"tensor {ORDER}: got 2, expected 0, the order of rows and columns; {REMEDY}": (
            put(torch.tensor(2, dtype=torch.uint8), ORDER)
        ),
    },
}


@pytest.mark.parametrize(
    ("bits", "message"), [(bits, message) for bits in BAD_BITS for message in BAD_BITS[bits]]
)
def test_weights_of_bitsandbytes_that_do_not_fit_are_one_line_and_exit_code_2(
    source, tmp_path, refusal, bits, message
):
    quantized_by_bitsandbytes(source, tmp_path / "quantized", **BITS[bits])
    edit_weights(tmp_path / "quantized", BAD_BITS[bits][message])
    assert message in refusal(tmp_path / "quantized", tmp_path / "dst")
