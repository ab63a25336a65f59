import itertools

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MambaConfig, MambaForCausalLM

from coca_hf.evaluate.attention_maps import attention_map_rows
from coca_hf.evaluate.loaded_model import load_model
from coca_hf.evaluate.sample import draw_sample
from tests.conftest import refused
from tests.evaluate.runs import raw_of, run_of


def measure(loaded, baseline, books, out, length=40):
    sample = draw_sample(loaded, str(books), length)
    (row,) = attention_map_rows(run_of(loaded, out, length), baseline, sample)
    return row, raw_of(row, out, "heads")


def test_a_model_is_no_distance_from_itself(llama, tiny_llama_dir, books, tmp_path):
    row, heads = measure(llama, load_model(str(tiny_llama_dir)), books, tmp_path / "out")
    assert row["value"] == pytest.approx(0, abs=1e-7)
    assert row["sink"] == row["baseline_sink"]
    places = list(itertools.product(range(3), range(6)))
    assert [(line["layer"], line["head"]) for line in heads] == places
    assert all(line["previous"] == line["baseline_previous"] > 0 for line in heads)
    assert llama.model.config._attn_implementation == "sdpa"  # as it was


@torch.no_grad()
def test_numbers_are_those_of_a_loop_over_queries(llama, coca, books, tmp_path):
    row, heads = measure(coca, llama, books, tmp_path / "out", length=30)
    maps = {}
    for name, loaded in (("ours", coca), ("theirs", llama)):
        loaded.model.set_attn_implementation("eager")
        documents = draw_sample(loaded, str(books), 30).token_ids
        found = [
            loaded.model(ids[None, :30], output_attentions=True).attentions for ids in documents
        ]
        # (layers, h, m, m) of each document
        maps[name] = [torch.stack(layers)[:, 0].double() for layers in found]
    for line in heads:
        layer, head = line["layer"], line["head"]
        divergences, sinks, previous = [], [], []
        for ours, theirs in zip(maps["ours"], maps["theirs"], strict=True):
            for query in range(30):
                q, p = (of[layer, head, query, : query + 1] for of in (ours, theirs))
                divergences.append((p * (p / q).log()).sum().item())
                if query:
                    sinks.append(q[0].item())
                    previous.append(q[query - 1].item())
        assert line["divergence"] == pytest.approx(sum(divergences) / 90)
        assert line["sink"] == pytest.approx(sum(sinks) / 87)
        assert line["previous"] == pytest.approx(sum(previous) / 87)
    assert row["value"] == pytest.approx(sum(line["divergence"] for line in heads) / 18)
    assert row["value"] > 1e-3
    assert (row["tokens"], row["baseline"]) == (90, "tiny-llama")


def other_layers(llama):
    llama.model.config.num_hidden_layers = 1


def other_tokens(llama):
    names = llama.tokenizer.convert_ids_to_tokens
    llama.tokenizer.convert_ids_to_tokens = lambda ids: names([258 - number for number in ids])


SIZES = {"vocab_size": 259, "hidden_size": 48, "num_hidden_layers": 3}


def other_family(llama):
    config = GPTNeoXConfig(**SIZES, num_attention_heads=6, intermediate_size=80)
    llama.model = GPTNeoXForCausalLM(config)


def no_heads(llama):
    llama.model = MambaForCausalLM(MambaConfig(**SIZES))


OTHERS = {
    other_layers: "num_hidden_layers 1, expected 3",
    other_tokens: r"a tokenizer that takes the tokens of austen\.txt for others, expected",
    other_family: r"model_type gpt_neox, expected llama as .*tiny-coca has;",
    no_heads: "MambaForCausalLM, expected a model with attention",
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_baseline_that_is_not_the_original_is_refused(llama, coca, books, tmp_path, change):
    change(llama)
    refused(f"got {OTHERS[change]}", measure, coca, llama, books, tmp_path)
