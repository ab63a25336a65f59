"""The ALiBi baseline: LLaMA without rotation, with transformers' own ALiBi (BLOOM's) on its scores."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from coca_hf import AlibiLlamaConfig, AlibiLlamaForCausalLM
from coca_hf.models.alibi import alibi_slopes
from tests.models.families import SHAPE, padded, tokens

# LLaMA's norms compute in fp32
BACKENDS = {"eager": (torch.float32, 2e-5), "sdpa": (torch.float64, 1e-5)}


def alibi_model(heads=6, **fields):
    torch.manual_seed(2)
    fields = SHAPE | {"num_attention_heads": heads} | fields
    return AlibiLlamaForCausalLM(AlibiLlamaConfig(**fields)).eval()


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])
def test_slopes_are_blooms(heads):
    # what a step of one adds
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), bloom)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [6, 4])
def test_logits_are_those_of_llamas_blocks_with_blooms_bias(heads, backend, monkeypatch):
    """The reference: a stock LLaMA with no angles, whose scores get BLOOM's bias, which counts from
    the row's start.
    """
    dtype, limit = BACKENDS[backend]
    model = alibi_model(heads, num_key_value_heads=2, attn_implementation=backend).to(dtype)
    ids, mask = padded()
    plain = {"rope_parameters": None, "model_type": "llama", "auto_map": None}
    fields = model.config.to_dict() | plain
    stock = LlamaForCausalLM(LlamaConfig(**fields)).to(dtype).eval()
    stock.load_state_dict(model.state_dict())
    bias = build_alibi_tensor(mask, heads, dtype).view(2, heads, 1, 23)

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        key, value = (x.repeat_interleave(heads // 2, dim=1) for x in (key, value))
        weights = (query @ key.mT * scaling + bias + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", attend)
    stock.set_attn_implementation("eager")
    stock.model.rotary_emb.inv_freq.zero_()
    expected = stock(ids, attention_mask=mask, use_cache=False).logits
    monkeypatch.undo()
    got = model(ids, attention_mask=mask).logits
    assert expected.std() > 0.1
    assert (got - expected)[mask.bool()].abs().max() < limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_padding_and_static_cache_give_the_tokens_of_no_cache(backend):
    model = alibi_model(attn_implementation=backend).to(BACKENDS[backend][0])
    short, long = tokens(1, 6), tokens(1, 11, seed=8)
    ids = torch.cat((torch.nn.functional.pad(short, (5, 0)), long))
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 13}
    expected = model.generate(ids, **options, use_cache=False)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), expected)
    alone = model.generate(short, max_new_tokens=13, use_cache=False)
    assert torch.equal(expected[0, 11:], alone[0, 6:])
    assert len(expected[:, 11:].unique()) > 3


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="got 'alibi_llama', whose bias continuous batching"):
        alibi_model().generate_batch([[1, 2, 3]])


def test_nothing_but_the_bias_knows_positions():
    model, ids = alibi_model().double(), tokens(1)
    shifted = model(ids, position_ids=torch.arange(23)[None] + 50).logits
    assert torch.equal(shifted, model(ids).logits)


def test_trains_saves_and_loads_by_the_auto_classes(tmp_path):
    model, ids = alibi_model().train(), tokens()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is AlibiLlamaForCausalLM
    assert again.config.rope_parameters is None
    assert torch.equal(again(ids).logits, model(ids).logits)
    # Trainer's label smoothing shifts the labels of the models that have a name here
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["alibi_llama"] == type(again).__name__


def test_backends_that_take_no_bias_are_refused():
    with pytest.raises(ValueError, match="flex_attention"):
        alibi_model(attn_implementation="flex_attention")
    assert not AlibiLlamaForCausalLM._supports_flash_attn
