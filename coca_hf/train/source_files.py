"""What the files of sources contain, as hashes that are kept beside the prepared blocks.

PREPARED/files.json   by path: size and times of change, xxh3_128

A file is read for its hash once, and again where its size or a time has changed. A copy of it has
the same hash.
"""

import functools
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from coca_hf.documents import names_of
from coca_hf.errors import CocaError
from coca_hf.files import replace_text
from coca_hf.train.run_directory import file_hash
from coca_hf.weights import size_in_words

KEPT = "files.json"
FRESH_SECONDS = 2.0  # within which a file may change again and have the same times
LARGE = 2**30  # bytes: reading them takes long enough to say so


def contents(files: list[Path], prepared: Path) -> dict[str, str]:
    """Size and hash of each of `files`, by the name that its documents have."""
    kept = _kept(prepared)
    return {
        name: f"{file.stat().st_size:,} bytes, xxh3_128 {_hash(file, kept)}"
        for name, file in zip(names_of(files), files, strict=True)
    }


def keep_hashes(files: Iterable[Path], prepared: Path) -> None:
    """Keep the hashes of `files` in the directory `prepared` for the runs that follow."""
    kept = _kept(prepared)
    known = {
        str(file.absolute()): [_state(file), _hash(file, kept)]
        for file in files
        if not _is_fresh(_state(file))
    }
    if kept != kept | known:
        replace_text(prepared / KEPT, json.dumps(kept | known))


def _kept(prepared: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        kept = json.loads((prepared / KEPT).read_text(encoding="utf-8"))
        return kept if isinstance(kept, dict) else {}
    return {}


def _hash(file: Path, kept: dict[str, Any]) -> str:
    state = _state(file)
    match kept.get(str(file.absolute())):
        case [before, str(digest)] if before == state:
            return digest
    if _is_fresh(state):
        return _read(file)
    return _read_once(file.absolute(), *state)


def _state(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _is_fresh(state: list[int]) -> bool:
    return time.time() - max(state[1:]) / 1e9 < FRESH_SECONDS


@functools.cache
def _read_once(file: Path, size: int, changed: int, changed_inode: int) -> str:
    return _read(file)


def _read(file: Path) -> str:
    size = file.stat().st_size
    if size >= LARGE:
        print(f"{file}: reading {size_in_words(size)} for their hash, once", flush=True)
    try:
        return file_hash(file) or "of no file"
    except OSError as error:
        raise CocaError(f"{file}: cannot be read: {error.strerror}; mend or remove it") from None
