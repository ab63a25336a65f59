"""Rotary angles depend on the positions of their own row, and on nothing else."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coca_hf.models.rotary import CocaRotaryEmbedding, ntk_base
from tests.models.test_llama import tiny_model, tokens

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 3.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def config_of(rope):
    return LlamaConfig(hidden_size=48, num_attention_heads=3, max_position_embeddings=64, rope_parameters=dict(rope))


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_angles_are_those_of_transformers_for_a_fresh_module(rope, length):
    positions = torch.arange(length)[None]
    cos, sin = CocaRotaryEmbedding(config_of(rope))(torch.empty(0), positions)
    stock_cos, stock_sin = LlamaRotaryEmbedding(config_of(rope))(torch.empty(0), positions)
    assert cos.shape == (1, length, 8)
    torch.testing.assert_close(torch.cat((cos, cos), dim=-1), stock_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat((sin, sin), dim=-1), stock_sin, atol=1e-5, rtol=0)


def test_a_long_row_changes_neither_its_batch_mate_nor_the_next_call():
    rotary = CocaRotaryEmbedding(config_of(ROPES["dynamic"]))
    short, long = torch.arange(20)[None], torch.arange(200)[None]
    before = rotary(torch.empty(0), short)[0]
    batch = torch.cat((torch.nn.functional.pad(short, (0, 180)), long))
    together = rotary(torch.empty(0), batch)[0]
    assert torch.equal(together[:1, :20], before)
    assert torch.equal(together[1:], rotary(torch.empty(0), long)[0])
    assert torch.equal(rotary(torch.empty(0), short)[0], before)


def test_dynamic_base_grows_only_past_the_trained_length():
    assert ntk_base(1e4, 4.0, 64, 64, 16) == 1e4
    assert ntk_base(1e4, 4.0, 20, 64, 16) == 1e4
    assert ntk_base(1e4, 4.0, 128, 64, 16) == pytest.approx(1e4 * 5 ** (16 / 14))


@pytest.mark.parametrize("total", [64, 96, 192])
@pytest.mark.parametrize("prompt_len", [50, 90, 150])
def test_generation_past_the_trained_length_equals_the_full_forward(prompt_len, total):
    """The base is fixed from prompt + new tokens, so a cache is exact: 64 trained; 1, 1.5 and 3 times that in all."""
    if prompt_len >= total:
        pytest.skip("nothing is left to generate")
    model = tiny_model(rope_parameters=dict(ROPES["dynamic"])).double()
    prompt = tokens(1, prompt_len)
    out = model.generate(prompt, max_length=total, return_dict_in_generate=True, output_logits=True, do_sample=False)
    full = model(out.sequences, rope_length=total).logits[:, prompt_len - 1 : -1]
    assert (torch.stack(out.logits, dim=1) - full).abs().max() < 1e-5  # generate hands out fp32
    other = model(out.sequences, rope_length=total + 64).logits[:, prompt_len - 1 : -1]
    assert (full - other).abs().max() > 1e-3


def test_a_dialogue_goes_on_within_its_planned_length_and_is_refused_beyond_it():
    model = tiny_model(rope_parameters=dict(ROPES["dynamic"])).double()
    prompt = tokens(1, 60)
    whole = model.generate(prompt, max_length=100, rope_length=120, do_sample=False)
    first = model.generate(prompt, max_length=80, rope_length=120, do_sample=False, return_dict_in_generate=True)
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_length=100, do_sample=False)
    assert torch.equal(second, whole)
    with pytest.raises(ValueError, match="got 130 tokens in all, but the rotary base was planned for 120; start again"):
        model.generate(first.sequences, past_key_values=first.past_key_values, max_length=130)
    with pytest.raises(ValueError, match="planned for 70"):
        model.generate(prompt, max_length=80, rope_length=70)
