"""The precision in which a machine multiplies matrices."""

import contextlib
from collections.abc import Iterator

import torch


def matrix_dtype(device: str) -> torch.dtype:
    """bfloat16 on a processor that multiplies it in hardware, float32 otherwise."""
    capabilities = torch.cpu.get_capabilities() if device == "cpu" else {}
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Multiply matrices in TF32 on GPUs and in `dtype` on CPUs."""
    is_half = dtype == torch.bfloat16
    # no cache: the weights change at every step
    with tf32(True), torch.autocast("cpu", torch.bfloat16, enabled=is_half, cache_enabled=False):
        yield


@contextlib.contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Let GPUs multiply float32 matrices in TF32, or do not let them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
