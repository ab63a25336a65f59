"""What a stage leaves behind: its weights, its record, and its log."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

STAGES = ["1-k", "2-qkv", "3-full"]


def weights(stage_dir: Path) -> dict[str, Tensor]:
    return load_file(stage_dir / "model.safetensors")


def assert_same_weights(ours: Path, theirs: Path, atol: float = 0.0) -> None:
    a, b = weights(ours), weights(theirs)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=atol) for name in b)


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The names of the weights that differ in any bit."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name].float(), after[name])}


def record(stage_dir: Path) -> dict:
    return json.loads((stage_dir / "training.json").read_text())


def log_lines(stage_dir: Path) -> list[dict]:
    """The training losses that a stage logged."""
    lines = map(json.loads, (stage_dir / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def logged(stage_dir: Path, key: str = "loss") -> list[float]:
    return [line[key] for line in log_lines(stage_dir)]


def assert_same_losses(ours: Path, theirs: Path) -> None:
    """And norms of gradients, up to rounding."""
    for key in ("loss", "grad_norm"):
        assert logged(ours, key) == pytest.approx(logged(theirs, key), abs=1e-4), key


def timeless(stage_dir: Path) -> list[dict]:
    """Every line of the log, without measurements of time and memory."""
    measured = ("seconds", "tokens_per_second", "memory_bytes")
    lines = map(json.loads, (stage_dir / "log.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


@contextmanager
def no_file_above(size: int):
    """Let no file grow beyond this many bytes, which looks like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
