"""The products of queries and keys, against the attention that models really compute."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.llama import modeling_llama

from coca_hf import CocaError, patch_
from coca_hf.evaluate.query_key_products import frequencies, visiting_products
from coca_hf.models import attention
from tests.conftest import TINY

SIZE = {"vocab_size": 53, "initializer_range": 0.4}
NEOX = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}
NEOX |= {"intermediate_size": 40}
# the 11 tokens of the tests are long
LONGROPE = {"rope_type": "longrope", "rope_theta": 90.0, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE["attention_factor"] = 1.0
CONFIGS = {
    "llama": LlamaConfig(**TINY, **SIZE),
    "llama, longrope": LlamaConfig(**TINY, **SIZE, rope_parameters=LONGROPE),
    "mistral": MistralConfig(**TINY, **SIZE, sliding_window=None),
    "qwen2, biases": Qwen2Config(**TINY, **SIZE),
    "qwen3, norms": Qwen3Config(**TINY, **SIZE, head_dim=12),
    "granite": GraniteConfig(**TINY, **SIZE, attention_multiplier=0.5),
    "gpt_neox, partial": GPTNeoXConfig(**NEOX, **SIZE, rotary_pct=0.5),
    "cohere, neighbours": CohereConfig(**{**TINY, "pad_token_id": 0}, **SIZE),
}


COCA = itertools.product(
    ("llama", "llama, longrope", "qwen3, norms", "gpt_neox, partial"), ("slack", "strict")
)


@pytest.mark.parametrize(("family", "constraint"), [*((name, None) for name in CONFIGS), *COCA])
@torch.no_grad()
def test_products_give_the_scores_that_attention_really_has(family, constraint):
    """Re sum_j [h_j exp(i (m - n) theta_j) + g_j exp(i (m + n) theta_j)], plus what a plain model's
    unrotated dimensions add, is softmax's input. CoCA's unrotated pairs have the angle zero; its
    layer 1 is kept.
    """
    torch.manual_seed(1)
    config = CONFIGS[family]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta, close = frequencies(model, 11), {"rtol": 1e-3, "atol": 1e-5}
    if constraint:
        close = {"rtol": 0, "atol": 1e-6}
        theta = nn.functional.pad(theta, (0, d // 2 - len(theta)))
        model = patch_(model, constraint, keep_layers=[1]).eval()
        model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters() if not constraint else ():
        if name.endswith("bias") or "q_norm" in name or "k_norm" in name:
            nn.init.normal_(parameter)
    ids = torch.randint(53, (1, 11), generator=torch.Generator().manual_seed(2))
    m, n = torch.tril_indices(11, 11).unbind()
    products = {}
    with visiting_products(model, theta, lambda layer, of: products.update({layer: of(m, n)})):
        attentions = model(ids, output_attentions=True).attentions
    assert sorted(products) == list(range(config.num_hidden_layers))
    for layer, weights in enumerate(attentions):
        h, g = (part.to(torch.complex128) for part in products[layer])
        if constraint is None or layer == 1:  # RoPE's own, at any angle
            assert h.imag.any()
            assert g.abs().max() <= (1e-6 if constraint else 0) * h.abs().max()
        else:
            assert bool(g.any()) == bool(h.imag.any()) == (constraint == "slack")
        near, far = ((1j * places[:, None] * theta).exp() for places in (m - n, m + n))
        scores = torch.full(weights.shape[1:], -math.inf, dtype=torch.float64)
        scores[:, m, n] = (h * near + g * far).real.sum(-1) * d**-0.5
        if constraint is None and "neox" in family:
            scores[:, m, n] += unrotated(model, layer, ids, m, n) * d**-0.5
        assert scores[:, m, n].std() > 0.05  # or else every softmax is alike
        torch.testing.assert_close(scores.softmax(-1), weights[0].double(), **close)


@torch.no_grad()
def test_layers_without_rotary_embedding_have_no_products():
    config = SmolLM3Config(**TINY, **SIZE, pad_token_id=0, no_rope_layers=[1, 0, 1])
    model, visited = patch_(AutoModelForCausalLM.from_config(config)), []
    with visiting_products(model, frequencies(model, 9), lambda layer, of: visited.append(layer)):
        model(torch.arange(9)[None])
    assert visited == [0, 2]


def test_content_pairs_are_refused(llama):
    model = patch_(copy.deepcopy(llama.model), content_pairs=2)
    with (
        pytest.raises(CocaError, match=r"CocaLlamaForCausalLM: got content pairs, .* without them"),
        visiting_products(model, frequencies(model, 9), lambda layer, of: None),
    ):
        pass


@torch.no_grad()
def test_a_key_that_is_not_collinear_with_the_query_shows_as_an_angle(coca, monkeypatch):
    def wrong(q, t, cos, sin, *form):
        query, key = attention.plain_fold(q, t, cos, sin, *form)
        return query, attention.rotate(key, torch.full_like(cos, 0.8), torch.full_like(cos, 0.6))

    coca.model.config.coca_constraint = "strict"
    monkeypatch.setitem(attention.FOLDS, "cpu", wrong)
    found = []
    same = torch.arange(9)
    theta = frequencies(coca.model, 9)
    with visiting_products(coca.model, theta, lambda layer, of: found.append(of(same, same))):
        coca.model(same[None])
    assert len(found) == 3
    for h, _ in found:
        angle = h[h != 0].angle()
        torch.testing.assert_close(angle, torch.full_like(angle, -math.atan2(0.6, 0.8)))


def unrotated(model, layer, ids, m, n):
    """The part of a GPT-NeoX score that does not depend on positions: dimensions 8 to 15 of 16."""
    seen = {}
    attention = model.gpt_neox.layers[layer].attention.query_key_value
    hook = attention.register_forward_hook(lambda module, inputs, output: seen.update(qkv=output))
    model(ids)
    hook.remove()
    q, k, _ = seen["qkv"].view(11, 3, 3 * 16).transpose(0, 1).double().chunk(3, dim=-1)
    return (q[:, m, 8:] * k[:, n, 8:]).sum(-1)


def test_the_model_is_unchanged_afterwards(llama, coca):
    rotate = modeling_llama.apply_rotary_pos_emb
    for model in (llama.model, coca.model):
        ids = torch.arange(9)[None]
        before = model(ids).logits
        with visiting_products(model, frequencies(model, 9), lambda layer, h: None):
            during = model(ids).logits
        assert torch.equal(before, during)
        assert torch.equal(before, model(ids).logits)
        assert modeling_llama.apply_rotary_pos_emb is rotate
        assert not any("rotated" in vars(module) for module in model.modules())


def test_a_rotation_by_other_angles_is_refused_and_the_model_keeps_its_own(llama):
    rotate = modeling_llama.apply_rotary_pos_emb
    said = "rotates 4 pairs of 8 dimensions, expected 4 pairs by the angles"
    with (
        pytest.raises(CocaError, match=said),
        visiting_products(llama.model, frequencies(llama.model, 9) * 2, lambda layer, h: None),
    ):
        llama.model(torch.arange(9)[None])
    assert modeling_llama.apply_rotary_pos_emb is rotate
