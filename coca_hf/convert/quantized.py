"""Quantized weights: the tensors that store each of them, and its numbers.

FP8 has a scale for each block, and bitsandbytes' eight-bit format one for each row. Its four-bit
formats (nf4, fp4) have one for each block, which double quantisation stores in eight bits; the shape
and the block sizes are JSON in another tensor. Sizes are checked before a weight is read, because
bitsandbytes reads as much memory as the JSON says.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from coca_hf.convert.initialise import Shape
from coca_hf.errors import CocaError, library_errors
from coca_hf.weights import FLOATS, AnyFile, parse_json

FP8, SCALE = "F8_E4M3", "_scale_inv"  # a type of safetensors; its scales follow the weight's name
FOUR_BITS = ".quant_state.bitsandbytes__"  # follows the weight's name, before nf4 or fp4
EIGHT_BITS = ".SCB"  # of the module's name
STATE_DTYPES = {"float32", "float16", "bfloat16"}
METHOD_FIELDS = {"quant_method", "load_in_4bit", "load_in_8bit"}  # bitsandbytes once had no first
MAX_STATE_BYTES = 10_000
REQUANTIZE = "convert the checkpoint that it was quantized from, and quantize the result"

Files = Mapping[str, AnyFile]  # the open file that has each tensor, by the tensor's name


class QuantizedWeight(NamedTuple):
    """A weight of `shape`. beside: other tensors that store it. read: returns its numbers."""

    shape: Shape
    beside: frozenset[str]
    read: Callable[[], Tensor]


def quantized_weights(
    config: Mapping, files: Files, where: Path
) -> tuple[str | None, dict[str, QuantizedWeight]]:
    """The method that a checkpoint's `config`, at `where`, names, and its quantized weights by name.

    Raises CocaError for a method that is not supported and for tensors that do not fit together.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or not quantization.keys() & METHOD_FIELDS:
        return None, {}  # `converted_config` refuses anything else in that field
    method = quantization.get("quant_method", "bitsandbytes")
    block = quantization.get("weight_block_size") or []
    is_block = isinstance(block, list) and len(block) in (0, 2)
    if method == "fp8" and is_block and all(type(size) is int and size > 0 for size in block):
        names = [name for name, file in files.items() if file.tensors[name].dtype == FP8]
        return "FP8", {name: _fp8(name, tuple(block), files) for name in names}
    if method == "bitsandbytes":
        import bitsandbytes  # noqa: F401  # before anything is read

        four_bits = [_four_bits(name, files) for name in files if FOUR_BITS in name]
        eight_bits = [_eight_bits(name, files) for name in files if name.endswith(EIGHT_BITS)]
        return "bitsandbytes", dict(four_bits + eight_bits)
    raise CocaError(
        f"{where}: got weights quantized by {method}, expected plain ones, FP8 with a scale for "
        f"each block, or bitsandbytes; {REQUANTIZE}"
    )


def dequantize_fp8(weight: Tensor, scales: Tensor, block: tuple[int, ...]) -> Tensor:
    """The numbers of `weight` (rows, columns) in float32: each times the scale of its block.

    scales: (rows / block[0], columns / block[1]), rounded up; a single one if `block` is empty.
    """
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
    return weight.float() * scales.float()


def _fp8(name: str, block: tuple[int, ...], files: Files) -> QuantizedWeight:
    file, shape, scales = files[name].file, files[name].tensors[name].shape, name + SCALE
    found = files[scales].tensors[scales] if scales in files else None
    expected = tuple(
        -(-length // max(1, size)) for length, size in zip(shape, block or shape, strict=False)
    )
    is_single = not block and found is not None and math.prod(found.shape) == 1
    if found is None or len(shape) != 2 or not (found.shape == expected or is_single):
        raise CocaError(
            f"{file}: tensor {name}: got shape {shape} and scales of shape "
            f"{found and found.shape}, expected {expected}; {REQUANTIZE}"
        )
    if found.dtype not in FLOATS:
        raise CocaError(
            f"{file}: tensor {scales} has dtype {found.dtype}, expected one of "
            f"{', '.join(FLOATS)}; {REQUANTIZE}"
        )

    def read() -> Tensor:
        return dequantize_fp8(files[name].read(name), files[scales].read(scales), block)

    return QuantizedWeight(shape, frozenset([scales]), read)


def _eight_bits(scales: str, files: Files) -> tuple[str, QuantizedWeight]:
    module = scales.removesuffix(EIGHT_BITS)
    name, order = f"{module}.weight", f"{module}.weight_format"
    shape = files[name].tensors[name].shape if name in files else ()
    expected: dict[str, tuple[str, Shape]] = {name: ("I8", shape[:2]), scales: ("F32", shape[:1])}
    if order in files:
        expected[order] = ("U8", ())
    _check(expected, files, files[scales].file)
    if order in files and (found := files[order].read(order).item()) != 0:
        raise CocaError(
            f"{files[order].file}: tensor {order}: got {found}, expected 0, the order of rows and "
            f"columns; {REQUANTIZE}"
        )

    def read() -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(files[name].read(name), files[scales].read(scales))

    return name, QuantizedWeight(shape, frozenset(expected) - {name}, read)


def _four_bits(state: str, files: Files) -> tuple[str, QuantizedWeight]:
    name, file = state.partition(FOUR_BITS)[0], files[state].file
    with library_errors(f"{file}: tensor {state}: does not describe a weight; {REQUANTIZE}"):
        if files[state].tensors[state].num_bytes > MAX_STATE_BYTES:
            raise ValueError(f"more than {MAX_STATE_BYTES} bytes")
        described = parse_json(files[state].read(state).numpy().tobytes())
        shape, block = tuple(described["shape"]), described["blocksize"]
        nested_block = described.get("nested_blocksize")
        sizes = (*shape, block, nested_block or 1)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"got sizes {sizes}")
        if not {described["dtype"], described.get("nested_dtype", "float32")} <= STATE_DTYPES:
            raise ValueError(f"got dtype {described['dtype']}")
    num_blocks, num_bytes = -(-math.prod(shape) // block), -(-math.prod(shape) // 2)
    expected: dict[str, tuple[str, Shape]] = {
        f"{name}.absmax": ("U8" if nested_block else "F32", (num_blocks,)),
        f"{name}.quant_map": ("F32", (16,)),
    }
    if nested_block:
        expected |= {
            f"{name}.nested_absmax": ("F32", (-(-num_blocks // nested_block),)),
            f"{name}.nested_quant_map": ("F32", (256,)),
        }
    _check(expected, files, file)
    found = files[name].tensors[name].num_bytes if name in files else 0  # of whatever type
    if found != num_bytes:
        raise CocaError(
            f"{file}: tensor {name}: got {found} bytes, expected {num_bytes}, four bits for each "
            f"number of {shape}; {REQUANTIZE}"
        )

    def read() -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        of_state = {
            one.removeprefix(f"{name}."): files[one].read(one) for one in (*expected, state)
        }
        with library_errors(f"{file}: tensor {name}: bitsandbytes does not dequantize it"):
            packed = files[name].read(name).flatten().view(torch.uint8).view(-1, 1)
            return dequantize_4bit(packed, QuantState.from_dict(of_state, torch.device("cpu")))

    return name, QuantizedWeight(shape, frozenset([*expected, state]), read)


def _check(expected: Mapping[str, tuple[str, Shape]], files: Files, file: Path) -> None:
    """Raise CocaError if a tensor is absent or has another type or shape."""
    for name, kind in expected.items():
        found = files[name].tensors[name][:2] if name in files else None
        if found != kind:
            raise CocaError(f"{file}: tensor {name}: got {found}, expected {kind}; {REQUANTIZE}")
