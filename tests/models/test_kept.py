"""Layers that keep the original's attention: exactly the original's, on every path that people take, beside CoCA's."""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache

from coca_hf import patch_
from coca_hf.models.attention import KeptAttention
from coca_hf.models.cache import CocaCache, CocaStaticCache
from tests.models.families import CASES, stock_model, tokens

EVERY_CASE = pytest.mark.parametrize("case", CASES)
CONSTRAINTS = pytest.mark.parametrize("constraint", ["slack", "strict"])


def kept_model(case, keep_layers, constraint="slack", **options):
    """`stock_model(case)`, patched but for `keep_layers`, with coefficients that all differ from zero and the start."""
    model = patch_(stock_model(case), constraint, keep_layers=keep_layers)
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        if layer.self_attn.layer_idx not in keep_layers:
            for parameter in layer.self_attn.t_proj.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.set_attn_implementation(options.get("attn_implementation", "sdpa"))
    return model


@EVERY_CASE
def test_a_model_that_keeps_all_layers_is_the_original(case):
    stock = stock_model(case).double()
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    expected = stock(ids, attention_mask=mask).logits
    kept = patch_(copy.deepcopy(stock), keep_layers=[0, 1, 2])
    assert not any("t_proj" in name for name, _ in kept.named_parameters())
    assert all(isinstance(layer.self_attn, KeptAttention) for layer in kept.model.layers)
    got = kept(ids, attention_mask=mask).logits
    assert expected[mask.bool()].std() > 0.1
    assert (got - expected)[mask.bool()].abs().max() < 1e-6
    prompt = tokens(1, 9)
    expected, got = (model.generate(prompt, max_new_tokens=20, do_sample=False) for model in (stock, kept))
    assert torch.equal(got, expected)
    assert len(got[0, 9:].unique()) > 3


@CONSTRAINTS
@EVERY_CASE
def test_a_mix_is_the_original_and_the_converted_model_layer_by_layer(case, constraint):
    """Layers 0 and 2 of the original and layer 1 of the model with all layers converted, run by hand, one by one."""
    stock, mixed = stock_model(case).double(), kept_model(case, [0, 2], constraint).double()
    converted = patch_(copy.deepcopy(stock), constraint)
    converted.model.layers[1].load_state_dict(mixed.model.layers[1].state_dict())
    for model in (stock, mixed, converted):
        model.set_attn_implementation("eager")
    ids = tokens()
    positions = torch.arange(23).expand(2, -1)
    base = stock.base_model
    states = stock.get_input_embeddings()(ids)
    full, half = base.rotary_emb(states, positions), converted.model.rotary_emb(states, positions)
    masks = converted.model.causal_masks(states, None, None, positions)
    kinds = getattr(stock.config, "layer_types", None) or list(masks) * 3
    layers = [base.layers[0], converted.model.layers[1], base.layers[2]]
    for number, (layer, angles) in enumerate(zip(layers, (full, half, full), strict=True)):
        mask = masks[kinds[number]]
        states = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    expected = stock.get_output_embeddings()(converted.model.norm(states))
    got = mixed(ids).logits
    assert (got - expected).abs().max() < 1e-6
    assert (got - stock(ids).logits).abs().max() > 1e-2
    assert (got - converted(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("keep_layers", [[0], [1, 2]])
@pytest.mark.parametrize("kind", [CocaCache, DynamicCache, CocaStaticCache, StaticCache])
@EVERY_CASE
def test_cached_decoding_in_pieces_equals_the_full_forward_at_every_position(case, kind, keep_layers):
    model, ids = kept_model(case, keep_layers).double(), tokens()
    if "window" in case and "Static" in kind.__name__:
        pytest.skip("CocaStaticCache is for models without windows")
    cache = kind(config=model.config, **({"max_cache_len": 23} if "Static" in kind.__name__ else {}))
    cuts = (0, 4, 10, 11, 12, 15, 23)
    pieces = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)]
    assert (torch.cat(pieces, dim=1) - model(ids).logits).abs().max() < 1e-5


def test_the_cache_holds_half_width_keys_where_coca_is_and_full_ones_where_not():
    model, ids = kept_model("llama", [1]), tokens()
    cache = CocaCache(model.config)
    model(ids, past_key_values=cache)
    assert [layer.keys.shape[-1] for layer in cache.layers] == [4, 8, 4, 4]  # the last are the angles
    assert [layer.values.shape[-1] for layer in cache.layers[:3]] == [8, 8, 8]
