"""Results as JSON lines: one row per measurement, with whatever is needed to repeat it, kept across kills."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.rope import trained_length

# A row that has these in common with another is the same measurement.
IDENTITY = (
    *("model", "fingerprint", "dtype", "task", "rope", "length", "stride", "asked_stride", "seed"),
    *("data", "data_hash", "documents", "max_tokens", "cases", "new_tokens"),
)


class RowStore:
    """The rows of a directory. Opening it drops a last line that a kill cut short.

    Raises CocaError where the directory cannot be made or another line is no JSON object.
    """

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CocaError(f"--out {out_dir}: got {error.strerror}, expected a directory or a free name") from None
        self._rows = {_identity(row): row for row in _read_and_repair(out_dir / "rows.jsonl")}

    def find(self, settings: dict) -> dict | None:
        """The row already measured with these settings, or None."""
        return self._rows.get(_identity(settings))

    def append(self, row: dict, cases: Iterable[dict] = ()) -> dict:
        """Write `row`, after its `cases` to `TASK-cases.jsonl`, so that a row on disk is complete. Returns the row."""
        path = self.out_dir / f"{row['task']}-cases.jsonl"
        lines = [{key: row[key] for key in ("model", "fingerprint", "rope", "length", "seed")} | case for case in cases]
        if lines:
            _read_and_repair(path)
            _append(path, lines)
        _append(self.out_dir / "rows.jsonl", [row])
        self._rows[_identity(row)] = row
        return row


def subject_settings(subject: Subject) -> dict:
    """What a row says about its model, machine and versions."""
    model = subject.model
    return {
        "model": subject.name,
        "model_path": subject.path,
        "fingerprint": subject.fingerprint,
        "model_type": model.config.model_type,
        "coca_constraint": getattr(model.config, "coca_constraint", None),
        "trained_length": trained_length(model),
        "tokens_seen": subject.tokens_seen,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device_name(model.device),
        "versions": {name: version(name) for name in ("coca-hf", "torch", "transformers")}
        | {"python": platform.python_version()},
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


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
    *whole, rest = path.read_bytes().split(b"\n")
    if rest:
        os.truncate(path, path.stat().st_size - len(rest))
    rows = []
    for line_number, line in enumerate(whole, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise CocaError(
                f"{path}, line {line_number}: got no JSON object, expected a row; delete the line"
            ) from None
    return rows


def _append(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
