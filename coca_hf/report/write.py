"""The page in its three forms: Markdown for a README, PNGs for a paper, one HTML file to read."""

import json
from collections.abc import Sequence
from pathlib import Path

from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.rows import Measurement
from coca_hf.evaluate.tables import Table
from coca_hf.files import replace_text, replacing
from coca_hf.page import Part, Section, Text, escape, markdown
from coca_hf.report.html import html
from coca_hf.report.plots import draw, to_png
from coca_hf.report.read import read_tables
from coca_hf.report.recovery import read_recovery, recovery
from coca_hf.report.sections import how_made, models, surroundings

TITLE = "Evaluation"
PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
PUBLISHED = tuple(PAPER["perplexity"])  # what --paper takes


def write_report(
    runs: Sequence[Path], out_dir: Path, paper: Sequence[str] = (), title: str = TITLE
) -> Path:
    """Write `report.html`, `report.md` and a PNG for each figure, from the rows of `runs`.

    A directory that coca-train wrote gives its recovery curve instead.

    paper: names of the published curves to show, of `PUBLISHED`. title: of the page. Returns the
    path of `report.html`. Every file replaces its predecessor whole, the HTML last.

    Raises CocaError where a directory has no rows, a line is no row, a name is unknown, or the page
    cannot be written.
    """
    page = read_page(runs, paper, title)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for figure in page.figures():
            drawn = draw(figure.drawing, 9, max(4.5, figure.height * 1.4), True)
            with replacing(out_dir / f"{figure.name}.png") as unfinished:
                unfinished.write_bytes(to_png(drawn))
        replace_text(out_dir / "report.md", markdown(page) + "\n")
        replace_text(out_dir / "report.html", html(page))
    except OSError as error:
        problem = f"the page cannot be written there ({one_line(error)})"
        raise CocaError(f"--out {out_dir}: {problem}") from None
    return out_dir / "report.html"


def read_page(runs: Sequence[Path], paper: Sequence[str] = (), title: str = TITLE) -> Section:
    """The page of the directories `runs`, with nothing drawn yet.

    Models first, then a section for each measurement, the recovery in training, and how numbers
    were made. Raises CocaError as `write_report` does.
    """
    if unknown := [name for name in paper if name not in PUBLISHED]:
        expected = f"one of {', '.join(PUBLISHED)}"
        raise CocaError(f"--paper: got {unknown[0]!r}, expected {expected}")
    recoveries = {run: found for run in runs if (found := read_recovery(run))}
    tables = read_tables([run for run in runs if run not in recoveries])
    for table in tables:
        table.published = _published(table.measurement.task, paper)
    sections = [
        models(tables) if tables else None,
        *(_section(one, tables) for one in MEASUREMENTS.values()),
        recovery([*recoveries.values()]),
        how_made(tables) if tables else None,
    ]
    return Section(title, [section for section in sections if section])


def tables_markdown(tables: Sequence[Table]) -> str:
    """`tables`, at least one, as Markdown, without figures, for a model card."""
    parts: list[str] = []
    for table in tables:
        about = table.measurement
        parts += [
            escape(f"{about.title}: {table.settings}. {about.explanation}"),
            markdown(table.grid()),
        ]
    rows = [row for table in tables for row in table.rows]
    dates = sorted(row["date"][:10] for row in rows)
    machines = "; ".join(dict.fromkeys(map(surroundings, rows)))
    made = f"Measured by coca-eval from {dates[0]} to {dates[-1]} on {machines}."
    return "\n\n".join([*parts, escape(made)])


def _section(measurement: Measurement, tables: list[Table]) -> Section | None:
    """The section of a measurement; None where there are no rows for it."""
    own = [table for table in tables if table.measurement is measurement]
    if not own:
        return None
    parts: list[Part] = [Text(measurement.explanation)]
    if own[0].published:
        settings = PAPER["settings"][measurement.task]
        notice = (
            f"Grey and dotted: published by {PAPER['source']} ({settings}). Other models, other "
            f"training and another text: shapes can be compared, values cannot."
        )
        parts.append(Text(notice, notice=True))
    return Section(measurement.title, [*parts, *measurement.parts(own)])


def _published(task: str, paper: Sequence[str]) -> dict[str, dict[int, float | None]]:
    """The published values of a task by length, by the name of their curve."""
    families = PAPER.get(task, {})
    return {
        name: dict(zip(PAPER["lengths"], values, strict=True))
        for family in paper
        for name, values in families.get(family, {}).items()
    }
