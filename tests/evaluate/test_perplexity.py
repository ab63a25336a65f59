import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from coca_hf.errors import CocaError
from coca_hf.evaluate.perplexity import compute_windows, perplexity_rows, token_losses
from coca_hf.evaluate.rope import Rope
from coca_hf.evaluate.rows import RowStore
from coca_hf.evaluate.sample import Sample, draw_sample
from coca_hf.evaluate.variants import Window, windows_of

DEFAULT = Rope("default")


def double_loop(model, documents, length, stride):
    """Perplexity token by token: each by a forward over what its window holds before it."""
    losses = []
    for ids in documents:
        for target in range(1, len(ids)):
            start = next(start for start in itertools.count(step=stride) if start + length >= target)
            with torch.no_grad():
                last = model(input_ids=ids[None, start:target]).logits[0, -1]
            losses.append(-last.double().log_softmax(-1)[ids[target]].item())
    return math.exp(math.fsum(losses) / len(losses))


def total_nll(model, documents, length, stride, batch_size=1):
    windows = [window for index, ids in enumerate(documents) for window in windows_of(len(ids), length, stride, index)]

    def compute(batch):
        return token_losses(model, documents, batch).double().sum(-1).tolist()

    windows, nlls, error, _ = compute_windows(windows, compute, batch_size)
    assert error is None
    return math.fsum(nlls), sum(window.scored_len for window in windows)


def documents_of(*lengths, vocab_size=259):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize(
    ("length", "stride", "batch_size", "doc_lens"),
    [
        (7, 3, 1, (23,)),
        (8, 8, 2, (17, 26)),
        (13, 5, 4, (14, 31, 32)),
        (6, 1, 3, (11,)),
        (16, 15, 5, (17, 47, 49)),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "coca"])
def test_perplexity_equals_a_double_loop_over_tokens(kind, length, stride, batch_size, doc_lens, request):
    model = request.getfixturevalue(kind).model.double()
    documents = documents_of(*doc_lens)
    nll, tokens = total_nll(model, documents, length, stride, batch_size)
    assert tokens == sum(doc_lens) - len(doc_lens)
    assert math.exp(nll / tokens) == pytest.approx(double_loop(model, documents, length, stride), rel=1e-6)


def test_every_combination_of_length_stride_and_batch_equals_the_double_loop(llama):
    """Documents of unequal lengths, so that batches of windows differ in shape and last windows are short."""
    model, documents = llama.model.double(), documents_of(12, 15, 17)
    for length in (2, 5, 12):
        for stride in {1, length - 1, length}:
            expected = double_loop(model, documents, length, stride)
            for batch_size in (1, 7, 100):
                nll, tokens = total_nll(model, documents, length, stride, batch_size)
                assert tokens == 11 + 14 + 16
                assert math.exp(nll / tokens) == pytest.approx(expected, rel=1e-6), (length, stride, batch_size)


@pytest.mark.parametrize("batch_size", [2, 3, 64])
def test_batch_size_does_not_change_the_result(coca, batch_size):
    documents = documents_of(41, 29, 53)
    alone, tokens = total_nll(coca.model, documents, 11, 4)
    together, _ = total_nll(coca.model, documents, 11, 4, batch_size)
    assert together / tokens == pytest.approx(alone / tokens, rel=1e-6)


def test_a_uniform_models_perplexity_is_its_vocabulary_size(llama):
    nn.init.zeros_(llama.model.lm_head.weight)
    nll, tokens = total_nll(llama.model, documents_of(37, 30), 12, 5)
    assert math.exp(nll / tokens) == pytest.approx(llama.model.config.vocab_size, rel=1e-6)


def test_losses_over_a_large_vocabulary_are_exact():
    """Of 50,000 logits in float32, against float64: the sum of their exponentials must not lose digits."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 21, 50_000, generator=generator)

    class Fixed(nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=logits)

    documents = documents_of(22, vocab_size=50_000) + documents_of(22, vocab_size=49_000)
    losses = token_losses(Fixed(), documents, [Window(0, 0, 21, 21), Window(1, 0, 21, 21)])
    targets = torch.stack(documents)[:, 1:, None]
    expected = -logits.double().log_softmax(-1).gather(-1, targets)[..., 0]
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=3e-6)


def test_perplexity_weighs_tokens_and_not_windows_or_documents():
    """A model that gives token 1 half the probability after any token, and all others the rest in equal parts."""
    vocab_size = 5
    logits = torch.full((vocab_size,), math.log(0.5 / (vocab_size - 1)))
    logits[1] = math.log(0.5)

    class Unigram(nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=logits.expand(*input_ids.shape, vocab_size))

    documents = [torch.ones(31, dtype=torch.long), torch.full((8,), 2)]
    nll, tokens = total_nll(Unigram(), documents, 7, 3)
    assert tokens == 30 + 7
    assert nll == pytest.approx(-30 * math.log(0.5) - 7 * math.log(0.125), rel=1e-6)


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (5, 1), (5, 2), (6, 6), (9, 7)])
def test_every_token_but_the_first_is_scored_exactly_once(length, stride):
    for doc_len in range(length, 40):
        windows = windows_of(doc_len, length, stride)
        scored = []
        for number, window in enumerate(windows):
            end = window.start + window.input_len + 1  # one past the last target
            assert window.start == number * stride
            assert window.input_len <= length
            assert end <= doc_len
            scored += range(end - window.scored_len, end)
        assert scored == list(range(1, doc_len))


def test_a_stride_longer_than_the_window_is_refused():
    with pytest.raises(CocaError, match="stride: got 9, expected 1 to 8"):
        windows_of(30, 8, 9)


def test_a_document_shorter_than_a_window_is_refused():
    with pytest.raises(CocaError, match="document 4: got 7 tokens, expected at least 8"):
        windows_of(7, 8, 2, document=4)


def rows_of(subject, books, out_dir, lengths=(16, 40), stride=24, ropes=(DEFAULT,), **options):
    sample = draw_sample(subject, str(books), max(lengths))
    return list(perplexity_rows(subject, sample, list(lengths), stride, list(ropes), RowStore(out_dir), **options))


def test_rows_say_what_is_needed_to_repeat_them(coca, books, tmp_path):
    short, long = rows_of(coca, books, tmp_path / "out")
    assert (short["length"], short["stride"], long["length"], long["stride"]) == (16, 16, 40, 24)
    assert long["value"] == pytest.approx(math.exp(long["nll"]))
    expected = {
        "model": "tiny-coca",
        "task": "perplexity",
        "rope": "default",
        "tokens": 210 + 230 + 250 - 3,
        "documents": 3,
        "document_names": ["austen.txt", "bronte.txt", "conrad.txt"],
        "seed": 0,
        "trained_length": 64,
        "coca_constraint": "slack",
        "tokens_seen": 0,
        "dtype": "float32",
        "error": None,
    }
    assert {key: long[key] for key in expected} == expected
    assert set(long["versions"]) == {
        *("coca-hf", "torch", "transformers", "tokenizers", "accelerate", "datasets", "python", "cuda")
    }


def test_the_value_of_a_row_is_the_perplexity_under_its_rope_setting(llama, tmp_path):
    (tmp_path / "short.txt").write_text("a sea voyage, a ball and no trains at all; " * 3)
    plain, stretched = rows_of(
        *(llama, tmp_path / "short.txt", tmp_path / "out"), lengths=(90,), ropes=(DEFAULT, Rope("linear", 3.0))
    )
    # The last setting, linear by 3, is still on the live model.
    documents = draw_sample(llama, str(tmp_path / "short.txt"), 91).token_ids
    assert stretched["value"] == pytest.approx(double_loop(llama.model, documents, 90, 24), rel=1e-4)
    assert abs(plain["value"] / stretched["value"] - 1) > 0.01


def test_lm_evals_rolling_perplexity_is_ours_where_its_windows_are(coca, tmp_path):
    """A stride of the length, a first token that is not scored, and texts of 3 and 5 whole windows of 13 tokens."""
    texts = ["a sea voyage, a ball and no trains at all"[:39], ("one more voyage, " * 4)[:65]]
    model = HFLM(pretrained=coca.model, tokenizer=coca.tokenizer, max_length=13, batch_size=2)
    requests = [Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=i) for i, text in enumerate(texts)]
    loglikelihoods = model.loglikelihood_rolling(requests, disable_tqdm=True)
    sample = Sample({"data": "x", "column": "text", "split": "test", "seed": 0, "max_tokens": None})
    for text in texts:
        sample.names.append(text)
        sample.token_ids.append(torch.tensor([model.prefix_token_id, *coca.tokenizer(text).input_ids]))
    (row,) = perplexity_rows(coca, sample, [13], 13, [DEFAULT], RowStore(tmp_path))
    assert row["tokens"] == 39 + 65
    assert row["value"] == pytest.approx(math.exp(-sum(loglikelihoods) / (39 + 65)), rel=1e-6)


def test_rows_already_there_are_not_measured_again(llama, books, tmp_path, monkeypatch):
    first = rows_of(llama, books, tmp_path / "out")
    monkeypatch.setattr(llama.model, "forward", None)
    assert rows_of(llama, books, tmp_path / "out") == first
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("change", ["model", "data", "dtype", "length", "rope"])
def test_a_changed_setting_is_measured_again(llama, books, tmp_path, change):
    rows_of(llama, books, tmp_path / "out", lengths=(40,))
    options = {}
    if change == "model":
        llama.fingerprint = "another"
    elif change == "data":
        (books / "conrad.txt").write_text("t" * 250)
    elif change == "dtype":
        llama.model.bfloat16()
    elif change == "rope":
        options["ropes"] = (Rope("linear", 2.0),)
    rows_of(llama, books, tmp_path / "out", lengths=(41 if change == "length" else 40,), **options)
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 2


def test_a_model_that_emits_nan_gets_a_row_that_says_so(llama, books, tmp_path):
    nn.init.constant_(llama.model.lm_head.weight, math.nan)
    rows = rows_of(llama, books, tmp_path / "out")
    assert [row["value"] for row in rows] == [None, None]
    assert all(row["error"] == "the model's loss is nan" for row in rows)


def test_lengths_beyond_learned_positions_get_a_row_that_says_so_and_the_rest_goes_on(llama, tmp_path):
    torch.manual_seed(1)
    llama.model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=12, n_head=2, n_layer=1, n_positions=32)).eval()
    sample = Sample({"data": "x", "column": "text", "split": "test", "seed": 0, "max_tokens": None})
    sample.names, sample.token_ids = ["a"], documents_of(80)
    long, short = perplexity_rows(llama, sample, [50, 20], 10, [DEFAULT], RowStore(tmp_path / "out"))
    assert long["value"] is None
    assert long["error"].startswith("the model failed on 50 tokens (IndexError")
    assert short["value"] == pytest.approx(double_loop(llama.model, sample.token_ids, 20, 10), rel=1e-5)
