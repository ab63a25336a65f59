"""Loss against the token's index in its window: shows a boundary that an average over tokens hides.

Windows of `length` tokens do not overlap, so the target with index i is predicted from exactly the
i + 1 tokens before it in the window. Losses are summed over buckets of indices.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from typing_extensions import TypedDict

from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import Rope, use_rope_
from coca_hf.evaluate.perplexity import (
    VARIANTS,
    Window,
    compute_windows,
    nats_per_token,
    perplexity_cell,
    token_losses,
    tokens_of,
    value_of,
)
from coca_hf.evaluate.rows import Count, Identity, Positive, Raw, Run, Setting, TextRow
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import Measurement, Table, each_table, grid_of, powers, text_settings
from coca_hf.page import Grid, Part

EDGES = (256, 1024)


class Range(TypedDict):
    """Perplexity of the tokens whose index in their window is at least `first` and below `end`."""

    first: int
    end: int
    perplexity: float | None


class PositionRow(TextRow):
    """`ranges` are cut at `EDGES`, the config's trained length and the window's end; inside a
    bucket, at its end.

    The raw table `buckets` has document (index into `document_names`), first (index of the bucket),
    tokens and nll (their sum in nats). `in_ranges` makes other ranges from it.
    """

    length: Identity[Count]
    value: Positive  # the perplexity of all tokens
    nll: float | None  # nats per token
    ranges: list[Range] | None
    bucket: Setting[Count]  # tokens


def position_rows(run: Run, sample: Sample, bucket: int = 64) -> Iterator[dict]:
    """Yield the rows of a run."""
    sliding, model = VARIANTS["sliding"], run.loaded.model

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        def compute(batch: list[Window]) -> list[list[float]]:
            losses = token_losses(model, sample.token_ids, batch).double()  # (b, m)
            pieces = losses.split(min(bucket, length), dim=1)
            return torch.stack([piece.sum(1) for piece in pieces], dim=1).tolist()

        windows = sliding.windows([len(ids) for ids in sample.token_ids], length, length, [])
        use_rope_(model, rope, length)
        windows, sums = compute_windows(windows, compute, batches)
        lines = _by_document(windows, sums, bucket)
        results = value_of(sliding, lines)
        edges = [*EDGES, run.about["trained_length"] or length]
        ranges = in_ranges(lines, length, edges) if results["value"] else []
        return results | {"ranges": ranges, "stride": length}, {"buckets": lines}

    settings = {"task": "position-loss", "bucket": bucket, **sample.describe()}
    return run.rows(PositionRow, settings, measure)


def in_ranges(buckets: list[dict], length: int, edges: list[int]) -> list[dict]:
    """Perplexity by ranges of indices, cut at those of `edges` that lie below `length`.

    buckets: lines of the raw table. An edge inside a bucket cuts at the bucket's end.
    """
    begins = sorted({bucket["first"] for bucket in buckets})
    found = {next((first for first in begins if first >= edge), length) for edge in edges}
    cuts = [0, *sorted(cut for cut in found if 0 < cut < length), length]
    ranges = []
    for first, end in itertools.pairwise(cuts):
        if within := [bucket for bucket in buckets if first <= bucket["first"] < end]:
            nll = nats_per_token(within)
            perplexity = math.exp(nll) if nll < 700 else None  # beyond a float64
            about = {"first": first, "end": end, "tokens": tokens_of(within)}
            ranges.append(about | {"perplexity": perplexity})
    return ranges


def _by_document(windows: list[Window], sums: list[list[float]], bucket: int) -> list[dict]:
    """The lines of the raw table. sums: nats of every bucket, by window."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for window, of_window in zip(windows, sums, strict=True):
        for number, nll in enumerate(of_window):
            first = number * bucket
            tokens = min(bucket, window.tokens - first)
            found.setdefault((window.document, first), []).append((tokens, nll))
    return [
        {
            "document": document,
            "first": first,
            "tokens": sum(tokens for tokens, _ in some),
            "nll": math.fsum(nll for _, nll in some),
        }
        for (document, first), some in sorted(found.items())
    ]


def _parts(table: Table) -> Iterator[Part]:
    """Loss against the index of a token in windows of one length, and the perplexities."""
    points = {}
    for name, buckets in table.raw_of_longest("buckets").items():
        sums: dict[int, list[dict]] = {}
        for bucket in buckets:
            sums.setdefault(bucket["first"], []).append(bucket)
        size, length = table.rows[0]["bucket"], table.longest[name]["length"]
        points[name] = [  # the last bucket may be shorter
            (float(min(first + size, length)), nats_per_token(some))
            for first, some in sorted(sums.items())
        ]
    if points:
        yield table.figure(
            "position-loss",
            "Loss in nats per token against the index of the token in its window: the "
            "table beside it says how the windows do as a whole.",
            f"Loss against the token's index{table.at}: {table.settings}.",
            points,
            "loss (nats per token)",
            marked=False,
            x_label="token index",
            y_scale="linear",
            trained_lengths=table.trained_lengths,
            ticks=powers(2, points),
        )
    yield from [table.grid(), *_ranges(table), *table.missing()]


def _ranges(table: Table) -> list[Grid]:
    """Perplexity by ranges of the token's index, at one length."""
    lines = {
        name: {
            (one["first"], one["end"]): MEASUREMENT.show({"value": one["perplexity"]})
            for one in row["ranges"] or []
        }
        for name, row in table.longest.items()
    }
    columns = sorted({column for cells in lines.values() for column in cells})
    names = {(first, end): f"{first:,} to {end:,}" for first, end in columns}
    corner = f"perplexity of tokens{table.at}"
    return [grid_of(corner, lines, names)] if len(columns) > 1 else []


MEASUREMENT = Measurement(
    task="position-loss",
    title="Loss by position",
    explanation="Perplexity over disjoint windows, and the loss by the index of the token in its "
    "window: an average hides where the model breaks, this does not. Lower is better.",
    row=PositionRow,
    settings=lambda row: f"{text_settings(row)}, buckets of {row['bucket']} tokens",
    cell=perplexity_cell,
    parts=each_table(_parts),
    raw={"buckets": {"first": int, "tokens": int, "nll": float}},
)
