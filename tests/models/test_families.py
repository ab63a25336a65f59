"""Every family's CoCA is its own transformers model with other scores, on every path that people
take.
"""

import copy
import itertools
import re
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

import coca_hf
from coca_hf.models.attention import CACHE, NO_CONTENT, ContentPairs
from coca_hf.models.cache import CocaCache, CocaStaticCache
from coca_hf.models.reference import use_reference_
from tests.models.families import (
    CONSTRAINTS,
    EVERY_CASE,
    EVERY_CASE_UNDER_ONE_CONSTRAINT,
    MENDED_CACHES,
    ONE_CASE_EACH,
    WINDOW,
    carry_t_,
    coca_model,
    padded,
    reference_logits,
    stock_model,
    tiny_model,
    tokens,
)


# A backend is handed queries and keys that are folded already, so each has one constraint here.
# Transformers' eager attention takes the softmax in fp32, where the mask of float64 is infinite, so
# a row without keys would be NaN.
@pytest.mark.parametrize(
    ("constraint", "backend", "padding", "limit"),
    [("slack", "sdpa", slice(6), 1e-5), ("strict", "eager", slice(-6, None), 5e-5)],
    ids=["slack-sdpa", "strict-eager"],
)
@EVERY_CASE
def test_logits_are_the_stock_models_with_contracted_scores(
    case, constraint, backend, padding, limit
):
    """With content pairs."""
    model = coca_model(case, constraint, [], 2, [1], backend).double()
    content = model.config.content_of
    stock = carry_t_(stock_model(case), model).double()
    ids, mask = padded(padding)
    got = model(ids, attention_mask=mask).logits
    expected = reference_logits(stock, constraint, ids, mask, content)
    assert expected[mask.bool()].std() > 0.1
    assert (got - expected)[mask.bool()].abs().max() < limit
    other = "strict" if constraint == "slack" else "slack"
    wrongs = (
        (other, ids, mask, content),
        (constraint, ids, mask, lambda layer: NO_CONTENT),
        (constraint, ids, mask, lambda layer: ContentPairs(2)),
    )
    for wrong in wrongs:
        assert (got - reference_logits(stock, *wrong))[mask.bool()].abs().max() > 1e-2


@EVERY_CASE_UNDER_ONE_CONSTRAINT
def test_the_reference_has_the_projections_of_its_family(case, constraint):
    """Layer 1, which is kept, stays as it is; the others have content pairs."""
    model = coca_model(case, constraint, [1], 2, [0], "eager")
    reference, ids = use_reference_(use_reference_(copy.deepcopy(model))), tokens()
    got, expected = model(ids).logits, reference(ids).logits
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def test_reference_refuses_a_cache_and_a_model_without_coca(tiny_llama_dir):
    with pytest.raises(ValueError, match="expected use_cache=False"):
        use_reference_(tiny_model())(tokens(), use_cache=True)
    with pytest.raises(ValueError, match="which has no CoCA attention"):
        use_reference_(LlamaForCausalLM.from_pretrained(tiny_llama_dir))


@EVERY_CASE_UNDER_ONE_CONSTRAINT
def test_cached_decoding_with_left_padding_gives_the_tokens_of_no_cache(case, constraint):
    content = {"content_pairs": 2, "content_layers": [1]}
    model = coca_model(case, constraint, **content).double()
    short, long = tokens(1, 6), tokens(1, 11, seed=8)
    ids = torch.cat((torch.nn.functional.pad(short, (5, 0)), long))
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 6}
    cached = model.generate(ids, **options, return_dict_in_generate=True)
    assert isinstance(cached[CACHE], CocaCache)
    plain = model.generate(ids, **options, use_cache=False)
    assert torch.equal(cached.sequences, plain)
    alone = model.generate(short, max_new_tokens=6, use_cache=False)
    assert torch.equal(cached.sequences[0, 11:], alone[0, 6:])
    assert len(plain[:, 11:].unique()) > 3


@pytest.mark.parametrize(
    ("kept", "kinds"),
    [([0], [CocaCache, CocaStaticCache]), ([], [DynamicCache]), ([1, 2], [StaticCache])],
    ids=str,
)
@EVERY_CASE
@torch.no_grad()
def test_cached_decoding_in_pieces_equals_the_full_forward_at_every_position(case, kept, kinds):
    if "window" in case:
        kinds = [kind for kind in kinds if "Static" not in kind.__name__]
        if not kinds:
            pytest.skip("CocaStaticCache is for models without windows")
    content = {"content_pairs": 2, "content_layers": [] if 1 in kept else [1]}
    model, ids = coca_model(case, keep_layers=kept, **content).double(), tokens()
    expected = model(ids).logits
    for kind in kinds:
        size = {"max_cache_len": 23} if "Static" in kind.__name__ else {}
        cache = kind(config=model.config, **size)
        cuts = itertools.pairwise((0, 10, 11, 12, 15, 23))
        pieces = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in cuts]
        assert (torch.cat(pieces, dim=1) - expected).abs().max() < 1e-5, kind


@pytest.mark.parametrize("columns", [1, 4, 8, 9, 11])
def test_a_mask_that_leaves_out_cached_or_new_tokens_is_refused(columns):
    model, ids = tiny_model(), tokens(2, 12)
    cache = model(ids[:, :8], use_cache=True)[CACHE]
    said = f"attention_mask: got {columns} columns, expected one for each of the 8 cached and 4 new"
    with pytest.raises(ValueError, match=said):
        model(ids[:, 8:], attention_mask=torch.ones(2, columns), **{CACHE: cache})


@MENDED_CACHES
@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window"])
def test_an_assistant_goes_on_beyond_its_window(case):
    model = coca_model(case, "slack").double()
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        # agrees with the model, but not always
        assistant.model.layers[2].mlp.down_proj.weight.mul_(0.7)
    prompt = tokens(1, 9).repeat(1, 2)
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    got = model.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, expected)
    assert len(got[0, 18:].unique()) > 3


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_the_cache_of_a_window_forgets_what_lies_behind_it(case):
    model = coca_model(case, "slack")
    cache = CocaCache(model.config)
    model(tokens(1, 40), **{CACHE: cache})
    kept = [layer.keys.shape[-2] for layer in cache.layers[:3]]
    kinds = {"mistral-window": "sss", "qwen2-window": "fss", "qwen3-window": "sfs"}[case]
    assert kept == [WINDOW - 1 if kind == "s" else 40 for kind in kinds]


@pytest.mark.parametrize(
    "case", ["llama", "mistral-window", "qwen2", "qwen3", "granite", "smollm3", "neox-partial"]
)
def test_declarations_that_sharding_and_serving_read_have_the_keys_of_kept_layers(case):
    model = coca_model(case, keep_layers=[1])
    family = type(model).__name__.removesuffix("ForCausalLM")
    plan = model.config.base_model_tp_plan
    assert plan["layers.*.self_attn.k_proj"] == plan["layers.*.self_attn.t_proj"] == "colwise"
    modules = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.model.named_modules()}
    assert plan.keys() <= modules
    for norm in ("q_norm", "k_norm"):
        assert (f"layers.*.self_attn.{norm}" in plan) == (case == "qwen3")
    without_kept = type(model.config).base_model_tp_plan
    assert not any("k_proj" in name or "k_norm" in name for name in without_kept)
    for feature in ("sdpa", "flash_attn", "flex_attn", "attention_backend"):
        assert getattr(model, f"_supports_{feature}")
    assert model._can_compile_fullgraph
    assert model._tp_plan["lm_head"] == LlamaForCausalLM._tp_plan["lm_head"]
    assert model.base_model is model.model
    assert model._no_split_modules == {f"{family}DecoderLayer"}
    assert type(model.model.layers[0]).__name__ == f"{family}DecoderLayer"
    file = model.config.model_type.removeprefix("coca_")
    assert model.config.auto_map == {
        "AutoConfig": f"{file}.{family}Config",
        "AutoModel": f"{file}.{family}Model",
        "AutoModelForCausalLM": f"{file}.{family}ForCausalLM",
        "AutoModelForSequenceClassification": f"{file}.{family}ForSequenceClassification",
        "AutoModelForTokenClassification": f"{file}.{family}ForTokenClassification",
    }
    assert all(hasattr(coca_hf, f"{family}{kind}") for kind in ("Config", "Model", "ForCausalLM"))
    carried = sys.modules[type(model).__module__]
    assert all(hasattr(carried, name.split(".")[1]) for name in model.config.auto_map.values())
    # a class that transformers derives from it could not be pickled
    assert add_generation_mixin_to_remote_model(type(model)) is type(model)


def test_dropout_of_gpt_neox_is_applied_in_training_only():
    config = coca_model("neox-partial", "slack").config
    config.hidden_dropout = 0.5
    model, ids = AutoModelForCausalLM.from_config(config), tokens()
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


@CONSTRAINTS
@pytest.mark.parametrize("backend", ["eager", "sdpa", "coca"])
@torch.no_grad()
def test_large_biases_of_queries_are_held_in_float16(backend, constraint):
    """Qwen2's go up to 284, and queries are squared."""
    model = stock_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.view(6, 2, 4)[:, :, 1] = torch.tensor([284.0, -250.0])
    ids, mask = padded()
    assert model.half()(ids, attention_mask=mask).logits.isfinite().all()
    model = coca_hf.patch_(model, constraint)
    model.set_attn_implementation(backend)
    got = model(ids, attention_mask=mask).logits[mask.bool()]
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, **options)
    expected = model.float()(ids, attention_mask=mask).logits[mask.bool()]
    assert (got - expected).norm() < 1e-2 * expected.norm()
    assert all(logits.isfinite().all() for logits in generated.logits)


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


@pytest.mark.parametrize("case", ONE_CASE_EACH.values())
def test_trainer_shifts_the_labels_that_it_smooths(case, tmp_path):
    model, ids = coca_model(case), tokens()
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to="none")
    model.to(arguments.device)
    ids = ids.to(arguments.device)
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coca_constraint": "loose"}, "loose"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        (
            {"rope_parameters": ROPE},
            "'proportional' is not supported with CoCA; supported: default",
        ),
    ],
)
def test_values_that_make_no_model_are_refused(fields, message):
    with pytest.raises(Exception, match=message):
        tiny_model(**fields)
