"""Figures (curves and heat maps) as PNG for a paper and as SVG that takes a page's colours."""

import io
import math
import re
import textwrap
from functools import cache
from html import escape
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from coca_hf.page import FAR, Curve, Heat, Key, Plot

# After Okabe and Ito, for colour-blind readers; three are darker, for a contrast of 3 on white
COLORS = ("#0072b2", "#d55e00", "#009068", "#b8578f", "#2e8bc0", "#a87000", "#444444")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v")  # one more than dashes, so that 20 pairs differ
PUBLISHED_MARKERS = ("v", "<", ">", "P", "X", "p", "*", "d", "1", "+", "2")
INK, MUTED, FAINT, PAPER = "#1b1b1b", "#5f5f5f", "#d9d9d9", "#ffffff"
CSS_NAMES = {INK: "ink", MUTED: "muted", FAINT: "faint", PAPER: "paper"} | {
    color: f"c{number}" for number, color in enumerate(COLORS)
}
AROUND_AXES = 1.5  # inches, for the names above and below the axes, at most
STYLE: Any = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def draw(drawing: Plot | Heat, width: float, height: float, legend: bool) -> Figure:
    """Draw at a size in inches, with or without a legend inside, for which it may be higher.

    A heat map has a number in every cell, or a scale where cells are many.
    """
    if legend and isinstance(drawing, Plot):
        height = max(height, _height_of_legend(drawing) + AROUND_AXES)
    with matplotlib.rc_context(STYLE | {"axes.grid": isinstance(drawing, Plot)}):
        figure = Figure(
            figsize=(width, height),
            layout="constrained",
            facecolor=PAPER if legend else "none",
        )
        axes = figure.subplots()
        if isinstance(drawing, Heat):
            _draw_heat(figure, axes, drawing)
        else:
            _draw_plot(axes, drawing, width, legend)
        return figure


def _height_of_legend(plot: Plot) -> float:
    """In inches: the lines of every label, and half a line between labels."""
    lines = [1.2 * len(_plain(curve.key.label).splitlines()) + 0.5 for curve in plot.curves]
    return sum(lines) * STYLE["font.size"] / 72 if len(lines) > 1 else 0.0


def look(key: Key) -> dict[str, Any]:
    """Colour tells models apart, dashes and markers their RoPE settings; the eighth model and later
    ones have hollow markers.
    """
    if key.published:
        marker = PUBLISHED_MARKERS[key.style % len(PUBLISHED_MARKERS)]
        line = {"color": MUTED, "linestyle": (0, (2, 2)), "linewidth": 1.2}
        return line | {"marker": marker, "markersize": 4.5}
    hollow = key.color >= len(COLORS)
    marked = key.marked or hollow or key.style >= len(DASHES)
    marker = MARKERS[key.style % len(MARKERS)] if marked else ""
    line = {"color": COLORS[key.color % len(COLORS)], "linewidth": 2}
    line |= {"linestyle": DASHES[key.style % len(DASHES)], "marker": marker, "markersize": 5.5}
    return line | ({"markerfacecolor": PAPER} if hollow else {})


def to_png(figure: Figure) -> bytes:
    """For a paper or a README: 200 dpi, with a palette, which saves two thirds of the bytes."""
    drawn, png = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=200)
    # Pillow takes a long legend for an attack
    with patch.object(Image, "MAX_IMAGE_PIXELS", None), Image.open(drawn) as image:
        palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        palette.save(png, "PNG", optimize=True, dpi=(200, 200))
    return png.getvalue()


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """For a page: text stays text, and the colours of this file become the page's variables.

    name: unique on the page; it keeps the ids inside the drawing apart.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=metadata)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # of groups; references use hashes
    for color, css_name in CSS_NAMES.items():
        svg = svg.replace(color, f"var(--{css_name})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    box = re.search(r'<svg[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box
    opening = (
        f'<svg viewBox="0 0 {box[1]} {box[2]}" role="img" aria-label="{escape(alt)}" '
        f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return opening + svg[svg.index(">") + 1 :]


@cache
def key_svg(key: Key) -> str:
    """The line of a legend, 34 by 14 pixels."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(34 / 72, 14 / 72), facecolor="none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **look(key))
        axes.set_xlim(0, 2)
        svg = to_svg(figure, f"key-{key}", "")
        return svg.replace('role="img" aria-label=""', 'aria-hidden="true"')


def _draw_plot(axes: Axes, plot: Plot, width: float, legend: bool) -> None:
    values = [value for curve in plot.curves for value in curve.values]
    xs = plot.ticks or sorted({x for curve in plot.curves for x in curve.xs})
    xs = xs[(len(xs) - 1) % 2 :: 2] if len(xs) > 9 else xs  # ticks must not touch
    banded = sum(any(curve.band or []) for curve in plot.curves)
    shade = min(0.15, 0.4 / max(banded, 1))
    lines = [
        _draw_curve(axes, curve, shade, _covers(curve, plot.curves[number:]))
        for number, curve in enumerate(plot.curves, 1)
    ]
    axes.set_ylabel(plot.y_label)
    axes.set_xlabel(plot.x_label)
    if plot.x_scale == "log":
        axes.set_xscale("log", base=2)
    points = width * 72 * (0.6 if legend else 0.8)
    axes.set_xticks(xs, _labels_apart(axes, xs, points))
    axes.xaxis.set_minor_locator(NullLocator())
    if plot.y_scale == "share":
        axes.set_ylim(-0.03, 1.05)  # room for whole markers at 0 and 1
    elif plot.y_scale == "zero":
        axes.set_ylim(bottom=0)
    # A logarithmic axis needs a number
    elif plot.y_scale == "log" and any(value and value <= FAR for value in values):
        _log_values(axes)
    _mark(axes, plot, xs, points)
    if legend and len(lines) > 1:
        lines.sort(key=lambda line: -_last(line.get_ydata()))
        axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _covers(curve: Curve, later: list[Curve]) -> int:
    """How many of the curves drawn over this one hide a piece of it, at most 3."""
    return min(sum(bool(_pieces(curve) & _pieces(other)) for other in later), 3)


def _pieces(curve: Curve) -> set[Any]:
    """The ends of every straight piece of a curve."""
    points = [*zip(curve.xs, curve.values, strict=True)]
    return {ends for ends in pairwise(points) if None not in (ends[0][1], ends[1][1])}


def _draw_curve(axes: Axes, curve: Curve, shade: float, covers: int) -> Any:
    """covers: curves that hide a piece of this one, which is wider, to be seen."""
    values = [math.nan if value is None or value > FAR else value for value in curve.values]
    style = look(curve.key)
    style["linewidth"] += 2.5 * covers
    style["markersize"] += 4 * covers
    if len(curve.xs) > 20:
        style["markevery"] = len(curve.xs) // 10  # more would hide the line
    label = _plain(curve.key.label)
    (line,) = axes.plot(curve.xs, values, label=label, clip_on=False, zorder=3, **style)
    missing = [x for x, value in zip(curve.xs, values, strict=True) if math.isnan(value)]
    cross = {"color": style["color"], "marker": "x", "linestyle": "none"}
    edge = axes.get_xaxis_transform()
    axes.plot(
        missing, [1.0] * len(missing), transform=edge, label="_", clip_on=False, zorder=4, **cross
    )
    spread = [(x, *ends) for x, ends in zip(curve.xs, curve.band or [], strict=False) if ends]
    if spread:
        xs, low, high = zip(*spread, strict=True)
        axes.fill_between(xs, low, high, color=style["color"], alpha=shade, linewidth=0, zorder=1)
    return line


def _draw_heat(figure: Figure, axes: Axes, heat: Heat) -> None:
    numbers = len(heat.lines) * len(heat.columns) <= 100
    values = [[math.nan if share is None else share for share in line] for line in heat.shares]
    edges: Any = {"edgecolors": PAPER, "linewidth": 1} if numbers else {"rasterized": True}
    colors = axes.pcolormesh(values, cmap="cividis", vmin=0, vmax=heat.top, **edges)
    for y, line in enumerate(heat.shares if numbers else []):
        for x, share in enumerate(line):
            if share is not None:
                shade = "#000000" if share > heat.top / 2 else "#fefefe"
                style: Any = {"ha": "center", "va": "center", "fontsize": 8.5, "color": shade}
                axes.text(x + 0.5, y + 0.5, f"{share:.2f}", **style)
    axes.set_title(_plain(heat.title), fontsize=10.5, loc="left")
    for axis, names in ((axes.xaxis, heat.columns), (axes.yaxis, heat.lines)):
        step = -(-len(names) // 12)  # names must not touch
        axis.set_ticks([place + 0.5 for place in range(0, len(names), step)], names[::step])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    axes.set_ylabel(heat.y_label)
    axes.set_xlabel(heat.x_label)
    if not numbers:
        figure.colorbar(colors, ax=axes).outline.set_visible(False)


def _labels_apart(axes: Axes, ticks: list[float], points: float) -> list[str]:
    """The names of `ticks`, empty for those that would touch the next: lengths may be close to one
    another. points: the width of the axes, about.
    """
    axes.set_xticks(ticks)
    to_axes = axes.transData + axes.transAxes.inverted()
    axes.get_xlim()  # which the ticks may have extended
    labels, free = [], math.inf
    for tick in reversed(ticks):
        name, middle = _short(tick), points * to_axes.transform((tick, 0))[0]
        half = 3.5 * len(name)
        labels.append(name if middle + half < free else "")
        free = middle - half if labels[-1] else free
    return labels[::-1]


def _mark(axes: Axes, plot: Plot, ticks: list[float], points: float) -> None:
    """Dashed lines at borders, and at trained lengths on the plot or within an octave of it. An
    arrow stands for longer ones.

    Names stand above the axes, out of the way of curves, in several rows if they would overlap.
    points: the width of the axes, about.
    """
    first, last = ticks[0], ticks[-1]
    on_plot = [length for length in plot.trained_lengths if first / 2 <= length <= last * 2]
    marks = [*plot.borders, *((length, f"trained at {_short(length)}") for length in on_plot)]
    for x, _ in marks:
        axes.axvline(x, color=MUTED, linestyle=(0, (5, 4)), linewidth=1.1, zorder=1)
    to_axes = axes.transData + axes.transAxes.inverted()
    axes.get_xlim()  # which the lines may have extended
    places = [(to_axes.transform((x, 1))[0], name) for x, name in sorted(marks)]
    if beyond := [length for length in plot.trained_lengths if length > last * 2]:
        lengths = ", ".join(map(_short, beyond))
        places.append((1.0, f"trained at {lengths} \N{RIGHTWARDS ARROW}"))
    ends: list[float] = []  # of each row
    for place, name in places:
        width = 5.5 * len(name) / points
        left = min(max(place - width / 2, 0), max(1 - width, 0))
        row = next((row for row, end in enumerate(ends) if end < left), len(ends))
        ends[row : row + 1] = [left + width]
        style: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(name, (left, 1), (0, 5 + 11 * row), fontsize=8.5, color=MUTED, **style)


def _log_values(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    locator = LogLocator(base=10, subs=(1, 2, 5) if high / low < 1e5 else (1,))
    few = sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 3
    axes.yaxis.set_major_locator(MaxNLocator(5) if few else locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _last(values) -> float:
    """The last value that is a number, otherwise 0."""
    return next((float(value) for value in reversed(values) if value == value), 0.0)


def _short(length: float) -> str:
    """8192 as 8k, 1048576 as 1M: long axes need short names."""
    for unit, name in ((2**20, "M"), (1024, "k")):
        if length >= unit and length % unit == 0:
            return f"{length / unit:g}{name}"
    return f"{length:g}"


def _plain(text: str) -> str:
    """`text` in lines of a figure's width, its dollars not taken for mathematics."""
    return "\n".join(textwrap.wrap(text, 44)).replace("$", r"\$")
