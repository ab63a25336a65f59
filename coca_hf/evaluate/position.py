"""Loss against the token's index in its window: it shows the boundary that an average over all tokens hides.

Windows of `length` tokens without overlap, so the target with index i is predicted from the i + 1 tokens before it in
the window, and from nothing else. Losses are summed over buckets of indices.

A row, task `position-loss`, has besides what `rows.py` lists: `value`, the perplexity over all tokens; `stride`, which
is the length; `bucket`, in tokens; what `Sample.describe` says; `nll`, nats per token, and the same for buckets that
begin below and from the length of the last training on, `nll_inside` and `nll_beyond` (null where there are none);
`ranges`, the perplexity of the tokens between `EDGES`, the trained length of the config and the window's end, each with
its first index, end and tokens. Its raw table `buckets`: document (index into `document_names`), first (index of the
bucket), tokens, nll (their sum in nats), of which `in_ranges` makes any other ranges.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import compute_windows, failed, perplexity_of, token_losses
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.variants import VARIANTS, Window
from coca_hf.report.rows import trained_length

EDGES = (256, 1024)


def position_rows(
    subject: Subject,
    sample: Sample,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    bucket: int = 64,
    batch_size: int | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again."""
    settings = {
        "task": "position-loss",
        "bucket": bucket,
        **sample.describe(),
        **subject_settings(subject),
        "batch_size": batch_size,
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings | {"stride": length},
        lambda rope, settings: _measure(subject, sample, rope, settings, track),
        track,
    )


def _measure(subject: Subject, sample: Sample, rope: Rope, settings: dict, track: Track) -> tuple[dict, Raw]:
    """The results of a row, and a line for each bucket of each document."""
    length, bucket = settings["length"], settings["bucket"]

    def compute(batch: list[Window]) -> list[list[float]]:
        losses = token_losses(subject.model, sample.token_ids, batch).double()  # (b, m)
        parts = losses.split(min(bucket, length), dim=1)
        return torch.stack([part.sum(1) for part in parts], dim=1).tolist()

    windows = VARIANTS["sliding"].windows([len(ids) for ids in sample.token_ids], length, length, [])
    use_rope_(subject.model, rope, length)
    windows, sums, error, batch_size = compute_windows(
        windows, compute, settings["batch_size"], lambda batches: track(batches, f"position-loss  {rope}  {length}")
    )
    lines = _by_document(windows, sums, bucket)
    tokens = sum(line["tokens"] for line in lines)
    value, error = (None, failed(error, length)) if error else perplexity_of(VARIANTS["sliding"], lines)
    trained = trained_length(settings) or length
    results = {
        "value": value,
        "nll": nats_per_token(lines) if value is not None else None,
        "nll_inside": nats_per_token([line for line in lines if line["first"] < trained]) if value else None,
        "nll_beyond": nats_per_token([line for line in lines if line["first"] >= trained]) if value else None,
        "ranges": in_ranges(lines, length, [*EDGES, settings["trained_length"] or length]) if value else [],
        "tokens": tokens,
        "error": error,
        "batch_size": batch_size,
    }
    return results, {"buckets": lines}


def in_ranges(buckets: list[dict], length: int, edges: list[int]) -> list[dict]:
    """Perplexity of lines of the raw table by ranges of indices, cut at those of `edges` that lie below `length`.

    A bucket belongs to the range that its first index lies in.
    """
    cuts = [0, *sorted({edge for edge in edges if 0 < edge < length}), length]
    ranges = []
    for first, end in itertools.pairwise(cuts):
        within = [bucket for bucket in buckets if first <= bucket["first"] < end]
        if within:
            tokens = sum(bucket["tokens"] for bucket in within)
            nll = math.fsum(bucket["nll"] for bucket in within) / tokens
            perplexity = math.exp(nll) if nll < 700 else None  # beyond a float64
            ranges.append({"first": first, "end": end, "tokens": tokens, "perplexity": perplexity})
    return ranges


def nats_per_token(buckets: list[dict]) -> float | None:
    """Over lines of the raw table, token-weighted; None of no lines."""
    return math.fsum(b["nll"] for b in buckets) / sum(b["tokens"] for b in buckets) if buckets else None


def _by_document(windows: list[Window], sums: list[list[float]], bucket: int) -> list[dict]:
    parts: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for window, of_window in zip(windows, sums, strict=False):
        for number, nll in enumerate(of_window):
            first = number * bucket
            tokens = min(bucket, window.scored_len - first)
            parts.setdefault((window.document, first), []).append((tokens, nll))
    return [
        {
            "document": document,
            "first": first,
            "tokens": sum(tokens for tokens, _ in some),
            "nll": math.fsum(nll for _, nll in some),
        }
        for (document, first), some in sorted(parts.items())
    ]
