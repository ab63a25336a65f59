"""Rotary borders: the angle that queries and keys start with, and what it does to scores (section 2.2, appendix B.2).

Letters: h query heads, g key/value heads, m query positions, n key positions, j rotary pairs, p sampled pairs (m, n) of
positions, s distances m - n.

For a rotary pair, q and k are complex numbers and h_j = q_j * conj(k_j), so that the score of a query s tokens after a
key is a(s) = Re sum_j h_j exp(i s theta_j) (eq. 2). The initial angle Theta_j = arg h_j, in [0, 2 pi), is measured
counterclockwise from key to query. A causal model (m > n) knows two of the paper's four scenarios:

    b   Theta <= pi   the score falls with distance, until the angle reaches pi, at s = (pi - Theta) / theta_j
    d   Theta >  pi   it first rises, for the tau = (2 pi - Theta) / theta_j nearest tokens: the anomaly

and none of a and c, which need m < n. Angles are taken over real text, between `pairs_per_document` positions m > n
that are drawn uniformly. How h_j of CoCA is measured, `products.py` says. The angle is zero where the key is collinear
with the query (eq. 6), as in strict. Slack lets the constraint of eq. 11 go: the part of its score that depends on
distance has angles between -pi/2 and pi/2, of which all that follows is told, and another part depends on m + n. No
bound of the appendix is of such a score, so slack has no table `decay`.

A row, task `boundary`, has besides what `rows.py` lists: `value`, which is `share_d`; `share_a` ... `share_d`, of the
pairs that have an angle; `share_undefined`, of all pairs, those where q_j or k_j is zero; `share_d_weighted`, weighted
by |h_j|; `mean_abs_angle`, radians, of angles in (-pi, pi]; `share_abnormal`, of pairs in scenario d that are sampled
nearer than their tau; `share_absolute`, of |g_j| in |h_j| + |g_j|, which is 0 for all but slack; `layers`, `heads`,
`rotary_pairs`, `pairs_per_document`; what `Sample.describe` says. Raw tables:

    angles   a line per layer, head and pair (of the h query heads): theta, radians per position; angle_counts, 36 bins
             of 10 degrees; tau_counts (d) and fall_counts (b), bin i counting positions in [2^(i-1), 2^i), the first
             those below 1, the last, of 24, open; abnormal, undefined; and over its pairs of positions, sum_magnitude
             of |h_j|, sum_magnitude_d of those in scenario d, sum_magnitude_absolute of |g_j|, sum_abs_angle
    decay    a line per layer and distance: the bounds of |a(s)| of the appendix (B.1), RoPE's max_h * sum_s and CoCA's
             max_l * sum_c, where max_h and max_l are means, over heads and sampled pairs, of max |h_{j+1} - h_j| and
             max |l_{j+1} - l_j| with l = |h|, sum_s = sum_j |S_{j+1}|, sum_c = sum_j |C_{j+1}|; score, the mean of
             |a(s)| of these q and k
"""

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.angles import count_angles, decay_distances, decay_sums, partial_sums
from coca_hf.evaluate.batches import compute_all
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.products import Products, frequencies, visiting_products
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample


def boundary_rows(
    subject: Subject,
    sample: Sample,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    pairs_per_document: int = 1024,
    seed: int = 0,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length, of the first `length` tokens of every document.

    Rows that `store` already has are not measured again.

    Raises CocaError where the model has no rotary embedding, or turns its heads in a way that is not understood.
    """
    settings = {
        "task": "boundary",
        "stride": None,
        **sample.describe(),
        "pairs_per_document": pairs_per_document,
        "seed": seed,
        **subject_settings(subject),
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings,
        lambda rope, settings: _measure(subject.model, sample, rope, settings, track),
        track,
    )


def _measure(model: Any, sample: Sample, rope: Rope, settings: dict, track: Track) -> tuple[dict, Raw]:
    """The results of a row and its raw tables."""
    length = settings["length"]
    use_rope_(model, rope, length)
    theta = frequencies(model)
    distances = decay_distances(max(length, settings["trained_length"] or 0))

    def compute(batch: list[int]) -> list[dict[str, np.ndarray]]:
        return [_of_document(model, sample.token_ids[i][:length], theta, distances, settings, i) for i in batch]

    found, error, _ = compute_all(
        [(list(range(len(sample.token_ids))), 1)],
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
            raw = {"angles": _angle_lines(sums, theta)}
            if settings["coca_constraint"] != "slack":
                raw["decay"] = _decay_lines(sums, theta, distances, len(found))
    return results | {"tokens": sum(len(ids[:length]) for ids in sample.token_ids)}, raw


def _of_document(
    model: Any, token_ids: Tensor, theta: Tensor, distances: list[int], settings: dict, index: int
) -> dict[str, np.ndarray]:
    """Counts and sums over the sampled positions of one document; every array's first axis is the layer."""
    m, n = draw_positions(len(token_ids), settings["pairs_per_document"], f"boundary {settings['seed']} {index}")
    layers: dict[int, dict[str, Tensor]] = {}

    def visit(layer: int, products: Products) -> None:
        h, g = products(m.to(model.device), n.to(model.device))
        layers[layer] = count_angles(h, theta, (m - n).to(model.device)) | decay_sums(h, theta, distances)
        layers[layer]["magnitude_absolute"] = g.abs().double().sum(1)

    with visiting_products(model, theta, visit), torch.inference_mode():
        model.base_model(input_ids=token_ids[None].to(model.device), use_cache=False)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if not layers or len(layers) != expected:
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


def _shares(sums: dict[str, np.ndarray]) -> dict[str, Any]:
    layers, heads, num_pairs = sums["scenario_b"].shape
    falls, rises, undefined = (int(sums[name].sum()) for name in ("scenario_b", "scenario_d", "undefined"))
    defined = max(falls + rises, 1)
    magnitude, rising, absolute = (float(sums[f"magnitude{part}"].sum()) for part in ("", "_d", "_absolute"))
    return {
        "value": rises / defined,
        "share_a": 0.0,
        "share_b": falls / defined,
        "share_c": 0.0,
        "share_d": rises / defined,
        "share_d_weighted": rising / max(magnitude, sys.float_info.min),
        "share_abnormal": int(sums["abnormal"].sum()) / defined,
        "share_absolute": absolute / max(magnitude + absolute, sys.float_info.min),
        "share_undefined": undefined / (falls + rises + undefined),
        "mean_abs_angle": float(sums["abs_angle"].sum() / defined),
        "layers": layers,
        "heads": heads,
        "rotary_pairs": num_pairs,
    }


def _angle_lines(sums: dict[str, np.ndarray], theta: Tensor) -> list[dict]:
    layers, heads, num_pairs = sums["scenario_b"].shape
    return [
        {
            "layer": layer,
            "head": head,
            "pair": pair,
            "theta": float(theta[pair]),
            **{name: sums[name][layer, head, pair].tolist() for name in ("angle_counts", "tau_counts", "fall_counts")},
            **{name: int(sums[name][layer, head, pair]) for name in ("abnormal", "undefined")},
            **{
                f"sum_{name}": float(sums[name][layer, head, pair])
                for name in ("magnitude", "magnitude_d", "magnitude_absolute", "abs_angle")
            },
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
