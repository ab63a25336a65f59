"""Sections as one HTML file that needs nothing else: no script, no font, no request to any host."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coca_hf.page import Figure, Grid, Section
from coca_hf.report.plots import COLORS, draw, key_svg, to_svg

SVG_WIDTH = 5.0  # inches: 360 units, the width of a telephone, so text there keeps its 10.5 pixels
# COLORS in dark mode, in the same order
DARK_COLORS = ("#5cb3ec", "#ff9a5c", "#3fcfa2", "#e69ac6", "#9fd3f5", "#e8b84a", "#cfcfcf")


def html(page: Section) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "rows": _rows,
        "kind": lambda part: type(part).__name__,
        "svg": _svg,
        "swatch": lambda key: Markup(key_svg(key)),
        "anchor": lambda title: re.sub(r"[\W_]", "-", title.lower()),
    }
    template = environment.get_template("report.html.j2")
    return template.render(page=page, colors=COLORS, dark_colors=DARK_COLORS)


def _rows(parts: list) -> list[list]:
    """Parts side by side: a figure and its table, or two figures."""
    rows: list[list] = []
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        left = rows[-1][0] if rows and len(rows[-1]) == 1 else None
        alone = isinstance(part, Figure) and not isinstance(after, Grid)
        if isinstance(left, Figure) and (isinstance(part, Grid) or alone):
            rows[-1].append(part)
        else:
            rows.append([part])
    return rows


def _svg(figure: Figure) -> Markup:
    drawn = draw(figure.drawing, SVG_WIDTH, figure.height, False)
    return Markup(to_svg(drawn, figure.name, figure.alt))
