"""Documents from text, JSON lines, parquet and arrow files, and data sets on the hub."""

import functools
import glob
import gzip
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coca_hf.errors import CocaError, first_line

COMPRESSIONS = ("", ".gz", ".zst")
SUFFIXES = (
    *(f"{kind}{packed}" for kind in (".txt", ".jsonl") for packed in COMPRESSIONS),
    ".json",
    ".parquet",
    ".arrow",
)
AS_ROWS = 'write other files as rows of a .jsonl, {"text": …}'
ENCODING = "utf-8-sig"  # UTF-8, with or without a mark at the beginning


class Document(NamedTuple):
    """name: from `names_of`, for rows with ":row" from 0. where: the same with the given path."""

    name: str
    text: str
    where: str


class TextSource(NamedTuple):
    """The arguments of `read_documents`."""

    source: str
    column: str = "text"
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    skip_empty: bool = False


def read_documents(
    source: str,
    column: str = "text",
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    skip_empty: bool = False,
    keep_empty: bool = False,
) -> Iterator[Document]:
    """Yield the documents of `source` in order, one at a time.

    source: a file, a directory or a glob of .txt (a file is a document), .jsonl, .json, .parquet or
    .arrow (a row is a document, its text in `column`), .txt and .jsonl also as .gz and .zst;
    otherwise the id of a data set on the hub, whose `split` (and `subset`, `revision`) is streamed.
    With `skip_empty`, rows whose text is null or blank are left out; with `keep_empty`, they are
    documents with the text "".

    Raises CocaError, with the file's path and the row, if there is nothing to read, a file is
    binary or damaged, a column is missing, or a text is empty, of another type or not UTF-8.
    """
    files = local_files(source)
    if os.path.isdir(source):
        _warn_of_other_files(source)
    rows: Iterator[tuple[str, str, Any]]
    if files:
        named = zip(files, names_of(files), strict=True)
        rows = itertools.chain.from_iterable(_read_file(file, name, column) for file, name in named)
    elif is_on_hub(source):
        rows = _read_hub(source, column, split, subset, revision)
    else:
        raise CocaError(
            f"{source}: got no such file, expected a {', '.join(SUFFIXES)} file, a directory or a "
            "glob of them, or the id of a data set on the hub"
        )
    for name, where, text in rows:
        if text is None or (isinstance(text, str) and (not text or text.isspace())):
            if keep_empty:
                yield Document(name, "", where)
            elif not skip_empty:
                raise CocaError(
                    f"{where}: got an empty document, expected text; remove it from the source"
                )
            continue
        if not isinstance(text, str):
            kind = type(text).__name__
            remedy = ""
            if isinstance(text, list):
                remedy = (
                    "; render conversations first, with "
                    "tokenizer.apply_chat_template(…, tokenize=False)"
                )
            raise CocaError(f"{where}: got {kind} in column {column!r}, expected text{remedy}")
        zeros = text.count("\0")
        if zeros * 100 > len(text):  # source code often has a few
            raise CocaError(
                f"{where}: got {zeros:,} zero bytes, expected text, not binary data; remove it"
            )
        try:
            text.isascii() or text.encode("utf-8")
        except UnicodeEncodeError as error:  # valid JSON, but tokenizers refuse it
            raise CocaError(
                f"{where}: got half of a surrogate pair at character {error.start}, expected text "
                "that UTF-8 can write; mend or remove it"
            ) from None
        yield Document(name, text, where)


def is_on_hub(source: str) -> bool:
    """Whether `read_documents` reads `source` as the id of a data set on the hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if local_files(source):
        return False
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source.count("/") == 1 and not _suffix(Path(source))


def check_text_options(
    source: str, of_hub: Mapping[str, object], of_rows: Mapping[str, object]
) -> None:
    """Raise CocaError if local files are given options that mean nothing to them.

    of_hub: whether options for data sets on the hub were given, by name. of_rows: the same for
    options for files of rows, which .txt files are not.
    """
    files = local_files(source)
    meaningless = [(of_hub, "data sets on the hub")]
    if all(_suffix(file).startswith(".txt") for file in files):
        meaningless.append((of_rows, "files of rows"))
    for given, owners in meaningless if files else ():
        if names := [name for name, is_given in given.items() if is_given]:
            problem = f"got {', '.join(names)}, which only {owners} have; leave it out"
            raise CocaError(f"{source}: {problem}")


def commit_of(source: str, revision: str | None = None) -> str | None:
    """The current commit of a data set on the hub, or `revision` offline; None for local files.

    Raises CocaError if the hub does not answer.
    """
    if not is_on_hub(source):
        return None
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(source, revision=revision).sha
    except Exception as error:
        raise _unread(source, error) from error


def local_files(source: str) -> list[Path]:
    """The files of `source` in reading order; none if it may be a data set on the hub.

    Raises CocaError for a directory without a file to read, a file of another kind, and "".
    """
    if not source.strip():
        expected = "a file, a directory, a glob of them or a hub id"
        raise CocaError(f"got an empty name of a source, expected {expected}")
    path = Path(source)
    if path.is_dir():
        shown = (file for file in path.iterdir() if not file.name.startswith("."))
        files = _each_once(file for file in shown if _suffix(file))
        if not files:
            found = f"got a directory without {', '.join(SUFFIXES)} files"
            raise CocaError(f"{source}: {found}, expected at least one; {AS_ROWS}")
        deeper = glob.iglob(f"{glob.escape(source)}/*/**/*", recursive=True)  # no hidden ones
        if first := next((name for name in deeper if _suffix(Path(name))), None):
            raise CocaError(
                f"{source}: got text in subdirectories too, such as {first}, and a directory stands "
                f"for its own files; name them by globs, such as {path}/*{_suffix(files[0])} or "
                f"{path}/**/*{_suffix(Path(first))}, in a source for each kind of file"
            )
    else:
        names = [source] if path.is_file() else glob.iglob(source, recursive=True)
        files = _each_once(map(Path, names))
    for file in files:
        if not _suffix(file):
            kind = file.suffix or "nameless"
            raise CocaError(
                f"{file}: got a {kind} file, expected one of {', '.join(SUFFIXES)}; {AS_ROWS}"
            )
        if file.exists() and not file.is_file():  # it is read more than once
            raise CocaError(
                f"{file}: is not an ordinary file, expected one; copy its text into a file"
            )
    return files


def _each_once(files: Iterable[Path]) -> list[Path]:
    """`files`, sorted. Raises CocaError for one that is there again by a symbolic link."""
    names: dict[str, Path] = {}
    for file in files:
        if (other := names.setdefault(os.path.realpath(file), file)) != file:
            first, second = sorted((other, file))
            raise CocaError(
                f"{second}: is {first} itself, by a symbolic link, expected each file once; remove "
                "the link, or name the files without it"
            )
    return sorted(names.values())


@functools.cache  # once a process: calibration and training read a source several times
def _warn_of_other_files(directory: str) -> None:
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    others = [name for name in names if not _suffix(Path(name)) and not name.startswith(".")]
    if others:
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        logging.getLogger(__name__).warning(
            f"{directory}: does not read {', '.join(others[:3])}{more}, only "
            f"{', '.join(SUFFIXES)} files; {AS_ROWS}"
        )


def names_of(files: list[Path]) -> list[str]:
    """The files' names, or their paths from their common directory if two names are equal."""
    if len({file.name for file in files}) == len(files):
        return [file.name for file in files]
    common = os.path.commonpath([file.parent for file in files])
    return [file.relative_to(common).as_posix() for file in files]


def _suffix(file: Path) -> str:
    """The file's suffix among SUFFIXES, in lower case, or ""."""
    name = file.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def _read_file(file: Path, name: str, column: str) -> Iterator[tuple[str, str, Any]]:
    """Name, place and content of every row; errors name the row after the last good one."""
    readers: dict[str, Callable[[Path, str], Iterable[Any]]]
    readers = {"txt": _whole_text, "jsonl": _json_lines, "parquet": _parquet_rows}
    readers |= {"json": _json_rows, "arrow": _arrow_rows}
    kind, number = _suffix(file).split(".")[1], 0
    try:
        for row in readers[kind](file, column):
            place = "" if kind == "txt" else f":{number}"
            yield f"{name}{place}", f"{file}{place}", _text_of(row, column, str(file), number)
            number += 1
    except (CocaError, ModuleNotFoundError):
        raise
    except Exception as error:  # pyarrow, datasets and the decompressors raise anything
        place = "" if kind == "txt" else f"row {number}: "
        raise CocaError(
            f"{file}: {place}cannot be read as {_suffix(file)} ({first_line(error)}); is the file "
            "whole, and in UTF-8?"
        ) from error


def _whole_text(file: Path, column: str) -> Iterator[dict[str, str]]:
    with _open(file) as stream:
        yield {column: stream.read().decode(ENCODING)}


def _open(file: Path) -> io.BufferedIOBase:
    """The file's bytes, decompressed by suffix. One that was cut off is an error while it is read."""
    is_compressed = _suffix(file).endswith((".gz", ".zst"))
    if is_compressed and not file.stat().st_size:
        raise EOFError("it is empty")
    if _suffix(file).endswith(".gz"):
        return gzip.open(file)
    if _suffix(file).endswith(".zst"):
        from pyarrow import input_stream

        return io.BufferedReader(input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _json_lines(file: Path, column: str) -> Iterator[Any]:
    with _open(file) as stream:
        for line in stream:
            if line.strip():
                yield json.loads(line.decode(ENCODING))


def _json_rows(file: Path, column: str) -> Iterator[Any]:
    """The rows of one array, or a row a line. `datasets` makes JSON of all texts if one is no text."""
    with file.open(encoding=ENCODING) as stream:
        is_array = next(filter(None, map(str.strip, stream)), "").startswith("[")
        stream.seek(0)
        if is_array:
            yield from json.load(stream)
            return
    yield from _json_lines(file, column)


def _arrow_rows(file: Path, column: str) -> Iterator[Any]:
    from datasets import load_dataset

    files = glob.escape(str(file))
    yield from load_dataset("arrow", data_files=files, split="train", streaming=True)


def _parquet_rows(file: Path, column: str) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        _check_columns(table.schema_arrow.names, column, str(file))
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            # One by one, so that an error names its row
            yield from ({column: value.as_py()} for value in batch.column(0))


def _read_hub(
    dataset_id: str, column: str, split: str, subset: str | None, revision: str | None
) -> Iterator[tuple[str, str, Any]]:
    from datasets import load_dataset

    row_number = -1
    try:
        rows = load_dataset(dataset_id, subset, split=split, revision=revision, streaming=True)
        for row_number, row in enumerate(rows):
            where = f"{dataset_id}:{row_number}"
            yield where, where, _text_of(row, column, dataset_id, row_number)
    except CocaError:
        raise
    except Exception as error:
        if row_number < 0:
            raise _unread(dataset_id, error) from error
        raise CocaError(
            f"{dataset_id}: the hub gave nothing after row {row_number} ({first_line(error)}); "
            "when it answers again, the same command continues, a training with --resume"
        ) from error


def _unread(dataset_id: str, error: Exception) -> CocaError:
    return CocaError(
        f"{dataset_id}: no such file here, and not readable as a data set on the hub "
        f"({first_line(error)})"
    )


def _text_of(row: Any, column: str, where: str, row_number: int) -> Any:
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise CocaError(f"{where}: row {row_number}: got a JSON {kind}, expected an object")
    _check_columns(row, column, where, row_number)
    return row[column]


def _check_columns(
    names: Iterable[str], column: str, where: str, row_number: int | None = None
) -> None:
    if column not in names:
        row = "" if row_number is None else f" in row {row_number}"
        raise CocaError(
            f"{where}: got columns {', '.join(names)}, expected a column {column!r} with the "
            f"text{row}"
        )
