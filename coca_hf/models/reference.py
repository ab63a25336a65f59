"""CoCA as the paper writes it: a contraction of three operands, for teaching, tests and comparison.

It stores every score (h * m * n per sequence), so it is slow and needs much memory; the models
compute the same numbers with `attention.coca_query` and `attention.coca_key`. Letters: see
`attention.py`. This file needs opt_einsum and does not travel inside checkpoints.
"""

import torch
from opt_einsum import contract
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import repeat_kv

from .attention import (
    CACHE,
    NO_CONTENT,
    QUERY_SCALE,
    CocaAttention,
    ContentPairs,
    KeptAttention,
    rotate,
)


def coca_scores(
    q: Tensor,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    constraint: str,
    content: ContentPairs = NO_CONTENT,
) -> Tensor:
    """CoCA scores before the division by sqrt(d), contracted from three operands (eq. 9 and 10;
    appendix C, eq. 18).

    slack, eq. 10: `<R_m q, q o R_n [t, t]>`; strict, eq. 9: `<R_m q, (R_n q) o [t, t]>`. Content
    pairs, if there are any, add `t_j (q_j + q_{j+d/2})`.

    q: (b, h, m, d); t: (b, g, n, j), before the ReLU; cos, sin: (b, 1, m, j), for m = n positions
    that are both query and key. Returns (b, h, m, n).
    """
    t = repeat_kv(t, q.shape[1] // t.shape[1])
    if content.exist:
        still = content.mask(t)
        first, second = q.chunk(2, dim=-1)
        matched = contract("bhmj,bhnj->bhmn", (first + second)[..., still], t[..., still])
        q = torch.cat((first[..., ~still], second[..., ~still]), dim=-1)
        t, cos, sin = (part[..., ~still] for part in (t, cos, sin))
        return matched + coca_scores(q, t, cos, sin, constraint)
    t = t.relu()
    if constraint == "slack":
        rotated_t = rotate(torch.cat((t, t), dim=-1), cos, sin)
        return contract("bhmd,bhmd,bhnd->bhmn", rotate(q, cos, sin), q, rotated_t)
    # R_n q of query m at key n: (real cos_n - imag sin_n, imag cos_n + real sin_n), never stored as
    # (b, h, m, n, d).
    (real, imag), (rotated_real, rotated_imag) = (
        q.chunk(2, dim=-1),
        rotate(q, cos, sin).chunk(2, dim=-1),
    )
    along = contract("bhmj,bhmj,bhnj->bhmn", rotated_real, real, t * cos)
    along = along + contract("bhmj,bhmj,bhnj->bhmn", rotated_imag, imag, t * cos)
    across = contract("bhmj,bhmj,bhnj->bhmn", rotated_imag, real, t * sin)
    across = across - contract("bhmj,bhmj,bhnj->bhmn", rotated_real, imag, t * sin)
    return along + across


class ReferenceCocaAttention(CocaAttention):
    """`CocaAttention` by the three-operand contraction, for full sequences only, without a cache
    and with eager masks.
    """

    def forward(  # type: ignore[override]  # an eager mask is always there
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        if kwargs.get(CACHE, past_key_values) is not None:
            raise ValueError(
                "ReferenceCocaAttention: got a key/value cache, expected use_cache=False"
            )
        leading = hidden_states.shape[:-1]
        q, t, value = self.project(hidden_states)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        scores = coca_scores(q, t, cos, sin, self.config.coca_constraint, self.content)
        scores = scores * (self.scaling * QUERY_SCALE) + attention_mask
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
            q.dtype
        )
        output = (weights @ repeat_kv(value, self.num_key_value_groups)).transpose(1, 2)
        return self.o_proj(output.reshape(*leading, -1)), weights


def use_reference_(model: PreTrainedModel) -> PreTrainedModel:
    """Make a CoCA model compute its attention by the three-operand contraction, in place; returns
    the model.

    Kept layers keep their plain attention.

    Raises ValueError if the model has no CoCA attention.
    """
    attentions = [module for module in model.modules() if isinstance(module, CocaAttention)]
    layers = [layer for layer in attentions if not isinstance(layer, KeptAttention)]
    if not layers:
        raise ValueError(
            f"use_reference_: got {type(model).__name__}, which has no CoCA attention; convert it "
            f"first"
        )
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    for layer in layers:
        # listed before the family's class, whose `project` it uses
        if not isinstance(layer, ReferenceCocaAttention):
            bases = (ReferenceCocaAttention, type(layer))
            layer.__class__ = type(f"Reference{type(layer).__name__}", bases, {})
    return model
