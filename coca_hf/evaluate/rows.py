"""Results as JSON lines: one row per measurement, with whatever is needed to repeat it, kept across kills.

    OUT/rows.jsonl                                 a line per row
    OUT/perplexity-windows/<row_id>.parquet        what the value of a row was made of: `raw` of the row names these

A row is written after its raw tables, so a row on disk is complete. Every row of every task has the fields of
`subject_settings`, and

    task, rope, length (tokens), stride, seed      what was measured
    value      the task's number, or null, and then `error` says why ("OOM: ..." where memory ran out)
    tokens     how many were scored or read
    batch_size sequences at a time, where a task takes several: halved where memory ran out; no part of row_id
    row_id     sixteen hex digits of the settings that make a row the same measurement
    raw        {name: path under OUT}; every raw table has the column row_id
    date, seconds
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
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coca_hf.checkout import commit
from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.batches import processes
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.rope import Rope, trained_length
from coca_hf.report.rows import is_whole, latest

# A row that has these in common with another is the same measurement.
IDENTITY = (
    *("model", "fingerprint", "dtype", "task", "rope", "length", "stride", "asked_stride", "seed"),
    *("data", "data_hash", "documents", "max_tokens", "cases", "pairs", "new_tokens", "variant", "depths", "bucket"),
    *("pairs_per_document", "mode", "repeats", "baseline_fingerprint", "measured_on", "benchmark", "metric", "filter"),
    *("shots", "limit", "warmup"),
)
SHOWN = {"model", "task", "rope", "length", "value"}  # of every row, when a run ends
Raw = Mapping[str, list[dict]]  # lines of a raw table, by its name
PACKAGES = ("coca-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets", "numpy", "pyarrow")


class Track:
    """How far a run is; this one shows nothing, that of `show.progress_on` does."""

    def __call__(self, items: list, description: str) -> Iterable:
        """The items of a loop within a row."""
        return items

    def begin(self, missing: list[dict], asked: int, noun: str = "rows") -> None:
        """Of `asked` rows these are to be made: their settings. noun: what is counted, where it is not rows."""

    def finish(self, settings: dict) -> None:
        """The row of these settings is made."""


UNSEEN = Track()


class RowStore:
    """The rows of a directory. Opening it drops a last line that a kill cut short; only the main process writes.

    Of lines that measure the same, the `latest` counts. One of memory that ran out is not found, so that it is measured
    again.

    Raises CocaError where the directory cannot be made or another line is no row.
    """

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        with processes().main_process_first():
            try:
                out_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CocaError(f"--out {out_dir}: got {error.strerror}, expected a directory or a free name") from None
            rows = latest(_read_and_repair(out_dir / "rows.jsonl"), _identity)
            self._rows = {key: row for key, row in rows.items() if not str(row.get("error")).startswith("OOM")}

    def find(self, settings: dict) -> dict | None:
        """The row already measured with these settings, or None."""
        return self._rows.get(_identity(settings))

    def find_all(self, settings: dict, but: tuple[str, ...]) -> list[dict]:
        """The rows that differ from these settings in nothing else than the fields `but`."""
        wanted = {name: settings.get(name) for name in IDENTITY if name not in but}
        return [row for row in self._rows.values() if all(row.get(name) == value for name, value in wanted.items())]

    def append(self, row: dict, raw: Raw | None = None) -> dict:
        """Write `row` after the tables of `raw`, each a list of lines by the name of the table. Returns the row.

        Raises CocaError where the disk does not take it.
        """
        row_id = hashlib.sha256(_identity(row).encode()).hexdigest()[:16]
        paths = {name: f"{row['task']}-{name}/{row_id}.parquet" for name, lines in (raw or {}).items() if lines}
        row = row | {"row_id": row_id, "raw": paths}
        if processes().is_main_process:
            try:
                for name, path in paths.items():
                    _write_table(self.out_dir / path, row_id, (raw or {})[name])
                _append(self.out_dir / "rows.jsonl", row)
            except OSError as error:
                raise CocaError(
                    f"{self.out_dir}: a row cannot be written ({one_line(error)}); make room and run the same command "
                    f"again: the rows before it are kept"
                ) from error
        self._rows[_identity(row)] = row
        return row


def rows_over(
    ropes: list[Rope],
    lengths: list[int],
    store: RowStore,
    settings_at: Callable[[int], dict],
    measure: Callable[[Rope, dict], tuple[dict, Raw]],
    track: Track,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    settings_at: what a row of a length says besides `rope` and `length`. measure: of these settings, what they came to
    and the raw tables.
    """
    asked = [
        (rope, {"rope": str(rope), "length": length} | settings_at(length))
        for rope, length in itertools.product(ropes, lengths)
    ]
    track.begin([settings for _, settings in asked if store.find(settings) is None], len(asked))
    for rope, settings in asked:
        row = store.find(settings)
        if row is None:
            began = time.perf_counter()
            results, raw = measure(rope, settings)
            made = {"seconds": round(time.perf_counter() - began, 3), "date": now()}
            row = store.append(settings | results | made, raw)
            track.finish(settings)
        yield row


def subject_settings(subject: Subject) -> dict:
    """What a row says about its model, machine and versions."""
    model = subject.model
    return {
        "model": subject.name,
        "model_path": subject.path,
        "fingerprint": subject.fingerprint,
        "model_type": model.config.model_type,
        "coca_constraint": getattr(model.config, "coca_constraint", None),
        "coca_kept_layers": getattr(model.config, "coca_kept_layers", None),
        "trained_length": trained_length(model),
        "model_commit": subject.commit,
        "trained_seq_len": subject.trained_seq_len,
        "tokens_seen": subject.tokens_seen,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device_name(model.device),
        "processes": processes().num_processes,
        "versions": _packages() | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def made_otherwise(rows: list[dict]) -> str | None:
    """One line on those of `rows` that other versions of `PACKAGES`, or another commit of coca_hf, made; else None."""
    here = _packages() | {"coca-hf commit": commit()}
    made = [row.get("versions", {}) | {"coca-hf commit": row.get("commit")} for row in rows]
    others = [[f"{name} {one.get(name) or 'unknown'}" for name in here if one.get(name) != here[name]] for one in made]
    count = sum(map(bool, others))
    if not count:
        return None
    were, found = "row was" if count == 1 else "rows were", dict.fromkeys(itertools.chain(*others))
    return f"{count} {were} made before, with {', '.join(found)}; delete such rows from rows.jsonl to measure anew"


def _packages() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def now() -> str:
    """The time in UTC, to the second, as rows write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _identity(row: dict) -> str:
    return json.dumps([row.get(key) for key in IDENTITY])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _read_and_repair(path: Path) -> list[dict]:
    if not path.exists():
        return []
    try:
        *whole, rest = path.read_bytes().split(b"\n")
        if is_whole(rest):  # but for the end of the line, which some editors take off
            with path.open("ab") as file:
                file.write(b"\n")
            whole, rest = [*whole, rest], b""
    except OSError as error:
        raise CocaError(f"{path}: got {error.strerror}, expected the rows of coca-eval or nothing") from None
    if rest:
        os.truncate(path, path.stat().st_size - len(rest))
    rows = []
    for line_number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not (isinstance(row, dict) and row.keys() >= SHOWN and isinstance(row["value"], int | float | None)):
            raise CocaError(f"{path}, line {line_number}: got no row of coca-eval; delete the line")
        rows.append(row)
    return rows


def _append(path: Path, row: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_table(path: Path, row_id: str, lines: list[dict]) -> None:
    """So that a reader, and a run that is killed, finds the whole file or none."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial")  # hidden: no part of the directory read as one
    try:
        pq.write_table(pa.Table.from_pylist([{"row_id": row_id} | line for line in lines]), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
