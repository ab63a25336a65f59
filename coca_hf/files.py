"""Writing files atomically and durably, and by one process at a time; hashing them."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from coca_hf.errors import CocaError

WAIT_SECONDS = 0.5  # between two tries to get a lock


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which then replaces `path`.

    Readers see the complete old file or the complete new one, even after a kill. After an error the
    old file stays. The temporary name is hidden and differs between processes.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        sync(unfinished)
        os.replace(unfinished, path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Whether a file has a temporary name of `replacing`."""
    return re.fullmatch(r"\..+\.\d+\.partial", path.name) is not None


def remove_unfinished(directory: Path) -> None:
    """Remove what `replacing` left in a directory when its process was killed."""
    for path in filter(is_unfinished, directory.iterdir()):
        path.unlink()


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file by `text`, in UTF-8; see `replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Append a line, in UTF-8, and wait until it is on the disk."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def locked(file: Path, message: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `file`; the system frees it when the process dies.

    If another process holds it, raises CocaError with `message`; with `wait`, prints it and calls
    `wait`, which may raise to give up, until the lock is free. The file is gone afterwards, unless
    others may be waiting for it.

    Raises OSError if `file` cannot be made.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait is None:
            raise CocaError(message) from None
        print(message, flush=True)
        while not lock.is_locked:
            wait()
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=WAIT_SECONDS)
    try:
        yield
    finally:
        if wait is None:
            with contextlib.suppress(OSError):  # Windows does not delete an open file
                file.unlink()
        lock.release()


def file_hash(file: Path, check_stop: Callable[[], None] = lambda: None) -> str | None:
    """The xxh3_128 of a file, or None if it does not exist. check_stop: called every 16 MiB."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(1 << 24):
                check_stop()
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def size_in_words(num_bytes: int) -> str:
    """A size in GB, or in MB below 1 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
