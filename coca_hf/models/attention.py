"""Collinear Constrained Attention as ordinary attention on a folded query and key (CoCA, arXiv
2309.08646).

Letters used in every tensor file of this package:
    b batch, h query heads, g key/value heads (h = g * groups), m query positions, n key positions,
    d head dimension, j rotary pairs (d = 2j).

Pair j of a head is `(x[j], x[j + d/2])`, the Hugging Face layout. `R_p` rotates every pair by its
angle at position p. The two forms of CoCA are different functions, and both are plain dot products
of a query and a key that are each computed once per token:

    slack   a(m, n) = <R_m q, q o R_n [t, t]>                 query  q o R_m q       key  R_n [t, t]
    strict  a(m, n) = sum_j t_j |q_j|^2 cos((m - n) theta_j)  query  R_m [|q|^2, 0]  key  R_n [t, 0]

Any attention that takes a query, a key and a value (SDPA, FlashAttention, FlexAttention, paged
attention) therefore computes CoCA unchanged. Strict depends on m - n only, slack on m and n.

Both square the query, which overflows in float16 for entries above 181. The folded query is
therefore multiplied by `QUERY_SCALE`, and `CocaAttention.scaling` divides by it.

Some pairs of every head, none in the paper, may be content pairs (`ContentPairs`). They do not
rotate, so there is no angle for CoCA to remove, and their coefficients may have either sign:

    content  a(m, n) = sum_j t_j (q_j + q_{j+d/2})
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

# exact in every dtype, as is its square root; 1 / sqrt(d) for the widest heads in use, d = 256
QUERY_SCALE = 2.0**-4
# transformers' name of the cache, in arguments and outputs: `past_key_values`, since 5.24 `cache`
CACHE = dataclasses.fields(BaseModelOutputWithPast)[1].name


def cache_of(kwargs: dict, past_key_values: Cache | None) -> Cache | None:
    """The cache that a model was called with, out of `kwargs` if it has the name `CACHE` there.

    Raises TypeError for a cache of any other name: the model would read without it.
    """
    cache = kwargs.pop(CACHE, past_key_values)
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            raise TypeError(
                f"got a cache as {name}, expected {CACHE}; if transformers renamed it, save the "
                "checkpoint again with the latest coca_hf"
            )
    return cache


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of `x` by its angle: `R_p x` (eq. 1).

    x: (..., m, d); cos, sin: broadcastable to (..., m, j). Returns (..., m, d).
    """
    real, imag = x.chunk(2, dim=-1)
    # Work on whole rows of d and in place: a CPU is slow at half rows and at new memory
    swapped = _row(imag, real).to(torch.promote_types(x.dtype, cos.dtype))
    return swapped.mul_(_row(-sin, sin)).addcmul_(x, _row(cos, cos))


class ContentPairs(NamedTuple):
    """The content pairs of every head of a layer: the `slowest` pairs and, if `every_second` is set,
    every second of the others, beginning with the slowest of them.

    A pair that rotates matches content only up to a quarter of its period away. The slowest pairs,
    which do not complete a rotation within the trained length, hardly tell positions apart, and
    carry content in the original, too (arXiv 2410.06205). Layers that look contents up need more
    than these; layers that read positions need all the others.
    """

    slowest: int = 0
    every_second: bool = False

    @property
    def exist(self) -> bool:
        # not by comparison with NO_CONTENT: vLLM pickles a checkpoint's classes by value, and an
        # instance that a method of its class refers to would be made before the class
        return self.slowest > 0 or self.every_second

    def mask(self, x: Tensor) -> Tensor:
        """Which pairs of `x`, (..., j), they are, (j,)."""
        others = x.shape[-1] - self.slowest
        pairs = torch.arange(x.shape[-1], device=x.device)
        mask = pairs >= others
        return mask | ((others + pairs) % 2 == 1) if self.every_second else mask


NO_CONTENT = ContentPairs()


def own_angles(cos: Tensor, sin: Tensor, content: ContentPairs) -> tuple[Tensor, Tensor]:
    """The cosines and sines of CoCA's pairs, each (..., j), from those of the model: content pairs
    have angle zero.

    The factor by which YaRN and longrope lengthen rotated pairs does not apply to them, as in the
    partial rotary embeddings of transformers.
    """
    if not content.exist:
        return cos, sin
    still = content.mask(cos)
    return cos.masked_fill(still, 1), sin.masked_fill(still, 0)


def _row(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=-1)


def coca_query(
    q: Tensor, cos: Tensor, sin: Tensor, constraint: str, content: ContentPairs = NO_CONTENT
) -> Tensor:
    """Fold the query's own rotation into it. The dot product with `coca_key` is `QUERY_SCALE` times
    the CoCA score.

    slack: `q o R_m q` (eq. 10 without the constraint of eq. 11); strict: `R_m [|q|^2, 0]` (eq. 9,
    closed form eq. 17). Content pairs, if there are any: `q`, and `[q_j + q_{j+d/2}, 0]`.

    q: (b, h, m, d); cos, sin: (b, 1, m, j), of `own_angles`. Returns (b, h, m, d).
    """
    root = QUERY_SCALE**0.5
    q = q * root  # before it is squared
    still = content.mask(cos) if content.exist else None
    if constraint == "slack":
        factor = q if still is None else q.masked_fill(_row(still, still), root)
        # in this order, because the result takes the memory layout of the first, (b, h, m, d)
        return rotate(q, cos, sin) * factor
    real, imag = q.chunk(2, dim=-1)
    energy = real.square() + imag.square()
    if still is not None:
        energy = torch.where(still, (real + imag) * root, energy)
    return _row(energy, energy) * _row(cos, sin)


def coca_key(
    t: Tensor, cos: Tensor, sin: Tensor, constraint: str, content: ContentPairs = NO_CONTENT
) -> Tensor:
    """Rotate the collinear coefficients into the key of a plain dot product.

    slack: `R_n [t, t]`; strict: `R_n [t, 0]`.

    t: (b, g, n, j), before the ReLU; cos, sin: (b, 1, n, j), of `own_angles`. Returns (b, g, n, d).
    """
    return scaled_key(rectified(t, content), unit_key(cos, sin, constraint))


def rectified(t: Tensor, content: ContentPairs) -> Tensor:
    """One coefficient per pair, (b, g, n, j), which ReLU makes non-negative (eq. 5 and 6), except
    in content pairs, if there are any.
    """
    return torch.where(content.mask(t), t, t.relu()) if content.exist else t.relu()


def unit_key(cos: Tensor, sin: Tensor, constraint: str) -> Tensor:
    """The key for coefficients of 1, `R_n [1, 1]` (slack) or `R_n [1, 0]` (strict). All heads share
    it. Returns (b, 1, n, 2, j).
    """
    return torch.stack((cos - sin, cos + sin) if constraint == "slack" else (cos, sin), dim=-2)


def scaled_key(t: Tensor, unit: Tensor) -> Tensor:
    """Keys (b, g, n, d) from coefficients (b, g, n, j) and their `unit_key`, in one pass."""
    return (unit * t.unsqueeze(-2)).flatten(-2)


def plain_fold(
    q: Tensor,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    constraint: str,
    content: ContentPairs = NO_CONTENT,
) -> tuple[Tensor, Tensor]:
    """Query (b, h, m, d) and key (b, g, m, d) of ordinary attention, from the arguments of
    `coca_query` and `coca_key` and the model's angles.
    """
    cos, sin = own_angles(cos, sin, content)
    query = coca_query(q, cos, sin, constraint, content)
    return query, coca_key(t, cos, sin, constraint, content)


# type of device -> a faster implementation of `plain_fold`, registered by coca_hf.kernels
FOLDS: dict[str, Callable] = {}


def layer_types(config) -> list[str]:
    """The kind of every layer, `full_attention` or `sliding_attention`, by the rule that
    transformers' caches follow.
    """
    if getattr(config, "layer_types", None):
        return config.layer_types
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def by_head(x: Tensor, width: int) -> Tensor:
    """(b, m, heads * width) as (b, heads, m, width).

    Raises ValueError if tensor parallelism has split a head.
    """
    if x.shape[-1] % width:
        raise ValueError(
            f"tensor parallelism left {x.shape[-1]} rows of a projection to this process, and a "
            f"head has {width}; load "
            f"on a number of processes that divides num_attention_heads and num_key_value_heads"
        )
    return x.view(*x.shape[:-1], -1, width).transpose(1, 2)


class CocaAttention(nn.Module):
    """Causal self-attention whose key is collinear with the query (section 2.3); it replaces
    `LlamaAttention`.

    `t_proj` has half the rows of the `k_proj` it replaces, one coefficient per rotary pair (eq. 5
    and 6). The released code averages a full-width projection over each pair, which is the same
    function: the mean is linear, so it folds into the weight. A family that computes queries or
    coefficients differently overrides `queries` or `coefficients`.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.content = config.content_of(layer_idx)
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.score_scale / QUERY_SCALE
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = (
            config.sliding_window if layer_types(config)[layer_idx] == "sliding_attention" else None
        )

        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=config.attention_bias)
        self.t_proj = nn.Linear(hidden, kv_heads * self.head_dim // 2, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.output_bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b, h, m, d), coefficients t (b, g, m, j), before their ReLU, and values (b, g,
        m, d).
        """
        value = by_head(self.v_proj(hidden_states), self.head_dim)
        return self.queries(hidden_states), self.coefficients(hidden_states), value

    def queries(self, hidden_states: Tensor) -> Tensor:
        return by_head(self.q_proj(hidden_states), self.head_dim)

    def coefficients(self, hidden_states: Tensor) -> Tensor:
        return by_head(self.t_proj(hidden_states), self.head_dim // 2)

    def rotated(self, q: Tensor, t: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query (b, h, m, d) and key (b, g, m, d) of ordinary attention; cos, sin: (b, 1, m, j)."""
        fold = FOLDS.get(q.device.type, plain_fold)
        return fold(q, t, cos, sin, self.config.coca_constraint, self.content)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: (b, m, hidden); position_embeddings: cos and sin, each (b, m, j). The cache
        may also have the name `CACHE`. Returns (b, m, hidden).
        """
        cache = kwargs.pop(CACHE, past_key_values)
        leading = hidden_states.shape[:-1]
        q, t, value = self.project(hidden_states)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query, key = self.rotated(q, t, cos, sin)
        if isinstance(cache, Cache):
            key, value = cache.update(
                key,
                value,
                self.layer_idx,
                t=t,
                angles=(cos, sin),
                content=self.content,
                half_width=self.config._attn_implementation == "coca",
            )
        elif cache is not None:  # that of continuous batching, which may add to kwargs
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)

        # vLLM parses this source: it expects one call, to a local assigned from get_interface, with
        # scaling=self.scaling. The cache is for the attention `coca` of coca_hf.kernels, which
        # computes keys from t; other attentions ignore it.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            past_key_values=cache,
            **kwargs,
        )
        return self.o_proj(output.reshape(*leading, -1)), weights


class KeptAttention(CocaAttention):
    """The original's own attention, with rotary embedding, in a layer of `config.coca_kept_layers`.

    `coefficients` returns keys (b, g, m, d) instead of t; caches hold them rotated and at full
    width.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling *= QUERY_SCALE
        del self.t_proj
        width = config.num_key_value_heads * self.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)

    def coefficients(self, hidden_states: Tensor) -> Tensor:
        """Keys (b, g, m, d), before they are rotated."""
        return by_head(self.k_proj(hidden_states), self.head_dim)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)
