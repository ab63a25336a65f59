"""Value against context length, one panel per table: log axis, trained length marked."""

import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from coca_hf.report.rows import Table

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")  # Okabe and Ito: for all eyes
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
AXES = {"perplexity": "perplexity (lower is better)", "passkey": "passkey accuracy (higher is better)"}


def plot_png(tables: list[Table]) -> bytes:
    """A PNG of 150 dpi with a panel for each of `tables`, which are all of one task.

    Colour tells models apart, dashes and markers their RoPE settings; the legend is in the order of the last values.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.5 * len(tables)), dpi=150, layout="constrained", facecolor="white")
        for axes, table in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
            _draw(axes, table)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()


def _draw(axes: Axes, table: Table) -> None:
    models = list(dict.fromkeys((row["model"], row["model_path"]) for row in table.rows))
    ropes = list(dict.fromkeys(["default", *(row["rope"] for row in table.rows)]))  # default is solid on every plot
    lines = []
    for name, rows in table.series.items():
        color = COLORS[models.index((rows[0]["model"], rows[0]["model_path"])) % len(COLORS)]
        rope = ropes.index(rows[0]["rope"])
        values = [float("nan") if row["value"] is None else row["value"] for row in rows]
        style: Any = {"color": color, "linestyle": DASHES[rope % 4], "marker": MARKERS[rope % 4], "linewidth": 2}
        lines += axes.plot([row["length"] for row in rows], values, label=name, clip_on=False, zorder=3, **style)

    axes.set_title(table.settings, fontsize=10, color="#555555", loc="left", pad=20)
    axes.set_ylabel(AXES[table.task])
    axes.set_xlabel("context length (tokens)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(table.lengths, [str(length) for length in table.lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    _mark_trained_lengths(axes, table)
    if table.task == "passkey":
        axes.set_ylim(-0.02, 1.04)  # room for whole markers at 0 and 1
    elif any(row["value"] for row in table.rows):  # a log axis needs a number
        _log_values(axes)
    lines.sort(key=lambda line: -_last(line.get_ydata()))
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _mark_trained_lengths(axes: Axes, table: Table) -> None:
    """A dashed line at each trained length on the plot or within an octave of it; an arrow's word for longer ones."""
    first, last = table.lengths[0], table.lengths[-1]
    for length in sorted({row["trained_length"] for row in table.rows if row["trained_length"]}):
        text: Any = {"transform": axes.get_xaxis_transform(), "fontsize": 9, "color": "#666666"}
        if first / 2 <= length <= last * 2:
            axes.axvline(length, color="#888888", linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
            axes.text(length, 1.02, f"trained length {length}", ha="center", **text)
        elif length > last:
            axes.text(last, 1.02, f"trained length {length} \N{RIGHTWARDS ARROW}", ha="right", **text)


def _log_values(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    locator = LogLocator(base=10, subs=(1, 2, 5))
    low, high = axes.get_ylim()
    few = sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 3
    axes.yaxis.set_major_locator(MaxNLocator(5) if few else locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _last(values) -> float:
    """The last value that is a number, else 0."""
    return next((float(value) for value in reversed(values) if value == value), 0.0)
