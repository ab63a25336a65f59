"""Perplexity with a sliding window (section 4.2 of the paper, after Press et al. 2021), each token scored once.

For a context of `length` tokens and a `stride`, windows start at 0, stride, 2 * stride, ... of a document. The window
at `start` reads tokens [start, start + length) and predicts tokens [start + 1, start + length + 1), so the model never
sees more than `length` positions. A token is scored by the first window that predicts it: the first window scores all
its targets, every later one the last `stride`, and the last window ends where the document does, so it may be shorter.
Every token of a document but the first is scored exactly once. Perplexity is exp(sum of negative log-likelihoods /
number of scored tokens), over all documents together.
"""

import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import RowStore, now, subject_settings
from coca_hf.evaluate.sample import Sample

Track = Callable[[list, str], Iterable]  # wraps a list, with a description, to show how far a loop over it is


class Window(NamedTuple):
    document: int
    start: int  # of the inputs, in tokens
    input_len: int
    scored_len: int  # how many of the last targets are scored


def windows_of(doc_len: int, length: int, stride: int, document: int = 0) -> list[Window]:
    """The windows of a document of `doc_len` tokens, by the definition at the top of this file.

    Raises CocaError where the stride is longer than the window (tokens would be left out), or the document has fewer
    than `length` tokens.
    """
    if not 1 <= stride <= length:
        raise CocaError(f"stride: got {stride}, expected 1 to {length}, the window's length; a longer one skips tokens")
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


def total_nll(
    model: Any,
    documents: list[Tensor],
    length: int,
    stride: int,
    batch_size: int = 1,
    track: Callable[[list], Iterable] = iter,
) -> tuple[float, int]:
    """Sum of the negative log-likelihoods in nats, and the number of tokens scored, over all windows of `documents`.

    documents: token ids, each (tokens,). Log-softmax in float32, sums in float64. Only windows of one shape share a
    batch, so nothing is padded and the result does not depend on `batch_size`.

    Raises CocaError as `windows_of` does.
    """
    windows = [window for index, ids in enumerate(documents) for window in windows_of(len(ids), length, stride, index)]
    nll = torch.zeros((), dtype=torch.float64)
    for batch in track(_batches(windows, batch_size)):
        inputs = torch.stack([documents[w.document][w.start : w.start + w.input_len] for w in batch])
        targets = torch.stack([documents[w.document][w.start + 1 : w.start + w.input_len + 1] for w in batch])
        nll += _nll(model, inputs.to(model.device), targets[:, -batch[0].scored_len :].to(model.device)).cpu()
    return nll.item(), sum(window.scored_len for window in windows)


def perplexity_rows(
    subject: Subject,
    sample: Sample,
    lengths: list[int],
    stride: int,
    ropes: list[Rope],
    store: RowStore,
    batch_size: int = 1,
    track: Track = lambda items, description: items,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    Where `stride` is longer than a length, that length's row uses the length, and says so in its `stride`. A value that
    is not finite becomes null, with the reason in `error`.
    """
    documents = sample.describe()
    for rope, length in itertools.product(ropes, lengths):
        settings = {
            "task": "perplexity",
            "rope": str(rope),
            "length": length,
            "stride": min(stride, length),
            "asked_stride": stride,
            **documents,
            **subject_settings(subject),
            "batch_size": batch_size,
        }
        row = store.find(settings)
        yield row or store.append(settings | _measure(subject.model, sample, rope, settings, track))


def _measure(model: Any, sample: Sample, rope: Rope, settings: dict, track: Track) -> dict:
    length, description = settings["length"], f"perplexity  {rope}  {settings['length']}"
    began, error = time.perf_counter(), None
    use_rope_(model, rope, length)
    try:
        nll, tokens = total_nll(
            model,
            sample.token_ids,
            length,
            settings["stride"],
            settings["batch_size"],
            lambda batches: track(batches, description),
        )
        value = math.exp(nll / tokens)
        if not math.isfinite(value):
            error = f"the model's loss is {nll}"
    except OverflowError:
        error = "the perplexity is beyond a float64"
    except IndexError as index_error:  # learned positions end where the model's training did
        error, tokens = f"the model failed on {length} tokens (IndexError: {index_error})", 0
    return {
        "value": None if error else value,
        "nll": nll / tokens if not error else None,
        "tokens": tokens,
        "error": error,
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }


def _batches(windows: list[Window], batch_size: int) -> list[list[Window]]:
    """Windows of one shape at a time, at most `batch_size` together."""

    def shape(window: Window) -> tuple[int, int]:
        return window.input_len, window.scored_len

    return [
        list(group[first : first + batch_size])
        for group in (list(same) for _, same in itertools.groupby(sorted(windows, key=shape), key=shape))
        for first in range(0, len(group), batch_size)
    ]


@torch.inference_mode()
def _nll(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over the last targets: inputs (b, m), targets (b, k) for the last k positions. Returns a float64 scalar."""
    scored_len = targets.shape[1]
    only_scored = {"logits_to_keep": scored_len} if _keeps_logits(model) else {}
    logits = model(input_ids=inputs, use_cache=False, **only_scored).logits[:, -scored_len:]  # (b, k, vocab)
    nll = torch.zeros((), dtype=torch.float64, device=logits.device)
    # In pieces, so that the float32 copy of the logits stays small beside them.
    for some_logits, some_targets in zip(logits.split(512, dim=1), targets.split(512, dim=1), strict=True):
        losses = nn.functional.cross_entropy(
            some_logits.float().flatten(0, 1), some_targets.flatten(), reduction="none"
        )
        nll += losses.double().sum()
    return nll


def _keeps_logits(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
