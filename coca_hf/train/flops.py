"""Floating-point operations of training, per token, and the peak of GPUs, for times and MFU.

torch counts the operations of matrix products: those of linear layers, including the head, and
those of attention over the whole square of scores, not its causal half, as in PaLM
(arXiv 2204.02311, appendix B). In the backward, a frozen weight has no gradient, and nothing before
the first trained parameter has one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import repeat_kv

from coca_hf.train.model import (
    model_from_config,
    shapes_only,
    stage_model,
    teacher_from_config,
)
from coca_hf.train.recipe import Recipe, Stage

# Dense bfloat16 operations a second, from the manufacturers' data sheets (which often give twice
# the number, for sparse matrices): nvidia.com/en-us/data-center/{b200,h200,h100,a100,l40s,l4,...},
# NVIDIA's Ampere and Ada GPU architecture whitepapers for RTX (with float32 sums),
# amd.com/en/products/accelerators/instinct. The first key whose words are all in a name counts.
PEAK_FLOPS = {
    **{"B200": 2250e12, "H200 NVL": 836e12, "H200": 989e12, "GH200": 989e12, "H100 NVL": 835e12},
    **{"H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12},
    **{"A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12},
    **{"A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12},
    **{"RTX 4090": 165.2e12, "RTX 3090": 71e12, "MI325X": 1307.4e12, "MI300X": 1307.4e12},
}

_ANOTHER = re.compile(r"mig|laptop|super|ti|d|\d+[abcq]")  # the last: a virtual GPU, as in A40-48Q


def count_flops(recipe: Recipe, stage: Stage) -> int:
    """Operations per token of a stage's forward and backward, for MFU: without those of the teacher
    and of gradient checkpointing.
    """
    with torch.device("meta"):
        base = model_from_config(recipe)
        return _count(base, stage_model(base, stage).train(), recipe.data.seq_len)


def count_teacher_flops(recipe: Recipe) -> int:
    """Operations per token of the teacher's forward."""
    with torch.device("meta"), torch.no_grad():
        teacher = teacher_from_config(recipe)
        return _count(teacher, teacher, recipe.data.seq_len)


def _count(base: PreTrainedModel, model: nn.Module, seq_len: int) -> int:
    """Operations per token of a forward of `model`, which has `base`, and of what it records."""
    base.config._attn_implementation = "sdpa"  # some models of transformers default to eager
    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    with shapes_only(base), _counted_attention(), FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops() // seq_len


def peak_flops(gpu: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU, by torch's name or a short one (H100), or None: also
    for a part of a GPU, and for a model of another kind with the same words in its name.
    """
    words = _words(gpu)
    if any(_ANOTHER.fullmatch(word) for word in words):
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if _words(name) <= words), None)


@contextmanager
def _counted_attention() -> Iterator[None]:
    """Let models do the products of attention alone, which torch counts: in its SDPA it does not
    count all, nor does it know of windows.
    """
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _products
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sliding_window: int | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Scores and sums of values, each query with as many keys as its window has.

    query: (b, h, m, d); key, value: (b, g, n, d). Returns (b, m, h, d), as transformers expects.
    """
    num_keys, groups = key.shape[2], query.shape[1] // key.shape[1]
    if sliding_window:
        num_keys = min(num_keys, sliding_window)
    key, value = (repeat_kv(tensor[:, :, :num_keys], groups) for tensor in (key, value))
    return (query @ key.mT @ value).transpose(1, 2).contiguous(), None


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name.lower()))
