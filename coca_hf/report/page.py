"""The Markdown page: tables, plots, and how each number was made."""

import os
from collections.abc import Sequence
from pathlib import Path

from coca_hf.errors import CocaError
from coca_hf.report.plots import plot_png
from coca_hf.report.recovery import read_recovery, recovery_markdown, recovery_png
from coca_hf.report.rows import Table, read_tables

TITLES = {"perplexity": "Perplexity", "passkey": "Passkey retrieval"}
EXPLANATIONS = {
    "perplexity": "Sliding window, window = context length; token-weighted over all documents; each token scored once; "
    "lower is better.",
    "passkey": "Share of prompts whose answer holds the five-digit number hidden in them; greedy; higher is better.",
}
LITTLE_TRAINING = 1_000_000_000  # tokens; the paper trained on 7.5 billion a stage


def write_report(runs: Sequence[Path], out_dir: Path) -> Path:
    """Write `report.md`, and a PNG for each task there are rows for, from the `rows.jsonl` of all directories `runs`.

    A directory that coca-train wrote gives its recovery curve instead.

    Returns the path of `report.md`. Every file replaces its predecessor whole, the page last.

    Raises CocaError where a directory has no rows, a line is not one, or `out_dir` cannot be made.
    """
    recoveries = {run: recovery for run in runs if (recovery := read_recovery(run))}
    tables = read_tables([run for run in runs if run not in recoveries])
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CocaError(f"--out {out_dir}: got {error.strerror}, expected a directory or a free name") from None
    for task in TITLES:
        if of_task := [table for table in tables if table.task == task]:
            _replace(out_dir / f"{task}.png", plot_png(of_task))
    page = _page(tables)
    if recoveries:
        _replace(out_dir / "recovery.png", recovery_png([*recoveries.values()]))
        curve = "## Recovery\n\n![Loss against tokens seen](recovery.png)\n\n"
        page += f"\n{curve}{recovery_markdown([*recoveries.values()])}\n"
    _replace(out_dir / "report.md", page.encode())
    return out_dir / "report.md"


def tables_markdown(runs: Sequence[Path]) -> str:
    """The tables of all directories `runs` alone, as they stand on the page, for a page of another kind.

    Raises CocaError where a directory has no rows or a line is not one.
    """
    tables = read_tables(runs)
    parts = []
    for table in tables:
        parts += [f"{TITLES[table.task]}: {_text(table.settings)}. {EXPLANATIONS[table.task]}", _values(table)]
    return "\n\n".join([*parts, _surroundings(tables)])


def _surroundings(tables: list[Table]) -> str:
    """Machines, versions and dates of all rows."""
    rows = [row for table in tables for row in table.rows]
    machines = dict.fromkeys(
        f"{row['device']}; {', '.join(f'{package} {number}' for package, number in row['versions'].items())}"
        for row in rows
    )
    dates = sorted(row["date"][:10] for row in rows)
    return f"Measured by coca-eval from {dates[0]} to {dates[-1]} on {'; '.join(map(_text, machines))}."


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _page(tables: list[Table]) -> str:
    parts = ["# Evaluation", *_notice(tables)]
    for task, title in TITLES.items():
        of_task = [table for table in tables if table.task == task]
        if of_task:
            parts += [f"## {title}", EXPLANATIONS[task], f"![{title} against context length]({task}.png)"]
        for table in of_task:
            parts += [f"{_text(table.settings)}:", _values(table), *_missing(table)]
    parts.append("## How each number was made")
    for table in tables:
        parts += [f"### {TITLES[table.task]}: {_text(table.settings)}", _makings(table), *_documents(table)]
    parts += ["### Commands", _commands(tables)]
    return "\n\n".join(parts) + "\n"


def _notice(tables: list[Table]) -> list[str]:
    """The one sentence that must stand before the numbers of a model that has hardly been trained."""
    seen = {
        row["model"]: row["tokens_seen"]
        for table in tables
        for row in table.rows
        if row["tokens_seen"] is not None and row["tokens_seen"] < LITTLE_TRAINING
    }
    if not seen:
        return []
    models = ", ".join(f"{_text(model)}: {tokens:,}" for model, tokens in seen.items())
    return [
        f"> Tokens seen in CoCA training: {models}. The paper trained on 7.5 billion tokens in each of three stages; "
        f"minutes of training show the machinery, not the paper's result."
    ]


def _values(table: Table) -> str:
    """Model and RoPE setting against length."""
    coca = any(row["coca_constraint"] for row in table.rows)
    header = ["model", *(["tokens seen in CoCA training"] if coca else []), *map(str, table.lengths)]
    lines = []
    for name, rows in table.series.items():
        values = {row["length"]: _value(row) for row in rows}
        seen = rows[0]["tokens_seen"]
        lines.append(
            [
                name,
                *(
                    [f"{seen:,}" if seen is not None else "unknown" if rows[0]["coca_constraint"] else ""]
                    if coca
                    else []
                ),
                *(values.get(length, "") for length in table.lengths),
            ]
        )
    return _markdown_table(header, lines, numbers_from=1)


def _value(row: dict) -> str:
    if row["value"] is None:
        return "none"
    return f"{row['value']:.2f}" if row["task"] == "passkey" or row["value"] < 1e4 else f"{row['value']:.3g}"


def _missing(table: Table) -> list[str]:
    reasons = [
        f"- {_text(name)} at {row['length']}: {_text(row['error'])}"
        for name, rows in table.series.items()
        for row in rows
        if row["value"] is None
    ]
    return ["No value:\n\n" + "\n".join(reasons)] if reasons else []


def _makings(table: Table) -> str:
    """A line for each number, and the machines and versions that made them."""
    tokens = "tokens scored" if table.task == "perplexity" else "prompt tokens"
    header = ["model", "length", "stride", tokens, "dtype", "seconds", "date", "made with"]
    machines: dict[str, int] = {}
    lines = []
    for name, rows in table.series.items():
        for row in rows:
            versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
            machine = machines.setdefault(f"{row['device']}; {versions}", len(machines) + 1)
            stride, seconds = str(row["stride"] or ""), f"{row['seconds']:.1f}"
            cells = [name, str(row["length"]), stride, f"{row['tokens']:,}", row["dtype"], seconds, row["date"]]
            lines.append([*cells, f"[{machine}]"])
    made_with = "\n".join(f"- [{number}] {_text(machine)}" for machine, number in machines.items())
    return _markdown_table(header, lines, numbers_from=len(header)) + "\n\n" + made_with


def _documents(table: Table) -> list[str]:
    if table.task != "perplexity":
        return []
    row = table.rows[0]
    names = "\n".join(f"- {_text(name)}" for name in row["document_names"])
    return [f"<details><summary>Documents of {_text(row['data'])}</summary>\n\n{names}\n\n</details>"]


def _commands(tables: list[Table]) -> str:
    rows = [row for table in tables for row in table.rows]
    commands = dict.fromkeys(row["command"] for row in rows)
    models = dict.fromkeys(f"- {_text(row['model'])}: `{row['model_path']}`" for row in rows)
    return "```\n" + "\n".join(commands) + "\n```\n\n" + "\n".join(models)


def _markdown_table(header: list[str], lines: list[list[str]], numbers_from: int) -> str:
    rule = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(map(_text, line)) + " |" for line in [header, rule, *lines])


def _text(text: str) -> str:
    """`text` on one line, without what Markdown would read as its own."""
    for sign in "\\|*_`<":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
