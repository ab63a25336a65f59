"""Perplexity with a sliding window (section 4.2 of the paper, after Press et al. 2021), each token scored once.

For a context of `length` tokens and a `stride`, windows start at 0, stride, 2 * stride, ... of a document. The window
at `start` reads tokens [start, start + length) and predicts tokens [start + 1, start + length + 1), so the model never
sees more than `length` positions. A token is scored by the first window that predicts it: the first window scores all
its targets, every later one the last `stride`, and the last window ends where the document does, so it may be shorter.
Every token of a document but the first is scored exactly once. Perplexity is exp(sum of negative log-likelihoods /
number of scored tokens), over all documents together.

That is the variant `sliding`. `variants.py` has those that give the numbers of other people's scripts.

A row, task `perplexity`, has besides what `rows.py` lists: `variant`; `stride`, and `asked_stride` where a length was
shorter; what `Sample.describe` says; `nll`, nats per token. Its raw table `windows`: document (index into
`document_names`), start, input_len, tokens (scored), nll (their sum in nats).
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from coca_hf.evaluate.batches import auto_batch_size, compute_all
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.variants import VARIANTS, Variant, Window


def compute_windows(
    windows: list[Window],
    compute: Callable[[list[Window]], list[Any]],
    batch_size: int | None = None,
    track: Callable[[list], Iterable] = iter,
) -> tuple[list[Window], list[Any], str | None, int]:
    """The windows in the order they were computed, the result of each, and what else `compute_all` returns.

    batch_size: `auto_batch_size`, by default. Only windows of one shape share a batch, so nothing is padded and results
    do not depend on it.
    """

    def shape(window: Window) -> tuple[int, int]:
        return window.input_len, window.scored_len

    windows = sorted(windows, key=shape)
    groups = [
        (list(same), batch_size or auto_batch_size(input_len))
        for (input_len, _), same in itertools.groupby(windows, key=shape)
    ]
    return windows, *compute_all(groups, compute, track)


def perplexity_rows(
    subject: Subject,
    sample: Sample,
    lengths: list[int],
    stride: int,
    ropes: list[Rope],
    store: RowStore,
    batch_size: int | None = None,
    variant: str = "sliding",
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    Where `stride` is longer than a length, that length's row uses the length, and says so in its `stride`. A value that
    is not finite becomes null, with the reason in `error`.

    Raises CocaError as the variant's `windows` does.
    """
    settings = {
        "task": "perplexity",
        "variant": variant,
        "asked_stride": stride,
        **sample.describe(),
        **subject_settings(subject),
        "batch_size": batch_size,
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings | {"stride": min(stride, length)},
        lambda rope, settings: _measure(subject, sample, rope, settings, track),
        track,
    )


def _measure(subject: Subject, sample: Sample, rope: Rope, settings: dict, track: Track) -> tuple[dict, Raw]:
    """The results of a row, and a line for each of its windows."""
    length, variant = settings["length"], VARIANTS[settings["variant"]]
    documents = variant.documents(sample.token_ids)
    prefix = variant.prefix(subject.tokenizer)
    windows = variant.windows([len(ids) for ids in documents], length, settings["stride"], prefix)
    use_rope_(subject.model, rope, length)
    windows, nlls, error, batch_size = compute_windows(
        windows,
        lambda batch: token_losses(subject.model, documents, batch, prefix).double().sum(-1).tolist(),
        settings["batch_size"],
        lambda batches: track(batches, f"perplexity  {rope}  {length}"),
    )
    lines = [
        {"document": w.document, "start": w.start, "input_len": w.input_len, "tokens": w.scored_len, "nll": nll}
        for w, nll in zip(windows, nlls, strict=False)
    ]
    tokens = sum(line["tokens"] for line in lines)
    value, error = (None, failed(error, length)) if error else perplexity_of(variant, lines)
    results = {
        "value": value,
        "nll": math.fsum(line["nll"] for line in lines) / tokens if value is not None else None,
        "tokens": tokens,
        "error": error,
        "batch_size": batch_size,
    }
    return results, {"windows": lines}


def perplexity_of(variant: Variant, windows: list[dict]) -> tuple[float | None, str | None]:
    """The value of a row from the lines of its raw table, or None and why there is none."""
    total = math.fsum(window["nll"] for window in windows)
    if not math.isfinite(total):
        return None, f"the model's loss is {total}"
    try:
        return variant.perplexity([w["nll"] for w in windows], [w["tokens"] for w in windows]), None
    except OverflowError:
        return None, "the perplexity is beyond a float64"


def failed(error: str, length: int | str) -> str:
    """An error of `compute_all` as a row says it; learned positions end where the model's training did."""
    return error if error.startswith("OOM") else f"the model failed on {length} tokens ({error})"


@torch.inference_mode()
def token_losses(model: Any, documents: list[Tensor], batch: list[Window], prefix: list[int] | None = None) -> Tensor:
    """The negative log-likelihoods, in nats, of the scored tokens of windows of one shape: (b, scored_len), float32.

    documents: token ids, each (tokens,). prefix: token ids that every window begins with.
    """
    input_len, scored_len = batch[0].input_len, batch[0].scored_len
    inputs = torch.stack([documents[w.document][w.start : w.start + input_len] for w in batch]).to(model.device)
    if prefix:
        inputs = torch.cat((inputs.new_tensor(prefix).expand(len(batch), -1), inputs), dim=1)
    ends = [(documents[w.document], w.start + input_len + 1) for w in batch]
    targets = torch.stack([ids[end - scored_len : end] for ids, end in ends]).to(model.device)

    only_scored = {"logits_to_keep": scored_len} if keeps_logits(model) else {}
    logits = model(input_ids=inputs, use_cache=False, **only_scored).logits[:, -scored_len:]  # (b, k, vocab)
    # In pieces, so that the float32 copy of the logits stays small beside them.
    pieces = zip(logits.split(512, dim=1), targets.split(512, dim=1), strict=True)
    return torch.cat([_cross_entropy(some_logits.float(), some) for some_logits, some in pieces], dim=1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: (b, k, vocab), targets: (b, k). Returns (b, k).

    The vocabulary stays the last axis: over any other, PyTorch adds up its exponentials one by one, which in float32 is
    wrong by 1e-4 for a vocabulary of 50,000.
    """
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def keeps_logits(model: Any) -> bool:
    """Whether the model's forward can leave out the logits that nobody asked for."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
