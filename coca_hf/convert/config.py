"""Configurations: the supported families, the fields they may have, and a baked NTK base."""

import dataclasses
import difflib
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME

from coca_hf.errors import CocaError, library_errors
from coca_hf.models.attention import layer_types
from coca_hf.models.decoder import MASKS, CocaConfig, CocaPreTrainedModel
from coca_hf.models.rotary import (
    LENGTH_DEPENDENT_ROPE_TYPES,
    SUPPORTED_ROPE_TYPES,
    CocaRotaryEmbedding,
    ntk_base,
    rotary_dim,
    unscaled_len,
)
from coca_hf.weights import checkpoint_file, read_json


@dataclasses.dataclass(frozen=True)
class Family:
    """transformers' classes for a source of `model_type`, and our registered classes for its CoCA
    model, of type `becomes`.

    other_fields: understood in a config.json, although they are not fields of both configurations.
    """

    model_type: str
    becomes: str
    other_fields: frozenset[str] = frozenset()
    rotates_part_of_heads: bool = False

    @property
    def config(self) -> Any:
        return CONFIG_MAPPING[self.model_type]

    @property
    def causal_lm(self) -> Any:
        return MODEL_FOR_CAUSAL_LM_MAPPING[self.config]

    @property
    def coca_config(self) -> Any:
        return CONFIG_MAPPING[self.becomes]

    def understands(self) -> set[str]:
        common = _fields(self.config) & _fields(self.coca_config)
        return common | {"rope_theta", "rope_scaling"} | self.other_fields


_NEOX_FIELDS = frozenset({"rotary_pct", "rotary_emb_base"})
_PHI3_FIELDS = frozenset({"original_max_position_embeddings", "partial_rotary_factor"})
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "coca_llama"),
        Family("mistral", "coca_mistral"),
        Family("qwen2", "coca_qwen2", frozenset({"head_dim"})),
        Family("qwen3", "coca_qwen3"),
        Family("granite", "coca_granite"),
        Family("smollm3", "coca_smollm3"),
        Family("gpt_neox", "coca_gpt_neox", _NEOX_FIELDS, rotates_part_of_heads=True),
        # a Mistral once its fused projections are split, which happens as they are read
        Family("phi3", "coca_mistral", _PHI3_FIELDS, rotates_part_of_heads=True),
    )
}

# classes by their head, which is the end of their names, and by their config
MODELS = {
    "ForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING,
    "ForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "ForTokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}

_UNBOUNDED = (
    "its attention reads hidden states that no norm has bounded and divides keys by their size; "
    "CoCA's coefficients have no such norm, so nothing would bound its scores"
)
REFUSED_FAMILIES = {"olmo2": _UNBOUNDED, "olmo3": _UNBOUNDED}

# Fields that transformers, trainers and model authors have written over the years, and that do not
# affect weights or attention, or are examined elsewhere. Names that begin with an underscore and
# fields that are null do not matter, either.
INERT_FIELDS = GenerationConfig().to_dict().keys() | set(
    """
    attn_implementation auto_map bos_token eos_token finetuning_task gradient_checkpointing
    is_decoder is_llama_config max_sequence_length max_window_layers model_max_length model_name
    model_type pad_token prefix pretraining_tp sep_token_id task_specific_params tf_legacy_loss
    tokenizer_class torch_dtype torchscript transformers.js_config unk_token unk_token_id
    unsloth_fixed unsloth_version use_bfloat16
    """.split()  # noqa: SIM905
)
# Fields that change the model in ways that CoCA does not follow, and what is supported instead.
REFUSED_WHEN_SET = {
    "add_cross_attention": "decoders alone",
    "attention_bias": "projections without biases",
    "cross_attention_hidden_size": "decoders alone",
    "embd_pdrop": "dropout of attention alone",
    "lm_head_bias": "projections without biases",
    "mlp_bias": "projections without biases",
    "pruned_heads": "models with all of their heads",
    "quantization_config": "plain float64, float32, float16, bfloat16; load it dequantized and "
    "save it first",
    "resid_pdrop": "dropout of attention alone",
    "rope_interleaved": "pairs (x[j], x[j + d/2])",
    "sliding_window": "a window of mistral, qwen2, qwen3",
    "tie_encoder_decoder": "decoders alone",
    "use_mrope": "one position to a token",
}


def head_of(architectures: object) -> str:
    """`ForCausalLM`, unless the `architectures` of a config.json name a classifier."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    return next((head for head in MODELS if str(named).endswith(head)), "ForCausalLM")


def check_not_quantized(where: str, config: PreTrainedConfig) -> None:
    """Raises CocaError for quantized weights, whose sizes and scales are not those of a model."""
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CocaError(
            f"{where}: got weights quantized by {method}, expected plain ones: those before "
            "quantization, or what coca-convert makes of these"
        )


def check_generation_config(directory: Path) -> None:
    """Raise CocaError for a generation_config.json with which transformers would not load a model."""
    if os.path.lexists(directory / GENERATION_CONFIG_NAME):
        file = checkpoint_file(directory, GENERATION_CONFIG_NAME)
        settings = read_json(file)
        with library_errors(f"{file}: cannot be read; correct it, or remove the file"):
            GenerationConfig.from_dict(settings)


def coca_class(config: CocaConfig) -> type[CocaPreTrainedModel]:
    """The family's model with the head that `architectures` names."""
    return MODELS[head_of(config.architectures)][type(config)]


@dataclasses.dataclass(frozen=True)
class Form:
    """The options of `convert_checkpoint` that decide what is written.

    src: the source's name in messages.
    """

    src: str
    constraint: str | None
    dtype: str
    shard_bytes: int
    ntk_length: int | None
    released: bool
    ignored_fields: Collection[str]
    content_pairs: int | Literal["auto"] | None
    content_layers: Collection[int] = ()
    kept_window: int | None = None


def is_coca(config: Mapping) -> bool:
    """Whether a `config.json` is from one of our CoCA checkpoints."""
    return str(config.get("model_type")).startswith("coca_")


def converted_config(
    config: Mapping, form: Form, kept_layers: Sequence[int], where: str
) -> CocaConfig:
    """The configuration to write, without the NTK base that `form` may ask for.

    Raises CocaError as `coca_config` does, and for a CoCA source if `form` asks for anything that
    would change its layers, or for no NTK base.
    """
    if not is_coca(config):
        kept = sorted(kept_layers)
        # ranked layers, which are known after calibration, may be among the content layers
        some = {*form.content_layers} - {*kept}
        constraint, content = form.constraint or "slack", form.content_pairs or 0
        return coca_config(config, constraint, where, kept, content, some, form.ignored_fields)
    own = _copied_config(config, where, form.ignored_fields)
    if not form.ntk_length:
        raise CocaError(
            f"{where}: got a CoCA checkpoint already (model_type {config['model_type']!r}), expected "
            "an original; train or evaluate it, or give it a longer base with --ntk-length"
        )
    changes = {
        "--constraint": form.constraint not in (None, own.coca_constraint),
        "--keep-layers": bool(kept_layers),
        "--content-pairs": form.content_pairs is not None,
        "--content-layers": bool(form.content_layers),
    }
    if found := [option for option, is_asked in changes.items() if is_asked]:
        raise CocaError(
            f"{where}: {found[0]}: got it for a CoCA checkpoint, whose layers stay as they are; "
            "leave it out, or convert the original"
        )
    return own


def coca_config(
    config: Mapping,
    constraint: str,
    where: str,
    kept_layers: Iterable[int] = (),
    content_pairs: int | Literal["auto"] = 0,
    content_layers: Iterable[int] = (),
    ignored: Collection[str] = (),
) -> CocaConfig:
    """The CoCA configuration for a checkpoint's `config.json`, which `where` names in errors.

    content_pairs: `auto` stands for `slow_pairs`. ignored: unknown fields that the user declares
    inert.

    Raises CocaError for an unknown family, a field that is not understood, or a value that CoCA
    does not support.
    """
    family = _family(config.get("model_type"), where)
    if config.get("auto_map") and "auto_map" not in ignored:
        raise CocaError(
            f"{where}: auto_map names the checkpoint's own code, which is never run; expected a "
            f"plain {family.model_type!r}; --ignore-field auto_map (ignore_fields in Python) leaves it "
            f"out, if the weights are those of transformers' {family.causal_lm.__name__}"
        )
    understood = family.understands()
    fields = _understood_fields(config, understood, ignored, where)
    head = head_of(config.get("architectures"))
    fields["architectures"] = [MODELS[head][family.coca_config].__name__]
    kept_layers, number = list(kept_layers), fields.get("num_hidden_layers")
    if isinstance(number, int) and not all(0 <= layer < number for layer in kept_layers):
        raise CocaError(
            f"{where}: --keep-layers: got {kept_layers}, expected each layer once, numbered from "
            f"0 to {number - 1}"
        )
    with library_errors(where):
        if not issubclass(family.coca_config, family.config):  # then their defaults may differ
            own = family.config(**fields).to_dict()
            fields = {name: own[name] for name in understood - family.other_fields if name in own}
        result = family.coca_config(
            **fields, coca_constraint=constraint, coca_kept_layers=kept_layers
        )
        pairs = slow_pairs(result) if content_pairs == "auto" else content_pairs
    with library_errors(f"{where}: --content-pairs"):
        result.coca_content_pairs = pairs
        result.validate_pairs()
    with library_errors(f"{where}: --content-layers"):
        result.coca_content_layers = sorted(content_layers)
        result.validate_layers()
    _check_positions(result, family, where)
    return result


def angles_reach(config: PreTrainedConfig) -> int:
    """Over how many positions the original has its trained angles."""
    rope, lengths = config.rope_parameters, [config.max_position_embeddings]
    # with "default", an NTK base may be baked in
    if rope["rope_type"] in ("default", *LENGTH_DEPENDENT_ROPE_TYPES):
        lengths.append(rope.get("original_max_position_embeddings"))
    return min(int(length) for length in lengths if length)


def slow_pairs(config: CocaConfig) -> int:
    """How many of a head's pairs, the last ones, do not complete a rotation within the trained
    length. Pairs that do not rotate count.
    """
    angles = CocaRotaryEmbedding(config).initial_buffers()["inv_freq"]  # of one position
    turns = angles * angles_reach(config) / (2 * math.pi)
    slow = (turns < 1).flip(0).cumprod(0).sum()  # of those that rotate
    return config.head_dim // 2 - len(turns) + int(slow)


def check_kept_window(
    window: int | None,
    keep_layers: Collection[int] | int | str | None,
    block_tokens: int = 2,
    name: str = "--keep-window",
) -> None:
    """Raise CocaError for a window without kept layers, or shorter than a calibration block. `name`
    is that of the window in errors.
    """
    if window is None:
        return
    if not keep_layers:
        raise CocaError(f"{name}: got {window} without kept layers, expected both")
    if not block_tokens <= window < 2**31:
        of_block = ", those of a block of --calibrate" if block_tokens > 2 else ""
        raise CocaError(
            f"{name}: got {window}, expected at least {block_tokens:,} tokens{of_block}, and below 2^31"
        )


def with_kept_window(config: CocaConfig, window: int, where: str) -> CocaConfig:
    """`config`, whose kept layers attend to the last `window` tokens.

    Raises CocaError if the family's own windows are in use, which kept layers keep, or if none of
    the kept layers has a rotary embedding (SmolLM3).
    """
    if "sliding_attention" in layer_types(config):
        raise CocaError(
            f"{where}: --keep-window: got {window}, but the model has windows of its own, "
            f"{config.sliding_window:,} tokens; kept layers keep those"
        )
    windowed = type(config).from_dict(config.to_dict() | {"coca_kept_window": window})
    if not windowed.windowed_layers():
        raise CocaError(
            f"{where}: --keep-window: got {window} for layers {config.coca_kept_layers}, which have "
            "no rotary embedding and attend to all tokens; expected other kept layers as well"
        )
    return windowed


def bake_ntk_(config: CocaConfig, length: int, where: str) -> dict:
    """Give `config` dynamic NTK's rotary base for `length` tokens; returns what was done.

    Afterwards `rope_type` is `default`, `max_position_embeddings` is the length, and the trained
    length is in `rope_parameters["original_max_position_embeddings"]`. Dynamic NTK's factor is the
    config's own, if its RoPE is dynamic, or length / trained length, which is what transformers
    means by a factor: how many times the trained length the model should reach. To get the function
    whose perplexity was measured, the config has to have the factor of that measurement (the
    paper's are 2, 4 and 8).

    Raises CocaError if the configuration's RoPE is scaled in another way or baked already, the
    length does not exceed the trained one, or the base overflows float32. `where` names the
    configuration in errors.
    """
    rope, trained_len = config.rope_parameters, unscaled_len(config)
    option, problem = f"{where}: --ntk-length: got", None
    if rope["rope_type"] == "default" and "original_max_position_embeddings" in rope:
        baked = config.max_position_embeddings
        problem = f"a checkpoint with an NTK base for {baked} tokens already, expected its source"
    elif rope["rope_type"] not in ("default", "dynamic"):
        problem = f"rope_type {rope['rope_type']!r}, expected default or dynamic"
    elif length <= trained_len:
        problem = (
            f"{length}, expected more than the {trained_len} tokens of training, up to which the "
            "base does not change"
        )
    elif (dims := rotary_dim(config)) <= 2:
        problem = f"{dims} rotary dimensions, expected more than one rotary pair"
    if problem:
        raise CocaError(f"{option} {problem}")
    try:
        factor = rope["factor"] if rope["rope_type"] == "dynamic" else length / trained_len
        base = ntk_base(rope["rope_theta"], factor, length, trained_len, rotary_dim(config))
    except OverflowError:
        base = math.inf
    if not base <= torch.finfo(torch.float32).max:  # the dtype in which models compute angles
        raise CocaError(
            f"{option} {length}, whose base is beyond float32; expected fewer tokens, or a smaller "
            "factor of a dynamic RoPE"
        )
    done = {
        "ntk_length": length,
        "trained_length": trained_len,
        "factor": factor,
        "rope_theta": {"before": rope["rope_theta"], "after": base},
    }
    kept = {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    config.rope_parameters = kept | {
        "rope_type": "default",
        "rope_theta": base,
        "original_max_position_embeddings": angles_reach(config),
    }
    config.max_position_embeddings = length
    return done


def _copied_config(config: Mapping, where: str, ignored: Collection[str]) -> CocaConfig:
    """The configuration of a CoCA `config.json`, as in `coca_config`; its own code is not run."""
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise CocaError(
            f"{where}: got model_type {model_type!r}, which this version of coca_hf does not have"
        )
    config_class = CONFIG_MAPPING[model_type]
    own = {field for field in config if field.startswith("coca_")}  # it refuses those it lacks
    fields = _understood_fields(config, _fields(config_class) | own, ignored, where)
    with library_errors(where):
        return config_class(**fields)


def _fields(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} - {"transformers_version"}


def _understood_fields(
    config: Mapping, understood: Collection[str], ignored: Collection[str], where: str
) -> dict:
    """The fields of `config` that are `understood`; the others are inert, unset or `ignored`.

    Raises CocaError for any other field, and if an ignored one is absent or changes the model.
    """
    for field in ignored:
        if field not in config:
            raise CocaError(f"{where}: --ignore-field {field}: got no such field")
        if field in understood or field in REFUSED_WHEN_SET or field == "model_type":
            raise CocaError(
                f"{where}: --ignore-field {field}: got a field that changes the model, "
                "expected an inert one"
            )
    name = config["model_type"]
    for field, value in config.items():
        is_inert = value is None or field in INERT_FIELDS or field.startswith("_")
        if is_inert or field in understood or field in ignored:
            continue
        if field not in REFUSED_WHEN_SET:
            near = difflib.get_close_matches(field, understood, n=1)
            hint = f" (nearest known field: {near[0]})" if near else ""
            raise CocaError(
                f"{where}: {field}={value!r} is not understood for {name!r}{hint}; converting "
                f"could change the model; --ignore-field {field} (ignore_fields in Python) leaves it "
                "out, if it says nothing about weights or attention"
            )
        if value:
            raise CocaError(
                f"{where}: {field}={value!r} is not supported with CoCA for {name!r}; supported: "
                f"{REFUSED_WHEN_SET[field]}"
            )
    fields = {field: value for field, value in config.items() if field in understood}
    if "torch_dtype" in config:
        fields.setdefault("dtype", config["torch_dtype"])
    return fields


def _family(model_type: object, where: str) -> Family:
    name = str(model_type)
    if name in REFUSED_FAMILIES:
        raise CocaError(f"{where}: {name!r} is refused: {REFUSED_FAMILIES[name]}")
    if name not in FAMILIES:
        raise CocaError(
            f"{where}: got model_type {model_type!r}, supported: {', '.join(map(repr, FAMILIES))}"
        )
    return FAMILIES[name]


def _check_positions(config: CocaConfig, family: Family, where: str) -> None:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CocaError(
            f"{where}: rope_type {rope_type!r} is not supported with CoCA; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if not family.rotates_part_of_heads and rotary_dim(config) != config.head_dim:
        partial = [name for name, other in FAMILIES.items() if other.rotates_part_of_heads]
        raise CocaError(
            f"{where}: partial_rotary_factor {config.rope_parameters['partial_rotary_factor']} is "
            f"not supported with CoCA for {family.model_type!r}; supported: 1, or less of "
            f"{', '.join(partial)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds and getattr(config, "sliding_window", None) is None:
        raise CocaError(
            f"{where}: got layer_types with sliding_attention, but no sliding_window in use; correct "
            "layer_types, or sliding_window and use_sliding_window"
        )
    unknown = sorted(kinds - MASKS.keys())
    if unknown:
        raise CocaError(
            f"{where}: layer type {unknown[0]!r} is not supported with CoCA; supported: "
            f"{', '.join(MASKS)}"
        )


def cache_numbers(config: PreTrainedConfig) -> dict[str, int]:
    """Numbers in the half-width cache of one sequence (models/cache.py): `growing` per token, of
    which keys and values of full width would have `standard`, and `fixed` for sliding windows.
    """
    is_coca = isinstance(config, CocaConfig)
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    full = 2 * d * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    numbers = {"growing": 0, "fixed": 0, "standard": 0}
    for layer, kind in enumerate(layer_types(config)):
        width = full * 3 // 4 if is_coca and layer not in config.coca_kept_layers else full
        if kind == "sliding_attention":
            numbers["fixed"] += config.sliding_window * width
        else:
            numbers["growing"] += width
            numbers["standard"] += full
    if is_coca:
        numbers["growing"] += config.kinds_of_angles() * d  # cos and sin of a position
    return numbers
