"""Text of other kinds than novels, from what is installed on this machine, to calibrate and train on,
and to measure with.

    python scripts/recovery/other_text.py ../shared/data/books-train-0.parquet runs/other-text

Makes the second directory, unless it exists, with

train.parquet         24M characters: Python of installed packages, C and C++ headers, JavaScript, documentation in
                      Markdown, reStructuredText and plain text, plays
calibrate.jsonl       9M of these and 9M of the books, mixed
python.jsonl, documentation.jsonl, perl.jsonl
                      to measure with: the standard library's files of more than 20,000 characters, `pydoc_data.topics`
                      joined to texts of 60,000 characters, and Perl's modules, a kind that is not in train.parquet

What it finds depends on what is installed: here Debian's development packages, Perl and vim, and the environment of
`scripts/setup.sh all,dev,gguf`. The plays are the quickstart's text.
"""

import argparse
import gzip
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pyarrow.parquet

PACKAGES = Path(sysconfig.get_paths()["purelib"])
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
KINDS = {  # places and patterns; characters to take
    "Python": ([(PACKAGES, "*.py")], 9_000_000),
    "C": ([(Path("/usr/include"), "*.h"), (PACKAGES, "*.h")], 4_000_000),
    "JavaScript": (
        [(PACKAGES, "*.js"), (Path("/usr/share"), "*.js"), (Path("/usr/lib/node_modules"), "*.js")],
        2_000_000,
    ),
    "documentation": (
        [
            *((PACKAGES, pattern) for pattern in ("*.md", "*.rst", "METADATA")),
            *((Path("/usr/share/doc"), pattern) for pattern in ("*.md", "*.txt", "*.gz")),
            (Path("/usr/share/vim"), "*.txt"),
        ],
        7_000_000,
    ),
    "plays": ([(Path("quickstart/text/train"), "*.txt")], 2_000_000),
}
HELD_OUT = {  # what KINDS does not read
    "python": ([(LIBRARY, "*.py")], 10_000_000),
    "perl": ([(Path("/usr/share/perl"), "*.pm")], 2_000_000),
}
LONGEST = 40_000  # characters of a text to train on
SHORTEST = 20_000  # characters of a text to measure with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("books", metavar="BOOKS.parquet", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    args = parser.parse_args()
    books, finished = args.books, args.out
    if finished.exists():
        return
    out = finished.with_name(f"{finished.name}.incomplete")
    out.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    for name, kind in HELD_OUT.items():
        write_lines(out / f"{name}.jsonl", files(*kind, shortest=SHORTEST))
    help_texts = "\n\n".join(topics.values())
    write_lines(out / "documentation.jsonl", pieces(help_texts, 60_000))

    mixed = [text[:LONGEST] for kind in KINDS.values() for text in files(*kind, shortest=1500)]
    random.shuffle(mixed)
    table = pyarrow.table({"text": mixed})
    pyarrow.parquet.write_table(table, out / "train.parquet", compression="zstd")

    novels = pyarrow.parquet.read_table(books).column("text").to_pylist()[:70]
    passages = [piece for novel in novels for piece in pieces(novel[60_000:260_000], LONGEST)]
    random.shuffle(passages)
    calibration = [*up_to(passages, 9_000_000), *up_to(mixed, 9_000_000)]
    random.shuffle(calibration)
    write_lines(out / "calibrate.jsonl", calibration)
    out.rename(finished)


def files(places: list[tuple[Path, str]], characters: int, shortest: int) -> Iterator[str]:
    """Texts in English letters, in random order, `characters` in all: no tests, nothing minified."""
    place_of = {path: place for place, pattern in places for path in place.rglob(pattern)}
    found = sorted(place_of)
    random.shuffle(found)
    texts = (read(path, place_of[path], shortest) for path in found)
    return up_to(filter(None, texts), characters)


def read(path: Path, place: Path, shortest: int) -> str | None:
    """The text of a file below `place`; None if it is shorter, of a kind that nobody reads, or one
    of the packages and `place` is not: they may be in the directory of the library.
    """
    is_package = PACKAGES in path.parents
    is_elsewhere = place != PACKAGES if is_package else "site-packages" in path.parts
    if "test" in str(path.relative_to(place)) or ".min." in path.name or is_elsewhere:
        return None
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError):
        return None
    foreign = sum(character > "~" for character in text)
    is_prose_or_code = (
        foreign < 0.02 * len(text) and max(map(len, text.splitlines() or [""])) <= 600
    )
    return text if len(text) >= shortest and is_prose_or_code else None


def up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= min(len(text), LONGEST)
        yield text


def pieces(text: str, characters: int) -> list[str]:
    return [text[start : start + characters] for start in range(0, len(text), characters)]


def write_lines(file: Path, texts: Iterable[str]) -> None:
    with file.open("w") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    main()
