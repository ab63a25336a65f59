"""The documents of a measurement: one seeded sample for all lengths and RoPE settings."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from coca_hf.documents import Document, check_text_options, commit_of, read_all_documents
from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import LoadedModel, check_vocabulary
from coca_hf.evaluate.rows import relative

T = TypeVar("T")


@dataclass
class Sample:
    """Tokenized documents, each (tokens,), with what is needed to draw them again.

    settings: the arguments that drew it: data, column, split, seed, max_tokens, ... skipped: names
    of the documents that are empty or too short. left_out: the number of documents of fewer than
    `min_bytes` bytes, which are not drawn. text_hash: of the documents' text, whatever the tokenizer.
    """

    settings: dict
    names: list[str] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left_out: int = 0
    text_hash: str | None = None

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
            "text_hash": self.text_hash,
        }


PRESETS: dict[str, dict] = {
    # The paper: 100 of PG-19's documents of at least 32768 tokens, cut to them. The test split has
    # no more than 100.
    "pg19": {"data": "emozilla/pg19-test", "documents": 100},
    # YaRN's eval.sh: 50 of Proof-pile's test documents of at least 32768 tokens. It takes the
    # first ones; these are drawn. A token is a byte or more, but for a few that the tokenizer adds.
    "proof-pile": {
        "data": "emozilla/proofpile-test-tokenized",
        "documents": 50,
        "min_bytes": 32_000,
    },
}
OF_ALL = {"split": "test", "column": "text", "min_tokens": 32768, "max_tokens": 32768}


def check_preset(name: str) -> dict:
    """The arguments of `draw_sample` that a preset stands for.

    Raises CocaError for an unknown name.
    """
    if name not in PRESETS:
        raise CocaError(f"--preset: got {name!r}, expected one of {', '.join(PRESETS)}")
    return OF_ALL | PRESETS[name] | {"skip_short": True}


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

    Only documents of at least `min_bytes` bytes in UTF-8 are drawn from. The seed draws, whatever
    the tokenizer, so that models with different ones are measured on the same documents. With
    `skip_short`, only documents of at least `min_tokens` tokens are drawn from, of this tokenizer,
    and all of `data` is tokenized. A text is tokenized as the tokenizer does by default: with its
    token for the beginning, if it sets one; or without `special_tokens`. data_revision: of a data
    set on the hub; whatever it names, all is read at the commit that it is at first.

    Raises CocaError where a drawn document is empty or too short (unless `skip_short`), there are
    fewer documents than asked for, none is left, local files are to have a `split`, `subset` or
    `data_revision`, .txt files a `column`, or the tokenizer does not fit the model.
    """
    if max_tokens is not None and max_tokens < min_tokens:
        least = f"at least {min_tokens}, the longest of --lengths"
        raise CocaError(f"--max-tokens: got {max_tokens}, expected {least}")
    of_hub = {"--split": split != "test", "--subset": subset, "--data-revision": data_revision}
    check_text_options(data, of_hub, {"--column": column != "text"})
    commit = commit_of(data, data_revision)
    settings: dict = {"data": relative(data), "column": column, "split": split, "subset": subset}
    settings |= {"data_revision": data_revision, "data_commit": commit}
    settings |= {"seed": seed, "max_tokens": max_tokens}
    sample = Sample(settings | ({"min_bytes": min_bytes} if min_bytes else {}))
    total = 0

    def tokenize(document: Document) -> Tensor:
        ids = []
        if document.text:
            ids = loaded.tokenizer(document.text, add_special_tokens=special_tokens)["input_ids"]
        return torch.tensor(ids[:max_tokens], dtype=torch.long)

    def candidates() -> Iterator[tuple[Document, Tensor | None]]:
        nonlocal total
        for document in read_all_documents(data, column, split, subset, commit):
            if len(document.text.encode()) < min_bytes:
                sample.left_out += 1
                continue
            total += 1
            ids = tokenize(document) if skip_short else None
            if ids is not None and len(ids) < min_tokens:
                sample.skipped.append(document.name)
            else:
                yield document, ids

    drawn = _draw(candidates(), documents, seed)
    if documents is not None and total < documents:
        expected = f"expected --documents {documents}; ask for fewer"
        raise CocaError(f"{data}: got {total} documents, {expected}")
    found = [(document, tokenize(document) if ids is None else ids) for document, ids in drawn]
    _refuse_short(found, data, min_tokens)
    digest = hashlib.sha256()
    for document, _ in found:
        digest.update(f"{len(document.text)} {document.text}".encode())
    sample.text_hash = digest.hexdigest()[:16]
    for document, ids in found:
        check_vocabulary(loaded, ids, document.where)
        sample.names.append(document.name)
        sample.token_ids.append(ids)
    if not found:
        found_none = f"got no document of at least {min_tokens} tokens"
        raise CocaError(f"{data}: {found_none}; ask for shorter --lengths")
    return sample


def _draw(candidates: Iterable[T], number: int | None, seed: int) -> list[T]:
    """All, or a uniform sample of `number` in their own order: one pass, `number` in memory."""
    if number is None:
        return list(candidates)
    rng, drawn = random.Random(f"documents {seed}"), {}
    for row_number, candidate in enumerate(candidates):
        place = row_number if row_number < number else rng.randint(0, row_number)
        if place < number:
            drawn[place] = row_number, candidate
    return [candidate for _, candidate in sorted(drawn.values(), key=lambda one: one[0])]


def _refuse_short(found: list[tuple[Document, Tensor]], data: str, min_tokens: int) -> None:
    empty = [document.where for document, ids in found if not len(ids)]
    if empty:
        raise CocaError(
            f"{data}: {len(empty)} of {len(found)} documents are empty, first: "
            f"{first_of(empty, 3)}; remove them or add --skip-short"
        )
    short = [f"{document.where} ({len(ids)})" for document, ids in found if len(ids) < min_tokens]
    if short:
        raise CocaError(
            f"{data}: {len(short)} of {len(found)} documents have fewer than {min_tokens} tokens, "
            f"the longest of --lengths, first: {first_of(short, 3)}; ask for shorter --lengths or "
            f"add --skip-short"
        )


def first_of(names: list[str], most: int) -> str:
    """The first of many names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
