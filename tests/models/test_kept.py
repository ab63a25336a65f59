"""Layers that keep the original's attention: exactly the original's, on every path that people
take, beside CoCA's.
"""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from coca_hf import CocaLlamaConfig, patch_
from coca_hf.models.attention import CACHE, KeptAttention
from tests.conftest import refused
from tests.models.families import (
    EVERY_CASE,
    EVERY_CASE_UNDER_ONE_CONSTRAINT,
    coca_model,
    padded,
    stock_model,
    tokens,
)

LOGITS = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@EVERY_CASE
def test_a_model_that_keeps_all_layers_is_the_original(case):
    stock = stock_model(case).double()
    ids, mask = padded(slice(17, None))
    expected = stock(ids, attention_mask=mask).logits
    kept = patch_(copy.deepcopy(stock), keep_layers=[0, 1, 2], content_pairs=2)
    assert not any("t_proj" in name for name, _ in kept.named_parameters())
    assert all(isinstance(layer.self_attn, KeptAttention) for layer in kept.model.layers)
    got = kept(ids, attention_mask=mask).logits
    assert expected[mask.bool()].std() > 0.1
    assert (got - expected)[mask.bool()].abs().max() < 1e-6
    prompt = tokens(1, 9)
    greedy = {"max_new_tokens": 20, "do_sample": False}
    expected, got = (model.generate(prompt, **greedy) for model in (stock, kept))
    assert torch.equal(got, expected)
    assert len(got[0, 9:].unique()) > 3


def test_layers_without_rotary_embedding_stay_so_when_others_are_dropped():
    stock = stock_model("smollm3", no_rope_layers=[1, 0, 1])
    kept = patch_(copy.deepcopy(stock), keep_layers=[0, 2])
    for model in (stock, kept):
        del model.model.layers[0]
        model.config.num_hidden_layers = 2
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = number
    assert (kept(tokens()).logits - stock(tokens()).logits).abs().max() < 1e-4


@EVERY_CASE_UNDER_ONE_CONSTRAINT
def test_a_mix_is_the_original_and_the_converted_model_layer_by_layer(case, constraint):
    """Layers 0 and 2 of the original and layer 1 of the model with all layers converted, run by
    hand, one by one.
    """
    stock = stock_model(case).double()
    mixed = coca_model(case, constraint, keep_layers=[0, 2]).double()
    converted = patch_(copy.deepcopy(stock), constraint)
    converted.model.layers[1].load_state_dict(mixed.model.layers[1].state_dict())
    for model in (stock, mixed, converted):
        model.set_attn_implementation("eager")
    ids = tokens()
    positions = torch.arange(23).expand(2, -1)
    base = stock.base_model
    states = converted.model.before_layers(stock.get_input_embeddings()(ids))
    full, half = base.rotary_emb(states, positions), converted.model.rotary_emb(states, positions)
    masks = converted.model.causal_masks(states, None, None, positions)
    kinds = getattr(stock.config, "layer_types", None) or list(masks) * 3
    layers = [base.layers[0], converted.model.layers[1], base.layers[2]]
    for number, (layer, angles) in enumerate(zip(layers, (full, half, full), strict=True)):
        states = layer(states, attention_mask=masks[kinds[number]], position_embeddings=angles)
    expected = stock.get_output_embeddings()(converted.model.norm(states))
    expected = expected / getattr(stock.config, "logits_scaling", 1.0)
    got = mixed(ids).logits
    assert (got - expected).abs().max() < 1e-6
    assert (got - stock(ids).logits).abs().max() > 1e-2
    assert (got - converted(ids).logits).abs().max() > 1e-2


def test_kept_layers_have_the_angles_of_dynamic_ntk_and_of_longer_texts_decode_alike():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    stock, ids = stock_model("llama", rope_parameters=rope).double(), tokens(1, 96)
    model = patch_(copy.deepcopy(stock), keep_layers=[0, 1, 2])
    assert (model(ids).logits - stock(ids).logits).abs().max() < 1e-6  # trained on 64
    mixed = coca_model("llama", keep_layers=[1], rope_parameters=rope).double()
    out = mixed.generate(ids, max_new_tokens=9, **LOGITS)
    full = mixed(out.sequences, rope_length=105).logits[:, 95:-1]
    assert (torch.stack(out.logits, dim=1) - full).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("case", "constraint", "layers"),
    [
        *(("qwen3-window", "strict", 3), ("granite", "slack", 2)),
        *(("smollm3", "slack", 3), ("neox-partial", "strict", 2)),
    ],
)
def test_fresh_models_with_layers_of_both_kinds_train_record_and_compile(case, constraint, layers):
    """From a configuration alone: every parameter gets a gradient, and the whole is one graph."""
    torch.compiler.reset()
    size = {"num_hidden_layers": layers}
    config, ids = coca_model(case, constraint, keep_layers=[1], **size).config, tokens()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    output = model(ids, labels=ids, output_attentions=True, output_hidden_states=True)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert (len(output.attentions), len(output.hidden_states)) == (layers, layers + 1)
    for weights in output.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    model.set_attn_implementation("sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    logits = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)


def test_adapters_lie_on_the_keys_of_kept_layers_and_on_the_coefficients_of_the_others():
    targets = ["q_proj", "k_proj", "t_proj", "v_proj"]
    model, ids = coca_model("qwen3", keep_layers=[1]), tokens()
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    names = [name.split(".") for name, _ in adapted.named_parameters() if "lora_A" in name]
    keys = {name[4]: name[6] for name in names if name[6] in ("k_proj", "t_proj")}
    assert keys == {"0": "t_proj", "1": "k_proj", "2": "t_proj"}
    expected = adapted(ids).logits
    assert (adapted.merge_and_unload()(ids).logits - expected).abs().max() < 1e-4


KEPT = [[3], [-1], [1, 1], [1.0], ["1"], None, "all", 1]
WINDOWS = [0, 1, 2**31]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(({"coca_kept_layers": kept}, "coca_kept_layers") for kept in KEPT),
        *(({"coca_kept_layers": [1], "coca_kept_window": w}, "coca_kept_window") for w in WINDOWS),
        ({"coca_kept_window": 9}, "coca_kept_window"),
    ],
)
def test_kept_layers_and_windows_that_there_cannot_be_are_refused(fields, name):
    with pytest.raises(Exception, match=name):
        CocaLlamaConfig(num_hidden_layers=3, **fields)


@pytest.mark.parametrize(
    ("case", "window", "layers", "message"),
    [
        ("llama", 5, [], "patch_: keep_window: got 5 without kept layers"),
        ("llama", 1, [1], "patch_: keep_window: got 1, expected at least 2 tokens, and below"),
        ("llama", 2**31, [1], "patch_: keep_window: got 2147483648, expected at least 2"),
        ("qwen3-window", 5, [1], "the model has windows of its own"),
    ],
)
def test_a_window_that_no_layer_could_have_is_refused(case, window, layers, message):
    refused(message, patch_, stock_model(case), keep_window=window, keep_layers=layers)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "granite", "neox-partial"])
def test_a_window_hides_what_is_further_away_from_kept_layers_and_from_no_others(case):
    options = {"keep_layers": [1], "constraint": "strict"}
    if case == "mistral":
        options["sliding_window"] = None  # Mistral's own
    wide, near = coca_model(case, **options), coca_model(case, keep_window=5, **options)
    ids, rows = tokens(), torch.arange(23)
    visible = (rows <= rows[:, None]) & (rows > rows[:, None] - 5)

    def hide(layer, args, kwargs):
        return args, kwargs | {"attention_mask": visible.expand(2, 1, -1, -1)}

    unchanged = wide(ids).logits
    wide.model.layers[1].register_forward_pre_hook(hide, with_kwargs=True)
    expected = wide(ids).logits
    assert (expected - unchanged)[:, 5:].abs().max() > 1e-2
    for implementation in ("sdpa", "eager", "coca"):
        near.set_attn_implementation(implementation)
        assert (near(ids).logits - expected).abs().max() < 1e-5, implementation


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "smollm3", "phi3-partial"])
def test_decoding_with_a_window_over_kept_layers_is_exact_and_caches_no_more(case, tmp_path):
    model = coca_model(case, keep_layers=[1], keep_window=5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["coca_kept_window"] == 5
    assert "layer_types" not in saved
    assert saved.get("sliding_window") is None
    prompt = tokens(1, 9)
    out = loaded.generate(prompt, max_new_tokens=12, **LOGITS)
    full = model(out.sequences).logits[:, 8:-1]
    assert (torch.stack(out.logits, dim=1) - full).abs().max() < 1e-4
    layers = out[CACHE].layers
    assert [layer.keys.shape[-2] for layer in layers[:3]] == [20, 4, 20]
    head_dim, kept = model.config.head_dim, model.config.coca_kept_layers
    widths = [head_dim if number in kept else head_dim // 2 for number in range(3)]
    assert [layer.keys.shape[-1] for layer in layers] == [*widths, head_dim // 2]  # of the angles
    assert [layer.values.shape[-1] for layer in layers[:3]] == [head_dim] * 3


@pytest.mark.parametrize("case", ["llama", "mistral", "phi3-partial"])
def test_another_window_is_an_argument_or_an_edit_and_none_is_full_attention(case, tmp_path):
    coca_model(case, keep_layers=[1], keep_window=5).save_pretrained(tmp_path)
    ids, config = tokens(), json.loads((tmp_path / "config.json").read_text())
    for window in (9, None):
        expected = coca_model(case, keep_layers=[1], keep_window=window)(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, coca_kept_window=window).eval()
        assert (loaded(ids).logits - expected).abs().max() < 1e-5
        loaded.save_pretrained(tmp_path / "saved")
        edited = json.dumps(config | {"coca_kept_window": window})
        (tmp_path / "saved/config.json").write_text(edited)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        assert (again(ids).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("made_with", "window"), [(5, 4), (5, None), (None, 4)])
def test_no_model_is_made_or_saved_with_a_window_that_was_set_on_its_config(
    made_with, window, tmp_path
):
    model = coca_model("llama", keep_layers=[1], keep_window=made_with)
    model.config.coca_kept_window = window
    message = (
        f"coca_kept_window is {window}, but sliding_window, which follows from it, is {made_with}"
    )
    with pytest.raises(Exception, match=message):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(model.config)


def test_a_window_over_kept_layers_does_not_replace_the_windows_of_a_model(tmp_path):
    coca_model("mistral-window", keep_layers=[1]).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="coca_kept_window is 5 beside sliding_window 7"):
        AutoModelForCausalLM.from_pretrained(tmp_path, coca_kept_window=5)
