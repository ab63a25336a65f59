"""Perplexity with a sliding window (section 4.1 of the paper, after Press et al. 2021).

For a context of `length` tokens and a `stride`, windows start at 0, stride, 2 * stride, ... of a
document. The window at `start` reads tokens [start, start + length) and predicts tokens
[start + 1, start + length + 1), so the model never sees more than `length` positions. A token is
scored by the first window that predicts it: the first window scores all its targets, later windows
the last `stride`, and the last window ends with the document, so it may be shorter. Every token of
a document except the first is scored exactly once. Perplexity is exp(sum of negative
log-likelihoods / number of scored tokens), over all documents together.

This is the variant `sliding`. The others cut windows and average as published scripts do:

    yarn        eval/perplexity.py of jquesnelle/yarn: no special tokens, except that every window
                begins with the tokenizer's token for the beginning, if it has one, which leaves
                `length - 1` for text; windows every `stride` tokens (its --sliding-window, 256),
                the first scores all its tokens, later ones the new ones; exp(mean of the windows'
                means)
    longlora    eval.py of dvlab-research/LongLoRA with --batch_size 1, as its README calls it:
                documents without special tokens as one stream, a window every `stride` (256) tokens
                except the last, each scoring all its `length - 1` targets; 2.71828 ^ (mean of the
                windows' means)

All of them tokenize the text first, as `Sample` does; its `special_tokens` follows the variant.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.loaded_model import Rope, check_vocabulary, use_rope_
from coca_hf.evaluate.rows import Count, Identity, Positive, Raw, Run, Setting, TextRow
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import Measurement, Table, against_length, each_table, text_settings
from coca_hf.page import FAR


class PerplexityRow(TextRow):
    """The raw table `windows` has document (index into `document_names`), start, input_len, tokens
    (scored) and nll (their sum in nats) of every window."""

    length: Identity[Count]
    value: Positive
    nll: float | None  # nats per token
    variant: Setting[str]
    asked_stride: Setting[int]
    stride: int | None  # no longer than the length


def perplexity_rows(
    run: Run, sample: Sample, stride: int, variant: str = "sliding"
) -> Iterator[dict]:
    """Yield the rows of a run.

    A length shorter than `stride` is its own stride, as the row's `stride` says. A value that is
    not finite becomes null, with the reason in `error`.

    Raises CocaError as the variant's `windows` does, and for a token that begins texts and that the
    model does not have.
    """
    kind, model, bos = VARIANTS[variant], run.loaded.model, run.loaded.tokenizer.bos_token_id
    documents = [torch.cat(sample.token_ids)] if kind.joins else sample.token_ids
    prefix = [bos] if kind.begins and bos is not None else []
    if prefix:
        check_vocabulary(run.loaded, torch.tensor(prefix), "beginning of a text")

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        used_stride = min(stride, length)
        windows = kind.windows([len(ids) for ids in documents], length, used_stride, prefix)
        use_rope_(model, rope, length)

        def compute(batch: list[Window]) -> list[float]:
            return token_losses(model, documents, batch, prefix).double().sum(-1).tolist()

        windows, nlls = compute_windows(windows, compute, batches)
        lines = [w._asdict() | {"nll": nll} for w, nll in zip(windows, nlls, strict=True)]
        return value_of(kind, lines) | {"stride": used_stride}, {"windows": lines}

    settings = {"task": "perplexity", "variant": variant, "asked_stride": stride}
    return run.rows(PerplexityRow, settings | sample.describe(), measure)


class Window(NamedTuple):
    document: int
    start: int  # of the inputs, in tokens
    input_len: int  # tokens of the document to read
    tokens: int  # to score: the last targets


class Variant(NamedTuple):
    """windows: from the lengths of documents, the window's length, the stride and the prefix.
    perplexity: from the lines of the raw table. stride: by default."""

    windows: Callable[[list[int], int, int, list[int]], list[Window]]
    perplexity: Callable[[list[dict]], float]
    stride: int
    special_tokens: bool = False  # whether documents are tokenized with the tokenizer's
    begins: bool = False  # whether every window begins with the token for the beginning
    joins: bool = False  # whether documents are one stream


def _sliding(doc_lens: list[int], length: int, stride: int, prefix: list[int]) -> list[Window]:
    """For a stride of at most `length`: a longer one would skip tokens."""
    windows = []
    for document, doc_len in enumerate(doc_lens):
        start, scored = 0, min(length, doc_len - 1)
        windows.append(Window(document, start, scored, scored))
        while scored < doc_len - 1:
            start += stride
            input_len = min(length, doc_len - 1 - start)
            windows.append(Window(document, start, input_len, start + input_len - scored))
            scored = start + input_len
    return windows


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
    return [window for window in windows if window.tokens]


def _longlora(doc_lens: list[int], length: int, stride: int, prefix: list[int]) -> list[Window]:
    """Raises CocaError if the stream is too short for a window that is not the last."""
    starts = range(0, doc_lens[0] - length, stride)[:-1]
    if not starts:
        raise CocaError(
            f"--variant longlora: got {doc_lens[0]} tokens in all documents together, expected "
            f"more than {length + stride}: length and stride"
        )
    return [Window(0, start, length - 1, length - 1) for start in starts]


def _token_mean(lines: list[dict]) -> float:
    return math.exp(nats_per_token(lines))


def _window_mean(lines: list[dict]) -> float:
    return math.exp(math.fsum(line["nll"] / line["tokens"] for line in lines) / len(lines))


def _window_mean_longlora(lines: list[dict]) -> float:
    return 2.71828 ** math.log(_window_mean(lines))


VARIANTS = {
    "sliding": Variant(_sliding, _token_mean, stride=512, special_tokens=True),
    "yarn": Variant(_yarn, _window_mean, stride=256, begins=True),
    "longlora": Variant(_longlora, _window_mean_longlora, stride=256, joins=True),
}


def _settings(row: dict) -> str:
    variant = "" if row["variant"] == "sliding" else f", {row['variant']}'s windows and mean"
    return f"{text_settings(row)}, stride {row['asked_stride']}{variant}"


def perplexity_cell(row: dict) -> str:
    """Two decimal places; three digits from 10,000 on."""
    return f"{row['value']:.2f}" if row["value"] < 1e4 else f"{row['value']:.3g}"


def _spread(table: Table, row: dict) -> tuple[float, float] | None:
    """The 10th and 90th percentile of the documents' perplexities; None for fewer than two."""
    documents: dict[int, list[dict]] = {}
    for window in table.read_raw(row, "windows") or []:
        documents.setdefault(window["document"], []).append(window)
    means = [nats_per_token(windows) for windows in documents.values()]
    if len(means) < 2 or row["value"] is None or max(means) > math.log(FAR):
        return None
    low, high = (math.exp(mean) for mean in np.quantile(means, [0.1, 0.9]))
    return low, high


MEASUREMENT = Measurement(
    task="perplexity",
    title="Perplexity",
    explanation="Sliding window, window = context length; token-weighted over all documents; each "
    "token scored once, unless the table names a script's windows and mean; lower is better.",
    row=PerplexityRow,
    settings=_settings,
    cell=perplexity_cell,
    parts=each_table(partial(against_length, y_label="perplexity", y_scale="log", spread=_spread)),
    raw={"windows": {"document": int, "tokens": int, "nll": float}},
)


def compute_windows(
    windows: list[Window], compute: Callable[[list[Window]], list[Any]], batches: Batches
) -> tuple[list[Window], list[Any]]:
    """The windows in the order they were computed, and the result of each.

    Only windows of one shape share a batch, so nothing is padded and results do not depend on its
    size. Raises NoValue as `Batches.compute` does.
    """
    shape = attrgetter("input_len", "tokens")
    windows = sorted(windows, key=shape)
    groups = [(list(same), one[0]) for one, same in itertools.groupby(windows, key=shape)]
    return windows, batches.compute(groups, compute)


def value_of(variant: Variant, lines: list[dict]) -> dict:
    """From the lines of a raw table, the fields of its row: the value, or null with the reason in
    `error`; nats per token; and the number of tokens.
    """
    value, nll, error = None, None, None
    total = math.fsum(line["nll"] for line in lines)
    if math.isfinite(total):
        try:
            value, nll = variant.perplexity(lines), nats_per_token(lines)
        except OverflowError:
            error = "the perplexity is beyond a float64"
    else:
        error = f"the model's loss is {total}"
    return {"value": value, "nll": nll, "tokens": tokens_of(lines), "error": error}


def tokens_of(lines: list[dict]) -> int:
    return sum(line["tokens"] for line in lines)


def nats_per_token(lines: list[dict]) -> float:
    """Token-weighted mean over the lines of a raw table."""
    return math.fsum(line["nll"] for line in lines) / tokens_of(lines)


def check_loss(total: float) -> None:
    """Raise NoValue for a sum of losses that is not finite."""
    if not math.isfinite(total):
        raise NoValue(f"the model's loss is {total}")


@torch.inference_mode()
def token_losses(
    model: Any, documents: list[Tensor], batch: list[Window], prefix: list[int] | None = None
) -> Tensor:
    """Negative log-likelihoods, in nats, of the scored tokens of windows of one shape.

    documents: token ids, each (tokens,). prefix: token ids before every window. Returns
    (b, scored_len), float32.
    """
    _, _, input_len, scored_len = batch[0]
    inputs = torch.stack([documents[w.document][w.start : w.start + input_len] for w in batch]).to(
        model.device
    )
    if prefix:
        inputs = torch.cat((inputs.new_tensor(prefix).expand(len(batch), -1), inputs), dim=1)
    ends = [(documents[w.document], w.start + input_len + 1) for w in batch]
    targets = torch.stack([ids[end - scored_len : end] for ids, end in ends]).to(model.device)

    logits = last_logits(model, inputs, scored_len)
    # In pieces, so that the float32 copy of the logits stays small. The vocabulary stays the last
    # axis: over any other, PyTorch adds its exponentials up one by one, which in float32 is wrong
    # by 1e-4 for a vocabulary of 50,000.
    losses = [
        nn.functional.cross_entropy(
            some_logits.float().flatten(0, 1), some_targets.flatten(), reduction="none"
        ).view_as(some_targets)
        for some_logits, some_targets in zip(
            logits.split(512, dim=1), targets.split(512, dim=1), strict=True
        )
    ]
    return torch.cat(losses, dim=1)


def last_logits(model: Any, input_ids: Tensor, kept: int) -> Tensor:
    """The logits of the last `kept` positions, (b, kept, vocab); input_ids: (b, m).

    A model that takes `logits_to_keep` computes no others.
    """
    return model(input_ids=input_ids, use_cache=False, **only_last(model, kept)).logits[:, -kept:]


def only_last(model: Any, kept: int) -> dict[str, int]:
    """The argument of a forward that leaves out all logits but the last `kept`, if it takes one."""
    takes_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": kept} if takes_it else {}
