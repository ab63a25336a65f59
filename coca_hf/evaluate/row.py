"""Rows: one measured value each, as a line of rows.jsonl with all that is needed to repeat it.

Every measurement extends `Row` beside the function that yields its rows; a row itself is a dict.
Fields are declared as

    Identity[T]   part of what is measured: a row that agrees in all of these is not measured again
    Shared[T]     the same in all rows of one table, whose values are comparable only then
    Setting[T]    both
    Beside[T]     shown beside the value, so not null where there is a value
"""

import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict, get_type_hints  # pydantic needs these

from coca_hf.errors import CocaError

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


def check_row(row: dict, row_type: Any, where: str) -> None:
    """Raise CocaError where a field of `row_type` is missing or has a value of another type."""
    if missing := row_type.__required_keys__ - row.keys():
        raise CocaError(f"{where}: got a row without {', '.join(sorted(missing))}; delete it")
    absent = [name for name in fields(row_type, BESIDE) if row.get(name) is None]
    wrong = absent[:1] if row["value"] is not None else []
    try:
        _checker(row_type).validate_python(row, strict=True)
    except ValidationError as error:
        wrong = [str(error.errors()[0]["loc"][0])]
    for name in wrong:
        problem = f"got a row with {name} {row[name]!r}, no value of coca-eval's; delete it"
        raise CocaError(f"{where}: {problem}")


@cache
def _checker(row_type: Any) -> TypeAdapter:
    return TypeAdapter(row_type)


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
