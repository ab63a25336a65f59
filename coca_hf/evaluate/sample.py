"""The documents of a measurement: a seeded sample, tokenized and cut, the same for every length and RoPE setting."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coca_hf.documents import Document, commit_of, local_files, read_documents
from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject, check_vocabulary


@dataclass
class Sample:
    """Tokenized documents, each (tokens,), with what is needed to draw them again."""

    settings: dict  # the arguments that drew it: data, column, split, seed, max_tokens, ...
    names: list[str] = field(default_factory=list)
    token_ids: list[Tensor] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # names of the documents that were drawn and too short
    left_out: int = 0  # documents of fewer than `min_chars` characters, of which none was drawn

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
        "min_chars": 4 * 32768,
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
    subset: str | None = None,
    data_revision: str | None = None,
    documents: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    skip_short: bool = False,
    special_tokens: bool = True,
    min_chars: int = 0,
) -> Sample:
    """Read `data` (see `read_documents`), draw `documents` of them and tokenize each, cut to its first `max_tokens`.

    data_revision: of a data set on the hub; whatever it names, all is read at the commit that it is at first.
    The draw comes before the tokenizer, so that models with different ones are measured on the same documents. A text
    is tokenized as the tokenizer does by default: with its token for the beginning, if it sets one; or without
    `special_tokens`. Only documents of at least `min_chars` characters are drawn from.

    Raises CocaError where a document has fewer than `min_tokens` tokens (unless `skip_short`), there are fewer
    documents than asked for, none is left, local files are to have a `subset` or `data_revision`, or the tokenizer does
    not fit the model.
    """
    if max_tokens is not None and max_tokens < min_tokens:
        raise CocaError(f"--max-tokens: got {max_tokens}, expected at least {min_tokens}, the longest of --lengths")
    of_hub = {"--subset": subset, "--data-revision": data_revision}
    if any(of_hub.values()) and local_files(data):
        names = ", ".join(name for name, value in of_hub.items() if value)
        raise CocaError(f"{data}: got {names}, which only data sets on the hub have; leave it out")
    commit = commit_of(data, data_revision)
    sample = Sample(
        {
            "data": data,
            "column": column,
            "split": split,
            "subset": subset,
            "data_revision": data_revision,
            "data_commit": commit,
            "seed": seed,
            "max_tokens": max_tokens,
        }
    )
    if min_chars:
        sample.settings["min_chars"] = min_chars

    def long_enough() -> Iterator[Document]:
        for document in read_documents(data, column, split, subset, commit):
            if len(document.text) >= min_chars:
                yield document
            else:
                sample.left_out += 1

    for document in _draw(long_enough(), data, documents, seed):
        ids = subject.tokenizer(document.text, add_special_tokens=special_tokens)["input_ids"]
        ids = torch.tensor(ids[:max_tokens], dtype=torch.long)
        if len(ids) >= min_tokens:
            check_vocabulary(subject, ids, document.where)
            sample.names.append(document.name)
            sample.token_ids.append(ids)
        elif skip_short:
            sample.skipped.append(document.name)
        else:
            raise CocaError(
                f"{document.where}: got a document of {len(ids)} tokens, expected at least {min_tokens}, the longest "
                f"of --lengths; ask for shorter --lengths or add --skip-short"
            )
    if not sample.names:
        raise CocaError(f"{data}: got no document of at least {min_tokens} tokens; ask for shorter --lengths")
    return sample


def _draw(texts: Iterator[Document], data: str, documents: int | None, seed: int) -> Iterator[Document]:
    """All documents, or a uniform sample of `documents` in their own order: one pass, `documents` texts in memory."""
    if documents is None:
        yield from texts
        return
    rng, drawn = random.Random(f"documents {seed}"), {}
    for row_number, document in enumerate(texts):
        place = row_number if row_number < documents else rng.randint(0, row_number)
        if place < documents:
            drawn[place] = row_number, document
    if len(drawn) < documents:
        raise CocaError(f"{data}: got {len(drawn)} documents, expected --documents {documents}; ask for fewer")
    for _, document in sorted(drawn.values()):
        yield document
