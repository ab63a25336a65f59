"""The products of queries and keys in a model's attention, before they are rotated.

The score of query m and key n, before it is divided by sqrt(d), is

    a(m, n) = Re sum_j [h_j exp(i (m - n) theta_j) + g_j exp(i (m + n) theta_j)]

A plain model has h_j = q_j conj(k_j) and no g. CoCA's fold is linear in cosine and sine of the
query's angle and of the key's, so its values at angle 0 and at a quarter turn give both at every
position. By eq. 17, strict should come to h_j = t_j |q_j|^2 and g_j = 0. Slack, with
q_j = (a, b), has

    h_j = t_j / 2 ((a + b)^2 + i (b^2 - a^2))        g_j = t_j / 2 ((a - b)^2 - i (b^2 - a^2))

which the constraint of eq. 11, a = b, would make strict's.

Letters: b batch, h query heads, g key/value heads, m query positions, n key positions, d head
dimension, j rotary pairs, p pairs (m, n) of positions.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import rotary_modules
from coca_hf.models import attention

# Of query and key positions, each (p,): h_j and g_j of every head, complex, each (h, p, j).
Products = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def frequencies(model: Any, length: int) -> Tensor:
    """The angle per position of every rotary pair in a text of `length` tokens, (j,) float64.

    Raises CocaError if there is no rotary embedding, or several kinds.
    """
    found = [rotary for _, _, rotary in rotary_modules(model)]
    if not found:
        problem = "got no rotary embedding, or several kinds, expected one (RoPE)"
        raise CocaError(f"{type(model).__name__}: {problem}")
    rotary = found[0]
    if rotary.config.rope_parameters["rope_type"] != "longrope":
        return rotary.inv_freq.double()
    # until it has read a long text, the module holds the factors for short ones
    of_length = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, rotary.inv_freq.device, length)
    return of_length[0].double()


@contextmanager
def visiting_products(
    model: Any, theta: Tensor, visit: Callable[[int, Products], None]
) -> Iterator[None]:
    """Call `visit` with number and products of every attention layer that runs inside.

    theta: radians per position of every rotary pair, (j,); pairs without rotation are left out.
    Only the first row of a batch counts. A plain model's q and k are what its modelling file passes
    to its own `apply_rotary_pos_emb`, which all families call by that name, after biases, norms and
    the like. CoCA's q and t are what its attention passes to `rotated`.

    Raises CocaError for models with content pairs, and for a model whose RoPE is unknown.
    """
    all_of_coca = [m for m in model.modules() if isinstance(m, attention.CocaAttention)]
    if any(module.content.exist for module in all_of_coca):
        raise CocaError(
            f"{type(model).__name__}: got content pairs, which have no angle whose boundary could "
            "be measured; expected a model that was converted without them"
        )
    if attentions := [m for m in all_of_coca if getattr(m, "use_rope", True)]:  # SmolLM3's
        with _visiting_coca(attentions, len(theta), visit):
            yield
        return
    modelling = sys.modules[type(model).__module__]
    rotate = getattr(modelling, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise CocaError(
            f"{type(model).__name__}: got a model whose file has no apply_rotary_pos_emb, "
            f"expected one with RoPE as in transformers' LLaMA, Mistral, Qwen or GPT-NeoX"
        )
    layers = itertools.count()
    multiplier = getattr(model.config, "attention_multiplier", None)  # Granite's 1 / sqrt(d)

    def seen(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        real, imag = rotary_pairs(
            lambda x: rotate(x, x, cos[:, :2], sin[:, :2], *args, **kwargs)[0], q, theta
        )

        def products(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            query, key = _of_heads(q, k, m, n)
            h = torch.complex(query[..., real], query[..., imag]) * torch.complex(
                key[..., real], -key[..., imag]
            )
            if multiplier is not None:
                h = h * (multiplier * q.shape[-1] ** 0.5)
            return h, torch.zeros_like(h)

        visit(next(layers), products)
        return rotate(q, k, cos, sin, *args, **kwargs)

    with patch.object(modelling, "apply_rotary_pos_emb", seen):
        yield


def rotary_pairs(
    rotate: Callable[[Tensor], Tensor], q: Tensor, theta: Tensor
) -> tuple[Tensor, Tensor]:
    """The first and second dimensions of a head's rotary pairs, each (j,).

    They are found by rotating unit vectors to position 1, so the layout (halves, neighbours, a part
    of the head) does not matter. rotate: of (1, h, 2, d), at positions 0 and 1. q: (b, h, m, d).

    Raises CocaError if `rotate` is not a rotation of pairs by `theta`.
    """
    d = q.shape[-1]
    units = torch.eye(d, dtype=q.dtype, device=q.device)[None, :, None].expand(1, d, 2, d)
    try:
        rotated = rotate(units)[0, :, 1].double()  # (d, d): row i is where unit vector i goes
    except RuntimeError:  # its shapes are not heads before positions
        rotated = torch.zeros(d, d, dtype=torch.float64, device=q.device)
    first, second = (rotated * (1 - torch.eye(d, device=q.device)) > 0).nonzero().unbind(1)
    angle = torch.atan2(rotated[first, second], rotated[first, first])
    if len(first) != len(theta) or not torch.allclose(angle, theta, rtol=0.02):
        raise CocaError(
            f"got an apply_rotary_pos_emb that rotates {len(first)} pairs of {d} dimensions, "
            f"expected {len(theta)} pairs by the angles of the rotary embedding; coca-eval "
            f"boundary does not understand this model's rotation"
        )
    return first, second


@contextmanager
def _visiting_coca(
    attentions: list[attention.CocaAttention], pairs: int, visit: Callable[[int, Products], None]
) -> Iterator[None]:
    """The same for CoCA, whose first `pairs` pairs are rotated. Kept layers' RoPE is linear too."""

    def seen(
        layer: attention.CocaAttention, q: Tensor, t: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        one, zero = torch.ones_like(cos), torch.zeros_like(cos)
        rotated = partial(type(layer).rotated, layer, q, t)
        folds = rotated(one, zero), rotated(zero, one)

        def products(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            def dot(of_query: int, of_key: int) -> Tensor:
                """The products of every pair, (h, p, j); 0 is angle 0, 1 a quarter turn."""
                query, key = _of_heads(folds[of_query][0], folds[of_key][1], m, n)
                score = (query * key).unflatten(-1, (2, -1)).sum(-2)[..., :pairs]
                return score * (layer.scaling * layer.head_dim**0.5)

            along, across, query_quarter, key_quarter = dot(0, 0), dot(1, 1), dot(1, 0), dot(0, 1)
            h = torch.complex(along + across, key_quarter - query_quarter) / 2
            return h, torch.complex(along - across, -key_quarter - query_quarter) / 2

        visit(layer.layer_idx, products)
        return rotated(cos, sin)

    for layer in attentions:
        layer.rotated = partial(seen, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in attentions:
            del layer.rotated


def _of_heads(q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Queries at positions m and keys at n of the first row, both (h, p, d) in float32.

    Every query head has its key.
    """
    query, key = q[0, :, m].float(), k[0, :, n].float()
    return query, key.repeat_interleave(len(query) // len(key), dim=0)
