"""The rows of several runs, and the tables they make: measurements that may stand side by side."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pyarrow
from pyarrow.parquet import read_table
from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from coca_hf.errors import CocaError

TEXT, WHOLE, NAMES = str | None, int | None, list[str]
COUNT = Annotated[int, Field(gt=0, le=2**53)]
NUMBER, ABOVE_0, SHARE = float | None, PositiveFloat | None, Annotated[float, Field(ge=0, le=1)] | None
FILES = dict[str, Annotated[str, Field(max_length=200)]]


class Range(TypedDict):
    """Tokens of a position-loss row whose index in their window is at least `first` and below `end`."""

    first: int
    end: int
    perplexity: float | None


# What the rows of one table have in common: only then are their values comparable.
_TEXTS: dict[str, Any] = {"data": str, "column": str, "split": str, "document_names": NAMES, "max_tokens": WHOLE}
SETTINGS: dict[str, dict[str, Any]] = {
    "perplexity": _TEXTS | {"asked_stride": int, "variant": str},
    "position-loss": _TEXTS | {"bucket": COUNT},
    "passkey": {"cases": int, "new_tokens": int, "seed": int, "variant": str, "depths": COUNT | None},
    "copying": {"cases": int, "seed": int},
    "recall": {"cases": int, "pairs": int, "seed": int},
    "attention-maps": _TEXTS | {"baseline": str},
    "layers": _TEXTS | {"baseline": str, "cases": int, "seed": int},
    "boundary": _TEXTS | {"pairs_per_document": int, "seed": int},
    "tasks": {"benchmark": str, "metric": TEXT, "filter": TEXT, "shots": WHOLE, "limit": WHOLE},
    "speed": {"mode": str, "batch_size": int, "device": str},
}
# What every row has besides: a value of its task, and the fields common to all tasks.
VALUES: dict[str, dict[str, Any]] = {
    **{task: {"value": ABOVE_0} for task in ("perplexity", "position-loss", "speed")},
    **{task: {"value": SHARE} for task in ("passkey", "boundary")},
    "copying": {"value": NUMBER, "nll_first": NUMBER},
    "recall": {"value": SHARE, "nll": NUMBER},
    "attention-maps": {"value": NUMBER, "sink": NUMBER, "baseline_sink": NUMBER},
    "layers": {"value": NUMBER},
    "tasks": {"value": NUMBER, "length": COUNT | None},  # RULER alone has a length
}
COMMON: dict[str, Any] = {
    **dict.fromkeys(("model", "task", "rope", "date", "model_path", "dtype", "device", "command"), str),
    **{"length": COUNT, "trained_length": COUNT | None, "trained_seq_len": COUNT | None},
    **{"error": TEXT, "coca_constraint": TEXT, "tokens_seen": WHOLE, "seconds": float},
    **{"versions": dict, "raw": FILES},
}
# What some rows have.
SOME: dict[str, Any] = {
    **{
        "coca_kept_layers": list[int] | None,
        "model_type": str,
        "ranges": list[Range],
        "order": list[int],
        "tokens": WHOLE,
        "stride": WHOLE,
        "seed": WHOLE,
        "skipped_documents": NAMES,
    },
    **{f"{whose}{text}": NUMBER for whose in ("", "baseline_") for text in ("perplexity", "copy", "again")},
    **dict.fromkeys(("share_a", "share_b", "share_c", "share_d", "share_d_weighted"), NUMBER),
    **dict.fromkeys(("share_abnormal", "share_absolute"), NUMBER),
    **dict.fromkeys(("mean_abs_angle", "stderr", "tokens_per_second", "peak_bytes", "ratio"), NUMBER),
    **dict.fromkeys(("nll_first", "nll", "nats_per_digit", "sink", "baseline_sink"), NUMBER),
    **dict.fromkeys(("data", "dimension", "memory_kind", "baseline", "subset", "data_revision", "commit"), TEXT),
}
# Of each raw table, the columns that the page reads.
_FLOAT, _INT, _COUNTS = pyarrow.float64(), pyarrow.int64(), pyarrow.list_(pyarrow.int64())
SWAPPED = [f"{way}_{name}" for way in ("alone", "back") for name in ("divergence", "perplexity", "copy", "again")]
RAW = {
    "windows": {"document": _INT, "tokens": _INT, "nll": _FLOAT},
    "buckets": {"first": _INT, "tokens": _INT, "nll": _FLOAT},
    "cases": {"case": _INT, "depth": _FLOAT, "distance": _INT, "correct": pyarrow.bool_()},
    "heads": {"layer": _INT, "divergence": _FLOAT, "baseline_sink": _FLOAT, "baseline_previous": _FLOAT},
    "layers": {"layer": _INT, "harm": _FLOAT, **dict.fromkeys(SWAPPED, _FLOAT)},
    "angles": {"layer": _INT, "head": _INT, "angle_counts": _COUNTS, "tau_counts": _COUNTS},
    "decay": {"distance": _INT, "bound_rope": _FLOAT, "bound_coca": _FLOAT},
}


@dataclass
class Table:
    """Rows of one task with the same settings."""

    task: str
    rows: list[dict]

    @property
    def lengths(self) -> list[int]:
        return sorted({row["length"] for row in self.rows if row["length"] is not None})

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
            name if shared[name] == 1 else f"{name} ({path}, {dtype})": sorted(rows, key=_length)
            for (name, path, dtype), rows in lines.items()
        }

    @property
    def settings(self) -> str:
        """What the rows share, in words."""
        row = self.rows[0]
        if self.task == "passkey":
            depths = f"{row['depths']} depth{'s' * (row['depths'] > 1)}" if row["depths"] else "uniform depth"
            answer = f"{row['new_tokens']} new tokens" if row["new_tokens"] else "keys scored without generation"
            cases = f"{row['cases']} cases per length, {depths}, {answer}, seed {row['seed']}"
            return cases if row["variant"] == "paper" else f"{cases}, {row['variant']}'s prompt and scoring"
        if self.task == "copying":
            copied = f"passages of {data_of(row)}" if row.get("data") else "random tokens"
            return f"{copied}, {row['cases']} cases per length, seed {row['seed']}"
        if self.task == "recall":
            return f"lists of {row['pairs']} lines, {row['cases']} cases per length, seed {row['seed']}"
        if self.task == "speed":
            return f"{row['mode']}, batch size {row['batch_size']}, {row['device']}"
        if self.task == "tasks":
            return f"{row['benchmark']}, {row['metric']} ({row['filter']}), {shots_of(row)}"
        count = len(row["document_names"])
        cut = f" cut to {row['max_tokens']} tokens" if row["max_tokens"] else ""
        text = f"{data_of(row)}, {count} document{'s' * (count > 1)}{cut}"
        if self.task == "position-loss":
            return f"{text}, buckets of {row['bucket']} tokens"
        if self.task == "attention-maps":
            return f"{text}, beside {row['baseline']}"
        if self.task == "layers":
            return f"{text}, beside {row['baseline']}, {row['cases']} cases of each text, seed {row['seed']}"
        if self.task == "boundary":
            return f"{text}, {row['pairs_per_document']} pairs of positions a document, seed {row['seed']}"
        return f"{text}, stride {row['asked_stride']}" + (f", {row['variant']}" * (row["variant"] != "sliding"))


def data_of(row: dict) -> str:
    """The documents' source, and of a data set on the hub what was asked of it."""
    asked = {"subset": row.get("subset"), "revision": row.get("data_revision")}
    return ", ".join([row["data"], *(f"{name} {value}" for name, value in asked.items() if value)])


def shots_of(row: dict) -> str:
    """Examples before a question of a benchmark, and where its cases were cut."""
    shots = "the task's own shots" if row["shots"] is None else f"{row['shots']} shots"
    return shots + (f", first {row['limit']} cases" if row["limit"] else "")


def _length(row: dict) -> int:
    return row["length"] or 0  # benchmarks of lm-eval have none


def _label(row: dict) -> str:
    return row["model"] if row["rope"] == "default" else f"{row['model']} + {row['rope']}"


def read_tables(runs: Sequence[Path]) -> list[Table]:
    """The tables of the directories `runs`, perplexity first. Of rows that measure the same, the latest counts.

    Rows get `model_states` and `text_states`: the fingerprints of the model of this name and path, and the hashes of
    the documents of this table that it was measured on, in all rows. There is one of each, unless files have changed.

    A row's `raw` becomes paths, of which those may be absent that somebody left behind. Raises CocaError where a
    directory has no rows, or a line is not one.
    """
    every_row = [row for run in runs for row in sorted(_read(run / "rows.jsonl"), key=lambda row: row["date"])]
    models: dict[tuple, set] = {}
    texts: dict[tuple, set] = {}
    for row in every_row:
        whose = row["model"], row["model_path"]
        models.setdefault(whose, set()).add(row.get("fingerprint"))
        texts.setdefault((whose, row["task"], _settings_of(row)), set()).add(row.get("data_hash"))
        row |= {
            "model_states": models[whose],
            "text_states": texts[whose, row["task"], _settings_of(row)],
        }
    rows = latest(every_row, _key)
    # A benchmark that fails has a row without a metric, and once it does not, one for each.
    answered = {_key(row | {"metric": None, "filter": None}): row["date"] for row in rows.values() if row.get("metric")}
    tables: dict[tuple[str, str], Table] = {}
    for key, row in rows.items():
        if key in answered and row["date"] <= answered[key]:
            continue
        tables.setdefault((row["task"], _settings_of(row)), Table(row["task"], [])).rows.append(row)
    return sorted(tables.values(), key=lambda table: list(SETTINGS).index(table.task))


def latest(rows: Iterable[dict], measured: Callable[[dict], Any]) -> dict[Any, dict]:
    """Of rows that have `measured` in common, the one of the latest date, and of one second the last, by `measured`."""
    found: dict[Any, dict] = {}
    for row in rows:
        key = measured(row)
        if key not in found or str(found[key].get("date")) <= str(row.get("date")):
            found[key] = row
    return found


def _key(row: dict) -> tuple:
    """What rows that measure the same have in common."""
    return _label(row), row["model_path"], row["dtype"], row["task"], row["length"], _settings_of(row)


def _settings_of(row: dict) -> str:
    return json.dumps(
        [*(row[name] for name in SETTINGS[row["task"]]), row.get("subset"), row.get("data_revision"), row.get("data")]
    )


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise CocaError(f"{path.parent}: got no rows.jsonl there, expected the --out of coca-eval")
    *lines, rest = path.read_bytes().split(b"\n")
    if is_whole(rest):
        lines.append(rest)
    rows = []
    for line_number, line in enumerate(lines, 1):
        where = f"{path}, line {line_number}"
        try:
            row = json.loads(line, parse_constant=_refuse)
            needed = COMMON | SETTINGS[row["task"]] | VALUES[row["task"]]
            missing = needed.keys() - row.keys()
            # Half a character of UTF-16, and 1e999, can be read, but never written.
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CocaError(f"{where}: got no row of coca-eval; delete the line") from None
        if missing:
            raise CocaError(f"{where}: got a row without {', '.join(sorted(missing))}; delete it")
        beside = VALUES[row["task"]].keys() - {"length"} if row["value"] is not None else ()
        for name, kind in (needed | SOME).items():
            if name in row and (not _is(row[name], kind) or (name in beside and row[name] is None)):
                raise CocaError(f"{where}: got a row with {name} {row[name]!r}, no value of coca-eval's; delete it")
        row["raw"] = {name: path.parent / file for name, file in row["raw"].items()}
        rows.append(row)
    if not rows:
        raise CocaError(f"{path}: got no rows, expected at least one; run coca-eval first")
    return rows


def is_whole(line: bytes) -> bool:
    """Whether a last line without its end is a row, not the part of one that a kill has left."""
    try:
        return bool(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _is(value: Any, kind: Any) -> bool:
    try:
        _checker(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@cache
def _checker(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def trained_length(row: dict) -> int | None:
    """The tokens of a sequence in the model's last training: a stage of coca-train, else what its config says."""
    return row["trained_seq_len"] or row["trained_length"]


def read_raw(row: dict, name: str) -> list[dict] | None:
    """The raw results of a row, a dict for each line of its parquet file; None where the file is not there.

    Raises CocaError where the file has not the columns of `RAW`.
    """
    path = row["raw"].get(name)
    if path is None or not path.is_file():
        return None
    try:
        schema = pyarrow.schema([pyarrow.field(*column, nullable=False) for column in RAW[name].items()])
        return read_table(path).select(schema.names).cast(schema).to_pylist()
    except (ValueError, OSError, KeyError, NotImplementedError) as error:  # pyarrow's are of these
        raise CocaError(
            f"{path}: got no parquet file with columns {', '.join(RAW[name])} as coca-eval writes them; delete it and "
            f"its row, and measure again"
        ) from error


def _refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")
