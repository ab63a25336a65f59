"""What the sections of a page share: the rows there are, a table and curves of values against length."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coca_hf.report.document import Bullets, Figure, Grid, Section, Text
from coca_hf.report.plots import FAR, Curve, Key, line_figure
from coca_hf.report.recovery import Recovery
from coca_hf.report.rows import Table, read_raw, trained_length

TITLES = {
    "perplexity": "Perplexity",
    "position-loss": "Loss by position",
    "passkey": "Passkey retrieval",
    "copying": "Copying",
    "recall": "Key-value recall",
    "attention-maps": "Attention beside the original's",
    "layers": "Harm of each layer",
    "boundary": "Rotary boundaries",
    "tasks": "Short context",
    "speed": "Speed and memory",
}
EXPLANATIONS = {
    "perplexity": "Sliding window, window = context length; token-weighted over all documents; each token scored once; "
    "lower is better.",
    "position-loss": "Perplexity over disjoint windows, and the loss by the index of the token in its window: an "
    "average hides where the model breaks, this does not. Lower is better.",
    "passkey": "Share of prompts whose answer holds the five-digit number hidden in them; greedy; higher is better. In "
    "brackets, where the number was scored without generation: nats per digit; lower is better.",
    "copying": "Loss, in nats per token, on the second copy of a random sequence, which only attention to the first "
    "can predict, or of a passage of text that is read again; in brackets that of the first copy. Lower is better.",
    "recall": "Share of lists of keys and values in which the value of the key that is asked for is found; greedy; "
    "higher is better. In brackets: nats per token of the value; lower is better.",
    "attention-maps": "Divergence of every head's attention from the original model's on the same text, in nats, mean "
    "over layers, heads and queries; in brackets the mass on the first token, and the original's. Lower is nearer.",
    "layers": "Divergence of the converted model's predictions from the original's, in nats per token, mean over a "
    "passage, a second copy of random tokens and a passage that is read again; lower is nearer. A layer's harm is what "
    "its conversion adds to that: the mean over converting it alone and converting it last.",
    "boundary": "The angle between query and key before rotation, per rotary pair. Where it lies between 180° and 360° "
    "the score rises with distance for the nearest tokens (the paper's scenario d); strict CoCA makes the angle zero.",
    "tasks": "Benchmarks of lm-eval at short context: what a longer context must not cost. ± the standard error, where "
    "the metric is a mean over cases.",
    "speed": "Median seconds of a step. In brackets: times the unconverted model's, measured in the same run.",
}
NBSP = "\N{NO-BREAK SPACE}"
AXES = {
    "perplexity": "perplexity",
    "passkey": "share found",
    "recall": "share found",
    "position-loss": "loss (nats per token)",
}
PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
PUBLISHED = tuple(PAPER["perplexity"])  # what --paper takes


@dataclass(frozen=True)
class Measured:
    """All there is to report: the tables of rows, the directories they came from, the published curves asked for."""

    tables: list[Table]
    runs: Sequence[Path]
    paper: Sequence[str] = ()
    recoveries: Sequence[Recovery] = ()

    def of_task(self, task: str) -> list[Table]:
        return [table for table in self.tables if table.task == task]

    @property
    def rows(self) -> list[dict]:
        return [row for table in self.tables for row in table.rows]


def values(table: Table, published: dict[str, list] | None = None) -> Grid:
    """Model and RoPE setting against length, then the published values."""
    published = published or {}
    lengths = sorted({*table.lengths, *(PAPER["lengths"] if published else [])})
    lines = []
    for name, rows in table.series.items():
        cells = {row["length"]: show(row) for row in rows}
        lines.append([name, *(cells.get(length, "") for length in lengths)])
    muted = frozenset(range(len(lines), len(lines) + len(published)))
    for name, numbers in published.items():
        cells = {
            length: "none" if number is None else show({"task": table.task, "value": number})
            for length, number in zip(PAPER["lengths"], numbers, strict=True)
        }
        lines.append([f"paper: {name}", *(cells.get(length, "") for length in lengths)])
    return Grid(["model", *map(str, lengths)], lines, numbers_from=1, muted=muted)


def show(row: dict) -> str:
    """The value of a row as tables have it."""
    value, task = row["value"], row["task"]
    if value is None:
        return "OOM" if (row.get("error") or "").startswith("OOM") else "none"
    if task == "speed":
        return f"{value:.3g}{NBSP}s" + (f" ({row['ratio']:.2f}{NBSP}x)" if row["ratio"] else "")
    if task == "tasks":
        return f"{value:.3f}" + (f"{NBSP}±{NBSP}{row['stderr']:.3f}" if row["stderr"] is not None else "")
    if task == "copying":
        return f"{value:.2f}{NBSP}({row['nll_first']:.2f})"
    if task == "recall":
        return f"{value:.2f}{NBSP}({row['nll']:.2f})"
    if row.get("nats_per_digit") is not None:
        return f"{value:.2f}{NBSP}({row['nats_per_digit']:.2f})"
    if task == "layers":
        return f"{value:.3f}"
    if task == "attention-maps":
        return f"{value:.3f}{NBSP}({row['sink']:.2f},{NBSP}{row['baseline_sink']:.2f})"
    return f"{value:.2f}" if task in ("passkey", "boundary") or value < 1e4 else f"{value:.3g}"


def against_length(task: str, measured: Measured) -> Section | None:
    tables = measured.of_task(task)
    published = {name: line for family in measured.paper for name, line in PAPER.get(task, {}).get(family, {}).items()}
    parts: list = [Text(EXPLANATIONS[task])]
    if published:
        parts.append(
            Text(
                f"Grey and dotted: published by {PAPER['source']} ({PAPER['settings'][task]}). Other models, other "
                f"training and another text: shapes can be compared, values cannot.",
                notice=True,
            )
        )
    for number, table in enumerate(tables, 1):
        parts += [_figure(table, number, published), values(table, published), *missing_values(table)]
    return Section(TITLES[task], parts) if tables else None


def _figure(table: Table, number: int, published: dict[str, list]) -> Figure:
    curves = curves_of(table)
    for style, (name, numbers) in enumerate(published.items()):
        known = [(x, y) for x, y in zip(PAPER["lengths"], numbers, strict=True) if y is not None]
        curves.append(Curve(Key(f"paper: {name}", style=style, published=True), *map(list, zip(*known, strict=True))))
    title = TITLES[table.task]
    far = any(row["value"] is None or row["value"] > FAR for row in table.rows)
    crosses = " A cross at the upper edge: no value, or one beyond the page." if far else ""
    banded = any(ends for curve in curves for ends in curve.band or [])
    bands = " Shaded: from the 10th to the 90th percentile of the documents." if banded else ""
    return curve_figure(
        numbered(table.task, number),
        f"{title} against context length. {in_words(table)}",
        f"{title} against context length: {table.settings}.{bands}{crosses}{_trainings(table)}",
        curves,
        AXES[table.task],
        y_scale="log" if table.task == "perplexity" else "share",
        trained_lengths=trained_lengths(table),
    )


def curve_figure(name: str, alt: str, caption: str, curves: list[Curve], y_label: str, **drawn: Any) -> Figure:
    """`curves` as `line_figure` draws them, with their keys beside it."""
    return Figure(name, alt, caption, line_figure(curves, y_label, **drawn), [curve.key for curve in curves])


def curves_of(table: Table) -> list[Curve]:
    keys = keys_of(table)
    return [
        Curve(keys[name], [row["length"] for row in rows], [row["value"] for row in rows], [*map(_spread, rows)])
        for name, rows in table.series.items()
    ]


def _trainings(table: Table) -> str:
    """Which model was trained at which length, where the lengths differ."""
    if len(trained_lengths(table)) < 2:
        return ""
    lengths = {row["model"]: length for row in table.rows if (length := trained_length(row))}
    return " Trained at: " + ", ".join(f"{length} ({model})" for model, length in lengths.items()) + "."


def _spread(row: dict) -> tuple[float, float] | None:
    """The 10th and the 90th percentile of the documents' perplexities; None for one document, or none kept."""
    sums: dict[int, list[float]] = {}
    for window in read_raw(row, "windows") or []:
        nll, tokens = sums.setdefault(window["document"], [0.0, 0])
        sums[window["document"]] = [nll + window["nll"], tokens + window["tokens"]]
    means = [nll / tokens for nll, tokens in sums.values()]
    if len(means) < 2 or row["value"] is None or max(means) > math.log(FAR):
        return None
    low, high = (math.exp(mean) for mean in np.quantile(means, [0.1, 0.9]))
    return low, high


def keys_of(table: Table, marked: bool = True) -> dict[str, Key]:
    names = list(dict.fromkeys((row["model"], row["model_path"]) for row in table.rows))
    ropes = list(dict.fromkeys(["default", *(row["rope"] for row in table.rows)]))  # default is solid on every plot
    return {
        name: Key(
            name, names.index((rows[0]["model"], rows[0]["model_path"])), ropes.index(rows[0]["rope"]), marked=marked
        )
        for name, rows in table.series.items()
    }


def trained_lengths(table: Table) -> list[int]:
    return sorted({length for row in table.rows if (length := trained_length(row))})


def in_words(table: Table) -> str:
    """The ends of every line, for whoever cannot see it."""
    return " ".join(
        f"{name}: {show(rows[0])} at {rows[0]['length']}"
        + (f", {show(rows[-1])} at {rows[-1]['length']}." if len(rows) > 1 else ".")
        for name, rows in table.series.items()
    )


def missing_values(table: Table) -> list[Bullets]:
    reasons = [
        f"no value for {name} at {row['length']}: {row['error']}"
        for name, rows in table.series.items()
        for row in rows
        if row["value"] is None
    ]
    return [Bullets(reasons)] if reasons else []


def numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def xs_of(curves: list[Curve]) -> list[float]:
    return [x for curve in curves for x in curve.xs]
