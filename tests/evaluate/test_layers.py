import math
import re

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import coca_hf
from coca_hf.errors import CocaError
from coca_hf.evaluate.copying import passages, repeated_sequences
from coca_hf.evaluate.layers import TEXTS, layer_rows
from coca_hf.evaluate.loaded_model import LoadedModel, load_model
from coca_hf.evaluate.sample import draw_sample
from coca_hf.report import read_tables
from tests.conftest import refused
from tests.evaluate.runs import raw_of, run_of

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 64}
SIZES |= {"initializer_range": 0.2, "intermediate_size": 80}


@pytest.fixture(params=["llama", "qwen2", "gpt_neox", "phi3"])
def pair(request, tiny_llama_dir, tiny_tokenizer, tmp_path):
    """An original and its conversion. Qwen2's last layers only look 9 tokens back; Phi-3 becomes a
    Mistral.
    """
    torch.manual_seed(1)
    source, size = tmp_path / "original", {"vocab_size": len(tiny_tokenizer), **SIZES}
    if request.param == "llama":
        source = tiny_llama_dir
    elif request.param == "qwen2":
        windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
        config = Qwen2Config(hidden_size=48, num_key_value_heads=2, **windows, **size)
        Qwen2ForCausalLM(config).save_pretrained(source)
    elif request.param == "phi3":
        config = Phi3Config(hidden_size=48, num_key_value_heads=2, pad_token_id=0, **size)
        Phi3ForCausalLM(config).save_pretrained(source)
    else:
        GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=48, **size)).save_pretrained(source)
    tiny_tokenizer.save_pretrained(source)
    coca_hf.convert_checkpoint(source, tmp_path / "coca")
    return [load_model(str(path), dtype="float32") for path in (source, tmp_path / "coca")]


def measure(pair, books, out, batch_size=None):
    original, converted = pair
    sample = draw_sample(converted, str(books), 40, special_tokens=False)
    run = run_of(converted, out, 40, batch_size=batch_size)
    (row,) = layer_rows(run, original, sample, num_cases=3)
    return row, sample, raw_of(row, out, "layers")


@torch.no_grad()
def by_hand(host, guest, number, original, loaded, sample):
    """The measures of `host` with layer `number` of `guest`, on the input of the host's layer."""
    texts = {
        "perplexity": (passages(loaded, 40, 3, 0, sample), 39),
        "copy": (repeated_sequences(loaded, 40, 3, 0)[0], 19),
        "again": (repeated_sequences(loaded, 40, 3, 0, sample)[0], 19),
    }
    found, divergences = {}, []
    for text, (cases, scored) in texts.items():
        losses, divergence = [], []
        for ids in cases:
            given = {}
            own = guest.base_model.layers[number]
            hook = own.register_forward_pre_hook(
                lambda _, __, kwargs, given=given: given.update(kwargs), with_kwargs=True
            )
            guest(ids[None], use_cache=False)
            hook.remove()
            hook = host.base_model.layers[number].register_forward_hook(
                lambda _, inputs, __, own=own, given=given: own(inputs[0], **given)
            )
            logits = host(ids[None], use_cache=False).logits[0, -scored - 1 : -1].log_softmax(-1)
            hook.remove()
            reference = original(ids[None]).logits[0, -scored - 1 : -1].log_softmax(-1)
            losses.append(-logits.gather(1, ids[-scored:, None]).mean().item())
            divergence.append((reference.exp() * (reference - logits)).sum(-1).mean().item())
        found[text] = sum(losses) / 3
        divergences.append(sum(divergence) / 3)
    return found | {"perplexity": math.exp(found["perplexity"]), "divergence": sum(divergences) / 3}


def test_swapped_layers_equal_a_slow_swap(pair, books, tmp_path):
    row, sample, lines = measure(pair, books, tmp_path / "out", batch_size=2)
    original, converted = (one.model for one in pair)
    for line in lines:
        alone = by_hand(original, converted, line["layer"], original, pair[1], sample)
        back = by_hand(converted, original, line["layer"], original, pair[1], sample)
        for name in ("divergence", *TEXTS):
            assert line[f"alone_{name}"] == pytest.approx(alone[name], rel=1e-3)
            assert line[f"back_{name}"] == pytest.approx(back[name], rel=1e-3)
        harm = (alone["divergence"] + row["value"] - back["divergence"]) / 2
        assert line["harm"] == pytest.approx(harm, rel=1e-3, abs=1e-4)
    assert row["order"] == sorted(range(3), key=lambda layer: -lines[layer]["harm"])
    assert "forward" not in vars(original.base_model.layers[0])


def test_a_model_beside_itself_has_no_harm(llama, books, tmp_path):
    row, _, lines = measure([llama, llama], books, tmp_path / "out")
    assert row["value"] == pytest.approx(0, abs=1e-6)
    assert all(line["harm"] == pytest.approx(0, abs=1e-6) for line in lines)
    assert all(row[text] == row[f"baseline_{text}"] for text in TEXTS)


def test_models_of_two_dtypes_can_be_swapped(llama, coca, books, tmp_path):
    alike, _, _ = measure([llama, coca], books, tmp_path / "out")
    llama.model.bfloat16()
    row, _, _ = measure([llama, coca], books, tmp_path / "out")
    assert row["value"] > 0
    assert row["row_id"] != alike["row_id"]  # not skipped as measured already
    tables = read_tables([tmp_path / "out"])
    assert [" in bfloat16," in table.settings for table in tables] == [False, True]


def test_the_command_and_the_page_say_which_layers_to_keep_first(
    tiny_llama_dir, tiny_coca_dir, books, tmp_path, coca_eval, monkeypatch
):
    monkeypatch.setattr("coca_hf.report.write.to_png", lambda figure: b"")
    out = tmp_path / "out"
    options = f"--data {books} --lengths 30 --cases 2 --out {out} --name '+ CoCA'"
    code, stdout, stderr = coca_eval(f"layers {tiny_llama_dir} {tiny_coca_dir}", options)
    assert code == 0, stderr
    assert "layers by context length" in stdout
    assert re.search(
        r"^keep first, measured at 30 tokens: [012],[012],[012]$", stdout, re.MULTILINE
    )
    assert coca_eval(f"report {out} --out {tmp_path / 'page'}")[0] == 0
    page = (tmp_path / "page" / "report.md").read_text()
    measures = "perplexity | second copy (nats) | read again (nats)"
    said = ["## Harm of each layer", "+ CoCA: keep first ", "| tiny-llama | "]
    for words in [*said, f"| as they are, at length 30 | {measures} |"]:
        assert words in page
    assert (tmp_path / "page" / "layers.png").is_file()


def test_layers_that_were_kept_have_no_harm(llama, tiny_llama_dir, books, tmp_path):
    coca_hf.convert_checkpoint(tiny_llama_dir, tmp_path / "coca", keep_layers=[0, 2])
    row, _, lines = measure([llama, load_model(str(tmp_path / "coca"))], books, tmp_path / "out")
    assert row["order"][0] == 1
    assert [line["harm"] == pytest.approx(0, abs=1e-6) for line in lines] == [True, False, True]
    assert lines[1]["alone_divergence"] == pytest.approx(row["value"], rel=1e-4)


def test_models_that_cannot_be_compared_are_refused(llama, coca, tiny_tokenizer, books, tmp_path):
    vocab_size = {"vocab_size": len(tiny_tokenizer)}
    config = GPT2Config(**vocab_size, n_embd=12, n_layer=2, n_head=2, n_positions=64)
    gpt2 = LoadedModel(GPT2LMHeadModel(config).eval(), tiny_tokenizer, "gpt2", "/gpt2", "0123")
    unknown = "coca-eval layers: got GPT2LMHeadModel, whose layers it does not understand"
    for pair, message in (
        ([gpt2, gpt2], unknown),
        ([coca, llama], r"got a CoCA model before .*; expected the original first"),
    ):
        refused(message, measure, pair, books, tmp_path / "out")
    embeddings = coca.model.get_input_embeddings()
    embeddings.weight.data = torch.cat((embeddings.weight.data,) * 2)
    rows = len(tiny_tokenizer)
    with pytest.raises(CocaError, match=f"got {rows} rows of embeddings, expected {2 * rows} as"):
        measure([llama, coca], books, tmp_path / "out")
    llama.model.config.num_hidden_layers = 7
    other = r"tiny-llama: got num_hidden_layers 7, expected 3 as .*tiny-coca has"
    refused(other, measure, [llama, coca], books, tmp_path / "out")
