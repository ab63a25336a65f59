"""The rows of several runs, and the tables they make: measurements that may stand side by side."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coca_hf.errors import CocaError

# What the rows of one table have in common: only then are their values comparable.
SETTINGS = {
    "perplexity": ("data", "column", "split", "document_names", "max_tokens", "asked_stride"),
    "passkey": ("cases", "new_tokens", "seed"),
}
COMMON = (
    *("model", "task", "rope", "length", "stride", "value", "error", "tokens", "date", "seconds"),
    *("model_path", "trained_length", "coca_constraint", "tokens_seen", "dtype", "device", "versions", "command"),
)


@dataclass
class Table:
    """Rows of one task with the same settings."""

    task: str
    rows: list[dict]

    @property
    def lengths(self) -> list[int]:
        return sorted({row["length"] for row in self.rows})

    @property
    def series(self) -> dict[str, list[dict]]:
        """The rows of each line of the table, in order of length, by its label: model and RoPE setting.

        Where two lines have the same label, the path and dtype of their models tell them apart.
        """
        lines: dict[tuple, list[dict]] = {}
        for row in self.rows:
            lines.setdefault((_label(row), row["model_path"], row["dtype"]), []).append(row)
        shared = Counter(name for name, _, _ in lines)
        return {
            name if shared[name] == 1 else f"{name} ({path}, {dtype})": sorted(rows, key=lambda row: row["length"])
            for (name, path, dtype), rows in lines.items()
        }

    @property
    def settings(self) -> str:
        """What the rows share, in words."""
        row = self.rows[0]
        if self.task == "passkey":
            return f"{row['cases']} cases per length, {row['new_tokens']} new tokens, seed {row['seed']}"
        count = len(row["document_names"])
        cut = f" cut to {row['max_tokens']} tokens" if row["max_tokens"] else ""
        return f"{row['data']}, {count} document{'s' * (count > 1)}{cut}, stride {row['asked_stride']}"


def _label(row: dict) -> str:
    return row["model"] if row["rope"] == "default" else f"{row['model']} + {row['rope']}"


def read_tables(runs: Sequence[Path]) -> list[Table]:
    """The tables of the directories `runs`, perplexity first. Of rows that measure the same, the latest counts.

    Raises CocaError where a directory has no rows, or a line is not one.
    """
    rows: dict[tuple, dict] = {}
    for run in runs:
        for row in sorted(_read(run / "rows.jsonl"), key=lambda row: row["date"]):
            key = (_label(row), row["model_path"], row["dtype"], row["task"], row["length"], _settings_of(row))
            if key not in rows or rows[key]["date"] <= row["date"]:
                rows[key] = row
    tables: dict[tuple[str, str], Table] = {}
    for row in rows.values():
        tables.setdefault((row["task"], _settings_of(row)), Table(row["task"], [])).rows.append(row)
    return sorted(tables.values(), key=lambda table: list(SETTINGS).index(table.task))


def _settings_of(row: dict) -> str:
    return json.dumps([row[name] for name in SETTINGS[row["task"]]])


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise CocaError(
            f"{path.parent}: got no rows.jsonl there, expected the --out of coca-eval perplexity or passkey"
        )
    *lines, _cut_short = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for line_number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            missing = {*COMMON, *SETTINGS[row["task"]]} - row.keys()
        except (ValueError, TypeError, KeyError):
            raise CocaError(
                f"{path}, line {line_number}: got no row of {' or '.join(SETTINGS)}; delete the line"
            ) from None
        if missing:
            raise CocaError(f"{path}, line {line_number}: got a row without {', '.join(sorted(missing))}; delete it")
        rows.append(row)
    if not rows:
        raise CocaError(f"{path}: got no rows, expected at least one; run coca-eval perplexity or passkey first")
    return rows
