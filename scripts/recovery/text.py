"""Write text to calibrate on, three quarters books and one quarter Python.

It takes a passage from the middle of every book, and after every third book one from a source file,
so the first few documents contain both.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from coca_hf.documents import read_documents
from coca_hf.files import replace_text

PASSAGE = 16_000  # characters, about 4,000 tokens
BOOKS = 150

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("books", metavar="BOOKS.parquet")
parser.add_argument("code", metavar="CODE.jsonl")
parser.add_argument("out", metavar="OUT.jsonl", type=Path)
args = parser.parse_args()
books, code, out = args.books, args.code, args.out


def middle(text: str) -> str:
    start = max(0, (len(text) - PASSAGE) // 2)
    return text[start : start + PASSAGE]


if not out.exists():
    sources = [document.text for document in read_documents(code) if len(document.text) >= PASSAGE]
    if len(sources) < BOOKS // 3:
        sys.exit(
            f"{code}: got {len(sources)} files of {PASSAGE:,} characters or more, expected {BOOKS // 3}"
        )
    step = len(sources) // (BOOKS // 3)
    python = (middle(text) for text in sources[::step])
    passages = []
    for number, document in enumerate(itertools.islice(read_documents(books), BOOKS), 1):
        passages.append(middle(document.text))
        if number % 3 == 0:
            passages.append(next(python))
    replace_text(out, "".join(json.dumps({"text": text}) + "\n" for text in passages))
