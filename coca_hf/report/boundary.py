"""Rotary boundaries: the initial angle of query and key, and what follows from it (the paper's section 2.2)."""

import numpy as np

from coca_hf.report.against_length import (
    EXPLANATIONS,
    TITLES,
    Measured,
    curve_figure,
    finite,
    keys_of,
    missing_values,
    numbered,
    trained_lengths,
    xs_of,
)
from coca_hf.report.document import Figure, Grid, Section, Text
from coca_hf.report.plots import Curve, Heat, heat_figure
from coca_hf.report.rows import Table, read_raw

SLACK = (
    "The score of a CoCA-slack model has two parts: one that depends on the distance of query and key, whose angle and "
    "scenarios its line has, and one that depends on where in the text they are, the share of which is in the column "
    "absolute; no bound of the paper's is of such a score."
)


def boundary(measured: Measured) -> Section | None:
    parts: list = [Text(EXPLANATIONS["boundary"])]
    tables = measured.of_task("boundary")
    if any(row["coca_constraint"] == "slack" for table in tables for row in table.rows):
        parts.append(Text(SLACK))
    for number, table in enumerate(tables, 1):
        longest = {name: rows[-1] for name, rows in table.series.items()}
        angles = {name: found for name, row in longest.items() if (found := read_raw(row, "angles"))}
        bounded = {name: row for name, row in longest.items() if row["coca_constraint"] != "slack"}
        decays = {name: found for name, row in bounded.items() if (found := read_raw(row, "decay"))}
        if angles:
            parts.append(_angle_figure(table, angles, number))
        parts.append(_scenarios(table))
        if angles:
            parts.append(_tau_figure(table, angles, number))
        if decays:
            parts.append(_decay_figure(table, decays, number))
        parts += _layer_figures(angles, number)
        parts += missing_values(table)
    return Section(TITLES["boundary"], parts) if tables else None


def _scenarios(table: Table) -> Grid:
    """The share of each of the paper's scenarios (figure 3), of the longest length of every line."""
    columns = {
        "a": "share_a",
        "b": "share_b",
        "c": "share_c",
        "d": "share_d",
        "d, weighted": "share_d_weighted",
        "score rises": "share_abnormal",
        "mean angle (radians)": "mean_abs_angle",
        "absolute": "share_absolute",
    }
    lines = []
    for name, rows in table.series.items():
        found = [rows[-1].get(column) for column in columns.values()]  # none of a row that is an error
        numbers = ["" if number is None else f"{number:.3f}" for number in found]
        lines.append([name, str(rows[-1]["length"]), *numbers])
    return Grid(["model", "length", *columns], lines, numbers_from=1)


def _angle_figure(table: Table, angles: dict[str, list[dict]], number: int) -> Figure:
    keys, curves = keys_of(table, marked=False), []
    for name, lines in angles.items():
        shares = _summed(lines, "angle_counts")
        degrees = [10.0 * edge for edge in range(len(shares) + 1) for _ in (0, 1)][1:-1]  # both edges of every bin
        curves.append(Curve(keys[name], degrees, [share for share in shares for _ in (0, 1)]))
    return curve_figure(
        numbered("boundary-angle", number),
        "Histogram of the initial angle between query and key from 0 to 360 degrees, in bins of 10: the table "
        "beside it has the share of each scenario.",
        f"Initial angle between query and key, over all layers, heads and rotary pairs: {table.settings}.",
        curves,
        "share of pairs",
        x_label="initial angle (degrees)",
        y_scale="zero",
        ticks=[*range(0, 361, 60)],
        x_scale="linear",
    )


def _tau_figure(table: Table, angles: dict[str, list[dict]], number: int) -> Figure:
    keys, curves = keys_of(table), []
    for name, lines in angles.items():
        defined = sum(sum(line["angle_counts"]) for line in lines)
        counts = [sum(line["tau_counts"][power] for line in lines) for power in range(len(lines[0]["tau_counts"]))]
        shares = [sum(counts[power:]) / defined if defined else 0.0 for power in range(1, len(counts))]
        curves.append(Curve(keys[name], [2**power for power in range(len(shares))], shares))
    return curve_figure(
        numbered("boundary-tau", number),
        "Share of pairs whose score wrongly rises over at least so many of the nearest tokens.",
        "Share of pairs whose score rises with distance, wrongly, over at least so many of the nearest tokens "
        "(τ, the boundary of scenario d).",
        curves,
        "share of pairs",
        x_label="boundary τ (tokens)",
        y_scale="zero",
        trained_lengths=trained_lengths(table),
        ticks=[16**power for power in range(6)],
    )


def _layer_figures(angles: dict[str, list[dict]], number: int) -> list[Figure]:
    """The share of scenario d by layer and head, a heat map for each model, all to one scale."""
    heats = []
    for name, lines in angles.items():
        layers, heads = (sorted({line[key] for line in lines}) for key in ("layer", "head"))
        counts = {(layer, head): np.zeros(36, dtype=int) for layer in layers for head in heads}
        for line in lines:
            counts[line["layer"], line["head"]] += line["angle_counts"]
        shares = [
            [_quotient(counts[layer, head][18:].sum(), counts[layer, head].sum()) for layer in layers] for head in heads
        ]
        heats.append(Heat(name, [*map(str, layers)], [*map(str, heads)], shares))
    top = max((share for heat in heats for line in heat.shares for share in line if share), default=1)
    return [
        Figure(
            name=f"{numbered('boundary-layers', number)}-of-{panel}",
            alt=f"Share of pairs in scenario d by layer and head of {heat.title}.",
            caption=f"Share of pairs in scenario d in {heat.title}, by layer (across) and head (down).",
            draw=heat_figure(heat, "layer", "head", top),
            height=1.2 + 0.13 * len(heat.lines),
        )
        for panel, heat in enumerate(heats, 1)
    ]


def _decay_figure(table: Table, decays: dict[str, list[dict]], number: int) -> Figure:
    keys, curves = keys_of(table), []
    for name, lines in decays.items():
        bound = "bound_coca" if table.series[name][-1]["coca_constraint"] else "bound_rope"
        distances = sorted({line["distance"] for line in lines if line["distance"]})
        means = [float(np.mean([line[bound] for line in lines if line["distance"] == at])) for at in distances]
        curves.append(Curve(keys[name], distances, [finite(mean) for mean in means]))
    xs = xs_of(curves)
    return curve_figure(
        numbered("boundary-decay", number),
        "Upper bound of the attention score against the distance of query and key.",
        "Long-term decay: the bound of a score against the distance of query and key, mean over layers; the bound of "
        "RoPE for models without CoCA, that of CoCA for strict.",
        curves,
        "bound of the score",
        x_label="distance (tokens)",
        ticks=[4**p for p in range(16) if min(xs) <= 4**p <= max(xs)],
    )


def _summed(lines: list[dict], counts: str) -> list[float]:
    """A histogram over all `lines`, as shares."""
    sums = np.sum([line[counts] for line in lines], axis=0)
    return [float(count / max(sums.sum(), 1)) for count in sums]


def _quotient(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None
