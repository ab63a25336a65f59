"""The kernels run on a GPU where there is one, else on the CPU by Triton's interpreter."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
HEAD_DIMS = (64, 80, 96, 128, 160, 256)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _the_interpreter_multiplies_bfloat16(monkeypatch):
    """It keeps bfloat16 as integers, and multiplies these (triton 3.7.1)."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def widened(handle):
        if str(handle.dtype.scalar) != "bf16":
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32
        )

    multiply = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest),
    )
