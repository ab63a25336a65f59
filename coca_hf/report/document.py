"""What a page is made of, whether it becomes Markdown or HTML: sections of paragraphs, tables and figures."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

from coca_hf.report.plots import Draw, Key


@dataclass(frozen=True)
class Text:
    """A paragraph; a `notice` is what must be read before the numbers below it."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Bullets:
    items: list[str]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Grid:
    """A table. Columns from `numbers_from` on are aligned as numbers; `muted` lines are somebody else's numbers."""

    header: list[str]
    lines: list[list[str]]
    numbers_from: int
    muted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A drawing, and what stands below it."""

    name: str  # of its file, and unique on the page
    alt: str  # for whoever cannot see it: what is drawn, and between which values
    caption: str
    draw: Draw
    keys: list[Key] = field(default_factory=list)  # the legend, where it stands beside the drawing
    height: float = 2.8  # inches, of a drawing 5 inches wide


@dataclass(frozen=True)
class Fold:
    """What stands closed until somebody opens it."""

    title: str
    parts: list[Part]


Part = Text | Bullets | Code | Grid | Figure | Fold


@dataclass(frozen=True)
class Section:
    title: str
    parts: list[Part | Section]

    def figures(self) -> list[Figure]:
        found: list[Figure] = []
        for part in self.parts:
            if isinstance(part, Section):
                found += part.figures()
            elif isinstance(part, Figure):
                found.append(part)
        return found


def markdown(section: Section, level: int = 1) -> str:
    """A section as Markdown; figures are the PNGs of their names."""
    parts = [_markdown(part, level) for part in section.parts]
    return "\n\n".join([f"{'#' * level} {escape(section.title)}", *parts])


def _markdown(part: Part | Section, level: int) -> str:
    match part:
        case Section():
            return markdown(part, level + 1)
        case Text(text, notice):
            return f"> {escape(text)}" if notice else escape(text)
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Code(text):
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}\n{text}\n{fence}"
        case Grid(header, lines, numbers_from):
            return markdown_table(header, lines, numbers_from)
        case Figure(name, _, caption):
            return f"![{escape(caption)}]({name}.png)"
        case Fold(title, parts):
            inside = "\n\n".join(_markdown(inner, level) for inner in parts)
            summary = html.escape(" ".join(title.split()), quote=False)  # Markdown leaves this line alone
            return f"<details><summary>{summary}</summary>\n\n{inside}\n\n</details>"


def markdown_table(header: list[str], lines: list[list[str]], numbers_from: int) -> str:
    rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(
        ["| " + " | ".join(cells) + " |" for cells in ([escape(cell) for cell in header], rule)]
        + ["| " + " | ".join(map(escape, line)) + " |" for line in lines]
    )


def escape(text: str) -> str:
    """`text` on one line, without what Markdown would read as its own."""
    for sign in "\\|*_`<":
        text = text.replace(sign, f"\\{sign}")
    text = text.replace("](", "]\\(")  # neither a link nor an image
    return " ".join(text.split())
