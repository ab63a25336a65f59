"""Rows: one measured value each, as a line of OUT/rows.jsonl with all that is needed to repeat it.

Every measurement extends `Row` beside the function that yields its rows, and describes itself by a
`Measurement`; a row itself is a dict. Fields are declared as

    Identity[T]   part of what is measured: a row that agrees in all of these is not measured again
    Shared[T]     the same in all rows of one table, whose values are comparable only then
    Setting[T]    both
    Beside[T]     shown beside the value, so not null where there is a value

What a value was made of is in raw tables, OUT/perplexity-windows/<row_id>.parquet for one; the
row's `raw` names them. A row is written after its raw tables, so a row on disk is complete. It also
has `row_id`, sixteen hex digits of what is measured, which is a column of its raw tables too;
`processes`; and `batch_size`, sequences at a time, where the measurement takes several: halved
where memory ran out, and no part of what is measured.
"""

import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from filelock import FileLock
from pydantic import Field, PositiveFloat
from typing_extensions import NotRequired, TypedDict, get_type_hints  # pydantic needs these

from coca_hf.checkout import commit, now, versions
from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.batches import Batches, NoValue, processes
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.rope import Rope, trained_length
from coca_hf.files import append_line, replacing
from coca_hf.page import Part

T = TypeVar("T")
IDENTITY, SHARED, BESIDE = "identity", "shared", "beside"
Identity = Annotated[T, IDENTITY]
Shared = Annotated[T, SHARED]
Setting = Annotated[T, IDENTITY, SHARED]
Beside = Annotated[T, BESIDE]

Count = Annotated[int, Field(gt=0, le=2**53)]
Positive = PositiveFloat | None
Share = Annotated[float, Field(ge=0, le=1)] | None
Names = list[str]
BASIC = {"model", "task", "rope", "length", "value"}  # of any row, of a later version too


class Row(TypedDict):
    """What every row says; the fields of a measurement come from its own file.

    A row also has `length` in tokens and `value`, whose bounds differ between measurements.
    """

    task: Identity[str]
    model: Identity[str]  # its name
    model_path: str
    fingerprint: NotRequired[Identity[str]]  # changes when the files of the model do
    model_type: NotRequired[str]
    model_commit: NotRequired[str | None]  # of a model on the hub
    rope: Identity[str]
    dtype: Identity[str]
    trained_length: Count | None  # tokens, as the config says
    trained_seq_len: Count | None  # positions reached in the last stage of coca-train
    tokens_seen: int | None  # in CoCA training
    coca_constraint: str | None
    coca_kept_layers: NotRequired[list[int] | None]
    coca_kept_window: NotRequired[int | None]  # tokens that kept layers attend to
    coca_partial_rotary_layers: NotRequired[list[int] | None]
    tokens: NotRequired[int | None]  # scored or read
    error: str | None  # why there is no value; "OOM: ..." where memory ran out
    raw: dict[str, Annotated[str, Field(max_length=200)]]  # files of raw results, by name
    device: str
    versions: dict
    commit: NotRequired[str | None]  # of coca_hf
    command: str
    date: str
    seconds: float


class TextRow(Row):
    """What rows of a measurement on documents say about them."""

    data: Shared[str]
    subset: NotRequired[Shared[str | None]]
    data_revision: NotRequired[Shared[str | None]]
    column: Shared[str]
    split: Shared[str]
    document_names: Shared[Names]
    skipped_documents: NotRequired[Names]
    data_hash: NotRequired[Identity[str]]  # of the very tokens
    text_hash: NotRequired[str | None]  # of the documents, whatever the tokenizer
    max_tokens: Setting[int | None]
    seed: Setting[int]


@dataclass(frozen=True)
class Measurement:
    """How the rows of a task are read and shown.

    row: the type of its rows. settings: what the rows of a table share, in words. cell: the value
    of a row, which it has. parts: of the section on the page, from each `tables.Table` of rows.
    raw: the columns that the page reads, each of one of `tables.TYPES`, by raw table.
    """

    task: str
    title: str
    explanation: str
    row: Any
    settings: Callable[[dict], str]
    cell: Callable[[dict], str]
    parts: Callable[[list[Any]], list[Part]]
    raw: dict[str, dict[str, Any]] = field(default_factory=dict)

    def show(self, row: dict) -> str:
        """The value of a row as a table has it."""
        if row["value"] is not None:
            return re.sub(r"^-(0\.0+)(?!\d)", r"\1", self.cell(row))  # no minus zero
        return "OOM" if (row.get("error") or "").startswith("OOM") else "none"


@cache
def fields(row_type: Any, mark: str) -> list[str]:
    """The names of the fields of `row_type` that have a mark: IDENTITY, SHARED or BESIDE."""
    found = []
    for name, hint in get_type_hints(row_type, include_extras=True).items():
        hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        if get_origin(hint) is Annotated and mark in hint.__metadata__:
            found.append(name)
    return found


def identity(row_type: Any, row: dict) -> str:
    """Equal for rows of the same measurement, and for those alone."""
    return json.dumps([row.get(name) for name in fields(row_type, IDENTITY)])


def shared(row_type: Any, row: dict) -> str:
    """Equal for rows that stand in one table, and for those alone."""
    return json.dumps([row.get(name) for name in fields(row_type, SHARED)])


def latest(rows: Iterable[dict], measured: Callable[[dict], T]) -> dict[T, dict]:
    """The latest of the rows that agree in `measured`; the last of those with one date."""
    found: dict[T, dict] = {}
    for row in rows:
        key = measured(row)
        if key not in found or str(found[key].get("date")) <= str(row.get("date")):
            found[key] = row
    return found


def label(row: dict) -> str:
    """Model and RoPE setting."""
    return row["model"] if row["rope"] == "default" else f"{row['model']} + {row['rope']}"


def last_trained_length(row: dict) -> int | None:
    """Positions reached in the model's last training: a stage of coca-train, or its config."""
    return row["trained_seq_len"] or row["trained_length"]


def relative(path: str) -> str:
    """An absolute path from the current directory, so that rows do not name a machine's own.

    Other texts, such as the id of a data set, stay as they are.
    """
    return os.path.relpath(path) if os.path.isabs(path) else path


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
    """The rows of a directory, which the first row makes. Several commands may write there.

    Only the main process writes. Of rows of one measurement the `latest` counts. Where memory ran
    out, the row does not count, so that it is measured again.

    Raises CocaError where the directory cannot be made or a line is no row.
    """

    def __init__(self, out_dir: Path):
        self.out_dir, self.progress = out_dir, Progress()
        path = out_dir / "rows.jsonl"
        try:
            self._rows = read_rows(path)[0]
        except FileNotFoundError:
            self._rows = []
            nearest = next(place for place in path.absolute().parents if place.exists())
            if not os.access(nearest, os.W_OK):
                problem = f"nothing can be written in {nearest}; choose another directory"
                raise CocaError(f"--out {out_dir}: {problem}") from None
        except OSError as error:
            problem = f"got {error.strerror}, expected the rows of coca-eval or nothing"
            raise CocaError(f"{path}: {problem}") from None

    def each(
        self,
        row_type: Any,
        asked: list[tuple[Rope, list[dict]]],
        measured: Callable[[Rope, list[dict]], list[dict]],
        but: tuple[str, ...] = (),
        noun: str = "rows",
    ) -> Iterator[dict]:
        """Yield the rows of everything that is asked for; those that are not here are `measured`.

        asked: settings of rows that are measured together. measured: appends the rows that it
        returns. but: as `find` takes it; settings then have as many rows as `metrics` says. noun:
        what is counted.
        """

        def found(together: list[dict]) -> list[dict]:
            rows = [self.find(row_type, settings, but) for settings in together]
            whole = all(some and len(some) >= some[0].get("metrics", 1) for some in rows)
            return list(itertools.chain(*rows)) if whole else []

        missing = [together[-1] for _, together in asked if not found(together)]
        self.progress.begin(missing, len(asked), noun)
        for rope, together in asked:
            rows = found(together)
            if not rows:
                rows = measured(rope, together)
                self.progress.finish(together[-1])
            yield from rows

    def find(self, row_type: Any, settings: dict, but: tuple[str, ...] = ()) -> list[dict]:
        """The rows that have these settings in all of their identity except the fields `but`."""
        names = [name for name in fields(row_type, IDENTITY) if name not in but]
        of_task = (row for row in self._rows if row["task"] == settings["task"])
        return [
            row
            for row in latest(of_task, partial(identity, row_type)).values()
            if not str(row.get("error")).startswith("OOM")
            and all(row.get(name) == settings.get(name) for name in names)
        ]

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
                self.out_dir.mkdir(parents=True, exist_ok=True)
                with FileLock(self.out_dir / ".rows.lock"):  # another command may write there
                    _end_last_line(self.out_dir / "rows.jsonl")
                    append_line(self.out_dir / "rows.jsonl", line)
            except OSError as error:
                raise CocaError(
                    f"{self.out_dir}: a row cannot be written ({one_line(error)}); make room and "
                    f"run the same command again: the rows before it are kept"
                ) from error
        self._rows.append(row)
        return row


@dataclass
class Run:
    """A model under RoPE settings, the lengths in tokens to measure it at, and where rows go.

    batch_size: sequences at a time; None for `auto_batch_size`.
    """

    loaded: LoadedModel
    lengths: list[int]
    ropes: list[Rope]
    store: RowStore
    batch_size: int | None = None

    @cached_property
    def about(self) -> dict:
        """`about_model` of its model."""
        return about_model(self.loaded)

    def batches(self, description: str) -> Batches:
        """For a row that is shown under a description."""
        return Batches(self.batch_size, partial(self.store.progress, description=description))

    def rows(
        self,
        row_type: Any,
        settings: dict,
        measure: Callable[[Rope, int, Batches], tuple[dict, Raw]],
    ) -> Iterator[dict]:
        """Yield a row for every RoPE setting and length; those that the store has are not measured.

        settings: what the rows say besides `rope`, `length` and `about`. measure: returns the
        results of a row and its raw tables.
        """

        def measured(rope: Rope, together: list[dict]) -> list[dict]:
            (of_row,) = together
            length, began = of_row["length"], time.perf_counter()
            batches = self.batches(f"{settings['task']}  {rope}  {length}")
            try:
                results, raw = measure(rope, length, batches)
                results |= {"batch_size": batches.used} if batches.used else {}
            except NoValue as failure:
                results, raw = {"value": None, "error": failure.explain(length)}, {}
                results |= dict.fromkeys(fields(row_type, BESIDE))
            made = {"seconds": round(time.perf_counter() - began, 3), "date": now()}
            return [self.store.append(row_type, of_row | {"error": None} | results | made, raw)]

        asked = [
            (rope, [settings | self.about | {"rope": str(rope), "length": length}])
            for rope, length in itertools.product(self.ropes, self.lengths)
        ]
        return self.store.each(row_type, asked, measured)


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
        "coca_kept_window": getattr(model.config, "coca_kept_window", None),
        "coca_partial_rotary_layers": getattr(model.config, "coca_partial_rotary_layers", None),
        "trained_length": trained_length(model.config),
        "model_commit": loaded.commit,
        "trained_seq_len": loaded.trained_seq_len,
        "tokens_seen": loaded.tokens_seen,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": _device_name(model.device),
        "processes": processes().num_processes,
        "versions": versions(*PACKAGES) | {"cuda": torch.version.cuda},
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
    here = versions(*PACKAGES) | {"coca-hf commit": commit()}
    del here["python"]
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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def _end_last_line(path: Path) -> None:
    """Take off a last line that a kill cut short; end one whose end an editor took off."""
    if not path.exists():
        return
    rest = path.read_bytes().rpartition(b"\n")[2]
    if _parsed(rest) is None:
        os.truncate(path, path.stat().st_size - len(rest))
    else:
        append_line(path, "")


def _write_table(path: Path, row_id: str, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        table = pa.Table.from_pylist([{"row_id": row_id} | line for line in lines])
        pq.write_table(table, unfinished)


def read_rows(path: Path) -> tuple[list[dict], bytes]:
    """The rows of a file, and the last line if a kill has cut it short; that is no row.

    Raises CocaError with the number of a line that is no row.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    if _parsed(rest) is not None:
        lines, rest = [*lines, rest], b""
    rows = []
    for line_number, line in enumerate(lines, 1):
        row = _parsed(line)
        if not (isinstance(row, dict) and row.keys() >= BASIC and _is_number(row["value"])):
            where = f"{path}, line {line_number}"
            raise CocaError(f"{where}: got no row of coca-eval; delete the line")
        rows.append(row)
    return rows, rest


def _parsed(line: bytes) -> Any:
    """The JSON of a line; None for what is no JSON, or could be read but never written."""
    try:
        row = json.loads(line, parse_constant=_refuse)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # 1e999, half a surrogate
    except (ValueError, RecursionError):
        return None
    return row


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None)
