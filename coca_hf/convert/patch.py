"""Make a model in memory a CoCA model, and back: `patch_`, `unpatch_`."""

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NoReturn

import torch
from transformers import PreTrainedModel

from coca_hf.convert.config import (
    FAMILIES,
    MODELS,
    check_kept_window,
    coca_class,
    coca_config,
    with_kept_window,
)
from coca_hf.convert.initialise import Initialiser
from coca_hf.convert.layout import check_tensors, stored_as
from coca_hf.errors import CocaError, short
from coca_hf.models.decoder import CocaConfig, CocaPreTrainedModel
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES, CocaRotaryEmbedding
from coca_hf.weights import HEADS

# in the model's __dict__: its class and __dict__ before patch_, and `_places`, `_parts`, `_buffers`
# and the config's fields after it; or None
ORIGINAL = "_original_of_patch"
# attributes of modules that are no floats and that decide what the modules compute
FLAGS = ("is_causal", "sliding_window", "use_parallel_residual", "use_rope")
# attributes of modules, after an underscore, that hold hooks
HOOKS = """
    forward_hooks forward_pre_hooks backward_hooks backward_pre_hooks state_dict_hooks
    state_dict_pre_hooks load_state_dict_pre_hooks load_state_dict_post_hooks
    """.split()  # noqa: SIM905


@torch.no_grad()
def patch_(
    model: PreTrainedModel,
    constraint: str = "slack",
    keep_original: bool = False,
    keep_layers: Iterable[int] = (),
    content_pairs: int | Literal["auto"] = 0,
    content_layers: Iterable[int] = (),
    keep_window: int | None = None,
    ignore_fields: Collection[str] = (),
) -> CocaPreTrainedModel:
    """Turn `model` into its family's CoCA model, in place, and return it.

    The initialisation is that of `convert_checkpoint`. All weights except the keys' remain the same
    parameters; the fused projections of GPT-NeoX and Phi-3 are split, so their queries and values
    are new parameters, too. Other models in the process do not change. keep_original: hold on to
    what is replaced, and to its memory, so `unpatch_` can restore it. The other arguments are those
    of `convert_checkpoint`, with layers by their numbers.

    Gradient checkpointing and `enable_input_require_grads` stay on, and a `loss_function` stays.
    Other hooks would be lost, so they are refused.

    Raises CocaError if the model is not a plain causal LM or classifier of a supported family
    (already CoCA, quantized, compiled, sharded, wrapped), has hooks, does not have all of its
    weights in memory, or computes with other numbers than its config says.
    """
    if isinstance(model, CocaPreTrainedModel):
        raise CocaError("patch_: got a CoCA model already; there is nothing to patch")
    configs = [family.config for family in FAMILIES.values()]
    supported = {of.get(config, None) for of in MODELS.values() for config in configs} - {None}
    if type(model) not in supported:
        names = sorted(model_class.__name__ for model_class in supported)
        raise CocaError(
            f"patch_: got {type(model).__name__}, expected one of {', '.join(names)}; unwrap it "
            "first"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise CocaError(
            "patch_: got a quantized model, expected plain weights; call its dequantize() first, or load "
            "it with a quantization_config that has dequantize=True"
        )

    if isinstance(keep_layers, (int, str)) or isinstance(content_layers, str):
        raise CocaError(
            f"patch_: got keep_layers={keep_layers!r}, content_layers={content_layers!r}, expected "
            "numbers of layers, as in [8, 17]; convert_checkpoint finds them, with calibrate_on"
        )
    _check_movable(model)
    keep_layers = sorted(keep_layers)
    check_kept_window(keep_window, keep_layers, name="patch_: keep_window")
    config = coca_config(
        model.config.to_dict() | {"architectures": [type(model).__name__]},
        constraint,
        "patch_: model.config",
        keep_layers,
        content_pairs,
        content_layers,
        ignore_fields,
    )
    if keep_window is not None:
        config = with_kept_window(config, keep_window, "patch_: model.config")
    _check_angles(model, config)
    config._attn_implementation = model.config._attn_implementation
    source = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in source.items()}
    if any(head in shapes for head in HEADS):  # a tied head has no name
        config.tie_word_embeddings = False
    family = FAMILIES[model.config.model_type]
    targets, _ = check_tensors(shapes, config, family, where="patch_")
    initialiser = Initialiser(config, targets, lambda name: source[name].cpu(), where="patch_")
    with torch.device("meta"):
        coca = coca_class(config)(config)
    for target in targets:
        parameter = source[target.source]
        made = parameter.data if target.is_carried_over else initialiser.make(target)
        stored = stored_as(config, parameter.dtype, made, target, "patch_").to(parameter.device)
        if not target.is_carried_over:
            parameter = torch.nn.Parameter(stored, requires_grad=parameter.requires_grad)
        module, _, name = target.name.rpartition(".")
        setattr(coca.get_submodule(module), name, parameter)
    _check_left_behind(model, coca)
    coca.tie_weights()
    coca.model.rotary_emb = CocaRotaryEmbedding(config).to(model.device)
    if model.can_generate():
        coca.generation_config = model.generation_config
    _set_training_state(coca, *_training_state(model))
    original = None
    if keep_original:
        parts = _parts(coca)
        fields = copy.deepcopy(vars(config))
        original = type(model), model.__dict__, _places(parts[1]), parts, _buffers(coca), fields
    model.__class__, model.__dict__ = type(coca), coca.__dict__
    model.__dict__[ORIGINAL] = original
    return model


def unpatch_(model: CocaPreTrainedModel) -> PreTrainedModel:
    """Undo `patch_(model, keep_original=True)` in place, and return the model.

    Parameters that both models share keep what training, moving or casting did to them. The key
    projections and the fused projections of GPT-NeoX and Phi-3 are as they were before `patch_`, but
    follow their layer's output projection if it was moved or cast. Fields of the config that were
    set since, and an attention that the original has, too, are the original's, too.

    Raises CocaError if the original was not kept, because it cannot be computed from the CoCA
    model, or if embeddings have been resized, modules or parameters replaced, or hooks, buffers or
    methods of your own added since.
    """
    if not isinstance(model, CocaPreTrainedModel):
        raise CocaError(
            f"unpatch_: got {type(model).__name__}, expected a model that patch_ changed"
        )
    if model.__dict__.get(ORIGINAL) is None:
        raise CocaError(
            "unpatch_: got a model without its original projections, expected patch_(model, "
            "keep_original=True); load the original again"
        )
    *original, places, parts, buffers, fields = model.__dict__[ORIGINAL]
    is_replaced = _parts(model) != parts
    has_hooks = any(map(_has_hooks, model.modules()))
    own_method = next((name for name, m in model.named_modules() if _has_own_method(m)), None)
    own_buffers = _buffers(model) - buffers
    state, config = _training_state(model), model.config
    head = getattr(model.get_output_embeddings(), "weight", None)  # classifiers have none
    coca = type(model), model.__dict__
    model.__class__, model.__dict__ = original
    original_head = getattr(model.get_output_embeddings(), "weight", None)
    problem = None
    if original_head is not head or model.config.vocab_size != config.vocab_size:
        problem = "embeddings that were resized or replaced since patch_; load the original again"
    elif is_replaced:
        problem = (
            "modules or parameters that were replaced since patch_, such as adapters or what their "
            "modules_to_save trained, which would be lost; merge adapters first (merge_and_unload)"
        )
    elif has_hooks:
        problem = "hooks that were registered since patch_, which would be lost; remove them first"
    elif own_method is not None:
        name = own_method or "the model"
        problem = (
            f"a method of your own on {name}, which would be lost; delete it first, or compile the "
            "model afterwards"
        )
    elif own_buffers:
        problem = f"{min(own_buffers)}, a buffer of your own, which would be lost; remove it first"
    if problem:
        model.__class__, model.__dict__ = coca
        raise CocaError(f"unpatch_: got {problem}")
    for number, place in _places(parts[1]).items():
        if place != places[number]:
            for parameter in {*model.base_model.layers[number].parameters()} - {*parts[1]}:
                parameter.data = parameter.data.to(*place)
    not_carried = {"architectures", "auto_map"}  # saving sets them
    if config._attn_implementation == "coca":  # which the original cannot use
        not_carried.add("_attn_implementation_internal")
    for name in vars(config).keys() - not_carried:
        value = getattr(config, name)
        is_set = name not in fields or value != fields[name]
        if is_set and (name not in fields or hasattr(model.config, name)):
            setattr(model.config, name, value)
    _set_training_state(model, *state)
    return model


def _places(parts: dict[torch.nn.Parameter, str]) -> dict[int, tuple[torch.device, torch.dtype]]:
    """Device and dtype of every layer's output projection, by the layer's number."""
    places = {}
    for parameter, name in parts.items():
        if name.endswith("self_attn.o_proj.weight"):
            places[int(name.split(".")[2])] = parameter.device, parameter.dtype
    return places


def _training_state(model: PreTrainedModel) -> tuple[bool, Callable | None, bool, dict]:
    """Whether the model trains, the function by which it checkpoints activations, if it does,
    whether its inputs require gradients, and its loss, which may be one of the caller's.
    """
    losses = ("loss_type", "_loss_function")
    loss = {name: getattr(model, name) for name in losses if hasattr(model, name)}
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    function = layers[0]._gradient_checkpointing_func if layers else None
    return model.training, function, hasattr(model, "_require_grads_hook"), loss


def _set_training_state(
    model: PreTrainedModel,
    training: bool,
    checkpointing: Callable | None,
    input_gradients: bool,
    loss: dict,
) -> None:
    for name, value in loss.items():
        setattr(model, name, value)
    model.train(training)
    model._set_gradient_checkpointing(checkpointing is not None, checkpointing)
    if input_gradients:
        model.enable_input_require_grads()


def _parts(model: PreTrainedModel) -> tuple[dict[str, type], dict[torch.nn.Parameter, str]]:
    """The kinds of all modules by name, and the parameters with their names.

    Parameters as keys are compared by identity, and a copy of the model has its own here.
    """
    kinds = {name: type(module) for name, module in model.named_modules()}
    return kinds, {parameter: name for name, parameter in model.named_parameters()}


def _check_movable(model: PreTrainedModel) -> None:
    """Raise CocaError for what `patch_` would lose: hooks, compiled code, weights elsewhere, buffers,
    attentions and MLPs other than the family's own, and numbers other than the config's.
    """
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    stock = dict(fresh.named_modules())
    if own_buffers := dict(model.named_buffers()).keys() - dict(fresh.named_buffers()).keys():
        raise CocaError(
            f"patch_: {min(own_buffers)} is a buffer of your own, which would be lost; remove it, "
            "and add it again afterwards"
        )
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own_name = names.setdefault(parameter, name)
        is_tied_head = name in HEADS and model.config.tie_word_embeddings
        if own_name != name and not is_tied_head:
            raise CocaError(
                f"patch_: {name} is {own_name} itself, expected a parameter of its own as the config "
                "says; give it a copy, or, if it is the head, set config.tie_word_embeddings"
            )
        if type(parameter.data) is not torch.Tensor or parameter.is_meta:
            raise CocaError(
                f"patch_: {name} is a {type(parameter.data).__name__} on {parameter.device}, "
                "expected plain weights in memory; patch_ before you quantize, shard or offload"
            )
    for name, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None
        has_method = bool(_own_methods(module))
        if is_compiled or _has_hooks(module) or has_method or hasattr(module, "_hf_hook"):
            raise CocaError(
                f"patch_: {name or 'the model'} is compiled or has hooks or a method of its own, "
                "which would be lost; patch_ first, with the model on one device"
            )
        if name in stock and type(module) is not type(stock[name]):
            got, expected = (
                f"{t.__module__}.{t.__name__}" for t in map(type, (module, stock[name]))
            )
            raise CocaError(
                f"patch_: {name} is a {got}, expected {expected}; what it computes would be lost, "
                "so patch_ first"
            )
        for number, stated in (vars(stock[name]) if name in stock else {}).items():
            decides = isinstance(stated, float) or number in FLAGS
            if decides and (value := getattr(module, number, None)) != stated:
                _refuse_number(f"{name}.{number}".lstrip("."), value, stated)


def _check_left_behind(model: PreTrainedModel, coca: CocaPreTrainedModel) -> None:
    """Raise CocaError if parameters of `model` that `coca` does not have carry hooks."""
    carried = {*coca.parameters()}
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter not in carried and any(hooks):
            raise CocaError(
                f"patch_: {name} has hooks, and another parameter takes its place; remove them, and "
                "register them again afterwards"
            )


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether `module` has hooks other than those that both models get from transformers."""
    own = ("transformers.utils.output_capturing", "transformers.modeling_utils")
    hooks = [hook for kind in HOOKS for hook in getattr(module, f"_{kind}").values()]
    return any(getattr(hook, "__module__", None) not in own for hook in hooks)


def _own_methods(module: torch.nn.Module) -> set[str]:
    """The names of methods that were set on `module` itself."""
    return {n for n, v in vars(module).items() if callable(v) and hasattr(type(module), n)}


def _has_own_method(module: torch.nn.Module) -> bool:
    """Whether `module` has a method of its own other than the `forward` that accelerate puts around
    a model's for mixed precision, which leaves with it.
    """
    accelerates = {"forward"} if "_original_forward" in vars(module) else set()
    return bool(_own_methods(module) - accelerates)


def _buffers(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_buffers()}


def _check_angles(model: PreTrainedModel, config: CocaConfig) -> None:
    """Raise CocaError if the model's rotary frequencies are not those of its `config`."""
    rotary = CocaRotaryEmbedding(config)
    by_length = rotary.rope_type in LENGTH_DEPENDENT_ROPE_TYPES
    name = "original_inv_freq" if by_length else "inv_freq"
    got, expected = getattr(model.base_model.rotary_emb, name), rotary.inv_freq.cpu()
    # `model.half()` and the like round them
    if not got.is_meta and not torch.allclose(got.cpu().float(), expected, rtol=0.01, atol=1e-7):
        _refuse_number(f"the rotary embedding's {name}", got.tolist(), expected.tolist())


def _refuse_number(name: str, got: object, expected: object) -> NoReturn:
    raise CocaError(
        f"patch_: {name} is {short(got)}, expected {short(expected)} as the config says; the change "
        "would be lost, so change the config instead, and load the model with it"
    )
