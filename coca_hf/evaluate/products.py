"""The products of queries and keys that a model's attention really computes, before they are rotated.

Letters: b batch, h query heads, g key/value heads, m query positions, n key positions, d head dimension, j rotary
pairs, p pairs (m, n) of positions.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.rope import rotary_modules
from coca_hf.models.attention import CocaAttention

Products = Callable[[Tensor, Tensor], Tensor]  # of query and key positions, each (p,): h_j of every head, (h, p, j)


def frequencies(model: Any) -> Tensor:
    """The angle per position of every rotary pair, (j,) float64. Raises CocaError where there is none."""
    found = [rotary.inv_freq for _, _, rotary in rotary_modules(model)]
    if not found:
        raise CocaError(f"{type(model).__name__}: got no rotary embedding, or several kinds, expected one (RoPE)")
    return found[0].double()


@contextmanager
def visiting_products(model: Any, theta: Tensor, visit: Callable[[int, Products], None]) -> Iterator[None]:
    """While it lasts, every attention layer of `model` hands its number and its products h_j to `visit`.

    theta: radians per position of every rotary pair, (j,); pairs that are not turned are left out. Rows of a batch but
    the first are not looked at. A plain model's q and k are those that its modelling file hands to its own
    `apply_rotary_pos_emb`, which all families call by that name: after biases, norms and whatever else comes before.
    """
    attentions = [module for module in model.modules() if isinstance(module, CocaAttention)]
    if attentions:
        with _visiting_coca(attentions, len(theta), visit):
            yield
        return
    modelling = sys.modules[type(model).__module__]
    rotate = getattr(modelling, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise CocaError(
            f"{type(model).__name__}: got a model whose file has no apply_rotary_pos_emb, expected one with RoPE as in "
            f"transformers' LLaMA, Mistral, Qwen or GPT-NeoX"
        )
    layers = itertools.count()

    def seen(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        real, imag = rotary_pairs(lambda x: rotate(x, x, cos[:, :2], sin[:, :2], *args, **kwargs)[0], q, theta)

        def products(m: Tensor, n: Tensor) -> Tensor:
            query, key = q[0, :, m].float(), k[0, :, n].float()  # (h, p, d), (g, p, d)
            key = key.repeat_interleave(len(query) // len(key), dim=0)
            return torch.complex(query[..., real], query[..., imag]) * torch.complex(key[..., real], -key[..., imag])

        visit(next(layers), products)
        return rotate(q, k, cos, sin, *args, **kwargs)

    modelling.apply_rotary_pos_emb = seen  # type: ignore[attr-defined]
    try:
        yield
    finally:
        modelling.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]


def rotary_pairs(turn: Callable[[Tensor], Tensor], q: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The dimensions of a head that a rotation turns into each other: first and second of every pair, each (j,).

    Found by turning unit vectors to position 1, so whatever the layout (halves, neighbours, a part of the head), they
    are the pairs that the model turns. turn: rotates (1, h, 2, d), at positions 0 and 1. q: (b, h, m, d).

    Raises CocaError where what it does is no rotation of pairs by `theta`.
    """
    d = q.shape[-1]
    units = torch.eye(d, dtype=q.dtype, device=q.device)[None, :, None].expand(1, d, 2, d)
    try:
        turned = turn(units)[0, :, 1].double()  # (d, d): row i is where unit vector i goes
    except RuntimeError:  # of shapes that are not those of heads before positions
        turned = torch.zeros(d, d, dtype=torch.float64, device=q.device)
    first, second = (turned * (1 - torch.eye(d, device=q.device)) > 0).nonzero().unbind(1)
    angle = torch.atan2(turned[first, second], turned[first, first])
    if len(first) != len(theta) or not torch.allclose(angle, theta, rtol=0.02):
        raise CocaError(
            f"got an apply_rotary_pos_emb that turns {len(first)} pairs of {d} dimensions, expected {len(theta)} pairs "
            f"by the angles of the rotary embedding; coca-eval boundary does not understand this model's rotation"
        )
    return first, second


@contextmanager
def _visiting_coca(
    attentions: list[CocaAttention], turned: int, visit: Callable[[int, Products], None]
) -> Iterator[None]:
    """The same for CoCA, of whose pairs the first `turned` are turned."""

    def watch(attention: CocaAttention) -> None:
        project = attention.project

        def seen(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, t, value = project(hidden_states)

            def products(m: Tensor, n: Tensor) -> Tensor:
                real, imag = q[0, :, m].float().chunk(2, dim=-1)  # each (h, p, j)
                coefficient = t[0, :, n].float().relu()  # (g, p, j)
                coefficient = coefficient.repeat_interleave(len(real) // len(coefficient), dim=0)
                return (coefficient * (real.square() + imag.square()))[..., :turned].to(torch.complex64)

            visit(attention.layer_idx, products)
            return q, t, value

        attention.project = seen  # type: ignore[method-assign]

    for attention in attentions:
        watch(attention)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.project
