"""Documents from where people keep them: text, jsonl and parquet files, and data sets on the hub."""

import glob
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coca_hf.errors import CocaError

FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class Document(NamedTuple):
    name: str  # the file's name, or file name and row
    text: str


def read_documents(source: str, column: str = "text", split: str = "train") -> Iterator[Document]:
    """Yield the documents of `source` in order, one at a time.

    source: a file, a directory or a glob of .txt (a file is a document), .jsonl or .parquet (a row is a document, its
    text in `column`), or else the id of a data set on the hub, of which `split` is streamed.

    Raises CocaError where there is nothing to read, a column is missing, or a text is empty or not UTF-8.
    """
    files = _local_files(source)
    rows: Iterator[Document]
    if files:
        rows = itertools.chain.from_iterable(_read_file(file, column) for file in files)
    elif is_on_hub(source):
        rows = _read_hub(source, column, split)
    else:
        raise CocaError(
            f"{source}: got no such file, expected a .txt, .jsonl or .parquet file, a directory or a glob of them, "
            f"or the id of a data set on the hub"
        )
    for document in rows:
        if not isinstance(document.text, str) or not document.text.strip():
            raise CocaError(f"{document.name}: got an empty document, expected text; remove it from the source")
        yield document


def is_on_hub(source: str) -> bool:
    """Whether `read_documents` takes `source` for the id of a data set on the hub."""
    return not _local_files(source) and _is_hub_id(source)


def _local_files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in FORMATS)
        if not files:
            raise CocaError(f"{source}: got a directory without {', '.join(FORMATS)} files, expected at least one")
        return files
    files = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(source, recursive=True))
    for file in files:
        if file.suffix not in FORMATS:
            raise CocaError(f"{file}: got a {file.suffix or 'nameless'} file, expected one of {', '.join(FORMATS)}")
    return files


def _is_hub_id(source: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source.count("/") == 1 and Path(source).suffix not in FORMATS


def _read_file(file: Path, column: str) -> Iterator[Document]:
    if FORMATS[file.suffix] == "text":
        try:
            yield Document(file.name, file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise CocaError(f"{file}: got bytes that are not UTF-8 at offset {error.start}; convert the file") from None
        return
    from datasets import load_dataset

    try:
        rows = load_dataset(FORMATS[file.suffix], data_files=str(file), split="train", streaming=True)
        for row_number, row in enumerate(rows):
            yield Document(f"{file.name}:{row_number}", _text_of(row, column, str(file)))
    except CocaError:
        raise
    except Exception as error:  # datasets raises what its readers raise
        raise CocaError(f"{file}: cannot be read as {file.suffix}: {_one_line(error)}") from error


def _read_hub(dataset_id: str, column: str, split: str) -> Iterator[Document]:
    from datasets import load_dataset

    try:
        rows = load_dataset(dataset_id, split=split, streaming=True)
        for row_number, row in enumerate(rows):
            yield Document(f"{dataset_id}:{row_number}", _text_of(row, column, dataset_id))
    except CocaError:
        raise
    except Exception as error:
        raise CocaError(
            f"{dataset_id}: no such file here, and not readable as a data set on the hub ({_one_line(error)})"
        ) from error


def _text_of(row: dict, column: str, where: str) -> str:
    if column not in row:
        raise CocaError(f"{where}: got columns {', '.join(row)}, expected a column {column!r} with the text")
    return row[column]


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
