"""The one exception for bad input: what was wrong, and what to do."""

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 1000


class CocaError(ValueError):
    """Bad input, or a machine that cannot run it. The message is one line: where, got, expected,
    remedy. The commands exit with 2.

    Messages quote names and values from other people's files. Line breaks and other unprintable
    characters therefore become escapes, and a very long message loses its middle.
    """

    def __init__(self, message: str):
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__(printable(message))


def printable(text: str) -> str:
    """`text` with escapes for line breaks, other unprintable characters, and what is not UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """An exception's message as one line, without its middle if it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:250]} ... {text[-240:]}"


def first_line(error: BaseException) -> str:
    """An exception's class, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def short(value: Any) -> str:
    """A value in a message: its `repr`, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return f"a very large {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known` that is spelt most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn whatever a library raises into a CocaError that begins with `problem`; a CocaError
    passes unchanged.
    """
    try:
        yield
    except CocaError:
        raise
    except Exception as error:  # libraries raise anything for files that nobody vouches for
        raise CocaError(f"{problem}: {one_line(error)}") from error
