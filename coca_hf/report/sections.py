"""The sections that are of all measurements together: which models, and how numbers were made."""

import os
from collections.abc import Sequence

from coca_hf.evaluate.rows import last_trained_length
from coca_hf.evaluate.tables import Table, data_of
from coca_hf.page import Bullets, Code, Fold, Grid, Part, Section, Text

LITTLE_TRAINING = 1_000_000_000  # tokens; the paper trained on 7.5 billion in each stage


def models(tables: Sequence[Table]) -> Section:
    """The models, and how much training their numbers rest on."""
    rows = [row for table in tables for row in table.rows]
    found = {(row["model"], row["model_path"], row["dtype"]): row for row in rows}
    lines = []
    for (name, _, dtype), row in found.items():
        constraint, kept = row["coca_constraint"], row.get("coca_kept_layers")
        attention = f"CoCA, {constraint}" if constraint else row.get("model_type") or ""
        attention += f", layers kept: {len(kept)}" if kept else ""
        window = row.get("coca_kept_window")
        attention += f", over the last {window:,} tokens" if window else ""
        still = row.get("coca_partial_rotary_layers")
        attention += f", layers partially rotated: {len(still)}" if still else ""
        seen = f"{row['tokens_seen']:,}" if row["tokens_seen"] is not None else ""
        length = last_trained_length(row)
        lines.append([name, attention, dtype, f"{length:,}" if length else "", seen])
    header = ["model", "attention", "dtype", "trained length", "tokens seen"]
    grid = Grid(header, lines, numbers_from=3)
    notices = [*_little_training(rows), *_changed(rows), *_of_other_texts(tables)]
    return Section("Models", [grid, *notices])


def how_made(tables: Sequence[Table]) -> Section:
    """The settings of every row, its machine, and the commands."""
    rows = [row for table in tables for row in table.rows]
    parts: list[Part] = []
    for table in tables:
        title = f"{table.measurement.title}: {table.settings}"
        parts.append(Fold(title, [*_row_by_row(table), *_documents(table)]))
    absent = [path for row in rows for path in row["raw"].values() if not path.is_file()]
    if absent:
        first = os.path.relpath(absent[0])
        problem = f"{len(absent)} files of raw results are not beside their rows"
        text = f"{problem}: what is drawn from them is left out (the first: {first})."
        parts.append(Text(text, notice=True))
    commands = dict.fromkeys(row["command"] for row in rows)
    paths = dict.fromkeys(f"{row['model']}: {row['model_path']}" for row in rows)
    parts.append(Fold("Commands and paths", [Code("\n".join(commands)), Bullets([*paths])]))
    return Section("How each number was made", [*parts])


def surroundings(row: dict) -> str:
    """The machine and the versions of a row."""
    versions = row["versions"] | ({"commit": row["commit"]} if row.get("commit") else {})
    said = ", ".join(f"{package} {number}" for package, number in versions.items())
    return f"{row['device']}; {said}"


def _little_training(rows: list[dict]) -> list[Text]:
    """A notice before the numbers of models that have hardly been trained."""
    seen = {row["model"]: row["tokens_seen"] for row in rows if row["tokens_seen"] is not None}
    little = {model: tokens for model, tokens in seen.items() if tokens < LITTLE_TRAINING}
    if not little:
        return []
    names = ", ".join(f"{model}: {tokens:,}" for model, tokens in little.items())
    paper = (
        "The paper trained on 7.5 billion tokens in each of three stages; minutes of training show "
        "the machinery, not the paper's result."
    )
    return [Text(f"Little training. Tokens seen: {names}. {paper}", notice=True)]


def _changed(rows: list[dict]) -> list[Text]:
    """A notice before numbers of one name that come from several models or texts."""
    notices = []
    for what, states in (("its files", "model_states"), ("its documents", "text_states")):
        counts = {row["model"]: len(row[states]) for row in rows if len(row[states]) > 1}
        for model, count in counts.items():
            text = (
                f"{model}: its rows are of {count} states of {what}; of each measurement the "
                f"latest row is shown, so numbers of one line may not belong together."
            )
            notices.append(Text(text, notice=True))
    return notices


def _of_other_texts(tables: Sequence[Table]) -> list[Text]:
    """A notice before tables of models that read different texts under the same names."""
    notices = []
    for table in tables:
        latest = max(table.rows, key=lambda row: row["date"]).get("text_hash")
        others = [row for row in table.rows if row.get("text_hash") not in (latest, None)]
        if latest and others:
            names = ", ".join(dict.fromkeys(row["model"] for row in others))
            text = (
                f"{table.measurement.title}, {table.settings}: the text of these documents changed "
                f"before the latest number; measure {names} again to compare."
            )
            notices.append(Text(text, notice=True))
    return notices


def _row_by_row(table: Table) -> list[Part]:
    """A line for each number, and the machines and versions that made them."""
    machines: dict[str, int] = {}
    lines = []
    for name, rows in table.series.items():
        for row in rows:
            machine = machines.setdefault(surroundings(row), len(machines) + 1)
            numbers = [row.get(key) for key in ("length", "stride", "tokens", "seed")]
            length, stride, tokens, seed = ("" if n is None else str(n) for n in numbers)
            tokens = f"{row['tokens']:,}" if tokens else ""
            cells = [name, length, stride, tokens, seed, row["dtype"]]
            lines.append([*cells, f"{row['seconds']:.1f}", row["date"], f"[{machine}]"])
    header = ["model", "length", "stride", "tokens", "seed"]
    header += ["dtype", "seconds", "date", "made with"]
    made_with = [f"[{number}] {machine}" for machine, number in machines.items()]
    return [Grid(header, lines, numbers_from=1), Bullets(made_with)]


def _documents(table: Table) -> list[Part]:
    row = table.rows[0]
    if "document_names" not in row:
        return []
    skipped = [
        f"{name} (empty or too short, left out)" for name in row.get("skipped_documents", [])
    ]
    names = Bullets([*row["document_names"], *skipped])
    return [Fold(f"Documents of {data_of(row)}", [names])]
