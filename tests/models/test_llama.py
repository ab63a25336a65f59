"""The CoCA LLaMA: what it computes on every path people take, and what it declares to transformers."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from coca_hf import CocaLlamaConfig, CocaLlamaForCausalLM
from coca_hf.models.reference import use_reference_
from tests.models.families import tiny_model, tokens

# transformers' eager attention takes the softmax in fp32, where the mask of an fp64 model
# overflows.
BACKENDS = {"eager": (torch.float32, 2e-5), "sdpa": (torch.float64, 1e-11)}
CASES = [
    pytest.param(constraint, kv_heads, id=f"{constraint}-{name}")
    for constraint in ("slack", "strict")
    for name, kv_heads in (("mha", 6), ("gqa", 2), ("mqa", 1))
]


@pytest.mark.parametrize(("constraint", "kv_heads"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_model_equals_itself_with_the_three_operand_contraction(constraint, kv_heads, backend):
    dtype, limit = BACKENDS[backend]
    model = tiny_model(constraint, num_key_value_heads=kv_heads, attn_implementation=backend).to(
        dtype
    )
    reference = use_reference_(copy.deepcopy(model))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    got, expected = (
        model(ids, attention_mask=mask).logits,
        reference(ids, attention_mask=mask).logits,
    )
    assert (got - expected)[mask.bool()].abs().max() < limit
    assert expected.std() > 0.1


def test_reference_refuses_a_cache_and_a_model_without_coca(tiny_llama_dir):
    with pytest.raises(ValueError, match="expected use_cache=False"):
        use_reference_(tiny_model())(tokens(), use_cache=True)
    with pytest.raises(ValueError, match="which has no CoCA attention"):
        use_reference_(LlamaForCausalLM.from_pretrained(tiny_llama_dir))


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_mates_do_not_move_logits(constraint, backend, side):
    dtype, limit = BACKENDS[backend]
    model = tiny_model(constraint, attn_implementation=backend).to(dtype)
    short, long = tokens(1, 9), tokens(1, 23, seed=8)
    pad = torch.zeros(1, 14, dtype=torch.long)
    ids = torch.cat((torch.cat((pad, short) if side == "left" else (short, pad), dim=1), long))
    mask = torch.ones_like(ids)
    mask[0, :14] = 0
    if side == "right":
        mask[0] = mask[0].flip(0)
    batch = model(ids, attention_mask=mask).logits
    assert (batch[0, mask[0].bool()] - model(short).logits[0]).abs().max() < limit
    assert (batch[1] - model(long).logits[0]).abs().max() < limit


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = tiny_model().train(), tokens()
    model(ids, labels=ids).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
    assert plain["model.layers.0.self_attn.t_proj.weight"].abs().max() > 0


def test_tied_embeddings_stay_tied_through_saving(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, CocaLlamaForCausalLM)
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coca_constraint": "loose"}, "loose"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
    ],
)
def test_config_refuses_values_that_make_no_model(fields, message):
    with pytest.raises(Exception, match=message):
        CocaLlamaConfig(**fields)


def test_unsupported_rope_type_is_refused_by_name():
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(
        ValueError, match="'proportional' is not supported with CoCA; supported: default, linear"
    ):
        tiny_model(rope_parameters=rope)
