"""Our variants give the numbers of the scripts that they follow, restated here."""

import math

import pytest
import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import check_choice
from coca_hf.evaluate.perplexity import VARIANTS, perplexity_rows
from coca_hf.evaluate.rows import RowStore
from coca_hf.evaluate.sample import draw_sample
from tests.evaluate.runs import run_of


@torch.no_grad()
def yarn(model, texts, bos, max_length, sliding_window, truncate):
    """Mean of the losses that transformers itself gives for windows of text with masked labels."""
    room = max_length - (bos is not None)
    if truncate:
        texts, sliding_window = [ids[:room] for ids in texts], room
    losses = []
    for ids in texts:
        done = 0
        for begin in range(0, len(ids), sliding_window):
            end = min(begin + room, len(ids))
            window = (
                ids[begin:end] if bos is None else torch.cat((torch.tensor([bos]), ids[begin:end]))
            )
            labels = window.clone()
            labels[: max(len(window) - (end - done), 0)] = -100
            losses.append(model(window[None], labels=labels[None]).loss)
            done = end
            if end == len(ids):
                break
    return math.exp(torch.stack(losses).double().mean())


@torch.no_grad()
def longlora(model, texts, seq_len, sliding_window):
    """Mean of the losses that transformers gives for whole windows of the stream, the last one left
    out.
    """
    stream = torch.cat(texts)
    begins = list(range(0, len(stream) - seq_len, sliding_window))[:-1]
    windows = [stream[None, begin : begin + seq_len] for begin in begins]
    return 2.71828 ** torch.stack([model(x, labels=x).loss for x in windows]).double().mean().item()


def value(loaded, books, out, variant, length, stride, **options):
    sample = draw_sample(
        loaded, str(books), length, special_tokens=VARIANTS[variant].special_tokens
    )
    (row,) = perplexity_rows(run_of(loaded, out, length, **options), sample, stride, variant)
    return row["value"]


@pytest.fixture
def texts(llama, books):
    return [
        torch.tensor(llama.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"])
        for path in sorted(books.iterdir())
    ]


@pytest.mark.parametrize(("length", "stride"), [(50, 16), (64, 64), (49, 7), (210, 30), (10, 60)])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("bos", [True, False])
def test_yarn(llama, books, texts, tmp_path, length, stride, truncate, bos):
    if not bos:
        llama.tokenizer.bos_token = None
    variant = "yarn-truncate" if truncate else "yarn"
    got = value(llama, books, tmp_path / "out", variant, length, min(stride, length), batch_size=3)
    expected = yarn(
        llama.model, texts, llama.tokenizer.bos_token_id, length, min(stride, length), truncate
    )
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("length", "stride"), [(50, 16), (64, 64), (331, 100)])
def test_longlora(llama, books, texts, tmp_path, length, stride):
    # A document of 420 tokens
    (books / "austen.txt").write_text((books / "austen.txt").read_text() * 2)
    texts[0] = torch.cat((texts[0], texts[0]))
    for name in ("bronte.txt", "conrad.txt"):
        (books / name).write_text((books / name).read_text() * 2)
    texts[1:] = [torch.cat((ids, ids)) for ids in texts[1:]]
    got = value(llama, books, tmp_path / "out", "longlora", length, stride, batch_size=4)
    assert got == pytest.approx(longlora(llama.model, texts, length, stride), rel=1e-5)


def test_variants_are_rows_of_their_own_and_their_values_differ(llama, books, tmp_path):
    values = {
        variant: value(llama, books, tmp_path / "out", variant, 60, 20) for variant in VARIANTS
    }
    assert len(set(values.values())) == 4
    assert len({row["row_id"] for row in RowStore(tmp_path / "out")._rows}) == 4


def test_a_stream_too_short_for_longlora_is_refused(llama, books, tmp_path):
    for name in ("bronte.txt", "conrad.txt"):
        (books / name).unlink()
    with pytest.raises(
        CocaError,
        match="longlora: got 210 tokens in all documents together, expected more than 220",
    ):
        value(llama, books, tmp_path / "out", "longlora", 200, 20)


def test_an_unknown_variant_is_refused_with_the_known_ones():
    known = "expected one of sliding, yarn, yarn-truncate, longlora"
    with pytest.raises(CocaError, match=f"--variant: got 'proof', {known}"):
        check_choice("--variant", "proof", VARIANTS)
