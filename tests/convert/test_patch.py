"""A model in memory becomes CoCA in place, and nothing else changes."""

import copy
import functools
import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from coca_hf import CocaLlamaForCausalLM, patch_, unpatch_
from coca_hf.convert.config import FAMILIES, MODELS
from tests.conftest import refused
from tests.models.families import CASES, ONE_CASE_EACH, stock_model, tokens
from tests.models.test_rotary import ROPES

LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])


class OwnMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def model(tiny_llama_dir):
    return LlamaForCausalLM.from_pretrained(tiny_llama_dir)


def test_patch_keeps_dtype_training_mode_and_attention_backend(tiny_llama_dir):
    model = LlamaForCausalLM.from_pretrained(
        tiny_llama_dir, dtype=torch.bfloat16, attn_implementation="eager"
    ).train()
    patch_(model, "strict")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert model.config._attn_implementation == "eager"
    assert model.config.coca_constraint == "strict"
    assert model._no_split_modules == {"CocaLlamaDecoderLayer"}


def set_to(part, name, value):
    return lambda model: setattr(model.get_submodule(part), name, value)


OTHERS = {
    "got a CoCA model already": patch_,
    "got LlamaForQuestionAnswering, ex": lambda model: LlamaForQuestionAnswering(model.config),
    "got OptimizedModule, expected": torch.compile,
    "got PeftModelForCausalLM, expected": lambda model: get_peft_model(model, LORA),
    "q_proj is a peft.tuners.lora": lambda model: inject_adapter_in_model(LORA, model),
}
ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}
ATTENTION = "model.layers.1.self_attn"
CHANGED = {
    "mlp is a tests.convert.test_patch.OwnMLP, expected transformers.models": (
        lambda model: setattr(model.model.layers[1], "mlp", OwnMLP(model.config))
    ),
    "proportional": lambda model: setattr(model.config, "rope_parameters", ROPE),
    f"{ATTENTION}.scaling is 0.5, expected 0.35": set_to(ATTENTION, "scaling", 0.5),
    f"{ATTENTION}.is_causal is False, expected True": set_to(ATTENTION, "is_causal", False),
    "model.norm.variance_epsilon is 0.5, expected 1e-06": (
        set_to("model.norm", "variance_epsilon", 0.5)
    ),
    "variance_epsilon is 1e-06, expected 0.5 as the config": (
        lambda model: setattr(model.config, "rms_norm_eps", 0.5)
    ),
    "model.rotary_emb.attention_scaling is 2.0, expected 1.0": (
        set_to("model.rotary_emb", "attention_scaling", 2.0)
    ),
    "the rotary embedding's inv_freq is ": lambda m: m.model.rotary_emb.inv_freq.div_(1.03),
    "model.steer is a buffer of your own": (
        lambda model: model.model.register_buffer("steer", torch.ones(3))
    ),
}


@pytest.mark.parametrize("message", OTHERS | CHANGED)
def test_what_is_not_a_plain_model_of_its_config_is_refused_and_left_as_it_was(model, message):
    if message in OTHERS:
        model = OTHERS[message](model)
    else:
        CHANGED[message](model)
    before = type(model)
    refused(f"patch_: .*{message}", patch_, model)
    assert type(model) is before


HOOKED = {
    "compiled": lambda module: module.compile(),
    "forward": lambda module: setattr(module, "forward", torch.compile(module.forward)),
    "method": lambda module: setattr(module, "extra_repr", lambda: ""),
    "hook": lambda module: module.register_forward_hook(lambda *_: None),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "saving": lambda module: module.register_state_dict_pre_hook(lambda *_: None),
    "loading": lambda module: module.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize(
    ("change", "part"), [*zip(HOOKED, itertools.cycle(["", "model.layers.1.mlp", "model.norm"]))]
)
def test_what_is_compiled_or_has_hooks_or_another_method_is_refused(model, part, change):
    HOOKED[change](model.get_submodule(part))
    refused(f"patch_: {part or 'the model'} is compiled or has hooks", patch_, model)
    assert type(model) is LlamaForCausalLM


def test_layers_that_were_dropped_and_kinds_that_the_config_gives_to_others_are_refused():
    model = stock_model("smollm3")
    model.model.layers = model.model.layers[1:]
    model.config.num_hidden_layers, model.config.layer_types = 2, model.config.layer_types[1:]
    refused(r"patch_: model.layers.1.self_attn.use_rope is ", patch_, model, keep_layers=[1])
    for kind, part, value in (
        ("neox-partial", "gpt_neox.layers.2.use_parallel_residual", False),
        ("qwen3", "model.layers.0.self_attn.sliding_window", 8),
    ):
        model = stock_model(kind)
        module, _, name = part.rpartition(".")
        setattr(model.get_submodule(module), name, value)
        refused(f"patch_: {part} is {value}", patch_, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_a_cast_rounded_or_a_long_text_moved_are_not_refused(rope, dtype):
    fields = {"hidden_size": 96, "rope_parameters": ROPES[rope] | {"rope_theta": 1e7}}
    model = stock_model("llama", **fields)
    model(tokens(1, 90))  # longer than trained
    patch_(model.to(dtype))


def test_a_quantized_model_is_refused(tiny_llama_dir):
    pytest.importorskip("bitsandbytes")
    model = LlamaForCausalLM.from_pretrained(
        tiny_llama_dir, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"
    )
    refused("got a quantized model, expected plain weights; call its dequantize", patch_, model)
    model.dequantize()
    assert type(patch_(model)) is CocaLlamaForCausalLM


def test_a_field_that_is_not_understood_can_be_ignored_and_the_message_names_the_argument(model):
    model.config.seq_len = 5
    message = r"model.config: seq_len=5 is not understood.*\(ignore_fields in Python\) leaves"
    refused(message, patch_, model)
    problems = {"hidden_size": "a field that changes the model", "seq_lem": "no such field"}
    for field, problem in problems.items():
        message = f"patch_: model.config: --ignore-field {field}: got {problem}"
        refused(message, patch_, model, ignore_fields=[field])
    assert type(model) is LlamaForCausalLM
    assert not hasattr(patch_(model, ignore_fields=["seq_len"]).config, "seq_len")


def test_offloaded_weights_are_refused_and_hooks_of_transformers_are_not(model):
    with torch.device("meta"):
        offloaded = LlamaForCausalLM(model.config)
    refused(r"patch_: model.embed_tokens.weight is a Tensor on meta", patch_, offloaded)
    ids = torch.arange(20)[None]
    model.set_attn_implementation("eager")
    model(ids, output_attentions=True)  # transformers' own hooks stay behind
    assert len(patch_(model)(ids, output_attentions=True).attentions) == 3


def test_gradient_checkpointing_and_inputs_that_require_gradients_stay_on(model):
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    before = model.model.layers[0]._gradient_checkpointing_func
    patch_(model)
    for layer in model.model.layers:
        assert layer.gradient_checkpointing
        assert layer._gradient_checkpointing_func is before
    ids = torch.arange(20)[None]
    model.requires_grad_(False)
    model.model.layers[0].self_attn.t_proj.requires_grad_(True)
    assert model.get_input_embeddings()(ids).requires_grad
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.t_proj.weight.grad.abs().max() > 0
    model.disable_input_require_grads()
    assert not model.get_input_embeddings()(ids).requires_grad


def test_a_loss_of_the_callers_own_stays(model):
    ids, expected = torch.arange(20)[None], torch.tensor(7.0)
    model.loss_function = lambda **arguments: expected
    assert patch_(model, keep_original=True)(ids, labels=ids).loss is expected
    assert unpatch_(model)(ids, labels=ids).loss is expected


@pytest.mark.parametrize("later", [True, False])
def test_unpatch_keeps_gradient_checkpointing_as_it_is(model, later):
    function = functools.partial(checkpoint, use_reentrant=False)
    model._set_gradient_checkpointing(not later, function)
    patch_(model, keep_original=True)._set_gradient_checkpointing(later, function)
    layers = unpatch_(model).model.layers
    assert {layer.gradient_checkpointing for layer in layers} == {later}
    ids = torch.arange(20)[None]
    model.train()(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("sizes", [[300], [300, 259]])
def test_unpatch_refuses_embeddings_that_were_resized(model, sizes):
    patch_(model, keep_original=True)
    for size in sizes:
        model.resize_token_embeddings(size)
    refused("unpatch_: got embeddings that were resized or replaced since", unpatch_, model)
    assert type(model) is CocaLlamaForCausalLM
    assert model(torch.arange(20)[None]).logits.shape == (1, 20, sizes[-1])


def test_unpatch_refuses_adapters_until_they_are_merged(model):
    patch_(model, keep_original=True)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "t_proj"]))
    message = r"unpatch_: got modules or parameters that were replaced .* \(merge_and_unl"
    refused(message, unpatch_, model)
    assert type(model) is CocaLlamaForCausalLM
    assert unpatch_(adapted.merge_and_unload()) is model
    assert type(model) is LlamaForCausalLM


ADDED = {
    "hooks that were registered since patch_,": (
        lambda model: model.model.norm.register_forward_hook(lambda *_: None)
    ),
    "a method of your own on model.layers.1.mlp,": (
        lambda model: setattr(model.model.layers[1].mlp, "forward", torch.zeros_like)
    ),
    "a method of your own on the model,": lambda model: setattr(model, "forward", torch.zeros_like),
    "model.steer, a buffer of your own,": (
        lambda model: model.model.register_buffer("steer", torch.ones(3))
    ),
}


@pytest.mark.parametrize("message", ADDED)
def test_unpatch_refuses_to_lose_hooks_methods_and_buffers_that_were_added_since(model, message):
    hook = ADDED[message](patch_(model, keep_original=True))
    refused(f"unpatch_: got {message} which would be lost; ", unpatch_, model)
    assert type(model) is CocaLlamaForCausalLM
    if hook:
        hook.remove()
        assert type(unpatch_(model)) is LlamaForCausalLM


def test_unpatch_takes_a_model_that_accelerate_prepared_for_mixed_precision(model, monkeypatch):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # a process has one precision
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    patch_(model, keep_original=True)
    Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert torch.equal(unpatch_(model)(ids).logits, expected)


def test_unpatch_keeps_what_was_set_on_the_config_since(tiny_llama_dir, tmp_path):
    model = LlamaForSequenceClassification.from_pretrained(tiny_llama_dir, num_labels=3)
    stock = model.config.to_dict()
    patch_(model, keep_original=True)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    model.config.pad_token_id, model.config.own = 0, "field"
    model.config.id2label = {0: "a", 1: "b", 2: "c"}
    model.config.problem_type = "multi_label_classification"
    config = unpatch_(model).config
    assert config._attn_implementation == "eager"
    set_since = {"pad_token_id": 0, "own": "field", "problem_type": "multi_label_classification"}
    set_since["id2label"] = {0: "a", 1: "b", 2: "c"}
    assert config.to_dict() == stock | set_since
    patch_(model, keep_original=True, ignore_fields=["own"]).set_attn_implementation("coca")
    assert unpatch_(model).config._attn_implementation == "eager"


def test_a_copy_of_a_patched_model_is_unpatched_on_its_own(model):
    ids = torch.arange(20)[None]
    before = model(ids).logits
    copied = copy.deepcopy(patch_(model, keep_original=True))
    assert torch.equal(unpatch_(copied)(ids).logits, before)
    assert type(model) is CocaLlamaForCausalLM
    assert torch.equal(unpatch_(model)(ids).logits, before)


def test_unpatch_refuses_to_lose_what_an_adapter_trained_beside_itself(model):
    """Merging leaves the trained copy of a module where peft has put it."""
    patch_(model, keep_original=True)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    merged = get_peft_model(model, lora).merge_and_unload()
    message = "replaced since patch_, such as adapters or what their mod"
    refused(message, unpatch_, merged)
    assert type(merged) is CocaLlamaForCausalLM


@pytest.mark.parametrize(
    ("case", "kept"), [*zip(ONE_CASE_EACH.values(), itertools.cycle([(), (1,)]))]
)
def test_unpatch_restores_every_family_exactly_and_patch_leaves_other_models_alone(case, kept):
    model, ids = stock_model(case), tokens()
    untouched, before = copy.deepcopy(model), dict(model.named_parameters())
    expected = model(ids).logits
    patch_(model, "strict", keep_original=True, keep_layers=kept)
    assert not torch.equal(model(ids).logits, expected)
    assert torch.equal(untouched(ids).logits, expected)
    with torch.no_grad():
        for parameter in model.model.layers[0].self_attn.t_proj.parameters():
            parameter.zero_()
    model.train()
    assert unpatch_(model) is model
    assert type(model) is type(untouched)
    assert model.training
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(model.eval()(ids).logits, expected)
    assert model.config.to_dict() == untouched.config.to_dict()
    assert type(patch_(model)) is MODELS["ForCausalLM"][FAMILIES[CASES[case][0]].coca_config]


@pytest.mark.parametrize(("case", "is_shared"), [("qwen2", True), ("neox-partial", False)])
def test_unpatch_keeps_changes_of_unfused_queries_and_values(case, is_shared):
    model, ids = stock_model(case), tokens()
    before = model(ids).logits
    patch_(model, keep_original=True)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    assert torch.equal(unpatch_(model)(ids).logits, before) != is_shared


@pytest.mark.parametrize("case", ["llama", "qwen3", "phi3-window", "neox-partial"])
def test_unpatch_casts_what_it_restores_as_the_model_was_cast(case):
    model, ids = stock_model(case), tokens()
    expected = copy.deepcopy(model).bfloat16()(ids).logits
    patch_(model, keep_original=True, keep_layers=[1]).bfloat16()
    assert {p.dtype for p in unpatch_(model).parameters()} == {torch.bfloat16}
    # the buffer of angles is not rounded
    assert (model(ids).logits - expected).norm() < 0.1 * expected.norm()


def test_unpatch_leaves_dtypes_that_differed_before(model):
    model.model.layers[1].self_attn.k_proj.double()
    before = {name: p.dtype for name, p in model.named_parameters()}
    unpatch_(patch_(model, keep_original=True))
    assert {name: p.dtype for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_that_are_replaced_are_refused_and_others_stay(model, register):
    calls = []
    attention = model.model.layers[1].self_attn
    getattr(attention.q_proj.weight, register)(calls.append)
    hook = getattr(attention.k_proj.weight, register)(calls.append)
    message = r"patch_: model.layers.1.self_attn.k_proj.weight has hooks, and another parameter"
    refused(message, patch_, model)
    assert type(model) is LlamaForCausalLM
    hook.remove()
    ids = tokens()
    patch_(model)(ids, labels=ids).loss.backward()
    assert len(calls) == 1
    assert model.model.layers[0].self_attn.t_proj.weight.grad.abs().max() > 0


def test_parameters_that_are_shared_beside_the_config_are_refused_by_name(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    message = "lm_head.weight is model.embed_tokens.weight itself, expected a parameter of its own"
    refused(message, patch_, model)
    model.config.tie_word_embeddings = True
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    message = r"layers.1.mlp.up_proj.weight is model.layers.0.mlp.up_proj.weight itself"
    refused(message, patch_, model)
    layers[1].mlp.up_proj.weight = torch.nn.Parameter(layers[0].mlp.up_proj.weight.detach().clone())
    assert patch_(model).lm_head.weight is model.model.embed_tokens.weight


def test_a_head_with_the_numbers_of_the_embedding_stays_a_parameter_of_its_own(model):
    model.config.tie_word_embeddings = True
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    patched = patch_(model)
    assert patched.lm_head.weight is not patched.model.embed_tokens.weight
    assert not patched.config.tie_word_embeddings


def test_unpatch_needs_the_original(model):
    message = "got LlamaForCausalLM, expected a model that patch_ changed"
    refused(message, unpatch_, model)
    refused("got a model without its original projections", unpatch_, patch_(model))


def test_a_sharded_model_is_refused(tiny_llama_dir, tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = fully_shard(LlamaForCausalLM.from_pretrained(tiny_llama_dir))
        refused("got FSDPLlamaForCausalLM, expected", patch_, model)
        model = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
        model.lm_head.weight = torch.nn.Parameter(
            distribute_tensor(model.lm_head.weight.data, init_device_mesh("cpu", (1,)))
        )
        refused(r"patch_: lm_head.weight is a DTensor", patch_, model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "layers", [{"keep_layers": 1}, {"keep_layers": "auto"}, {"content_layers": "auto"}]
)
def test_patch_takes_numbers_of_layers_alone(model, layers):
    refused(r"patch_: got keep_layers=.* expected numbers of layers", patch_, model, **layers)
    assert type(model) is LlamaForCausalLM
