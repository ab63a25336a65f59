"""Frozen parameters have no gradients, no optimizer state and no part in checkpoints."""

from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from coca_hf.train.trainer import STATE, StageTrainer, state_bytes
from tests.train.results import record


def bytes_of(trainer: StageTrainer) -> dict[str, int]:
    """After a backward: bytes of this process, and of the last checkpoint of all processes."""
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    saved: list = []
    for checkpoint in sorted(Path(trainer.args.output_dir).glob("checkpoint-*"))[-1:]:
        of_tensors = FileSystemReader(checkpoint / STATE).read_metadata().state_dict_metadata
        saved = [tensor for tensor in of_tensors.values() if getattr(tensor, "size", None)]
    return {
        "gradients": sum(map(_bytes, gradients)),
        "optimizer": sum(map(_bytes, states)),
        "saved": sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in saved),
        # on the disk, before a checkpoint is written
        "asked for": state_bytes(trainer.model, trainer.optimizer),
    }


def _bytes(value) -> int:
    if not isinstance(value, Tensor):
        return 0
    local = value.to_local() if isinstance(value, DTensor) else value
    # Adam counts steps, for each parameter
    return local.numel() * local.element_size() if local.dim() else 0


def assert_as_trained(measured: dict[str, int], trained: int, processes: int = 1) -> None:
    """float32: 4 bytes of gradient and 8 of Adam's state a parameter, 12 saved."""
    assert measured["gradients"] == pytest.approx(4 * trained / processes, rel=0.01)
    assert measured["optimizer"] == pytest.approx(8 * trained / processes, rel=0.01)
    assert measured["saved"] == pytest.approx(12 * trained, rel=0.01)
    assert measured["asked for"] == pytest.approx(measured["saved"], rel=0.01)


def test_frozen_parameters_cost_neither_gradients_nor_optimizer_state(train, tmp_path, monkeypatch):
    plain, measured = StageTrainer.training_step, {}

    def step(self, *arguments):
        loss = plain(self, *arguments)
        measured[Path(self.args.output_dir).parent.name] = bytes_of(self)
        return loss

    monkeypatch.setattr(StageTrainer, "training_step", step)
    out = tmp_path / "out"
    train(stage=None)
    for stage, of_stage in measured.items():
        assert_as_trained(of_stage, record(out / stage)["parameters"]["trained"])
    share = {key: num_bytes / measured["3-full"][key] for key, num_bytes in measured["1-k"].items()}
    assert share == pytest.approx(dict.fromkeys(share, 1152 / 77040), rel=0.01)
