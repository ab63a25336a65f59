"""The documents of a measurement: a seeded sample, tokenized and cut, the same for every length and RoPE setting."""

import bisect
import hashlib
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coca_hf.documents import read_all_documents
from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject, check_vocabulary


@dataclass
class Sample:
    """Tokenized documents, each (tokens,), with what is needed to draw them again."""

    settings: dict  # the arguments that drew it: data, column, split, seed, max_tokens, ...
    names: list[str] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # names of the documents that were drawn and empty or too short
    left_out: int = 0  # documents of fewer than `min_bytes` bytes, of which none was drawn

    def describe(self) -> dict:
        """What a row says about its documents; `data_hash` is of the very tokens."""
        digest = hashlib.sha256()
        for ids in self.token_ids:
            digest.update(ids.numpy().tobytes())
            digest.update(b"|")
        return {
            **self.settings,
            "documents": len(self.names),
            "document_names": self.names,
            "skipped_documents": self.skipped,
            "left_out_documents": self.left_out,
            "data_hash": digest.hexdigest()[:16],
        }


PRESETS: dict[str, dict] = {
    # The paper: 100 of PG-19's documents of at least 32768 tokens, cut to them. Its test split has no more than 100.
    "pg19": {
        "data": "emozilla/pg19-test",
        "split": "test",
        "column": "text",
        "documents": 100,
        "min_tokens": 32768,
        "max_tokens": 32768,
    },
    # YaRN's eval.sh: 50 of Proof-pile's test documents of at least 32768 tokens; it takes the first, this draws them.
    "proof-pile": {
        "data": "emozilla/proofpile-test-tokenized",
        "split": "test",
        "column": "text",
        "documents": 50,
        "min_bytes": 32_000,  # a token is a byte or more, but for a few that the tokenizer adds
        "min_tokens": 32768,
        "max_tokens": 32768,
    },
}


def check_preset(name: str) -> dict:
    """The arguments of `draw_sample` that a preset stands for. Raises CocaError for a name that is none."""
    if name not in PRESETS:
        raise CocaError(f"--preset: got {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name] | {"skip_short": True}


def draw_sample(
    subject: Subject,
    data: str,
    min_tokens: int,
    *,
    column: str = "text",
    split: str = "test",
    documents: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    skip_short: bool = False,
    special_tokens: bool = True,
    min_bytes: int = 0,
) -> Sample:
    """Read `data` (see `read_documents`), draw `documents` of them and tokenize each, cut to its first `max_tokens`.

    The seed alone puts the documents in an order, in which they are drawn; all of them without `documents`. Of those
    drawn, empty ones and those of fewer than `min_tokens` tokens are refused, or with `skip_short` left out, and the
    next in the order take their places until `documents` are found or the source ends. So models of different
    tokenizers are measured on the same documents, but for those that are long enough for one tokenizer only, and what
    stands in for them. Only documents of at least `min_bytes` bytes in UTF-8 are in the order.

    A text is tokenized as the tokenizer does by default: with its token for the beginning, if it sets one; or without
    `special_tokens`. The source is read once, the tokens of `documents` are held.

    Raises CocaError where a drawn document is empty or too short (unless `skip_short`), there are fewer documents than
    asked for, none is left, or the tokenizer does not fit the model.
    """
    if max_tokens is not None and max_tokens < min_tokens:
        raise CocaError(f"--max-tokens: got {max_tokens}, expected at least {min_tokens}, the longest of --lengths")
    sample = Sample({"data": data, "column": column, "split": split, "seed": seed, "max_tokens": max_tokens})
    if min_bytes:
        sample.settings["min_bytes"] = min_bytes
    rng, total = random.Random(f"documents {seed}"), 0
    drawn: list[_Drawn] = []
    short: list[_Drawn] = []
    for document in read_all_documents(data, column, split):
        if len(document.text.encode()) < min_bytes:
            sample.left_out += 1
            continue
        total += 1
        place = rng.random()
        if len(drawn) == documents and place > drawn[-1].place:
            continue
        ids = subject.tokenizer(document.text, add_special_tokens=special_tokens)["input_ids"] if document.text else []
        one = _Drawn(place, total, document.name, document.where, torch.tensor(ids[:max_tokens], dtype=torch.long))
        if skip_short and len(one.token_ids) < min_tokens:
            short.append(one)
            continue
        bisect.insort(drawn, one)
        if documents is not None:
            del drawn[documents:]
    if documents is not None and total < documents:
        raise CocaError(f"{data}: got {total} documents, expected --documents {documents}; ask for fewer")
    if len(drawn) == documents:
        short = [one for one in short if one.place < drawn[-1].place]
    drawn.sort(key=lambda one: one.row_number)
    _refuse_short(drawn, data, min_tokens)
    for one in drawn:
        check_vocabulary(subject, one.token_ids, one.where)
        sample.names.append(one.name)
        sample.token_ids.append(one.token_ids)
    sample.skipped = [one.name for one in sorted(short, key=lambda one: one.row_number)]
    if not drawn:
        raise CocaError(f"{data}: got no document of at least {min_tokens} tokens; ask for shorter --lengths")
    return sample


class _Drawn(NamedTuple):
    place: float  # in the seeded order
    row_number: int
    name: str
    where: str
    token_ids: Tensor  # none of an empty document


def _refuse_short(drawn: list[_Drawn], data: str, min_tokens: int) -> None:
    empty = [one.where for one in drawn if not len(one.token_ids)]
    if empty:
        raise CocaError(
            f"{data}: {len(empty)} of {len(drawn)} documents are empty, first: {first_of(empty, 3)}; remove them or "
            f"add --skip-short"
        )
    short = [f"{one.where} ({len(one.token_ids)})" for one in drawn if len(one.token_ids) < min_tokens]
    if short:
        raise CocaError(
            f"{data}: {len(short)} of {len(drawn)} documents have fewer than {min_tokens} tokens, the longest of "
            f"--lengths, first: {first_of(short, 3)}; ask for shorter --lengths or add --skip-short"
        )


def first_of(names: list[str], most: int) -> str:
    """Of many names the first, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
