"""The page: its sections, as Markdown for a README, PNGs for a paper and one HTML file."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.rows import ROWS, SHARED, fields, last_trained_length, latest
from coca_hf.evaluate.tables import Measurement, Table, data_of
from coca_hf.files import replace_text, replacing
from coca_hf.page import Bullets, Code, Fold, Grid, Part, Section, Text, escape, markdown
from coca_hf.report.html import html
from coca_hf.report.plots import draw, to_png
from coca_hf.report.read import read_tables
from coca_hf.report.recovery import MADE, read_recovery, recovery

TITLE = "Evaluation"
PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
PUBLISHED = tuple(PAPER["perplexity"])  # the names that --paper takes
LITTLE_TRAINING = 1_000_000_000  # tokens; the paper trained on 7.5 billion in each stage


def write_report(
    runs: Sequence[Path], out_dir: Path, paper: Sequence[str] = (), title: str = TITLE
) -> Path:
    """Write `report.html`, `report.md` and a PNG for each figure, from the rows of `runs`.

    A directory that coca-train wrote gives its recovery curve, and its rows if it has any.

    paper: names of published curves to show, of `PUBLISHED`. title: of the page. Returns the path
    of `report.html`. Every file replaces its predecessor atomically, the HTML last, and the Markdown,
    by which a later call knows its pictures, first.

    Raises CocaError if a directory has no rows, a line is not a row, a name is unknown, the page
    cannot be written, or it would replace a file that is not of such a page.
    """
    page = read_page(runs, paper, title)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if foreign := _not_ours(out_dir, page):
            problem = "is there and was not made by coca-eval report"
            raise CocaError(f"{foreign}: {problem}; move it, or choose another --out")
        replace_text(out_dir / "report.md", markdown(page) + "\n")
        for figure in page.figures():
            drawn = draw(figure.drawing, 9, max(4.5, figure.height * 1.4), True)
            with replacing(out_dir / f"{figure.name}.png") as unfinished:
                unfinished.write_bytes(to_png(drawn))
        replace_text(out_dir / "report.html", html(page))
    except OSError as error:
        problem = f"the page cannot be written there ({one_line(error)})"
        raise CocaError(f"--out {out_dir}: {problem}") from None
    return out_dir / "report.html"


def _not_ours(out_dir: Path, page: Section) -> Path | None:
    """A file that `page` would replace and that `write_report` has not made, if there is one.

    Pictures beside one of its pages are its own.
    """
    pages = [file for file in (out_dir / "report.md", out_dir / "report.html") if file.exists()]
    found = (file for file in pages if MADE not in file.read_text("utf-8", errors="replace"))
    pictures = (out_dir / f"{figure.name}.png" for figure in page.figures())
    return next(found if pages else filter(Path.exists, pictures), None)


def read_page(runs: Sequence[Path], paper: Sequence[str] = (), title: str = TITLE) -> Section:
    """The page of the directories `runs`, with nothing drawn yet.

    Models first, then a section for each measurement, the recovery in training, and how the numbers
    were made. Raises CocaError as `write_report` does.
    """
    if unknown := [name for name in paper if name not in PUBLISHED]:
        expected = f"expected one of {', '.join(PUBLISHED)}"
        raise CocaError(f"--paper: got {unknown[0]!r}, {expected}")
    recoveries = {run: found for run in runs if (found := read_recovery(run))}
    names = Counter(found.name for found in recoveries.values())
    for run, found in recoveries.items():
        if names[found.name] > 1:
            found.name = os.path.relpath(run)
    with_rows = [run for run in runs if run not in recoveries or (run / ROWS).exists()]
    tables = read_tables(with_rows)
    for table in tables:
        families = PAPER.get(table.measurement.task, {})
        table.published = {
            name: dict(zip(PAPER["lengths"], values, strict=True))
            for family in paper
            for name, values in families.get(family, {}).items()
        }
    sections = [
        _models(tables) if tables else None,
        *(_measured(one, tables) for one in MEASUREMENTS.values()),
        recovery([*recoveries.values()]),
        _how_made(tables) if tables else None,
    ]
    return Section(title, [section for section in sections if section])


def tables_markdown(tables: Sequence[Table]) -> str:
    """`tables`, at least one, as Markdown without figures, for a model card."""
    parts = [f"> {escape(notice)}" for notice in not_together(tables)]
    for table in tables:
        about = table.measurement
        parts += [
            escape(f"{about.title}: {table.settings}, {_dtypes(table)}. {about.explanation}"),
            markdown(table.grid()),
            *map(markdown, table.missing()),
        ]
    rows = [row for table in tables for row in table.rows]
    dates = sorted(row["date"][:10] for row in rows)
    machines = "; ".join(dict.fromkeys(map(_surroundings, rows)))
    made = f"Measured by coca-eval from {dates[0]} to {dates[-1]} on {machines}."
    return "\n\n".join([*parts, escape(made)])


def _dtypes(table: Table) -> str:
    """The dtypes of a table's lines; if there are several, with the lines."""
    models: dict[str, list[str]] = {}
    for name, rows in table.series.items():
        models.setdefault(rows[0]["dtype"], []).append(name)
    of = {dtype: f" ({', '.join(names)})" * (len(models) > 1) for dtype, names in models.items()}
    return ", ".join(dtype + names for dtype, names in of.items())


def _measured(measurement: Measurement, tables: list[Table]) -> Section | None:
    """The section of a measurement; None if it has no rows."""
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


def _models(tables: Sequence[Table]) -> Section:
    """The models, how much they were trained, and what to know before comparing their numbers."""
    rows = [row for table in tables for row in table.rows]
    found = latest(rows, itemgetter("model", "model_path", "dtype"))
    lines = []
    for (_, _, dtype), row in found.items():
        constraint, kept = row["coca_constraint"], row["coca_kept_layers"]
        attention = f"CoCA, {constraint}" if constraint else row["model_type"] or ""
        attention += f", layers kept: {len(kept)}" if kept else ""
        window = row["coca_kept_window"]
        attention += f" with a window of {window:,} tokens" if window else ""
        content = row["coca_content_pairs"]
        attention += f", {content} content pairs" if content else ""
        more = row["coca_content_layers"]
        attention += f", layers with more content pairs: {len(more)}" if more else ""
        seen = f"{row['tokens_seen']:,}" if row["tokens_seen"] is not None else ""
        length = last_trained_length(row)
        lines.append(
            [tables[0].model_of(row), attention, dtype, f"{length:,}" if length else "", seen]
        )
    header = ["model", "attention", "dtype", "trained length", "tokens seen"]
    notices = [*_little_training(tables[0], [*found.values()]), *not_together(tables)]
    grid = Grid(header, lines, numbers_from=3)
    return Section("Models", [grid, *(Text(notice, notice=True) for notice in notices)])


def _little_training(table: Table, rows: list[dict]) -> list[str]:
    """A notice about models that have hardly been trained. table: names the models of `rows`."""
    known = [row for row in rows if row["tokens_seen"] is not None]
    seen = {table.model_of(row): row["tokens_seen"] for row in known}
    little = {model: tokens for model, tokens in seen.items() if tokens < LITTLE_TRAINING}
    if not little:
        return []
    names = ", ".join(f"{model}: {tokens:,}" for model, tokens in little.items())
    paper = (
        "The paper trained on 7.5 billion tokens in each of three stages, and on 100 billion from "
        "scratch; minutes of training show the machinery, not the paper's result."
    )
    return [f"Little training. Tokens seen: {names}. {paper}"]


def not_together(tables: Sequence[Table]) -> list[str]:
    """Notices about numbers that may not belong together: of changed files, or of other texts."""
    return [*_changed(tables), *_of_other_texts(tables), *_of_one_caption(tables)]


def _changed(tables: Sequence[Table]) -> list[str]:
    """Notices about models whose numbers were measured on several states of files or documents."""
    files = _states(tables, "fingerprint")
    documents: dict[str, int] = {}
    for table in tables:
        documents |= _states([table], "data_hash")
    return [
        f"{model}: its rows are of {count} states of {what}; of each measurement the latest row is "
        f"shown, so numbers of one line may not belong together."
        for what, counts in (("its files", files), ("its documents", documents))
        for model, count in counts.items()
    ]


def _states(tables: Sequence[Table], key: str) -> dict[str, int]:
    """How many values of `key` the rows of a model have, if several."""
    found: dict[str, set] = {}
    for table in tables:
        for row in table.rows:
            found.setdefault(table.model_of(row), set()).add(row.get(key))
    return {model: len(values) for model, values in found.items() if len(values) > 1}


def _of_other_texts(tables: Sequence[Table]) -> list[str]:
    """Notices about tables of models that read different texts under the same names, or other
    tokens of the same text, and about own tasks of lm-eval whose files differ.
    """
    notices = []
    for table in tables:
        last = max(table.rows, key=itemgetter("date"))
        where = f"{table.measurement.title}, {table.settings}"
        what, key = "text of these documents", "text_hash"
        if table.measurement.task == "tasks":
            what, key = "files of these tasks, or their times,", "data_hash"
        hashed = [row for row in (last, *table.rows) if row.get(key)]
        model_of, newest = table.model_of, latest(hashed, itemgetter("length"))
        others = dict.fromkeys(model_of(row) for row in hashed if row[key] != hashed[0][key])
        other_tokens = dict.fromkeys(
            f"{model_of(row)} reads other tokens of this text than {model_of(newest[row['length']])}"
            for row in hashed
            if row.get("data_hash") != newest[row["length"]].get("data_hash")
        )
        if others:
            notices.append(
                f"{where}: the {what} changed before the latest number; measure "
                f"{', '.join(others)} again to compare."
            )
        elif other_tokens:
            notices.append(
                f"{where}: {'; '.join(other_tokens)}; losses and perplexities per token cannot be "
                "compared."
            )
    return notices


def _of_one_caption(tables: Sequence[Table]) -> list[str]:
    """Notices about tables that nothing tells apart, such as those beside an original that changed."""
    alike: dict[str, list[Table]] = {}
    for table in tables:
        alike.setdefault(f"{table.measurement.title}, {table.settings}", []).append(table)
    notices = []
    for where, several in alike.items():
        if len(several) > 1:
            names = [
                name.replace("_", " ")
                for name in fields(several[0].measurement.row, SHARED)
                if len({str(table.rows[0].get(name)) for table in several}) > 1
            ]
            newest = max(several, key=lambda table: max(row["date"] for row in table.rows))
            notices.append(
                f"{where}: {len(several)} tables, of rows that differ in {', '.join(names)}; the "
                f"latest row is in number {several.index(newest) + 1}."
            )
    return notices


def _how_made(tables: Sequence[Table]) -> Section:
    """The settings, machine and command of every row."""
    rows = [row for table in tables for row in table.rows]
    parts: list[Part] = []
    for table in tables:
        title = f"{table.measurement.title}: {table.settings}"
        parts.append(Fold(title, [*_row_by_row(table), *_documents(table.rows[0])]))
    absent = [path for row in rows for path in row["raw"].values() if not path.is_file()]
    if absent:
        first = os.path.relpath(absent[0])
        problem = f"Files of raw results that are not beside their rows: {len(absent)}"
        text = f"{problem}, the first {first}. What is drawn from them is left out."
        parts.append(Text(text, notice=True))
    commands = dict.fromkeys(row["command"] for row in rows)
    paths = dict.fromkeys(f"{row['model']}: {row['model_path']}" for row in rows)
    parts.append(Fold("Commands and paths", [Code("\n".join(commands)), Bullets([*paths])]))
    return Section(MADE, [*parts])


def _surroundings(row: dict) -> str:
    """The machine and the versions of a row."""
    versions = row["versions"] | ({"commit": row["commit"]} if row["commit"] else {})
    said = ", ".join(f"{package} {number}" for package, number in versions.items())
    return f"{row['device']}; {said}"


def _row_by_row(table: Table) -> list[Part]:
    """A line for each number, and the machines and versions that made them."""
    machines: dict[str, int] = {}
    lines = []
    for name, rows in table.series.items():
        for row in rows:
            machine = machines.setdefault(_surroundings(row), len(machines) + 1)
            numbers = [row.get(key) for key in ("length", "stride", "tokens", "seed")]
            length, stride, tokens, seed = ("" if n is None else str(n) for n in numbers)
            tokens = f"{row['tokens']:,}" if tokens else ""
            cells = [name, length, stride, tokens, seed, row["dtype"]]
            lines.append([*cells, f"{row['seconds']:.1f}", row["date"], f"[{machine}]"])
    header = ["model", "length", "stride", "tokens", "seed"]
    header += ["dtype", "seconds", "date", "made with"]
    made_with = [f"[{number}] {machine}" for machine, number in machines.items()]
    return [Grid(header, lines, numbers_from=1), Bullets(made_with)]


def _documents(row: dict) -> list[Part]:
    if not row.get("document_names"):
        return []
    skipped = row.get("skipped_documents") or []
    names = [*row["document_names"], *(f"{n} (empty or too short, left out)" for n in skipped)]
    return [Fold(f"Documents of {data_of(row)}", [Bullets(names)])]
