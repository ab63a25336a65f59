"""Rotary borders: the angle that queries and keys start with, and what it does to scores (section 2.2, appendix B.2).

Letters: h query heads, g key/value heads, m query positions, n key positions, j rotary pairs, p sampled pairs (m, n) of
positions, s distances m - n.

For a rotary pair, q and k are complex numbers and h_j = q_j * conj(k_j), so that the score of a query s tokens after a
key is a(s) = Re sum_j h_j exp(i s theta_j) (eq. 2). The initial angle Theta_j = arg h_j, in [0, 2 pi), is measured
counterclockwise from key to query. A causal model (m > n) knows two of the paper's four scenarios:

    b   Theta <= pi   the score falls with distance, until the angle reaches pi, at s = (pi - Theta) / theta_j
    d   Theta >  pi   it first rises, for the tau = (2 pi - Theta) / theta_j nearest tokens: the anomaly

and none of a and c, which need m < n. Angles are taken over real text, between `pairs_per_document` positions m > n
that are drawn uniformly. CoCA's key is q o t with t >= 0 (eq. 6), so h_j = t_j |q_j|^2, and the angle is that of t_j:
zero. That is the very score of `strict`; `slack` has it up to the constraint of eq. 11, which it lets go.

A row, task `boundary`, has besides what `rows.py` lists: `value`, which is `share_d`; `share_a` ... `share_d`, of the
pairs that have an angle; `share_undefined`, of all pairs, those where q_j or k_j is zero; `share_d_weighted`, weighted
by |h_j|; `mean_abs_angle`, radians, of angles in (-pi, pi]; `share_abnormal`, of pairs in scenario d that are sampled
nearer than their tau; `layers`, `heads`, `rotary_pairs`, `pairs_per_document`; what `Sample.describe` says. Raw tables:

    angles   a line per layer, head and pair (of the h query heads): theta, radians per position; angle_counts, 36 bins
             of 10 degrees; tau_counts (d) and fall_counts (b), bin i counting positions in [2^(i-1), 2^i), the first
             those below 1, the last, of 24, open; abnormal, undefined; magnitude, the mean of |h_j|
    decay    a line per layer and distance: the bounds of |a(s)| of the appendix (B.1), RoPE's max_h * sum_s and CoCA's
             max_l * sum_c, where max_h and max_l are means, over heads and sampled pairs, of max |h_{j+1} - h_j| and
             max |l_{j+1} - l_j| with l = |h|, sum_s = sum_j |S_{j+1}|, sum_c = sum_j |C_{j+1}|; score, the mean of
             |a(s)| of these q and k
"""

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Track, compute_all
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, rotary_modules, use_rope_
from coca_hf.evaluate.rows import RowStore, now, subject_settings
from coca_hf.evaluate.sample import Sample
from coca_hf.models.attention import CocaAttention

ANGLE_BINS = 36
TAU_BINS = 24

Products = Callable[[Tensor, Tensor], Tensor]  # of query and key positions, each (p,): h_j of every head, (h, p, j)


def boundary_rows(
    subject: Subject,
    sample: Sample,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    pairs_per_document: int = 1024,
    seed: int = 0,
    track: Track = lambda items, description: items,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length, of the first `length` tokens of every document.

    Rows that `store` already has are not measured again.

    Raises CocaError where the model has no rotary embedding, or turns its heads in a way that is not understood.
    """
    documents = sample.describe()
    for rope, length in itertools.product(ropes, lengths):
        settings = {
            "task": "boundary",
            "rope": str(rope),
            "length": length,
            "stride": None,
            **documents,
            "pairs_per_document": pairs_per_document,
            "seed": seed,
            **subject_settings(subject),
        }
        row = store.find(settings)
        if row is None:
            results, raw = _measure(subject.model, sample, rope, settings, track)
            row = store.append(settings | results, raw)
        yield row


def _measure(
    model: Any, sample: Sample, rope: Rope, settings: dict, track: Track
) -> tuple[dict, dict[str, list[dict]]]:
    """The results of a row and its raw tables."""
    length, began = settings["length"], time.perf_counter()
    use_rope_(model, rope, length)
    theta = _frequencies(model)
    distances = decay_distances(max(length, settings["trained_length"] or 0))

    def compute(batch: list[int]) -> list[dict[str, np.ndarray]]:
        return [_of_document(model, sample.token_ids[i][:length], theta, distances, settings, i) for i in batch]

    found, error = compute_all(
        [[index] for index in range(len(sample.token_ids))],
        compute,
        lambda batches: track(batches, f"boundary  {rope}  {length}"),
    )
    results: dict[str, Any] = {"value": None, "error": failed(error, length) if error else None}
    raw: dict[str, list[dict]] = {}
    if found:
        sums = {name: np.sum([one[name] for one in found], axis=0) for name in found[0]}
        if sums["not_finite"].any():
            results["error"] = f"{int(sums['not_finite'].sum())} products of queries and keys are not finite"
        else:
            results |= _shares(sums)
            raw = {
                "angles": _angle_lines(sums, theta),
                "decay": _decay_lines(sums, theta, distances, len(found)),
            }
    results |= {
        "tokens": sum(len(ids[:length]) for ids in sample.token_ids),
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }
    return results, raw


def _of_document(
    model: Any, token_ids: Tensor, theta: Tensor, distances: list[int], settings: dict, index: int
) -> dict[str, np.ndarray]:
    """Counts and sums over the sampled positions of one document; every array's first axis is the layer."""
    m, n = draw_positions(len(token_ids), settings["pairs_per_document"], f"boundary {settings['seed']} {index}")
    layers: dict[int, dict[str, Tensor]] = {}

    def visit(layer: int, products: Products) -> None:
        h = products(m.to(model.device), n.to(model.device))
        layers[layer] = count_angles(h, theta, (m - n).to(model.device)) | _decay_sums(h, theta, distances)

    with visiting_products(model, theta, visit), torch.inference_mode():
        model.base_model(input_ids=token_ids[None].to(model.device), use_cache=False)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) != expected:
        raise CocaError(
            f"{type(model).__name__}: got rotated queries and keys of {len(layers)} layers, expected {expected}; "
            f"coca-eval boundary does not understand its attention"
        )
    return {name: torch.stack([layers[i][name] for i in sorted(layers)]).cpu().numpy() for name in layers[0]}


def draw_positions(length: int, count: int, seed: str) -> tuple[Tensor, Tensor]:
    """`count` pairs of positions m > n below `length`, uniform over all such pairs: two tensors (p,)."""
    rng = random.Random(seed)
    pairs = torch.tensor([rng.sample(range(length), 2) for _ in range(count)])
    return pairs.amax(1), pairs.amin(1)


def count_angles(h: Tensor, theta: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """Histograms of the initial angles, and of the positions where monotonicity breaks.

    h: (h, p, j) complex; theta: (j,) radians per position; distance: (p,) tokens. Returns tensors (h, j, ...).
    """
    heads, _, num_pairs = h.shape
    finite = h.isfinite()
    defined = finite & (h != 0)
    angle = torch.atan2(h.imag.double(), h.real.double()) % (2 * math.pi)  # (h, p, j); in float32 pi is above pi
    angle = torch.where(defined, angle, 0.0)
    falls, rises = defined & (angle <= math.pi), defined & (angle > math.pi)
    tau = (2 * math.pi - angle) / theta
    place = torch.arange(heads * num_pairs, device=h.device).view(heads, 1, num_pairs).expand(h.shape)

    def histogram(bins: Tensor, among: Tensor, num_bins: int) -> Tensor:
        index = (place * num_bins + bins.clamp(0, num_bins - 1))[among]
        return index.bincount(minlength=heads * num_pairs * num_bins).view(heads, num_pairs, num_bins)

    def octave(positions: Tensor) -> Tensor:
        return positions.clamp(min=2**-1).log2().floor().long() + 1

    magnitude = torch.where(defined, h.abs(), 0.0).double()
    wrapped = torch.where(angle > math.pi, angle - 2 * math.pi, angle).abs()
    return {
        "angle_counts": histogram((angle / (2 * math.pi) * ANGLE_BINS).long(), defined, ANGLE_BINS),
        "tau_counts": histogram(octave(tau), rises, TAU_BINS),
        "fall_counts": histogram(octave((math.pi - angle) / theta), falls, TAU_BINS),
        "scenario_b": falls.sum(1),
        "scenario_d": rises.sum(1),
        "abnormal": (rises & (distance[:, None] < tau)).sum(1),
        "undefined": (h == 0).sum(1),
        "not_finite": (~finite).sum(1),
        "abs_angle": torch.where(defined, wrapped, 0.0).sum(1),
        "magnitude": magnitude.sum(1),
        "magnitude_d": torch.where(rises, magnitude, 0.0).sum(1),
    }


def decay_distances(longest: int) -> list[int]:
    """Distances on a grid of half octaves up to four times `longest`."""
    steps = math.ceil(2 * math.log2(4 * longest))
    return sorted({round(2 ** (step / 2)) for step in range(steps + 1)})


def partial_sums(theta: Tensor, distances: list[int]) -> tuple[Tensor, Tensor]:
    """sum_j |S_{j+1}| and sum_j |C_{j+1}| at every distance, each (s,), for the bounds of appendix B.1.

    S_j = sum_{k<j} exp(i s theta_k), and C_j is its real part. theta: (j,).
    """
    angles = torch.tensor(distances, device=theta.device).double()[:, None] * theta  # (s, j)
    turns = torch.polar(torch.ones_like(angles), angles).cumsum(-1)
    return turns.abs().sum(-1), turns.real.abs().sum(-1)


def largest_steps(h: Tensor) -> Tensor:
    """max_j |h_{j+1} - h_j|, where the one after the last is 0 (Su et al. 2021). h: (..., j). Returns (...)."""
    after = torch.cat((h[..., 1:], torch.zeros_like(h[..., :1])), dim=-1)
    return (after - h).abs().amax(-1)


def _decay_sums(h: Tensor, theta: Tensor, distances: list[int]) -> dict[str, Tensor]:
    """Means over heads and sampled pairs: `max_h`, `max_l` (), and |a(s)| (s,)."""
    angles = torch.tensor(distances, device=h.device).double()[:, None] * theta
    turns = torch.polar(torch.ones_like(angles), angles).to(h.dtype)  # (s, j)
    return {
        "max_h": largest_steps(h).double().mean(),
        "max_l": largest_steps(h.abs()).double().mean(),
        "score": (h @ turns.mT).real.abs().double().mean((0, 1)),
    }


def _shares(sums: dict[str, np.ndarray]) -> dict[str, Any]:
    layers, heads, num_pairs = sums["scenario_b"].shape
    falls, rises, undefined = (int(sums[name].sum()) for name in ("scenario_b", "scenario_d", "undefined"))
    defined = max(falls + rises, 1)
    return {
        "value": rises / defined,
        "share_a": 0.0,
        "share_b": falls / defined,
        "share_c": 0.0,
        "share_d": rises / defined,
        "share_d_weighted": float(sums["magnitude_d"].sum() / max(sums["magnitude"].sum(), sys.float_info.min)),
        "share_abnormal": int(sums["abnormal"].sum()) / defined,
        "share_undefined": undefined / (falls + rises + undefined),
        "mean_abs_angle": float(sums["abs_angle"].sum() / defined),
        "layers": layers,
        "heads": heads,
        "rotary_pairs": num_pairs,
    }


def _angle_lines(sums: dict[str, np.ndarray], theta: Tensor) -> list[dict]:
    layers, heads, num_pairs = sums["scenario_b"].shape
    count = sums["scenario_b"] + sums["scenario_d"] + sums["undefined"]
    return [
        {
            "layer": layer,
            "head": head,
            "pair": pair,
            "theta": float(theta[pair]),
            **{name: sums[name][layer, head, pair].tolist() for name in ("angle_counts", "tau_counts", "fall_counts")},
            **{name: int(sums[name][layer, head, pair]) for name in ("abnormal", "undefined")},
            "magnitude": float(sums["magnitude"][layer, head, pair] / count[layer, head, pair]),
        }
        for layer, head, pair in itertools.product(range(layers), range(heads), range(num_pairs))
    ]


def _decay_lines(sums: dict[str, np.ndarray], theta: Tensor, distances: list[int], documents: int) -> list[dict]:
    sum_s, sum_c = (sums_of.tolist() for sums_of in partial_sums(theta, distances))
    lines = []
    for layer, (max_h, max_l) in enumerate(zip(sums["max_h"] / documents, sums["max_l"] / documents, strict=True)):
        for i, distance in enumerate(distances):
            lines.append(
                {
                    "layer": layer,
                    "distance": distance,
                    "sum_s": sum_s[i],
                    "sum_c": sum_c[i],
                    "max_h": float(max_h),
                    "max_l": float(max_l),
                    "bound_rope": float(max_h * sum_s[i]),
                    "bound_coca": float(max_l * sum_c[i]),
                    "score": float(sums["score"][layer, i] / documents),
                }
            )
    return lines


def _frequencies(model: Any) -> Tensor:
    """The angle per position of every rotary pair, (j,) float64. Raises CocaError where there is none."""
    frequencies = [rotary.inv_freq for _, _, rotary in rotary_modules(model)]
    if not frequencies:
        raise CocaError(f"{type(model).__name__}: got no rotary embedding, or several kinds, expected one (RoPE)")
    return frequencies[0].double()


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

    with patch.object(modelling, "apply_rotary_pos_emb", seen):
        yield


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
                coefficient = t[0, :, n].float()  # (g, p, j)
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
