import math

import pytest
import torch

from coca_hf.evaluate.perplexity import perplexity_rows
from coca_hf.evaluate.position import in_ranges, nats_per_token, position_rows
from coca_hf.evaluate.sample import draw_sample
from tests.evaluate.runs import raw_of, run_of


def measure(loaded, books, out, length=100, bucket=64, **options):
    sample = draw_sample(loaded, str(books), length)
    (row,) = position_rows(run_of(loaded, out, length, **options), sample, bucket)
    return row, raw_of(row, out, "buckets")


@torch.no_grad()
def by_index(model, documents, length):
    """Losses by document and index, each from a forward over the tokens before it in its window."""
    found = {}
    for document, ids in enumerate(documents):
        for target in range(1, len(ids)):
            index = (target - 1) % length
            last = model(ids[None, target - 1 - index : target]).logits[0, -1]
            loss = -last.double().log_softmax(-1)[ids[target]].item()
            found.setdefault((document, index), []).append(loss)
    return found


@pytest.mark.parametrize(
    ("kind", "length", "bucket", "batch_size"),
    [("coca", 20, 6, 1), ("llama", 33, 33, 4), ("coca", 40, 10**25, 3)],
)
def test_buckets_are_a_loop_over_tokens(kind, length, bucket, batch_size, books, tmp_path, request):
    loaded = request.getfixturevalue(kind)
    loaded.model.double()
    for book in books.iterdir():
        book.write_text(book.read_text()[:45])
    options = {"bucket": bucket, "batch_size": batch_size}
    row, buckets = measure(loaded, books, tmp_path / "out", length, **options)
    losses = by_index(loaded.model, draw_sample(loaded, str(books), length).token_ids, length)
    for line in buckets:
        within = [
            loss
            for (document, index), some in losses.items()
            for loss in some
            if document == line["document"] and line["first"] <= index < line["first"] + bucket
        ]
        assert line["tokens"] == len(within)
        assert line["nll"] == pytest.approx(math.fsum(within), rel=1e-6)
    assert sum(line["tokens"] for line in buckets) == row["tokens"] == 3 * 44


def test_the_buckets_make_the_perplexity_of_disjoint_windows(llama, books, tmp_path):
    row, buckets = measure(llama, books, tmp_path / "out", 90, bucket=32)
    sample = draw_sample(llama, str(books), 90)
    (whole,) = perplexity_rows(run_of(llama, tmp_path / "out", 90), sample, 90)
    assert row["value"] == pytest.approx(whole["value"], rel=1e-9)
    assert row["tokens"] == whole["tokens"]
    assert math.exp(nats_per_token(buckets)) == pytest.approx(row["value"], rel=1e-12)


def test_ranges_are_cut_at_the_edges_and_the_trained_length(llama, books, tmp_path):
    row, buckets = measure(llama, books, tmp_path / "out", 128, bucket=16)
    # trained length 64
    assert [(part["first"], part["end"]) for part in row["ranges"]] == [(0, 64), (64, 128)]
    for part, near in zip(row["ranges"], (True, False), strict=True):
        within = [bucket for bucket in buckets if (bucket["first"] < 64) == near]
        assert part["perplexity"] == pytest.approx(math.exp(nats_per_token(within)))
    assert sum(part["tokens"] for part in row["ranges"]) == row["tokens"]
    firsts = [(part["first"], part["end"]) for part in in_ranges(buckets, 128, [32, 96, 4096])]
    assert firsts == [(0, 32), (32, 96), (96, 128)]


def test_an_edge_inside_a_bucket_cuts_at_the_buckets_end(llama, books, tmp_path):
    row, _ = measure(llama, books, tmp_path / "out", 128, bucket=50)  # trained length 64
    assert [(part["first"], part["end"]) for part in row["ranges"]] == [(0, 100), (100, 128)]
    _, single = measure(llama, books, tmp_path / "single", 128, bucket=1)
    expected = in_ranges(single, 128, [100])
    assert [part["tokens"] for part in row["ranges"]] == [part["tokens"] for part in expected]
    for part, one in zip(row["ranges"], expected, strict=True):
        assert part["perplexity"] == pytest.approx(one["perplexity"])


def test_a_range_beyond_a_float_has_no_perplexity():
    buckets = [{"first": 0, "tokens": 8, "nll": 16.0}, {"first": 8, "tokens": 1, "nll": 800.0}]
    near, far = (part["perplexity"] for part in in_ranges(buckets, 16, [8]))
    assert (near, far) == (pytest.approx(math.e**2), None)
