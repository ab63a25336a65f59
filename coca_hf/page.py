"""The parts of a page, in Markdown or HTML: sections of paragraphs, tables and figures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

FAR = 1e12  # a perplexity beyond it is drawn like a missing value


@dataclass(frozen=True)
class Text:
    """A paragraph. A `notice` is to be read before the numbers below it."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: list[str]


@dataclass(frozen=True)
class Code:
    """Lines to show verbatim."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table. Columns from `numbers_from` on are numbers; `muted` lines are published ones."""

    header: list[str]
    lines: list[list[str]]
    numbers_from: int
    muted: frozenset[int] = frozenset()


LOOKS = 14  # models that look different: twice the colours of report/plots.py


@dataclass(frozen=True)
class Key:
    """How a line looks: `color` numbers its model, `style` its RoPE setting or published curve."""

    label: str
    color: int = 0
    style: int = 0
    published: bool = False
    marked: bool = True  # whether its points have markers


@dataclass(frozen=True)
class Curve:
    """Values over `xs`, or None. `band`: the low and the high end of the spread at each x.

    A value that is None, no number or beyond `FAR` is a cross at the upper edge.
    """

    key: Key
    xs: list[float]
    values: list[float | None]
    band: list[tuple[float, float] | None] | None = None


@dataclass(frozen=True)
class Plot:
    """Curves over one x axis.

    y_scale: log, linear, zero (linear from 0) or share (0 to 1). ticks: of the x axis, by default
    every x. borders: places on the x axis, and the name of what begins there.
    """

    curves: list[Curve]
    y_label: str
    x_label: str = "context length (tokens)"
    y_scale: str = "log"
    trained_lengths: list[int] = field(default_factory=list)
    ticks: list[float] | None = None
    x_scale: str = "log"
    borders: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Heat:
    """Shares by line and column, from 0 to `top`, or None."""

    title: str
    columns: list[str]
    lines: list[str]
    shares: list[list[float | None]]
    x_label: str
    y_label: str
    top: float = 1.0


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption.

    name: of its file, unique on the page. alt: describes the drawing to readers who cannot see it.
    height: inches, at a width of 5 inches.
    """

    name: str
    alt: str
    caption: str
    drawing: Plot | Heat
    height: float = 2.8

    @property
    def keys(self) -> list[Key]:
        """The legend, if it stands beside the drawing."""
        return [curve.key for curve in getattr(self.drawing, "curves", [])]


@dataclass(frozen=True)
class Fold:
    """Parts that are folded away until the reader opens them."""

    title: str
    parts: list[Part]


Part = Text | Bullets | Code | Grid | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A titled list of parts. A page is a section of sections."""

    title: str
    parts: list[Part | Section]

    def figures(self) -> Iterator[Figure]:
        """All figures, those of inner sections included, in the order of the page."""
        for part in self.parts:
            if isinstance(part, Section):
                yield from part.figures()
            elif isinstance(part, Figure):
                yield part


def markdown(part: Part | Section, level: int = 1) -> str:
    """A section or a part of one as Markdown. A figure refers to the PNG of its name.

    level: of a section's heading.
    """
    match part:
        case Section(title, parts):
            heading = f"{'#' * level} {escape(title)}"
            return "\n\n".join([heading, *(markdown(inner, level + 1) for inner in parts)])
        case Text(text, notice):
            return f"> {escape(text)}" if notice else escape(text)
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Code(text):
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}\n{text}\n{fence}"
        case Grid(header, lines, numbers_from):
            rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
            table = [[*map(escape, header)], rule, *([*map(escape, line)] for line in lines)]
            return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        case Figure(name, _, caption):
            return f"![{escape(caption)}]({name}.png)"
        case Fold(title, parts):
            inside = "\n\n".join(markdown(inner, level) for inner in parts)
            summary = html.escape(" ".join(title.split()), quote=False)  # here Markdown reads HTML
            return f"<details><summary>{summary}</summary>\n\n{inside}\n\n</details>"


def escape(text: str) -> str:
    """`text` on one line, with all signs escaped that Markdown would interpret."""
    for sign in "\\|*_`<~":
        text = text.replace(sign, f"\\{sign}")
    text = text.replace("](", "]\\(")  # neither a link nor an image
    text = re.sub(r"&(?=#?\w+;)", r"\\&", text)  # nor the name of a sign
    return " ".join(text.split())
