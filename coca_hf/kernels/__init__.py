"""Faster implementations of the same functions, and the one place that chooses between them.

    fold          query and key from q and t, by one Triton kernel on a GPU, otherwise by
                  `models.attention.plain_fold`
    attention     `attn_implementation="coca"`, the default where PyTorch is built for CUDA: `sdpa`,
                  except that a new token attends to the half-width cache, by a Triton kernel on an
                  NVIDIA GPU, otherwise to keys computed from it, for all heads that share them at
                  once

Checkpoints that load without coca_hf run the plain functions. Letters: see `models/attention.py`.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coca_hf.models.attention import FOLDS
from coca_hf.models.decoder import CocaPreTrainedModel

DECODERS: dict[str, Callable] = {}  # type of device -> `decode.decode_attention`


def register() -> None:
    """Register the attention `coca` with transformers and, if PyTorch is built for GPUs, the
    kernels with the models, which then use it by default.

    This does not ask whether there is a GPU: asking would start its driver, and processes that are
    forked later could not use it.
    """
    AttentionInterface.register("coca", coca_attention_forward)
    AttentionMaskInterface.register("coca", sdpa_mask)
    if (torch.version.cuda or torch.version.hip) and find_spec("triton"):
        from coca_hf.kernels.fold import fused_fold

        FOLDS["cuda"] = fused_fold
    if torch.version.cuda and find_spec("triton"):  # Triton compiles it badly for AMD's processors
        from coca_hf.kernels.decode import decode_attention

        DECODERS["cuda"] = decode_attention
        CocaPreTrainedModel.default_attention = "coca"


def coca_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    past_key_values=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention in transformers' interface. key: (b, g, n, d), or t, (b, g, n, j), as half-width
    caches return it. With dropout, everything is `sdpa`.
    """
    is_token = not dropout and _is_token(query, attention_mask)
    if key.shape[-1] < query.shape[-1]:
        decode = DECODERS.get(query.device.type)
        if decode is not None and is_token and _can_decode(query, attention_mask):
            angles = past_key_values.angles_of(key, module.content)
            strict = module.config.coca_constraint == "strict"
            output = decode(query, key, value, *angles, attention_mask, scaling, strict)
            return output.transpose(1, 2), None  # (b, 1, h, d)
        key = past_key_values.keys_of(key, module.content)
    if is_token:
        return _attend_together(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _can_decode(query: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel supports it, if it is one new token: a 16-bit dtype, and a boolean mask or
    none.
    """
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    return narrow and (mask is None or mask.dtype == torch.bool)


def _is_token(query: Tensor, mask: Tensor | None) -> bool:
    """Whether this is one new token, without gradient, with a mask that all heads share or none."""
    return (
        query.shape[-2] == 1
        and not torch.is_grad_enabled()
        and (mask is None or mask.shape[1] == 1)
    )


def _attend_together(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """One token's attention, (b, 1, h, d). Heads that share keys are rows of one product, so a CPU
    reads the keys once.

    query: (b, h, 1, d); key, value: (b, g, n, d); mask: (b or 1, 1, 1, n) or None.
    """
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(-2)  # (b, g, groups, d)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2)
