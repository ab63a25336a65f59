"""What a page is made of, in Markdown or HTML: sections of paragraphs, tables and figures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # model cards escape their text with this file, and draw nothing
    from coca_hf.plots import Draw, Key


@dataclass(frozen=True)
class Text:
    """A paragraph. A `notice` has to be read before the numbers below it."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: list[str]


@dataclass(frozen=True)
class Code:
    """Lines that are shown as they are."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table. Columns from `numbers_from` on hold numbers; `muted` lines are published ones."""

    header: list[str]
    lines: list[list[str]]
    numbers_from: int
    muted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption.

    name: of its file, unique on the page. alt: describes the drawing to readers who cannot see it.
    keys: the legend, where it stands beside the drawing. height: inches, at a width of 5 inches.
    """

    name: str
    alt: str
    caption: str
    draw: Draw
    keys: list[Key] = field(default_factory=list)
    height: float = 2.8


@dataclass(frozen=True)
class Fold:
    """Parts that are closed until the reader opens them."""

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
    """`text` on one line, with every sign escaped that Markdown would interpret."""
    for sign in "\\|*_`<":
        text = text.replace(sign, f"\\{sign}")
    text = text.replace("](", "]\\(")  # neither a link nor an image
    return " ".join(text.split())
