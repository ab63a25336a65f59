"""Rows on disk, kept when a run is killed:

    OUT/rows.jsonl                              a line for each row
    OUT/perplexity-windows/<row_id>.parquet     what its value was made of; the row's `raw` names it

A row is written after its raw tables, so a row on disk is complete. Besides the fields of its type
(see `row.py`) a row has `row_id`, sixteen hex digits of what is measured, which is also a column of
its raw tables; `processes`; and `batch_size`, sequences at a time, where the measurement takes
several: halved where memory ran out, and no part of what is measured.
"""

import hashlib
import itertools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coca_hf.checkout import commit, versions
from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.batches import NoValue, Watch, processes
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.rope import Rope, trained_length
from coca_hf.evaluate.row import (
    BESIDE,
    IDENTITY,
    fields,
    identity,
    latest,
    read_rows,
    relative,
)
from coca_hf.files import append_line, replacing

Raw = Mapping[str, list[dict]]  # lines of a raw table, by its name
PACKAGES = (
    *("coca-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets"),
    *("numpy", "pyarrow"),
)


class Progress:
    """How far a run is. This one is silent; `terminal.progress_on` shows it."""

    def __call__(self, items: list, description: str) -> Iterable:
        """The items of a loop within a row."""
        return items

    def begin(self, missing: list[dict], asked: int, noun: str) -> None:
        """Rows with the settings `missing` are about to be made, of `asked` in all.

        noun: what is counted.
        """

    def finish(self, settings: dict) -> None:
        """The row of these settings is made."""


class RowStore:
    """The rows of a directory. Opening it drops a last line that a kill cut short.

    Only the main process writes. Of rows of one measurement the `latest` counts. Where memory ran
    out, the row does not count, so that it is measured again.

    Raises CocaError where the directory cannot be made or a line is no row.
    """

    def __init__(self, out_dir: Path, progress: Progress | None = None):
        self.out_dir, self.progress = out_dir, progress or Progress()
        with processes().main_process_first():
            try:
                out_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"got {error.strerror}, expected a directory or a free name"
                raise CocaError(f"--out {out_dir}: {problem}") from None
            self._rows = _read_and_repair(out_dir / "rows.jsonl")

    def rows(
        self,
        row_type: Any,
        settings: dict,
        ropes: list[Rope],
        lengths: list[int],
        measure: Callable[[Rope, int, Watch], tuple[dict, Raw]],
    ) -> Iterator[dict]:
        """Yield a row for every RoPE setting and length; measure those that are not here.

        settings: what the rows say besides `rope` and `length`. measure: returns the results of a
        row and its raw tables, and shows its loop through the given callback.
        """

        def found(wanted: list[dict]) -> list[dict]:
            row = self.find(row_type, *wanted)
            return [row] if row else []

        def measured(rope: Rope, wanted: list[dict]) -> list[dict]:
            (of_row,) = wanted
            length, began = of_row["length"], time.perf_counter()
            watch = partial(self.progress, description=f"{settings['task']}  {rope}  {length}")
            try:
                results, raw = measure(rope, length, watch)
            except NoValue as failure:
                results, raw = {"value": None, "error": failure.explain(length)}, {}
                results |= dict.fromkeys(fields(row_type, BESIDE))
            made = {"seconds": round(time.perf_counter() - began, 3), "date": now()}
            return [self.append(row_type, of_row | {"error": None} | results | made, raw)]

        asked = [
            (rope, [settings | {"rope": str(rope), "length": length}])
            for rope, length in itertools.product(ropes, lengths)
        ]
        return self.each(asked, found, measured)

    def each(
        self,
        asked: list[tuple[Rope, list[dict]]],
        found: Callable[[list[dict]], list[dict]],
        measured: Callable[[Rope, list[dict]], list[dict]],
        noun: str = "rows",
    ) -> Iterator[dict]:
        """Yield the rows of everything that is asked for: those `found`, otherwise those `measured`.

        asked: settings of rows that are measured together. noun: what is counted. measured: appends
        the rows that it returns.
        """
        missing = [settings[-1] for _, settings in asked if not found(settings)]
        self.progress.begin(missing, len(asked), noun)
        for rope, settings in asked:
            rows = found(settings)
            if not rows:
                rows = measured(rope, settings)
                self.progress.finish(settings[-1])
            yield from rows

    def find(self, row_type: Any, settings: dict) -> dict | None:
        """The row already measured with these settings, or None."""
        return self._found(row_type, settings["task"]).get(identity(row_type, settings))

    def find_all(self, row_type: Any, settings: dict, but: tuple[str, ...]) -> list[dict]:
        """The rows that have these settings in all of their identity except the fields `but`."""
        names = [name for name in fields(row_type, IDENTITY) if name not in but]
        rows = self._found(row_type, settings["task"]).values()
        return [row for row in rows if all(row.get(name) == settings.get(name) for name in names)]

    def append(self, row_type: Any, row: dict, raw: Raw | None = None) -> dict:
        """Write `row` after its raw tables. Returns the row with its `row_id` and `raw`.

        Raises CocaError where it cannot be written.
        """
        row_id = hashlib.sha256(identity(row_type, row).encode()).hexdigest()[:16]
        tables = {name: lines for name, lines in (raw or {}).items() if lines}
        paths = {name: f"{row['task']}-{name}/{row_id}.parquet" for name in tables}
        row = row | {"row_id": row_id, "raw": paths}
        if processes().is_main_process:
            try:
                for name, lines in tables.items():
                    _write_table(self.out_dir / paths[name], row_id, lines)
                line = json.dumps(row, ensure_ascii=False, allow_nan=False)
                append_line(self.out_dir / "rows.jsonl", line)
            except OSError as error:
                raise CocaError(
                    f"{self.out_dir}: a row cannot be written ({one_line(error)}); make room and "
                    f"run the same command again: the rows before it are kept"
                ) from error
        self._rows.append(row)
        return row

    def _found(self, row_type: Any, task: str) -> dict[str, dict]:
        of_task = (row for row in self._rows if row["task"] == task)
        rows = latest(of_task, partial(identity, row_type))
        return {
            key: row for key, row in rows.items() if not str(row.get("error")).startswith("OOM")
        }


def about_model(loaded: LoadedModel) -> dict:
    """What a row says about its model, machine and versions."""
    model = loaded.model
    return {
        "model": loaded.name,
        "model_path": relative(loaded.path),
        "fingerprint": loaded.fingerprint,
        "model_type": model.config.model_type,
        "coca_constraint": getattr(model.config, "coca_constraint", None),
        "coca_kept_layers": getattr(model.config, "coca_kept_layers", None),
        "coca_partial_rotary_layers": getattr(model.config, "coca_partial_rotary_layers", None),
        "trained_length": trained_length(model.config),
        "model_commit": loaded.commit,
        "trained_seq_len": loaded.trained_seq_len,
        "tokens_seen": loaded.tokens_seen,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device_name(model.device),
        "processes": processes().num_processes,
        "versions": _packages() | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "command": command_line(),
    }


def command_line() -> str:
    """The command that runs, with `relative` paths."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + relative(value))
    return shlex.join([Path(sys.argv[0]).name, *words])


def made_otherwise(rows: list[dict]) -> str | None:
    """One line about rows of other versions of `PACKAGES` or another commit; None without such."""
    here = _packages() | {"coca-hf commit": commit()}
    others = []
    for row in rows:
        made = row.get("versions", {}) | {"coca-hf commit": row.get("commit")}
        differ = [name for name in here if made.get(name) != here[name]]
        others.append([f"{name} {made.get(name) or 'unknown'}" for name in differ])
    count = sum(map(bool, others))
    if not count:
        return None
    were, found = "row was" if count == 1 else "rows were", dict.fromkeys(itertools.chain(*others))
    remedy = "delete such rows from rows.jsonl to measure them again"
    return f"{count} {were} made before, with {', '.join(found)}; {remedy}"


def now() -> str:
    """The time in UTC, to the second, as rows write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _packages() -> dict[str, str]:
    found = versions(*PACKAGES)
    return {name: found[name] for name in PACKAGES if name in found}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _read_and_repair(path: Path) -> list[dict]:
    """The rows of a file, which then ends with a whole line."""
    if not path.exists():
        return []
    try:
        rows, unfinished = read_rows(path)
        if unfinished:
            os.truncate(path, path.stat().st_size - len(unfinished))
        elif rows and not path.read_bytes().endswith(b"\n"):  # some editors take it off
            with path.open("ab") as file:
                file.write(b"\n")
    except OSError as error:
        problem = f"got {error.strerror}, expected the rows of coca-eval or nothing"
        raise CocaError(f"{path}: {problem}") from None
    return rows


def _write_table(path: Path, row_id: str, lines: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as unfinished:
        table = pa.Table.from_pylist([{"row_id": row_id} | line for line in lines])
        pq.write_table(table, unfinished)
