import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

import coca_hf
from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.perplexity import VARIANTS, Window, perplexity_rows, token_losses
from coca_hf.evaluate.sample import Sample, draw_sample
from coca_hf.evaluate.speed import speed_rows
from tests.evaluate.runs import run_of
from tests.evaluate.test_cli import rows_in


def double_loop(model, documents, length, stride):
    """Perplexity token by token, each from a forward over the tokens before it in its window."""
    losses = []
    for ids in documents:
        for target in range(1, len(ids)):
            starts = itertools.count(step=stride)
            start = next(start for start in starts if start + length >= target)
            with torch.no_grad():
                last = model(input_ids=ids[None, start:target]).logits[0, -1]
            losses.append(-last.double().log_softmax(-1)[ids[target]].item())
    return math.exp(math.fsum(losses) / len(losses))


def documents_of(*lengths, vocab_size=259):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def sample_of(documents):
    about = {"data": "x", "column": "text", "split": "test", "seed": 0, "max_tokens": None}
    return Sample(about, [*"abc"[: len(documents)]], documents)


TRAINED = 6  # tokens, so that a window of 12 is beyond and one of 5 is not


def inv_freq(rope, length):
    """The formulas of linear and dynamic RoPE, for four pairs, base 10,000 and factor 3."""
    stretch = max(3 * length / TRAINED - 2, 1) if rope == "dynamic:3" else 1
    base, slower = 10_000 * stretch ** (8 / 6), 3 if rope == "linear:3" else 1
    return torch.tensor([base ** (-pair / 4) / slower for pair in range(4)])


def sharp_model(constraint):
    """In float64, with an attention so sharp that every position counts; without a constraint, a
    LLaMA.
    """
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes["max_position_embeddings"] = TRAINED
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, **heads)).eval().double()
    return coca_hf.patch_(plain, constraint) if constraint else plain


@pytest.mark.parametrize(
    ("constraint", "rope", "length", "stride"),
    [
        *(("slack", "default", 5, 1), (None, "default", 5, 3), ("strict", "default", 5, 5)),
        *((None, "default", 12, 4), ("strict", "default", 12, 5), ("slack", "default", 12, 12)),
        *(("slack", "linear:3", 12, 5), (None, "dynamic:3", 5, 3), ("strict", "dynamic:3", 12, 5)),
    ],
)
def test_perplexity_equals_a_loop_over_tokens(
    constraint, rope, length, stride, tiny_tokenizer, tmp_path
):
    """One, three and as many sequences at a time as auto takes, none of them padded or masked."""
    model, documents = sharp_model(constraint), documents_of(13, 17, 26)
    sample = sample_of(documents)

    reference = copy.deepcopy(model)
    reference.model.rotary_emb.inv_freq = inv_freq(rope, length)
    expected = double_loop(reference, documents, length, stride)

    passages = {
        tuple(ids[i:j].tolist())
        for ids in documents
        for i, j in itertools.combinations(range(len(ids)), 2)
    }
    shapes = []

    def look(module, positional, given):
        assert not positional
        assert given.keys() <= {"input_ids", "use_cache", "logits_to_keep"}
        assert {tuple(ids) for ids in given["input_ids"].tolist()} <= passages
        shapes.append(given["input_ids"].shape)

    loaded = LoadedModel(model, tiny_tokenizer, "model", "/model", "0123")
    with model.register_forward_pre_hook(look, with_kwargs=True):
        for batch_size in (1, 3, None):
            out, how = tmp_path / str(batch_size), {"ropes": rope, "batch_size": batch_size}
            (row,) = perplexity_rows(run_of(loaded, out, length, **how), sample, stride)
            assert row["tokens"] == 12 + 16 + 25
            assert row["value"] == pytest.approx(expected, rel=1e-6)
    assert {1, 3} < {batch for batch, _ in shapes}


def test_losses_over_a_large_vocabulary_are_exact():
    """The sum of 50,000 exponentials in float32 must not lose digits against float64."""
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


def test_rows_say_what_is_needed_to_repeat_them(coca, books, tmp_path):
    sample = draw_sample(coca, str(books), 40)
    short, long = perplexity_rows(run_of(coca, tmp_path / "out", 16, 40), sample, 24)
    assert (short["length"], short["stride"], long["length"], long["stride"]) == (16, 16, 40, 24)
    assert long["value"] == pytest.approx(math.exp(long["nll"]))
    expected = {"model": "tiny-coca", "task": "perplexity", "rope": "default", "error": None}
    expected |= {"tokens": 210 + 230 + 250 - 3, "documents": 3, "seed": 0, "trained_length": 64}
    expected |= {"document_names": ["austen.txt", "bronte.txt", "conrad.txt"]}
    expected |= {"coca_constraint": "slack", "tokens_seen": 0, "dtype": "float32"}
    assert long.items() >= expected.items()
    packages = "coca-hf torch transformers tokenizers accelerate datasets numpy pyarrow python cuda"
    assert set(long["versions"]) == set(packages.split())


def test_a_length_beyond_a_models_positions_is_an_error_of_its_row_only(llama, tmp_path):
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=259, n_embd=12, n_head=2, n_layer=1, n_positions=32)
    llama.model = AutoModelForCausalLM.from_config(config).eval()
    documents = documents_of(80)
    long, short = perplexity_rows(run_of(llama, tmp_path, 50, 20), sample_of(documents), 10)
    assert long["value"] is None
    failed = "the model failed on 50 tokens (IndexError: "
    assert long["error"].startswith(failed)
    [timed] = speed_rows(run_of(llama, tmp_path, 50), modes=["prefill"], repeats=1, warmup=0)
    assert timed["error"].startswith(failed)
    expected = double_loop(llama.model, documents, 20, 10)
    assert short["value"] == pytest.approx(expected, rel=1e-5)


def test_lm_evals_rolling_perplexity_equals_ours_on_equal_windows(coca, tmp_path):
    """Equal windows: stride and length equal, no score for the first token, whole windows of 13."""
    texts = ["a sea voyage, a ball and no trains at all"[:39], ("one more voyage, " * 4)[:65]]
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    options = {"tokenizer": coca.tokenizer, "max_length": 13, "batch_size": 2}
    model = huggingface.HFLM(pretrained=coca.model, **options)
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), idx) for idx, text in enumerate(texts)
    ]
    loglikelihoods = model.loglikelihood_rolling(requests, disable_tqdm=True)
    prefix = [model.prefix_token_id]
    sample = sample_of([torch.tensor(prefix + coca.tokenizer(text).input_ids) for text in texts])
    (row,) = perplexity_rows(run_of(coca, tmp_path, 13), sample, 13)
    assert row["tokens"] == 39 + 65
    assert row["value"] == pytest.approx(math.exp(-sum(loglikelihoods) / (39 + 65)), rel=1e-6)


@torch.no_grad()
def yarn(model, texts, bos, max_length, sliding_window):
    """Mean of the losses that transformers itself gives for windows of text with masked labels."""
    room = max_length - (bos is not None)
    losses = []
    for ids in texts:
        done = 0
        for begin in range(0, len(ids), sliding_window):
            end = min(begin + room, len(ids))
            first = torch.tensor([] if bos is None else [bos], dtype=torch.long)
            window = torch.cat((first, ids[begin:end]))
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
    special_tokens = VARIANTS[variant].special_tokens
    sample = draw_sample(loaded, str(books), length, special_tokens=special_tokens)
    (row,) = perplexity_rows(run_of(loaded, out, length, **options), sample, stride, variant)
    return row["value"]


def written(llama, books, change):
    """The tokens of the books, each of them changed first."""
    for path in books.iterdir():
        path.write_text(change(path.read_text()))
    return [
        torch.tensor(llama.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"])
        for path in sorted(books.iterdir())
    ]


@pytest.mark.parametrize(
    ("bos", "length", "stride"),
    [(True, 50, 16), (False, 64, 64), (False, 49, 7), (True, 210, 30), (True, 2, 2)],
)
def test_yarn_equals_its_script(llama, books, tmp_path, length, stride, bos):
    if not bos:
        llama.tokenizer.bos_token = None
    texts = written(llama, books, lambda text: text[: 30 * length])
    batch_size = 3 if length > 2 else None  # chosen by the length of what is read: 0 tokens
    got = value(llama, books, tmp_path / "out", "yarn", length, stride, batch_size=batch_size)
    expected = yarn(llama.model, texts, llama.tokenizer.bos_token_id, length, stride)
    assert got == pytest.approx(expected, rel=1e-5)


def test_yarn_refuses_a_beginning_that_the_model_does_not_embed(llama, books, tmp_path):
    llama.tokenizer.add_special_tokens({"bos_token": "<begin>"})
    with pytest.raises(CocaError, match=r"beginning of a text: got token id .* below the model's"):
        value(llama, books, tmp_path / "out", "yarn", 50, 16)
    assert not (tmp_path / "out").exists()
    value(llama, books, tmp_path / "out", "longlora", 50, 16)


@pytest.mark.parametrize(("length", "stride"), [(50, 16), (64, 64), (331, 100)])
def test_longlora_equals_its_script(llama, books, tmp_path, length, stride):
    texts = written(llama, books, lambda text: text * 2)
    got = value(llama, books, tmp_path / "out", "longlora", length, stride, batch_size=4)
    assert got == pytest.approx(longlora(llama.model, texts, length, stride), rel=1e-5)


def test_variants_are_rows_of_their_own_and_their_values_differ(llama, books, tmp_path):
    out = tmp_path / "out"
    assert len({value(llama, books, out, variant, 60, 20) for variant in VARIANTS}) == 3
    assert len({row["row_id"] for row in rows_in(out)}) == 3


def test_a_stream_too_short_for_longlora_is_refused(llama, books, tmp_path):
    for name in ("bronte.txt", "conrad.txt"):
        (books / name).unlink()
    said = "longlora: got 210 tokens in all documents together, expected more than 220"
    with pytest.raises(CocaError, match=said):
        value(llama, books, tmp_path / "out", "longlora", 200, 20)
