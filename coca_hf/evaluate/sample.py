"""The documents of a measurement: one seeded sample for all lengths and RoPE settings."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from coca_hf.documents import Document, check_text_options, commit_of, read_documents
from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import LoadedModel, check_vocabulary
from coca_hf.evaluate.rows import relative
from coca_hf.tokens import around_text, begun

T = TypeVar("T")


@dataclass
class Sample:
    """Tokenized documents, each (tokens,), with what is needed to draw them again.

    settings: the arguments that drew it: data, column, split, seed, max_tokens, ... skipped: names
    of empty and of too short documents. left_out: how many documents have fewer than `min_bytes`
    bytes. text_hash: of the documents' text, whatever the tokenizer.
    """

    settings: dict
    names: list[str] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0
    text_hash: str | None = None

    def describe(self) -> dict:
        """The fields of a row about its documents; `data_hash` is of the very tokens."""
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
            "text_hash": self.text_hash,
        }


OF_ALL = {"min_tokens": 32768, "max_tokens": 32768, "skip_short": True}
PRESETS: dict[str, dict] = {  # arguments of `draw_sample`
    # The paper: 100 documents of PG-19 with at least 32768 tokens, cut to that length. The test
    # split has exactly 100 documents, so shorter ones are left out and not replaced.
    "pg19": {"data": "emozilla/pg19-test", "documents": 100, **OF_ALL},
    # YaRN's eval.sh: 50 of Proof-pile's test documents with at least 32768 tokens. It takes the
    # first ones; here they are drawn. Nearly all tokens are a byte or more, hence `min_bytes`.
    "proof-pile": {
        "data": "emozilla/proofpile-test-tokenized",
        "documents": 50,
        "min_bytes": 32_000,
        **OF_ALL,
    },
}


def draw_sample(
    loaded: LoadedModel,
    data: str,
    min_tokens: int,
    *,
    column: str = "text",
    split: str = "test",
    subset: str | None = None,
    data_revision: str | None = None,
    documents: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    skip_short: bool = False,
    special_tokens: bool = True,
    min_bytes: int = 0,
) -> Sample:
    """Draw `documents` from `data` (see `read_documents`) and tokenize each up to `max_tokens`.

    Only documents of at least `min_bytes` bytes in UTF-8 are drawn from. The draw depends on the
    seed and not on the tokenizer, so models with different ones read the same documents. With
    `skip_short`, all of `data` is tokenized, and only documents of at least `min_tokens` tokens are
    drawn from. special_tokens: whether texts begin with the tokenizer's own, once, if it sets any;
    those that it sets after a text are never read.
    data_revision: of a data set on the hub, which is read at one commit throughout.

    Raises CocaError if a drawn document is empty or too short (unless `skip_short`), there are
    fewer documents than asked for, none is left, the name of one is not UTF-8, local files are given
    a `split`, `subset` or `data_revision`, .txt files a `column`, or the tokenizer does not fit the
    model.
    """
    if max_tokens is not None and max_tokens < min_tokens:
        least = f"at least {min_tokens}, what --lengths or --preset needs of a document"
        raise CocaError(f"--max-tokens: got {max_tokens}, expected {least}")
    of_hub = {"--split": split != "test", "--subset": subset, "--data-revision": data_revision}
    check_text_options(data, of_hub, {"--column": column != "text"})
    commit = commit_of(data, data_revision)
    settings: dict = {"data": relative(data), "column": column, "split": split, "subset": subset}
    settings |= {"data_revision": data_revision, "data_commit": commit}
    settings |= {"seed": seed, "max_tokens": max_tokens}
    sample = Sample(settings | ({"min_bytes": min_bytes} if min_bytes else {}))

    before = around_text(loaded.tokenizer)[0] if special_tokens else []

    def tokenize(document: Document) -> Tensor:
        ids = loaded.tokenizer(document.text, add_special_tokens=False)["input_ids"]
        ids = begun(ids, before) if document.text else []
        return torch.tensor(ids[:max_tokens], dtype=torch.long)

    def candidates() -> Iterator[tuple[Document, Tensor | None]]:
        for document in read_documents(data, column, split, subset, commit, keep_empty=True):
            if len(document.text.encode()) < min_bytes:
                sample.left_out += 1
                continue
            ids = tokenize(document) if skip_short else None
            if ids is not None and len(ids) < min_tokens:
                sample.skipped.append(document.name)
            else:
                yield document, ids

    drawn = _draw(candidates(), documents, seed)
    total = len(drawn) + len(sample.skipped)
    if documents is not None and total < documents:
        expected = f"expected --documents {documents}; ask for fewer"
        raise CocaError(f"{data}: got {total} documents, {expected}")
    _refuse_other_encodings([*sample.skipped, *(document.name for document, _ in drawn)], data)
    found = [(document, tokenize(document) if ids is None else ids) for document, ids in drawn]
    _refuse_short(found, data, min_tokens)
    digest = hashlib.sha256()
    for document, ids in found:
        check_vocabulary(loaded, ids, document.where)
        sample.names.append(document.name)
        sample.token_ids.append(ids)
        digest.update(f"{len(document.text)} {document.text}".encode())
    sample.text_hash = digest.hexdigest()[:16]
    if not found:
        found_none = f"got no document of at least {min_tokens} tokens"
        raise CocaError(f"{data}: {found_none}; ask for shorter --lengths")
    return sample


def _draw(candidates: Iterable[T], number: int | None, seed: int) -> list[T]:
    """All, or a uniform sample of `number` in their own order, in one pass."""
    if number is None:
        return list(candidates)
    rng, drawn = random.Random(f"documents {seed}"), {}
    for row_number, candidate in enumerate(candidates):
        place = row_number if row_number < number else rng.randint(0, row_number)
        if place < number:
            drawn[place] = row_number, candidate
    return [candidate for _, candidate in sorted(drawn.values(), key=lambda one: one[0])]


def _refuse_other_encodings(names: list[str], data: str) -> None:
    """Raise CocaError for a document that no row could name."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            problem = f"got the name {name}, which is not UTF-8 and which no row can hold"
            raise CocaError(f"{data}: {problem}; rename the file") from None


def _refuse_short(found: list[tuple[Document, Tensor]], data: str, min_tokens: int) -> None:
    short = [f"{document.where} ({len(ids)})" for document, ids in found if len(ids) < min_tokens]
    if short:
        count = f"{len(short)} of {len(found)} documents"
        few = f"have fewer than {min_tokens} tokens, the longest of --lengths"
        remedy = "ask for shorter --lengths or add --skip-short"
        raise CocaError(f"{data}: {count} {few}, first: {first_of(short, 3)}; {remedy}")


def first_of(names: list[str], most: int) -> str:
    """The first of many names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
