"""Perplexity with a sliding window (section 4.2 of the paper, after Press et al. 2021).

For a context of `length` tokens and a `stride`, windows start at 0, stride, 2 * stride, ... of a
document. The window at `start` reads tokens [start, start + length) and predicts tokens
[start + 1, start + length + 1), so the model never sees more than `length` positions. A token is
scored by the first window that predicts it: the first window scores all its targets, every later
one the last `stride`, and the last window ends where the document does, so it may be shorter. Every
token of a document except the first is scored exactly once. Perplexity is exp(sum of negative
log-likelihoods / number of scored tokens), over all documents together.

This is the variant `sliding`. `windows.py` has those that give the numbers of published scripts.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import NotRequired

from coca_hf.evaluate.batches import Watch, auto_batch_size, compute_all
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.row import Count, Identity, Positive, Setting, TextRow
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.store import SILENT, Progress, Raw, RowStore, about_model, rows_over
from coca_hf.evaluate.tables import (
    FLOAT,
    INT,
    Measurement,
    Table,
    against_length,
    perplexity_cell,
    text_settings,
)
from coca_hf.evaluate.windows import VARIANTS, Variant, Window
from coca_hf.plots import FAR


class PerplexityRow(TextRow):
    """The raw table `windows` has document (index into `document_names`), start, input_len, tokens
    (scored) and nll (their sum in nats) of every window."""

    length: Identity[Count]
    value: Positive
    nll: NotRequired[float | None]  # nats per token
    variant: Setting[str]
    asked_stride: Setting[int]
    stride: NotRequired[int | None]  # no longer than the length


def perplexity_rows(
    loaded: LoadedModel,
    sample: Sample,
    lengths: list[int],
    stride: int,
    ropes: list[Rope],
    store: RowStore,
    batch_size: int | None = None,
    variant: str = "sliding",
    progress: Progress = SILENT,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` has are not measured again.

    Where `stride` is longer than a length, that length's row uses the length and says so in its
    `stride`. A value that is not finite becomes null, with the reason in `error`.

    Raises CocaError as the variant's `windows` does.
    """
    kind = VARIANTS[variant]
    documents, prefix = kind.documents(sample.token_ids), kind.prefix(loaded.tokenizer)

    def measure(rope: Rope, length: int, watch: Watch) -> tuple[dict, Raw]:
        used_stride = min(stride, length)
        windows = kind.windows([len(ids) for ids in documents], length, used_stride, prefix)
        use_rope_(loaded.model, rope, length)
        windows, nlls, error, used = compute_windows(
            windows,
            lambda batch: (
                token_losses(loaded.model, documents, batch, prefix).double().sum(-1).tolist()
            ),
            batch_size,
            watch,
        )
        lines = [
            {
                "document": w.document,
                "start": w.start,
                "input_len": w.input_len,
                "tokens": w.scored_len,
                "nll": nll,
            }
            for w, nll in zip(windows, nlls, strict=False)
        ]
        value, error = (None, failed(error, length)) if error else perplexity_of(kind, lines)
        results = {
            "value": value,
            "nll": nats_per_token(lines) if value is not None else None,
            "stride": used_stride,
            "tokens": sum(line["tokens"] for line in lines),
            "error": error,
            "batch_size": used,
        }
        return results, {"windows": lines}

    settings = {
        "task": "perplexity",
        "variant": variant,
        "asked_stride": stride,
        **sample.describe(),
        **about_model(loaded),
    }
    return rows_over(PerplexityRow, settings, ropes, lengths, store, measure, progress)


def _settings(row: dict) -> str:
    variant = "" if row["variant"] == "sliding" else f", {row['variant']}"
    return f"{text_settings(row)}, stride {row['asked_stride']}{variant}"


def _spread(table: Table, row: dict) -> tuple[float, float] | None:
    """The 10th and 90th percentile of the documents' perplexities; None for fewer than two."""
    sums: dict[int, list[float]] = {}
    for window in table.read_raw(row, "windows") or []:
        nll, tokens = sums.setdefault(window["document"], [0.0, 0])
        sums[window["document"]] = [nll + window["nll"], tokens + window["tokens"]]
    means = [nll / tokens for nll, tokens in sums.values()]
    if len(means) < 2 or row["value"] is None or max(means) > math.log(FAR):
        return None
    low, high = (math.exp(mean) for mean in np.quantile(means, [0.1, 0.9]))
    return low, high


MEASUREMENT = Measurement(
    task="perplexity",
    title="Perplexity",
    explanation="Sliding window, window = context length; token-weighted over all documents; each "
    "token scored once; lower is better.",
    row=PerplexityRow,
    settings=_settings,
    cell=perplexity_cell,
    parts=lambda tables: [
        part for table in tables for part in against_length(table, "perplexity", "log", _spread)
    ],
    raw={"windows": {"document": INT, "tokens": INT, "nll": FLOAT}},
)


def compute_windows(
    windows: list[Window],
    compute: Callable[[list[Window]], list[Any]],
    batch_size: int | None = None,
    watch: Watch = iter,
) -> tuple[list[Window], list[Any], str | None, int]:
    """The windows in the order they were computed, the result of each, an error and the batch size.

    The last two are those of `compute_all`. batch_size: None for `auto_batch_size`. Only windows of
    one shape share a batch, so nothing is padded and results do not depend on it.
    """

    def shape(window: Window) -> tuple[int, int]:
        return window.input_len, window.scored_len

    windows = sorted(windows, key=shape)
    groups = [
        (list(same), batch_size or auto_batch_size(input_len))
        for (input_len, _), same in itertools.groupby(windows, key=shape)
    ]
    return windows, *compute_all(groups, compute, watch)


def perplexity_of(variant: Variant, windows: list[dict]) -> tuple[float | None, str | None]:
    """The value of a row from the lines of its raw table, or None and why there is none."""
    total = math.fsum(window["nll"] for window in windows)
    if not math.isfinite(total):
        return None, f"the model's loss is {total}"
    try:
        nlls = [window["nll"] for window in windows]
        return variant.perplexity(nlls, [window["tokens"] for window in windows]), None
    except OverflowError:
        return None, "the perplexity is beyond a float64"


def nats_per_token(lines: list[dict]) -> float | None:
    """Token-weighted mean over the lines of a raw table; None for no lines."""
    tokens = sum(line["tokens"] for line in lines)
    return math.fsum(line["nll"] for line in lines) / tokens if lines else None


def failed(error: str, length: int | str) -> str:
    """An error of `compute_all` as a row says it; learned positions end at some length."""
    return error if error.startswith("OOM") else f"the model failed on {length} tokens ({error})"


def why_no_loss(error: str | None, total: float, length: int) -> str | None:
    """Why losses with the sum `total` make no value, or None. error: of `compute_all`."""
    if error:
        return failed(error, length)
    return None if math.isfinite(total) else f"the model's loss is {total}"


@torch.inference_mode()
def token_losses(
    model: Any, documents: list[Tensor], batch: list[Window], prefix: list[int] | None = None
) -> Tensor:
    """Negative log-likelihoods, in nats, of the scored tokens of windows of one shape.

    documents: token ids, each (tokens,). prefix: token ids that every window begins with. Returns
    (b, scored_len), float32.
    """
    input_len, scored_len = batch[0].input_len, batch[0].scored_len
    inputs = torch.stack([documents[w.document][w.start : w.start + input_len] for w in batch]).to(
        model.device
    )
    if prefix:
        inputs = torch.cat((inputs.new_tensor(prefix).expand(len(batch), -1), inputs), dim=1)
    ends = [(documents[w.document], w.start + input_len + 1) for w in batch]
    targets = torch.stack([ids[end - scored_len : end] for ids, end in ends]).to(model.device)

    only_scored = {"logits_to_keep": scored_len} if keeps_logits(model) else {}
    output = model(input_ids=inputs, use_cache=False, **only_scored)
    logits = output.logits[:, -scored_len:]  # (b, scored_len, vocab)
    # In pieces, so that the float32 copy of the logits stays small beside them.
    pieces = zip(logits.split(512, dim=1), targets.split(512, dim=1), strict=True)
    return torch.cat(
        [_cross_entropy(some_logits.float(), some) for some_logits, some in pieces], dim=1
    )


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: (b, k, vocab), targets: (b, k). Returns (b, k).

    The vocabulary stays the last axis: over any other, PyTorch adds up its exponentials one by one,
    which in float32 is wrong by 1e-4 for a vocabulary of 50,000.
    """
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def keeps_logits(model: Any) -> bool:
    """Whether the model's forward can leave out the logits that are not needed."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
