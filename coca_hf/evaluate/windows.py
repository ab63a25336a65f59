"""Ways to cut documents into windows and to average them: ours, and those of published scripts.

    sliding         every token once, token-weighted: see `perplexity.py`
    yarn            eval/perplexity.py of jquesnelle/yarn: no special tokens, but the token for the
                    beginning, where the tokenizer has one, before every window, which leaves
                    `length - 1` for text; windows every `stride` tokens (its --sliding-window,
                    256), the first scores all its tokens, later ones those that are new; exp(mean
                    of the windows' means)
    yarn-truncate   the same with its --truncate, as its Proof-pile numbers: the first window of
                    every document only
    longlora        eval.py of dvlab-research/LongLoRA with --batch_size 1, as its README calls it:
                    documents without special tokens as one stream, a window every `stride` (256)
                    tokens but the last one, each scoring all its `length - 1` targets; 2.71828 ^
                    (mean of the windows' means)

All scripts tokenize the text first; so does `Sample`, whose `special_tokens` follows the variant.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_hf.errors import CocaError


class Window(NamedTuple):
    document: int
    start: int  # of the inputs, in tokens
    input_len: int  # tokens of the document that are read
    scored_len: int  # how many of the last targets are scored


class Variant(NamedTuple):
    """windows: from the lengths of documents, the window's length, the stride and the prefix.
    perplexity: from the windows' sums of nats and their scored tokens. stride: the default."""

    windows: Callable[[list[int], int, int, list[int]], list[Window]]
    perplexity: Callable[[list[float], list[int]], float]
    stride: int
    special_tokens: bool = False  # whether documents are tokenized with the tokenizer's
    begins: bool = False  # whether every window begins with the token for the beginning
    joins: bool = False  # whether documents are one stream

    def documents(self, token_ids: list[Tensor]) -> list[Tensor]:
        return [torch.cat(token_ids)] if self.joins else token_ids

    def prefix(self, tokenizer: Any) -> list[int]:
        return (
            [tokenizer.bos_token_id] if self.begins and tokenizer.bos_token_id is not None else []
        )


def windows_of(doc_len: int, length: int, stride: int, document: int = 0) -> list[Window]:
    """The sliding windows of a document of `doc_len` tokens, as `perplexity.py` defines them.

    Raises CocaError where the stride is longer than the window (tokens would be left out), or the
    document has fewer than `length` tokens.
    """
    if not 1 <= stride <= length:
        raise CocaError(
            f"stride: got {stride}, expected 1 to {length}, the window's length; a longer one "
            f"skips tokens"
        )
    if doc_len < length:
        raise CocaError(f"document {document}: got {doc_len} tokens, expected at least {length}")
    scored = min(length, doc_len - 1)
    windows = [Window(document, 0, scored, scored)]
    while scored < doc_len - 1:
        start = windows[-1].start + stride
        input_len = min(length, doc_len - 1 - start)
        windows.append(Window(document, start, input_len, start + input_len - scored))
        scored = start + input_len
    return windows


def _sliding(doc_lens: list[int], length: int, stride: int, prefix: list[int]) -> list[Window]:
    return [
        window
        for index, size in enumerate(doc_lens)
        for window in windows_of(size, length, stride, index)
    ]


def _yarn(doc_lens: list[int], length: int, stride: int, prefix: list[int]) -> list[Window]:
    windows, text_len = [], length - len(prefix)
    for index, doc_len in enumerate(doc_lens):
        end = 0
        for start in range(0, doc_len, stride):
            before, end = end, min(start + text_len, doc_len)
            # Without a prefix, nothing predicts the first token
            predicted = end - start - (0 if prefix else 1)
            windows.append(Window(index, start, end - start - 1, min(end - before, predicted)))
            if end == doc_len:
                break
    return [window for window in windows if window.scored_len]


def _yarn_truncate(
    doc_lens: list[int], length: int, stride: int, prefix: list[int]
) -> list[Window]:
    text_len = length - len(prefix)
    return _yarn([min(doc_len, text_len) for doc_len in doc_lens], length, text_len, prefix)


def _longlora(doc_lens: list[int], length: int, stride: int, prefix: list[int]) -> list[Window]:
    """Raises CocaError where the stream is too short for a window that is not the last."""
    starts = range(0, doc_lens[0] - length, stride)[:-1]
    if not starts:
        raise CocaError(
            f"--variant longlora: got {doc_lens[0]} tokens in all documents together, expected "
            f"more than {length + stride}: length and stride"
        )
    return [Window(0, start, length - 1, length - 1) for start in starts]


def _token_mean(nlls: list[float], tokens: list[int]) -> float:
    return math.exp(math.fsum(nlls) / sum(tokens))


def _window_mean(nlls: list[float], tokens: list[int]) -> float:
    return math.exp(math.fsum(nll / n for nll, n in zip(nlls, tokens, strict=True)) / len(nlls))


def _window_mean_longlora(nlls: list[float], tokens: list[int]) -> float:
    return 2.71828 ** math.log(_window_mean(nlls, tokens))


VARIANTS = {
    "sliding": Variant(_sliding, _token_mean, stride=512, special_tokens=True),
    "yarn": Variant(_yarn, _window_mean, stride=256, begins=True),
    "yarn-truncate": Variant(_yarn_truncate, _window_mean, stride=256, begins=True),
    "longlora": Variant(_longlora, _window_mean_longlora, stride=256, joins=True),
}


def check_variant(name: str) -> Variant:
    """Raises CocaError for a name that is none of `VARIANTS`."""
    if name not in VARIANTS:
        raise CocaError(f"--variant: got {name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
