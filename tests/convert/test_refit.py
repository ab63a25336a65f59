"""W_O of calibrated layers: the ridge regression on the streams of whole models, with hooks."""

import copy

import pytest
import torch

from coca_hf import patch_
from coca_hf.convert.layer_pairs import LayerPairs
from coca_hf.convert.refit import RIDGE, TOKENS_A_COLUMN, blocks_to_refit_on, refit_outputs
from tests.models.families import CASES, WINDOW, stock_model, tokens


def seen_in(model, ids, layer, attention, output=None):
    """What a whole model has at a layer: its input, its attention's output, what W_O receives."""
    found = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: found.__setitem__("x", given[0])),
        attention.register_forward_hook(lambda _, __, result: found.__setitem__("a", result[0])),
        (output or layer).register_forward_pre_hook(
            lambda _, given: found.__setitem__("o", given[0])
        ),
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [found[name].flatten(0, 1).double() for name in ("x", "a", "o")]


def regression(theirs, a, ours, o, output, scale):
    """W_O, from the rows of one weighted least-squares problem, with the ridge as further rows."""
    weights = (theirs + scale * a).square().mean(-1, keepdim=True) ** -0.5
    wanted = a + (theirs - ours) / scale - (0 if output.bias is None else output.bias)
    root = (RIDGE * (weights * o).square().sum() / o.shape[1]).sqrt()
    rows = torch.cat((weights * o, root * torch.eye(o.shape[1], dtype=o.dtype)))
    goals = torch.cat((weights * wanted, root * output.weight.double().mT))
    return torch.linalg.lstsq(rows, goals).solution.mT


@pytest.mark.parametrize("case", CASES)
def test_every_layer_gets_the_regression_on_what_whole_models_have_there(case, pairs_of, tmp_path):
    original, ids, held_out = stock_model(case), tokens(5, WINDOW), tokens(2, WINDOW, seed=1)
    coca = patch_(copy.deepcopy(original)).eval()
    pairs = pairs_of(original)
    outputs, states = refit_outputs(pairs, {}, ids, held_out, tmp_path)
    scale = getattr(coca.config, "residual_multiplier", 1.0)
    for number in pairs.layout.converted:
        base, layer = original.base_model.layers[number], coca.model.layers[number]
        attention = base.self_attn if hasattr(base, "self_attn") else base.attention
        theirs, a, _ = seen_in(original, ids, base, attention)
        output = layer.self_attn.o_proj
        ours, _, o = seen_in(coca, ids, layer, layer.self_attn, output)
        expected = regression(theirs, a, ours, o, output, scale).float()
        found = outputs.pop(f"model.layers.{number}.self_attn.o_proj.weight")
        assert (found - output.weight).norm() > 0.01 * output.weight.norm()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        output.weight.data = found
    assert not outputs
    last = []
    coca.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    with torch.no_grad():
        coca(input_ids=held_out, use_cache=False)
    torch.testing.assert_close(states[:], last[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_layer_whose_values_are_zero_keeps_its_w_o(pairs_of, tmp_path):
    original, ids = stock_model("llama"), tokens(5, WINDOW)
    original.model.layers[1].self_attn.v_proj.weight.zero_()
    outputs, states = refit_outputs(pairs_of(original), {}, ids, ids[:1], tmp_path)
    attentions = [layer.self_attn for layer in original.model.layers]
    kept = [
        torch.equal(
            outputs[f"model.layers.{number}.self_attn.o_proj.weight"], attention.o_proj.weight
        )
        for number, attention in enumerate(attentions)
    ]
    assert kept == [False, True, False]
    assert states[:].isfinite().all()


def test_a_quarter_of_text_and_of_repeated_passages_is_fitted_on_or_as_much_as_w_o_needs():
    config, blocks = stock_model("llama").config, torch.zeros(4000, 64)
    chosen = blocks_to_refit_on(config, blocks, seed=3)
    assert len(chosen.unique()) == len(chosen) == 1000
    assert 0.45 < (chosen < 2000).float().mean() < 0.55
    width = config.num_attention_heads * config.head_dim
    assert len(blocks_to_refit_on(config, blocks[:60], seed=3)) == TOKENS_A_COLUMN * width / 64 < 60
    assert blocks_to_refit_on(config, blocks[:7], seed=3).tolist() == [*range(7)]


@pytest.mark.gpu
def test_a_gpu_finds_what_a_processor_does(pairs_of, tmp_path):
    pairs, ids = pairs_of(stock_model("qwen3")), tokens(5, WINDOW)
    on_gpu = LayerPairs(pairs.layout, "cuda")
    expected, _ = refit_outputs(pairs, {}, ids, ids[:1], tmp_path)
    found, _ = refit_outputs(on_gpu, {}, ids, ids[:1], tmp_path)
    for name, output in expected.items():
        torch.testing.assert_close(found[name], output, rtol=1e-3, atol=1e-3)
