"""Rotary borders: the angle that queries and keys start with, and what it does to scores
(section 2.2 and appendix D.2 of the paper).

Letters: h query heads, g key/value heads, m query positions, n key positions, j rotary pairs, p
sampled pairs (m, n) of positions, s distances m - n.

For a rotary pair, q and k are complex numbers and h_j = q_j * conj(k_j), so that the score of a
query s tokens after a key is a(s) = Re sum_j h_j exp(i s theta_j) (eq. 2). The initial angle
Theta_j = arg h_j, in [0, 2 pi), is measured counterclockwise from key to query. A causal model
(m > n) knows two of the paper's four scenarios:

    b   Theta <= pi   the score falls with distance, until the angle reaches pi, at
                      s = (pi - Theta) / theta_j
    d   Theta >  pi   it first rises, for the tau = (2 pi - Theta) / theta_j nearest tokens: the
                      anomaly

and not a and c, which need m < n. Angles are measured on real text, between `pairs_per_document`
uniformly drawn positions m > n. `query_key_products.py` says how h_j of CoCA is measured. The angle
is zero if the key is collinear with the query (eq. 7), as in strict. Slack drops the constraint of
eq. 11: the part of its score that depends on distance has angles between -pi/2 and pi/2, and only
these are counted; another part depends on m + n. The bounds of the appendix do not hold for such a
score, so slack has no table `decay`.
"""

import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.loaded_model import Rope, use_rope_
from coca_hf.evaluate.query_key_products import Products, frequencies, visiting_products
from coca_hf.evaluate.rows import Beside, Count, Identity, Raw, Run, Setting, Share, TextRow
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import Measurement, Table, grid_of, powers, text_settings
from coca_hf.page import Figure, Grid, Heat, Part, Text

ANGLE_BINS = 36
TAU_BINS = 24


class BoundaryRow(TextRow):
    """Shares of the paper's scenarios are among the pairs that have an angle. Raw tables:

    angles   a line per layer, query head and rotary pair: theta, radians per position;
             angle_counts, 36 bins of 10 degrees; tau_counts, bin i counting positions in
             [2^(i-1), 2^i), the first those below 1, the last of 24 open; abnormal; and over its
             pairs of positions, sum_magnitude of |h_j|, sum_magnitude_d of those in scenario d,
             sum_magnitude_absolute of |g_j|, sum_abs_angle
    decay    a line per layer and distance: the bounds of |a(s)| of the appendix (D.1), RoPE's
             max_h * sum_s and CoCA's max_l * sum_c, where max_h and max_l are means, over heads and
             sampled pairs, of max |h_{j+1} - h_j| and max |l_{j+1} - l_j| with l = |h|,
             sum_s = sum_j |S_{j+1}|, sum_c = sum_j |C_{j+1}|
    """

    length: Identity[Count]
    value: Share  # in scenario d
    pairs_per_document: Setting[int]
    share_b: Beside[float | None]
    share_d_weighted: Beside[float | None]  # by |h_j|
    share_abnormal: Beside[float | None]  # in scenario d, sampled nearer than their tau
    share_absolute: Beside[float | None]  # of |g_j| in |h_j| + |g_j|; only slack has any
    mean_abs_angle: Beside[float | None]  # radians, of angles in (-pi, pi]


def boundary_rows(run: Run, sample: Sample, pairs_per_document: int = 1024) -> Iterator[dict]:
    """Yield the rows of a run.

    The first `length` tokens of every document count. Positions are drawn with the sample's seed.

    Raises CocaError if the model has no rotary embedding, or rotates its heads in an unknown way.
    """
    model, documents, seed = run.loaded.model, sample.token_ids, sample.settings["seed"]

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        use_rope_(model, rope, length)
        theta = frequencies(model, length)
        distances = decay_distances(max(length, run.about["trained_length"] or 0))

        def of_document(number: int) -> dict[str, np.ndarray]:
            token_ids, draw_seed = documents[number][:length], f"boundary {seed} {number}"
            positions = draw_positions(len(token_ids), pairs_per_document, draw_seed)
            return _of_document(model, token_ids, theta, positions)

        found = batches.each([*range(len(documents))], of_document)
        sums = {name: np.sum([one[name] for one in found], axis=0) for name in found[0]}
        if count := int(sums["not_finite"].sum()):
            raise NoValue(f"{count} products of queries and keys are not finite")
        raw = {"angles": _angle_lines(sums, theta)}
        if run.about["coca_constraint"] != "slack":
            raw["decay"] = _decay_lines(sums, theta, distances, len(found))
        return _shares(sums) | {"tokens": sum(len(ids[:length]) for ids in documents)}, raw

    settings = {"task": "boundary", **sample.describe(), "pairs_per_document": pairs_per_document}
    return run.rows(BoundaryRow, settings, measure)


def _of_document(
    model: Any, token_ids: Tensor, theta: Tensor, positions: tuple[Tensor, Tensor]
) -> dict[str, np.ndarray]:
    """Counts and sums over `positions`, each (p,), of one document.

    The first axis of every array is the layer.
    """
    m, n = (of_pairs.to(model.device) for of_pairs in positions)
    layers: dict[int, dict[str, Tensor]] = {}

    def visit(layer: int, products: Products) -> None:
        h, g = products(m, n)
        layers[layer] = count_angles(h, theta, m - n)
        layers[layer]["max_h"] = largest_steps(h).double().mean()
        layers[layer]["max_l"] = largest_steps(h.abs()).double().mean()
        layers[layer]["magnitude_absolute"] = g.abs().double().sum(1)

    with visiting_products(model, theta, visit), torch.inference_mode():
        model.base_model(input_ids=token_ids[None].to(model.device), use_cache=False)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) != expected:
        raise CocaError(
            f"{type(model).__name__}: got rotated queries and keys of {len(layers)} layers, "
            f"expected {expected}; coca-eval boundary does not understand its attention"
        )
    in_order = [layers[number] for number in sorted(layers)]
    return {name: torch.stack([one[name] for one in in_order]).cpu().numpy() for name in layers[0]}


def draw_positions(length: int, count: int, seed: str) -> tuple[Tensor, Tensor]:
    """`count` pairs of positions m > n below `length`, uniform over all: two tensors (p,)."""
    rng = random.Random(seed)
    pairs = torch.tensor([rng.sample(range(length), 2) for _ in range(count)])
    return pairs.amax(1), pairs.amin(1)


def count_angles(h: Tensor, theta: Tensor, distance: Tensor) -> dict[str, Tensor]:
    """Histograms of the initial angles, and of the positions where monotonicity breaks.

    h: (h, p, j) complex; theta: (j,) radians per position; distance: (p,) tokens. Returns tensors
    (h, j, ...).
    """
    heads, _, num_pairs = h.shape
    finite = h.isfinite()
    defined = finite & (h != 0)
    # (h, p, j); in float32 pi is above pi
    angle = torch.atan2(h.imag.double(), h.real.double()) % (2 * math.pi)
    angle = torch.where(defined, angle, 0.0)
    falls, rises = defined & (angle <= math.pi), defined & (angle > math.pi)
    tau = (2 * math.pi - angle) / theta
    place = (
        torch.arange(heads * num_pairs, device=h.device).view(heads, 1, num_pairs).expand(h.shape)
    )

    def histogram(bins: Tensor, among: Tensor, num_bins: int) -> Tensor:
        index = (place * num_bins + bins.clamp(0, num_bins - 1))[among]
        return index.bincount(minlength=heads * num_pairs * num_bins).view(
            heads, num_pairs, num_bins
        )

    def octave(positions: Tensor) -> Tensor:
        return positions.clamp(min=2**-1).log2().floor().long() + 1

    magnitude = torch.where(defined, h.abs(), 0.0).double()
    wrapped = torch.where(angle > math.pi, angle - 2 * math.pi, angle).abs()
    return {
        "angle_counts": histogram((angle / (2 * math.pi) * ANGLE_BINS).long(), defined, ANGLE_BINS),
        "tau_counts": histogram(octave(tau), rises, TAU_BINS),
        "scenario_b": falls.sum(1),
        "scenario_d": rises.sum(1),
        "abnormal": (rises & (distance[:, None] < tau)).sum(1),
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
    """sum_j |S_{j+1}| and sum_j |C_{j+1}| at every distance, each (s,), for the bounds of appendix
    D.1 (eq. 19 and 20).

    S_j = sum_{k<j} exp(i s theta_k), and C_j is its real part. theta: (j,).
    """
    angles = torch.tensor(distances, device=theta.device).double()[:, None] * theta  # (s, j)
    turns = torch.polar(torch.ones_like(angles), angles).cumsum(-1)
    return turns.abs().sum(-1), turns.real.abs().sum(-1)


def largest_steps(h: Tensor) -> Tensor:
    """max_j |h_{j+1} - h_j|, where the one after the last is 0 (Su et al. 2021). h: (..., j).
    Returns (...).
    """
    after = torch.cat((h[..., 1:], torch.zeros_like(h[..., :1])), dim=-1)
    return (after - h).abs().amax(-1)


def _shares(sums: dict[str, np.ndarray]) -> dict[str, Any]:
    total = {name: float(sums[name].sum()) for name in sums}  # counts stay exact
    falls, rises = total["scenario_b"], total["scenario_d"]
    magnitude, absolute = total["magnitude"], total["magnitude_absolute"]
    defined, least = max(falls + rises, 1), sys.float_info.min
    return {
        "value": rises / defined,
        "share_b": falls / defined,
        "share_d_weighted": total["magnitude_d"] / max(magnitude, least),
        "share_abnormal": total["abnormal"] / defined,
        "share_absolute": absolute / max(magnitude + absolute, least),
        "mean_abs_angle": total["abs_angle"] / defined,
    }


def _angle_lines(sums: dict[str, np.ndarray], theta: Tensor) -> list[dict]:
    layers, heads, num_pairs = sums["scenario_b"].shape
    magnitudes = ("magnitude", "magnitude_d", "magnitude_absolute", "abs_angle")
    lines = []
    for at in itertools.product(range(layers), range(heads), range(num_pairs)):
        line: dict[str, Any] = dict(zip(("layer", "head", "pair"), at, strict=True))
        line["theta"] = float(theta[line["pair"]])
        line |= {name: sums[name][at].tolist() for name in ("angle_counts", "tau_counts")}
        line["abnormal"] = int(sums["abnormal"][at])
        line |= {f"sum_{name}": float(sums[name][at]) for name in magnitudes}
        lines.append(line)
    return lines


def _decay_lines(
    sums: dict[str, np.ndarray], theta: Tensor, distances: list[int], documents: int
) -> list[dict]:
    sum_s, sum_c = (sums_of.tolist() for sums_of in partial_sums(theta, distances))
    largest_h, largest_l = (sums[name] / documents for name in ("max_h", "max_l"))
    return [
        {
            "layer": layer,
            "distance": distance,
            "bound_rope": float(max_h * sum_s[i]),
            "bound_coca": float(max_l * sum_c[i]),
        }
        for layer, (max_h, max_l) in enumerate(zip(largest_h, largest_l, strict=True))
        for i, distance in enumerate(distances)
    ]


# The page: the scenarios of figure 3, and the borders of figure 7

SLACK = (
    "The score of a CoCA-slack model has two parts: one that depends on the distance of query and "
    "key, whose angle and scenarios its line has, and one that depends on where in the text they "
    "are, the share of which is in the column absolute; no bound of the paper's is of such a score."
)
SCENARIOS = {
    "b": "share_b",
    "d": "value",
    "d, weighted": "share_d_weighted",
    "score rises": "share_abnormal",
    "mean angle (radians)": "mean_abs_angle",
    "absolute": "share_absolute",
}
Lines = dict[str, list[dict]]  # of a raw table, by line of the table


def _parts(tables: list[Table]) -> list[Part]:
    parts: list[Part] = []
    if any(row["coca_constraint"] == "slack" for table in tables for row in table.rows):
        parts.append(Text(SLACK))
    for table in tables:
        angles, decays = table.raw_of_longest("angles"), table.raw_of_longest("decay")
        bounded = {name for name, row in table.longest.items() if row["coca_constraint"] != "slack"}
        decays = {name: lines for name, lines in decays.items() if name in bounded}
        parts += [_angle_figure(table, angles)] if angles else []
        parts += [_scenarios(table)]
        parts += [_tau_figure(table, angles)] if angles else []
        parts += [_decay_figure(table, decays)] if decays else []
        parts += [*_layer_figures(table, angles), *table.missing()]
    return parts


def _scenarios(table: Table) -> Grid:
    """The share of each scenario (figure 3), at one length."""
    lines = {}
    for name, row in table.longest.items():
        numbers = {key: row[column] for key, column in SCENARIOS.items()}
        cells = {key: f"{number:.3f}" for key, number in numbers.items() if number is not None}
        lines[name] = {"length": str(row["length"]), **cells}
    columns = ("length", *SCENARIOS)
    return grid_of("model", lines, dict(zip(columns, columns, strict=True)))


def _angle_figure(table: Table, angles: Lines) -> Figure:
    points = {}
    for name, lines in angles.items():
        counts = np.sum([line["angle_counts"] for line in lines], axis=0)
        shares = counts / max(counts.sum(), 1)
        points[name] = [
            (10.0 * edge, float(share))
            for number, share in enumerate(shares)
            for edge in (number, number + 1)
        ]
    return table.figure(
        "boundary-angle",
        "Histogram of the initial angle between query and key from 0 to 360 degrees, in bins of "
        "10: the table beside it has the share of each scenario.",
        f"Initial angle between query and key, over all layers, heads and rotary pairs{table.at}: "
        f"{table.settings}.",
        points,
        "share of pairs",
        marked=False,
        x_label="initial angle (degrees)",
        y_scale="zero",
        ticks=[*range(0, 361, 60)],
        x_scale="linear",
    )


def _tau_figure(table: Table, angles: Lines) -> Figure:
    points = {}
    for name, lines in angles.items():
        defined = sum(sum(line["angle_counts"]) for line in lines)
        counts = np.sum([line["tau_counts"] for line in lines], axis=0).tolist()
        points[name] = [
            (2**power, sum(counts[power + 1 :]) / defined if defined else 0.0)
            for power in range(len(counts) - 1)
        ]
    return table.figure(
        "boundary-tau",
        "Share of pairs whose score wrongly rises over the nearest τ tokens or more.",
        "Share of pairs whose score rises with distance, wrongly, over the nearest τ tokens or more "
        f"(τ: the boundary of scenario d){table.at}.",
        points,
        "share of pairs",
        x_label="boundary τ (tokens)",
        y_scale="zero",
        trained_lengths=table.trained_lengths,
        ticks=[16**power for power in range(6)],
    )


def _layer_figures(table: Table, angles: Lines) -> list[Figure]:
    """The share of scenario d by layer and head: a heat map for each model, on one scale."""
    heats = []
    for name, lines in angles.items():
        layers, heads = (sorted({line[key] for line in lines}) for key in ("layer", "head"))
        counts = {at: np.zeros(ANGLE_BINS, dtype=int) for at in itertools.product(layers, heads)}
        for line in lines:
            counts[line["layer"], line["head"]] += line["angle_counts"]
        shares = [[_share_d(counts[layer, head]) for layer in layers] for head in heads]
        heats.append(Heat(name, [*map(str, layers)], [*map(str, heads)], shares, "layer", "head"))
    known = [share for heat in heats for line in heat.shares for share in line if share]
    return [
        Figure(
            name=f"{table.named('boundary-layers')}-of-{panel}",
            alt=f"Share of pairs in scenario d by layer and head of {heat.title}.",
            caption=f"Share of pairs in scenario d in {heat.title}, by layer (across) and head "
            f"(down){table.at}.",
            drawing=replace(heat, top=max(known, default=1)),
            height=1.2 + 0.13 * len(heat.lines),
        )
        for panel, heat in enumerate(heats, 1)
    ]


def _share_d(counts: np.ndarray) -> float | None:
    """The share of angles that is above 180 degrees; None for no angles. counts: of bins."""
    return float(counts[ANGLE_BINS // 2 :].sum() / counts.sum()) if counts.sum() else None


def _decay_figure(table: Table, decays: Lines) -> Figure:
    points = {}
    for name, lines in decays.items():
        row = table.longest[name]
        kept = row["coca_kept_layers"] or []
        by_distance: dict[int, list[float]] = {}
        for line in lines:
            is_coca = row["coca_constraint"] and line["layer"] not in kept
            bound = line["bound_coca" if is_coca else "bound_rope"]
            by_distance.setdefault(line["distance"], []).append(bound)
        means = {s: float(np.mean(some)) for s, some in sorted(by_distance.items()) if s}
        points[name] = means.items()
    return table.figure(
        "boundary-decay",
        "Upper bound of the attention score against the distance of query and key.",
        "Long-term decay: the bound of a score against the distance of query and key, mean over "
        "layers; the bound of RoPE for models without CoCA and for kept layers, that of CoCA for "
        f"strict{table.at}.",
        points,
        "bound of the score",
        x_label="distance (tokens)",
        ticks=powers(4, points),
    )


def _settings(row: dict) -> str:
    return f"{text_settings(row)}, {row['pairs_per_document']} pairs of positions a document"


MEASUREMENT = Measurement(
    task="boundary",
    title="Rotary boundaries",
    explanation="Share of rotary pairs whose angle between query and key, before rotation, lies "
    "between 180° and 360°: there the score rises with distance for the nearest tokens (the paper's "
    "scenario d). Strict CoCA makes the angle zero.",
    row=BoundaryRow,
    settings=_settings,
    cell=lambda row: f"{row['value']:.2f}",
    parts=_parts,
    raw={
        "angles": {"layer": int, "head": int, "angle_counts": list[int], "tau_counts": list[int]},
        "decay": {"layer": int, "distance": int, "bound_rope": float, "bound_coca": float},
    },
)
