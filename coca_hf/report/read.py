"""The rows of several runs as tables of rows whose values can be compared."""

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from coca_hf.errors import CocaError
from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.rows import (
    BESIDE,
    IDENTITY,
    ROWS,
    SHARED,
    counts,
    fields,
    label,
    latest,
    marked,
    read_rows,
)
from coca_hf.evaluate.tables import Table, identity
from coca_hf.page import LOOKS


def read_tables(runs: Sequence[Path]) -> list[Table]:
    """The tables of the directories `runs`, in the order of `MEASUREMENTS`.

    The latest row of a measurement counts; one that ran out of memory only if there is no other of
    the same files and text.
    Models of one name and path whose files differ from one directory to the other are different
    models: the directory becomes part of their path. A model or a text of several paths, the same
    files or the same documents, has the first of them (a model the first at which no other files
    were measured), and its documents their names there. A row's `raw` becomes paths, whose files
    may be absent.

    Raises CocaError if a directory has no rows, or a line is not a row.
    """
    of_runs = {run: sorted(_read(run), key=lambda row: row["date"]) for run in runs}
    _tell_apart(of_runs)
    rows = [row for of_run in of_runs.values() for row in of_run]
    firsts = _lasting_paths(rows)
    of_text = [(field, "text_hash") for field in ("data", "document_names")]
    for row in rows:
        for field, *same in (("model_path", "model", "fingerprint"), *of_text):
            if row.get(same[-1]):
                row[field] = firsts.setdefault((field, *map(row.get, same)), row[field])
    measured = set(map(_state_of, filter(counts, rows)))
    found = latest(
        (row for row in rows if counts(row) or _state_of(row) not in measured), _measured
    )
    # A failed benchmark has a row without a metric; once it succeeds, it has a row for each
    answered = {
        _measured(row | {"metric": None, "filter": None}): row["date"]
        for row in found.values()
        if row.get("metric")
    }
    tables: dict[tuple, list[dict]] = {}
    for key, row in found.items():
        if key in answered and row["date"] <= answered[key]:
            continue
        tables.setdefault(_table_of(row), []).append(row)
    model_paths = {(row["model"], row["model_path"]) for row in found.values()}
    count = Counter(model for model, _ in model_paths)
    ambiguous = frozenset(model for model in count if count[model] > 1)
    in_order = sorted(found.values(), key=lambda row: [*MEASUREMENTS].index(row["task"]))
    of_page = tuple(dict.fromkeys(map(identity, in_order)))
    of_page = of_page if len(of_page) <= LOOKS else ()  # of one table, all should look different
    return [
        Table(measurement, of_table, number, ambiguous=ambiguous, models=of_page)
        for task, measurement in MEASUREMENTS.items()
        for number, of_table in enumerate(
            (rows for (task_of, _), rows in tables.items() if task_of == task), 1
        )
    ]


def _tell_apart(of_runs: dict[Path, list[dict]]) -> None:
    states: dict[tuple, dict[Path, set]] = {}
    for run, rows in of_runs.items():
        for row in rows:
            of_model = states.setdefault((row["model"], row["model_path"]), {})
            of_model.setdefault(run, set()).add(row["fingerprint"])
    for run, rows in of_runs.items():
        for row in rows:
            found = states[row["model"], row["model_path"]].values()
            if len(found) > 1 and sum(map(len, found)) == len(set().union(*found)):
                row["model_path"] += f" of {os.path.relpath(run)}"


def _lasting_paths(rows: list[dict]) -> dict[tuple, Any]:
    """For each model with a fingerprint, the first path at which no other files were measured. A
    path where it was trained again after it was copied would put two models on one line.
    """
    states: dict[tuple, set] = {}
    for row in rows:
        states.setdefault((row["model"], row["model_path"]), set()).add(row["fingerprint"])
    firsts: dict[tuple, Any] = {}
    for row in rows:
        if row["fingerprint"] and len(states[row["model"], row["model_path"]]) == 1:
            own = "model_path", row["model"], row["fingerprint"]
            firsts.setdefault(own, row["model_path"])
    return firsts


def _table_of(row: dict) -> tuple:
    return row["task"], marked(MEASUREMENTS[row["task"]].row, SHARED, row)


def _state_of(row: dict) -> str:
    """What it measures, of which state of the model's files and of the text."""
    return marked(MEASUREMENTS[row["task"]].row, IDENTITY, row)


def _measured(row: dict) -> tuple:
    """The settings that make rows one measurement."""
    return label(row), row["model_path"], row["dtype"], row["length"], _table_of(row)


def _read(run: Path) -> list[dict]:
    """The rows of a directory, checked, with paths in `raw`."""
    path = run / ROWS
    if not path.is_file():
        expected = "expected the --out of coca-eval, or of a coca-train that has begun to train"
        raise CocaError(f"{run}: got no {ROWS} there, {expected}")
    rows = read_rows(path)
    if not rows:
        raise CocaError(f"{path}: got no rows, expected at least one; run coca-eval first")
    for line_number, row in enumerate(rows, 1):
        where = f"{path}, line {line_number}"
        if str(row["task"]) not in MEASUREMENTS:
            raise CocaError(f"{where}: got no row of coca-eval; delete the line")
        row_type = MEASUREMENTS[row["task"]].row
        row |= {name: None for name in row_type.__annotations__ if name not in row}
        _check_row(row, row_type, where)
        row["raw"] = {name: run / file for name, file in row["raw"].items()}
    return rows


_checker = cache(TypeAdapter)


def _check_row(row: dict, row_type: Any, where: str) -> None:
    """Raise CocaError if the value of a field of `row_type` has another type."""
    beside = fields(row_type, BESIDE) if row["value"] is not None else []
    wrong = [name for name in beside if row[name] is None]
    try:
        _checker(row_type).validate_python(row, strict=True)
    except ValidationError as error:
        wrong = [str(error.errors()[0]["loc"][0])]
    if wrong:
        found = f"got a row with {wrong[0]} {row[wrong[0]]!r}"
        raise CocaError(f"{where}: {found}, no value of coca-eval's; delete it")
