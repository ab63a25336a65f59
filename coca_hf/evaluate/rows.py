"""Rows: one measured value each, as a line of OUT/rows.jsonl with all that is needed to repeat it.

Every measurement extends `Row` beside the function that yields its rows; a row itself is a dict.
Fields are declared as

    Identity[T]   part of what is measured: rows that agree in all of these are the same measurement
    Shared[T]     equal in all rows of one table, whose values can only then be compared
    Setting[T]    both
    Beside[T]     shown beside the value, so not null if there is a value

A field that a row lacks is null: the row has no value, or is of an earlier version.

The numbers behind a value are in raw tables, such as OUT/perplexity-windows/<row_id>.parquet,
which the row's `raw` names. A row is written after its raw tables, so a row on disk is complete.
`row_id`, sixteen hex digits of the row's identity, is also a column of its raw tables. Rows also
have `processes` and, if the measurement batches, `batch_size`: the sequences at a time, halved if
memory ran out, which are not part of the identity.
"""

import hashlib
import itertools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from pydantic import Field, PositiveFloat
from typing_extensions import TypedDict, get_type_hints  # pydantic needs these

from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, processes, trained_length
from coca_hf.evaluate.progress import Progress
from coca_hf.files import append_line, replacing
from coca_hf.provenance import commit, now, versions

T = TypeVar("T")
IDENTITY, SHARED, BESIDE = "identity", "shared", "beside"
Identity = Annotated[T, IDENTITY]
Shared = Annotated[T, SHARED]
Setting = Annotated[T, IDENTITY, SHARED]
Beside = Annotated[T, BESIDE]

Count = Annotated[int, Field(gt=0, le=2**53)]
Positive = PositiveFloat | None
Share = Annotated[float, Field(ge=0, le=1)] | None
RAW = r"^[\w-]+/[0-9a-f]{16}\.parquet$"
BASIC = {"model", "task", "rope", "length", "value"}  # in every row, also of a later version


class Row(TypedDict):
    """The fields of every row. A measurement adds its own and bounds `length` and `value`."""

    task: Identity[str]
    model: Identity[str]  # its name
    model_path: str
    fingerprint: Identity[str | None]  # changes when the files of the model do
    model_type: str | None
    model_commit: str | None  # of a model on the hub
    rope: Identity[str]
    dtype: Identity[str]
    trained_length: Count | None  # tokens, according to the config
    trained_seq_len: Count | None  # positions reached in the last stage of coca-train
    tokens_seen: int | None  # in CoCA training
    coca_constraint: str | None
    coca_kept_layers: list[int] | None
    coca_kept_window: int | None  # tokens that these layers attend to, if not all
    coca_content_pairs: int | None
    coca_content_layers: list[int] | None
    tokens: int | None  # scored or read
    error: str | None  # why there is no value; "OOM: ..." if memory ran out
    raw: dict[str, Annotated[str, Field(pattern=RAW)]]  # files of raw tables, by name
    device: str
    versions: dict
    commit: str | None  # of coca_hf
    command: str
    date: str
    seconds: float


class TextRow(Row):
    """The fields of a measurement on documents."""

    data: Shared[str]
    subset: Shared[str | None]
    data_revision: Shared[str | None]
    column: Shared[str]
    split: Shared[str]
    document_names: Shared[list[str]]
    skipped_documents: list[str] | None
    data_hash: Identity[str | None]  # of the very tokens
    text_hash: str | None  # of the documents, whatever the tokenizer
    max_tokens: Setting[int | None]
    seed: Setting[int]


@cache
def fields(row_type: Any, mark: str) -> list[str]:
    """The names of the fields of `row_type` that have a mark: IDENTITY, SHARED or BESIDE."""
    hints = get_type_hints(row_type, include_extras=True)
    return [name for name, hint in hints.items() if mark in getattr(hint, "__metadata__", ())]


def marked(row_type: Any, mark: str, row: dict) -> str:
    """The values of the fields that have a mark, as a key: equal for rows that agree in them."""
    return json.dumps([row.get(name) for name in fields(row_type, mark)])


def latest(rows: Iterable[dict], key: Callable[[dict], T]) -> dict[T, dict]:
    """The latest of the rows that agree in `key`; the last of those with the same date."""
    found: dict[T, dict] = {}
    for row in rows:
        its = key(row)
        if its not in found or str(found[its].get("date")) <= str(row.get("date")):
            found[its] = row
    return found


def label(row: dict) -> str:
    """Model and RoPE setting."""
    return row["model"] if row["rope"] == "default" else f"{row['model']} + {row['rope']}"


def last_trained_length(row: dict) -> int | None:
    """Positions reached in the model's last training: a stage of coca-train, or its config."""
    return row["trained_seq_len"] or row["trained_length"]


def relative(path: str) -> str:
    """An absolute path from the current directory, so that rows do not contain a machine's paths.

    Other texts, such as the id of a data set, stay as they are.
    """
    return os.path.relpath(path) if os.path.isabs(path) else path


ROWS = "rows.jsonl"
Raw = Mapping[str, list[dict]]  # lines of a raw table, by its name
PACKAGES = (
    *("coca-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets"),
    *("numpy", "pyarrow"),
)
# Fields of a CoCA model's config
OF_COCA = [name for name in Row.__annotations__ if name.startswith("coca_")]


class RowStore:
    """The rows of a directory, which the first row makes. Several commands may write there.

    Only the main process writes. The `latest` row of a measurement counts. A row that says that
    memory ran out does not count, whatever its date, so it is measured again.

    Raises CocaError if the directory cannot be made or a line is not a row.
    """

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        found: list[Any] = [None, None]
        if processes().is_main_process:
            try:
                found[0] = self._read()
            except CocaError as error:
                found[1] = error
        # all processes have to measure the same rows, and may see another file each
        self._rows, problem = broadcast_object_list(found)
        if problem:
            raise problem

    def _read(self) -> list[dict]:
        path = self.out_dir / ROWS
        try:
            return read_rows(path)
        except FileNotFoundError:
            self.check_writable()
            return []
        except OSError as error:
            problem = f"got {error.strerror}, expected the rows of coca-eval or nothing"
            raise CocaError(f"{path}: {problem}") from None

    def check_writable(self) -> None:
        """Raise CocaError if no row can be written."""
        nearest = next(p for p in (self.out_dir / ROWS).absolute().parents if p.exists())
        if not os.access(nearest, os.W_OK):
            problem = f"nothing can be written in {nearest}; choose another directory"
            raise CocaError(f"--out {self.out_dir}: {problem}")

    def find(self, row_type: Any, settings: dict, but: tuple[str, ...] = ()) -> list[dict]:
        """The rows that have these settings in all of their identity except the fields `but`."""
        names = [name for name in fields(row_type, IDENTITY) if name not in but]
        of_task = (row for row in self._rows if row["task"] == settings["task"] and counts(row))
        return [
            row
            for row in latest(of_task, partial(marked, row_type, IDENTITY)).values()
            if all(row.get(name) == settings.get(name) for name in names)
        ]

    def append(self, row_type: Any, row: dict, raw: Raw | None = None) -> dict:
        """`append_all` of one row."""
        return self.append_all(row_type, [(row, raw or {})])[0]

    def append_all(self, row_type: Any, measured: Sequence[tuple[dict, Raw]]) -> list[dict]:
        """Write rows that were measured together, after their raw tables. Returns the rows with their
        `row_id` and `raw`; if another command has written these measurements meanwhile, its rows.

        Raises CocaError if they cannot be written.
        """
        rows: list[dict] = []
        files: dict[str, list[dict]] = {}
        for row, raw in measured:
            row_id = hashlib.sha256(marked(row_type, IDENTITY, row).encode()).hexdigest()[:16]
            tables = {name: lines for name, lines in raw.items() if lines}
            paths = {name: f"{row['task']}-{name}/{row_id}.parquet" for name in tables}
            rows.append(row | {"row_id": row_id, "raw": paths})
            for name, lines in tables.items():
                files[paths[name]] = [{"row_id": row_id} | line for line in lines]
        if processes().is_main_process:
            try:
                self.out_dir.mkdir(parents=True, exist_ok=True)
                with FileLock(self.out_dir / ".rows.lock"):  # another command may write there
                    if theirs := self._written_meanwhile(row_type, rows):
                        rows = theirs
                    else:
                        self._write(rows, files)
            except OSError as error:
                raise CocaError(
                    f"{self.out_dir}: a row cannot be written ({one_line(error)}); make room and "
                    f"run the same command again: the rows before it are kept"
                ) from error
        self._rows += rows
        return rows

    def _written_meanwhile(self, row_type: Any, rows: list[dict]) -> list[dict]:
        """The rows of these measurements that another command has written since this one began, if
        it has written all of them.
        """
        try:
            there = self._read()
        except CocaError:  # the file was edited; what is measured must not be lost
            return []
        key = partial(marked, row_type, IDENTITY)
        theirs = latest((row for row in there if counts(row) and row not in self._rows), key)
        return [theirs[key(row)] for row in rows] if {*map(key, rows)} <= theirs.keys() else []

    def _write(self, rows: list[dict], files: dict[str, list[dict]]) -> None:
        for name, lines in files.items():
            path = self.out_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                pq.write_table(pa.Table.from_pylist(lines), unfinished)
        text = "\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        _end_last_line(self.out_dir / ROWS)
        append_line(self.out_dir / ROWS, text)


def counts(row: dict) -> bool:
    """Whether a row is a result: memory may not run out the next time."""
    return not str(row.get("error")).startswith("OOM")


def read_rows(path: Path) -> list[dict]:
    """The rows of a file, without a last line that a kill has cut short.

    Raises CocaError with the number of a line that is not a row.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    if _parsed(rest) is not None:
        lines.append(rest)
    rows = []
    for line_number, line in enumerate(lines, 1):
        row = _parsed(line)
        is_row = isinstance(row, dict) and row.keys() >= BASIC
        if not is_row or not isinstance(row["value"], int | float | None):
            where = f"{path}, line {line_number}"
            raise CocaError(f"{where}: got no row of coca-eval; delete the line")
        rows.append(row)
    return rows


def _parsed(line: bytes) -> Any:
    """The JSON of a line; None if it is not JSON, or has values that cannot be written again."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # NaN, half a surrogate
    except (ValueError, RecursionError):
        return None
    return row


def _end_last_line(path: Path) -> None:
    """Remove a last line that a kill cut short; end one whose line break an editor removed."""
    if not path.exists():
        return
    rest = path.read_bytes().rpartition(b"\n")[2]
    if _parsed(rest) is None:
        os.truncate(path, path.stat().st_size - len(rest))
    else:
        append_line(path, "")


@dataclass
class Run:
    """A model under RoPE settings, the lengths in tokens to measure it at, and where its rows go.

    batch_size: sequences at a time; None for `auto_batch_size`. progress: silent by default.
    """

    loaded: LoadedModel
    lengths: list[int]
    ropes: list[Rope]
    store: RowStore
    batch_size: int | None = None
    progress: Progress = field(default_factory=Progress)

    @cached_property
    def about(self) -> dict:
        """`about_model` of its model."""
        return about_model(self.loaded)

    def rows(
        self,
        row_type: Any,
        settings: dict,
        measure: Callable[[Rope, int, Batches], tuple[dict, Raw]],
    ) -> Iterator[dict]:
        """Yield a row for every RoPE setting and length; only missing ones are measured.

        settings: the fields of the rows besides `rope`, `length` and `about`. measure: returns the
        results of a row and its raw tables.
        """

        def make(rope: Rope, together: list[dict]) -> list[dict]:
            (row,) = together
            length, began = row["length"], time.perf_counter()
            watch = partial(self.progress, description=f"{row['task']}  {rope}  {length}")
            batches = Batches(self.batch_size, watch, length)
            try:
                results, raw = measure(rope, length, batches)
                results |= {"batch_size": batches.used} if batches.used else {}
            except NoValue as failure:
                results, raw = {"value": None, "error": str(failure)}, {}
            made = {"seconds": round(time.perf_counter() - began, 3), "date": now()}
            return [self.store.append(row_type, row | {"error": None} | results | made, raw)]

        asked = [
            (rope, [settings | self.about | {"rope": str(rope), "length": length}])
            for rope, length in itertools.product(self.ropes, self.lengths)
        ]
        return self.each(asked, partial(self.store.find, row_type), make)

    def each(
        self,
        asked: list[tuple[Rope, list[dict]]],
        find: Callable[[dict], list[dict]],
        make: Callable[[Rope, list[dict]], list[dict]],
        noun: str = "rows",
    ) -> Iterator[dict]:
        """Yield the rows of everything that is asked for; only missing ones are measured.

        asked: settings of rows that are measured together. find: the rows of some settings in the
        store; none if they are incomplete. make: measures, and appends the rows that it returns.
        noun: what is counted.
        """

        def found(together: list[dict]) -> list[dict]:
            rows = [find(settings) for settings in together]
            return list(itertools.chain(*rows)) if all(rows) else []

        missing = [together[-1] for _, together in asked if not found(together)]
        if missing:
            self.store.check_writable()
        self.progress.begin(missing, len(asked), noun)
        for rope, together in asked:
            rows = found(together)
            if not rows:
                rows = make(rope, together)
                self.progress.finish(together[-1])
            yield from rows


def about_model(loaded: LoadedModel) -> dict:
    """The fields of a row about its model, machine and versions."""
    config, device = loaded.model.config, loaded.model.device
    threads = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    method = getattr(getattr(config, "quantization_config", None), "quant_method", "")
    quantization = f", {getattr(method, 'value', method)}" if method else ""
    return {
        "model": loaded.name,
        "model_path": relative(loaded.path),
        "fingerprint": loaded.fingerprint,
        "model_type": config.model_type,
        **{name: getattr(config, name, None) for name in OF_COCA},
        "trained_length": trained_length(config),
        "model_commit": loaded.commit,
        "trained_seq_len": loaded.trained_seq_len,
        "tokens_seen": loaded.tokens_seen,
        "dtype": str(loaded.model.dtype).removeprefix("torch.") + quantization,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else threads,
        "processes": processes().num_processes,
        "versions": versions(*PACKAGES) | {"cuda": torch.version.cuda},
        "commit": commit(),
        "command": command_line(),
    }


def command_line() -> str:
    """The running command, with `relative` paths."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + relative(value))
    return shlex.join([Path(sys.argv[0]).name, *words])


def made_otherwise(rows: list[dict]) -> str | None:
    """One line about rows that other versions of `PACKAGES`, of lm-eval if they are of its tasks, or
    another commit made, or None.
    """
    here = versions(*PACKAGES, "lm-eval") | {"coca-hf commit": commit()}
    lm_eval = {"lm-eval": here.get("lm-eval")}  # of rows that do not name it
    del here["python"]
    others = []
    for row in rows:
        made = lm_eval | row.get("versions", {}) | {"coca-hf commit": row.get("commit")}
        differ = [name for name in here if made.get(name) != here[name]]
        others.append([f"{name} {made.get(name) or 'unknown'}" for name in differ])
    count = sum(map(bool, others))
    if not count:
        return None
    were, found = "row was" if count == 1 else "rows were", dict.fromkeys(itertools.chain(*others))
    remedy = f"delete such rows from {ROWS} to measure them again"
    return f"{count} {were} made before, with {', '.join(found)}; {remedy}"
