"""Initialisation of `W_T`: the key projection, folded to one row per rotary pair and scaled.

CoCA's scores are quadratic in the query, so a copied `W_K` gives them another size than the
original's and saturates the softmax; zero, behind the ReLU, would never train. The scale follows
from the weights alone. After the layer's norm an input is at most sqrt(hidden) long, so that with
the norm's weight multiplied into the columns of W_Q and W_K

    |original score| <= hidden * |W_Q| |W_K|                                   (|W|: spectral norm)
    |CoCA score|     <= c * hidden^(3/2) * |W_Q|^2 max_j |row j of fold(W_K)|
                        (c: sqrt(2) slack, 1 strict)

and the scale makes the second bound equal to the first, for every key/value head with its query
heads. A bias, of the projection or of a LayerNorm before it, counts as one more column.

Where queries and keys of a head are normalised (Qwen3), with weights w_q and w_k, W_K stands for
w_k o W_K, a query is at most sqrt(d) max |w_q| long, and |W_Q| and |W_K| give way to max |w_q| and
max |w_k|:

    |original score| <= d * max |w_q| max |w_k|
    |CoCA score|     <= c * d * max |w_q|^2 * hidden^(1/2) max_j |row j of fold(W_K)|

Letters: `models/attention.py`.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

RULE = (
    "W_T = scale * fold(W_K) per key/value head; fold: mean of the two rows of a rotary pair; "
    "scale: gives the scores the bound that the original's had over all inputs (formula: "
    "coca_hf/convert/initialise.py)"
)


def fold_pairs(projection: Tensor, num_key_value_heads: int) -> Tensor:
    """Mean over the two rows of each rotary pair: (g * d, ...) to (g * j, ...), float32 or wider.

    Exact for the released code's full-width `t_proj`, which takes that mean after the projection.
    """
    return initial_t(projection, torch.ones(num_key_value_heads), num_key_value_heads)


@torch.no_grad()
def initial_scales(weights: dict[str, Tensor], config: PreTrainedConfig) -> Tensor:
    """The factor on `fold(W_K)` of every key/value head, (g,): see the top of this file.

    weights: of one layer: `norm` (hidden,), `q` (h * d, hidden), `k` (g * d, hidden), and, if any,
    `q_bias`, `k_bias`, `norm_bias` (hidden,), `q_norm` and `k_norm` (d,), by which `k` and `k_bias`
    are multiplied already; the rows of a head are [first of every pair, second of every pair].
    """
    g, grams = config.num_key_value_heads, {}
    is_normed = "k_norm" in weights
    for name in "k" if is_normed else "qk":
        biases = [weights[f"{name}_bias"].float()] if f"{name}_bias" in weights else []
        if "norm_bias" in weights:
            biases.append(weights[name].float() @ weights["norm_bias"].float())
        extra = torch.stack(biases).sum(0) if biases else None
        grams[name] = _grams(weights[name], weights["norm"].float(), extra, config.head_dim)
    if not all(gram.isfinite().all() for gram in grams.values()):
        # LAPACK has errors of its own for those.
        return torch.full((g,), torch.nan)
    if is_normed:
        q_size, k_size = (weights[f"{name}_norm"].float().abs().max() for name in "qk")
    else:
        q_size = _spectral_norm(grams["q"]).unflatten(0, (g, -1)).amax(1)  # (g,)
        k_size = _spectral_norm(grams["k"])
    c = 2**0.5 if config.coca_constraint == "slack" else 1.0
    return k_size / (c * config.hidden_size**0.5 * q_size * _folded_row_norm(grams["k"]))


def _grams(projection: Tensor, norm: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """Gram matrices of each head's rows, (heads, d, d) in float64, the columns times `norm`.

    bias: (heads * d,), one more column, for an input that is always 1.
    """
    grams, buffer = [], norm.new_empty(head_dim, len(norm))
    for number, head in enumerate(projection.split(head_dim)):
        # One at a time: they stay in the processor's cache.
        rows = torch.mul(head, norm, out=buffer)
        gram = (rows @ rows.T).double()
        if bias is not None:
            column = bias[number * head_dim : (number + 1) * head_dim].double()
            gram += column[:, None] * column
        grams.append(gram)
    return torch.stack(grams)


def _spectral_norm(grams: Tensor) -> Tensor:
    """Largest singular value of the matrices with these Gram matrices; quicker than an SVD."""
    return torch.linalg.eigvalsh(grams)[..., -1].sqrt().float()


def _folded_row_norm(grams: Tensor) -> Tensor:
    """Norm of the longest row of every folded matrix.

    Folded: the mean of rows j and j + d/2 of the matrix with Gram `grams`.
    """
    own = grams.diagonal(dim1=-2, dim2=-1)
    both = grams.diagonal(offset=grams.shape[-1] // 2, dim1=-2, dim2=-1)
    first, second = own.chunk(2, dim=-1)
    return ((first + second + 2 * both).clamp(min=0).amax(-1).sqrt() / 2).float()


def initial_t(k: Tensor, scales: Tensor, num_key_value_heads: int) -> Tensor:
    """`W_T` (or its bias) from `W_K` (or its bias), float32 or wider.

    Folded, each key/value head times its scale. It can be far smaller than `W_K`: whoever stores it
    in 16 bits has to see what that loses.
    """
    heads = k.unflatten(0, (num_key_value_heads, 2, -1))
    w_t = k.new_empty(
        num_key_value_heads, *heads.shape[2:], dtype=torch.promote_types(k.dtype, torch.float32)
    )
    wide = torch.float32 if k.dtype.itemsize == 2 else torch.float64
    for head, (first, second) in enumerate(heads):
        # One at a time: what is wide stays in the processor's cache.
        w_t[head] = (first.to(wide) + second).mul_(scales[head] / 2)
    return w_t.flatten(0, 1)
