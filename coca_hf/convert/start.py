"""Where `W_T` starts: the key projection, folded to one row per rotary pair and scaled. Letters: `models/attention.py`.

CoCA's scores are quadratic in the query, so a copied `W_K` gives them another size than the original's and saturates
the softmax. `start_scales` measures both sizes on random inputs, without text and without the model, layer by layer.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import repeat_kv

from coca_hf.models.attention import coca_key, coca_query, rotate
from coca_hf.models.rotary import CocaRotaryEmbedding

PROBES = 256
RULE = (
    "W_T = scale * fold(W_K) per key/value head; fold: mean of the two rows of a rotary pair; scale: standard "
    "deviation of the original's causal scores over that of the scores of fold(W_K), on "
    f"{PROBES} inputs drawn from N(0, 1) (seed: the layer's number) times the layer's input norm weight, at positions "
    f"0 to {PROBES - 1}"
)


def fold_pairs(projection: Tensor, num_key_value_heads: int) -> Tensor:
    """Mean over the two rows of every rotary pair: (g * d, ...) to (g * j, ...), in the dtype of the input.

    Exact for the released code's full-width `t_proj`, which takes that mean after the projection (design, section 1).
    """
    pairs = projection.double().unflatten(0, (num_key_value_heads, 2, -1))
    return pairs.mean(1).flatten(0, 1).to(projection.dtype)


@torch.no_grad()
def start_scales(layer: int, weights: dict[str, Tensor], config: LlamaConfig) -> Tensor:
    """The factor on `fold(W_K)` that gives each key/value head's scores the spread that the original's had, (g,).

    weights: of one layer: `norm` (hidden,), `q` (h * d, hidden), `k` (g * d, hidden), and `q_bias`, `k_bias` if any.
    """
    d, g = config.head_dim, config.num_key_value_heads
    groups = config.num_attention_heads // g
    rope = CocaRotaryEmbedding(config)
    cos, sin = (part[:, None] for part in rope(torch.empty(0), torch.arange(PROBES)[None]))  # (1, 1, m, j)
    inputs = torch.randn(PROBES, config.hidden_size, generator=torch.Generator().manual_seed(layer))
    inputs = inputs * weights["norm"].float()

    def heads(name: str) -> Tensor:
        bias = weights.get(f"{name}_bias")
        projected = torch.nn.functional.linear(inputs, weights[name].float(), None if bias is None else bias.float())
        return projected.view(1, PROBES, -1, d).transpose(1, 2)  # (1, h or g, m, d)

    q, k = heads("q"), heads("k")
    t = k.unflatten(-1, (2, -1)).mean(-2).relu()
    original = rotate(q, cos, sin) @ repeat_kv(rotate(k, cos, sin), groups).mT  # (1, h, m, n)
    query = coca_query(q, cos, sin, config.coca_constraint)
    coca = query @ repeat_kv(coca_key(t, cos, sin, config.coca_constraint), groups).mT
    causal = torch.ones(PROBES, PROBES, dtype=torch.bool).tril()
    spread = [scores.view(g, groups, PROBES, PROBES)[..., causal].flatten(1).std(-1) for scores in (original, coca)]
    return spread[0] / spread[1]


def start_t(k: Tensor, scales: Tensor, num_key_value_heads: int) -> Tensor:
    """`W_T` (or its bias) from `W_K` (or its bias): folded, each key/value head times its scale; dtype of the input."""
    folded = fold_pairs(k.double(), num_key_value_heads).unflatten(0, (num_key_value_heads, -1))
    scaled = folded * scales.view(-1, *[1] * (folded.dim() - 1))
    return scaled.flatten(0, 1).to(k.dtype)
