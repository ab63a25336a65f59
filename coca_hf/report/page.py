"""The page in its three forms: Markdown for a README, PNGs for a paper, one HTML file for everybody else."""

import os
from collections.abc import Sequence
from pathlib import Path

from coca_hf.errors import CocaError, one_line
from coca_hf.report.against_length import EXPLANATIONS, PUBLISHED, TITLES, Measured, values
from coca_hf.report.document import Section, escape, markdown, markdown_table
from coca_hf.report.html import html
from coca_hf.report.plots import to_png
from coca_hf.report.recovery import read_recovery
from coca_hf.report.rows import Table, read_tables
from coca_hf.report.sections import SECTIONS, surroundings

TITLE = "Evaluation"


def write_report(runs: Sequence[Path], out_dir: Path, paper: Sequence[str] = (), title: str = TITLE) -> Path:
    """Write `report.html`, `report.md` and a PNG for each figure, from the `rows.jsonl` of all directories `runs`.

    A directory that coca-train wrote gives its recovery curve instead.

    paper: names of the published curves to show, of `PUBLISHED`. title: of the page. Returns the path of `report.html`.
    Every file replaces its predecessor whole, the HTML last.

    Raises CocaError where a directory has no rows, a line is not one, a name is unknown, or `out_dir` takes no files.
    """
    page = read_page(runs, paper, title)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for figure in page.figures():
            _replace(out_dir / f"{figure.name}.png", to_png(figure.draw(9, max(4.5, figure.height * 1.4), True)))
        _replace(out_dir / "report.md", (markdown(page) + "\n").encode())
        _replace(out_dir / "report.html", html(page).encode())
    except OSError as error:
        raise CocaError(f"--out {out_dir}: the page cannot be written there ({one_line(error)})") from None
    return out_dir / "report.html"


def read_page(runs: Sequence[Path], paper: Sequence[str] = (), title: str = TITLE) -> Section:
    """The page of the directories `runs`, with nothing drawn yet. Raises CocaError as `write_report` does."""
    if unknown := [name for name in paper if name not in PUBLISHED]:
        raise CocaError(f"--paper: got {unknown[0]!r}, expected one of {', '.join(PUBLISHED)}")
    recoveries = {run: recovery for run in runs if (recovery := read_recovery(run))}
    tables = read_tables([run for run in runs if run not in recoveries])
    measured = Measured(tables, runs, paper, list(recoveries.values()))
    return Section(title, [section for make in SECTIONS if (section := make(measured))])


def tables_markdown(runs: Sequence[Path]) -> str:
    """The tables of all directories `runs` alone, as they stand on the page, for a page of another kind.

    Raises CocaError where a directory has no rows or a line is not one.
    """
    tables = read_tables(runs)
    parts = []
    for table in tables:
        grid = values(table)
        parts += [
            escape(f"{TITLES[table.task]}: {table.settings}. {EXPLANATIONS[table.task]}"),
            markdown_table(grid.header, grid.lines, grid.numbers_from),
        ]
    return "\n\n".join([*parts, escape(_made(tables))])


def _made(tables: list[Table]) -> str:
    """Machines, versions and dates of all rows."""
    rows = [row for table in tables for row in table.rows]
    dates = sorted(row["date"][:10] for row in rows)
    return (
        f"Measured by coca-eval from {dates[0]} to {dates[-1]} on {'; '.join(dict.fromkeys(map(surroundings, rows)))}."
    )


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
