"""What becomes of a config.json: the families, the fields they may have, a baked NTK base."""

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from coca_hf.errors import CocaError, one_line
from coca_hf.models.decoder import MASKS, CocaConfig, CocaForCausalLM, CocaPreTrainedModel
from coca_hf.models.gpt_neox import CocaGPTNeoXConfig, CocaGPTNeoXForCausalLM
from coca_hf.models.granite import CocaGraniteConfig, CocaGraniteForCausalLM
from coca_hf.models.llama import CocaLlamaConfig, CocaLlamaForCausalLM
from coca_hf.models.mistral import CocaMistralConfig, CocaMistralForCausalLM
from coca_hf.models.qwen2 import CocaQwen2Config, CocaQwen2ForCausalLM
from coca_hf.models.qwen3 import CocaQwen3Config, CocaQwen3ForCausalLM
from coca_hf.models.rotary import SUPPORTED_ROPE_TYPES, ntk_base, rotary_dim, unscaled_len
from coca_hf.models.smollm3 import CocaSmolLM3Config, CocaSmolLM3ForCausalLM


@dataclasses.dataclass(frozen=True)
class Family:
    """transformers' classes of a source, and ours of what it becomes.

    other_fields: understood in a config.json without being fields of both configurations.
    """

    config: type[PreTrainedConfig]
    causal_lm: type[PreTrainedModel]
    coca_config: type[CocaConfig]
    coca_causal_lm: type[CocaForCausalLM]
    other_fields: frozenset[str] = frozenset()
    partial_rotary: bool = False

    def understands(self) -> set[str]:
        theirs, ours = (
            {field.name for field in dataclasses.fields(config)}
            for config in (self.config, self.coca_config)
        )
        return (theirs & ours) | {"rope_theta", "rope_scaling"} | self.other_fields


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaForCausalLM, CocaLlamaConfig, CocaLlamaForCausalLM),
    "mistral": Family(MistralConfig, MistralForCausalLM, CocaMistralConfig, CocaMistralForCausalLM),
    "qwen2": Family(
        Qwen2Config,
        Qwen2ForCausalLM,
        CocaQwen2Config,
        CocaQwen2ForCausalLM,
        frozenset({"head_dim"}),
    ),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, CocaQwen3Config, CocaQwen3ForCausalLM),
    "granite": Family(GraniteConfig, GraniteForCausalLM, CocaGraniteConfig, CocaGraniteForCausalLM),
    "smollm3": Family(SmolLM3Config, SmolLM3ForCausalLM, CocaSmolLM3Config, CocaSmolLM3ForCausalLM),
    "gpt_neox": Family(
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        CocaGPTNeoXConfig,
        CocaGPTNeoXForCausalLM,
        frozenset({"rotary_pct", "rotary_emb_base"}),
        partial_rotary=True,
    ),
    # Its fused projections are split while they are read, and what is left is Mistral's
    "phi3": Family(
        Phi3Config,
        Phi3ForCausalLM,
        CocaMistralConfig,
        CocaMistralForCausalLM,
        frozenset({"original_max_position_embeddings", "partial_rotary_factor"}),
        partial_rotary=True,
    ),
}

# By the end of their names: classes with another head than the language head, by their config
CLASSIFIERS = {
    "ForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "ForTokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}

_UNBOUNDED = (
    "its attention reads hidden states that no norm has bounded and divides keys by their size; "
    "CoCA's coefficients have no such norm, so that nothing would bound its scores"
)
REFUSED_FAMILIES = {"olmo2": _UNBOUNDED, "olmo3": _UNBOUNDED}

# Written by transformers, by trainers and by model authors over the years; they say nothing about
# weights or attention. Nor do names that begin with an underscore, or fields that are null. fmt:
# off
INERT_FIELDS = {
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "is_decoder",
    "is_llama_config",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "model_name",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_scores",
    "pad_token",
    "prefix",
    "pretraining_tp",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "typical_p",
    "unk_token",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
}
# fmt: on
IGNORE_OPTION = "--ignore-field {}"
# These change the model when they are set, in ways that CoCA does not follow; what it supports in
# their place.
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


def family_of(config: CocaConfig) -> Family:
    """The family that a CoCA configuration belongs to; its source may be of another one."""
    return FAMILIES[config.model_type.removeprefix("coca_")]


def head_of(architectures: object) -> str:
    """`ForCausalLM`, unless the `architectures` of a config.json name a classifier."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    return next((head for head in CLASSIFIERS if str(named).endswith(head)), "ForCausalLM")


def coca_class(config: CocaConfig) -> type[CocaPreTrainedModel]:
    """The family's model with the head that `architectures` names."""
    head = head_of(config.architectures)
    if head in CLASSIFIERS:
        return CLASSIFIERS[head][type(config)]
    return family_of(config).coca_causal_lm


def written_config(
    config: Mapping,
    constraint: str | None,
    ntk_length: int | None,
    ntk_factor: float | None,
    kept_layers: Sequence[int] | None,
    ignored: Collection[str],
    where: str,
) -> tuple[CocaConfig, bool, dict | None]:
    """The configuration to write, whether the source is CoCA already, and what `bake_ntk_` did.

    A CoCA source is good for `ntk_length` only. Raises CocaError as the functions below do.
    """
    from_coca = bool(ntk_length) and str(config.get("model_type")).startswith("coca_")
    if from_coca:
        result = _copied_config(config, where, ignored)
        if constraint and constraint != result.coca_constraint:
            raise CocaError(
                f"{where}: --constraint: got {constraint}, expected {result.coca_constraint}, the "
                "source's"
            )
        if kept_layers is not None and sorted(kept_layers) != sorted(result.coca_kept_layers):
            raise CocaError(
                f"{where}: --keep-layers: got {list(kept_layers)}, expected "
                f"{result.coca_kept_layers}, the source's"
            )
    else:
        result = coca_config(
            config, constraint or "slack", where, sorted(kept_layers or ()), ignored
        )
    return (
        result,
        from_coca,
        bake_ntk_(result, ntk_length, ntk_factor, where) if ntk_length else None,
    )


def coca_config(
    config: Mapping,
    constraint: str,
    where: str,
    kept_layers: Iterable[int] = (),
    ignored: Collection[str] = (),
    ignore_option: str = IGNORE_OPTION,
) -> CocaConfig:
    """The CoCA configuration of a checkpoint's `config.json`; `where` names it in errors.

    ignored: fields that it has and we do not know, which the user calls inert. ignore_option: how
    errors name the option that ignores the field `{}`.

    Raises CocaError for an unknown family, a field that is not understood, or a value that CoCA
    does not support.
    """
    family = _family(config.get("model_type"), where)
    config = _without_fields(config, ignored, family.understands(), where, ignore_option)
    _check_fields(config, family, where, ignore_option)
    understood = family.understands() - {"transformers_version"}
    fields = {field: value for field, value in config.items() if field in understood}
    head = head_of(config.get("architectures"))
    fields["architectures"] = [family.coca_causal_lm.__name__.replace("ForCausalLM", head)]
    if "torch_dtype" in config:
        fields.setdefault("dtype", config["torch_dtype"])
    try:
        if not issubclass(family.coca_config, family.config):  # which has defaults of its own
            own = family.config(**fields).to_dict()
            fields = {name: own[name] for name in understood - family.other_fields if name in own}
        result = family.coca_config(
            **fields, coca_constraint=constraint, coca_kept_layers=list(kept_layers)
        )
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{where}: {one_line(error)}") from error
    _check_positions(result, family, where)
    return result


def bake_ntk_(config: CocaConfig, length: int, factor: float | None, where: str) -> dict:
    """Give `config` dynamic NTK's rotary base for `length` tokens; returns what was done.

    Afterwards `rope_type` is `default`, `max_position_embeddings` is `length`, and the trained
    length stays known as `rope_parameters["original_max_position_embeddings"]`. factor: dynamic
    NTK's; by default that of a config which is dynamic already, else length / trained length, which
    is what transformers says a factor means: the number of times the trained length that the model
    is to reach. Where perplexity was measured with another (the paper's are 2, 4 and 8), that one
    gives the function that was measured.

    Raises CocaError where the configuration's RoPE is scaled otherwise or baked already, the length
    is no longer than the trained one, or the base is no float32 number. `where` names the
    configuration in errors.
    """
    rope = config.rope_parameters
    trained_len = unscaled_len(config)
    if rope["rope_type"] == "default" and "original_max_position_embeddings" in rope:
        raise CocaError(
            f"{where}: --ntk-length: got a checkpoint with an NTK base for "
            f"{config.max_position_embeddings} tokens already, expected the one it was made from"
        )
    if rope["rope_type"] not in ("default", "dynamic"):
        raise CocaError(
            f"{where}: --ntk-length: got rope_type {rope['rope_type']!r}, expected default or "
            "dynamic"
        )
    if length <= trained_len:
        raise CocaError(
            f"{where}: --ntk-length: got {length}, expected more than the {trained_len} tokens of "
            "training; up to those the base does not change"
        )
    if rotary_dim(config) <= 2:
        raise CocaError(
            f"{where}: --ntk-length: got {rotary_dim(config)} rotary dimensions, expected more "
            "than one rotary pair"
        )
    try:
        if factor is None:
            factor = rope["factor"] if rope["rope_type"] == "dynamic" else length / trained_len
        base = ntk_base(rope["rope_theta"], factor, length, trained_len, rotary_dim(config))
    except OverflowError:
        base = math.inf
    if not base <= torch.finfo(torch.float32).max:  # what models compute angles in
        raise CocaError(
            f"{where}: --ntk-length: got {length} and factor {factor}, whose base is beyond float32"
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
        "original_max_position_embeddings": trained_len,
    }
    config.max_position_embeddings = length
    return done


def _copied_config(config: Mapping, where: str, ignored: Collection[str]) -> CocaConfig:
    """The configuration of a CoCA `config.json`, as in `coca_config`. Its own code is not run.

    Raises CocaError for a family or a field that is not known, or a value that is not valid.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise CocaError(
            f"{where}: got model_type {model_type!r}, which this version of coca_hf does not have"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | {"auto_map"}
    config = _without_fields(config, ignored, known, where)
    unknown = [
        name
        for name, value in config.items()
        if value is not None and name not in known and not _is_inert(name)
    ]
    if unknown:
        raise CocaError(
            f"{where}: {unknown[0]}={config[unknown[0]]!r} is not understood; copying could change "
            f"the model; --ignore-field {unknown[0]} leaves it out, if it says nothing about "
            "weights or attention"
        )
    left_out = {"model_type", "auto_map", "transformers_version"}
    try:
        return config_class(
            **{field: value for field, value in config.items() if field not in left_out}
        )
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{where}: {one_line(error)}") from error


def _is_inert(field: str) -> bool:
    """Whether a field of a config.json is one that every family passes over."""
    return field in INERT_FIELDS or field.startswith("_")


def _without_fields(
    config: Mapping,
    ignored: Collection[str],
    understood: Collection[str],
    where: str,
    ignore_option: str = IGNORE_OPTION,
) -> dict:
    """`config` without the fields that the user calls inert.

    Raises CocaError for one that is absent or understood.
    """
    for field in ignored:
        if field not in config:
            raise CocaError(f"{where}: {ignore_option.format(field)}: got no such field")
        if field in understood or field in REFUSED_WHEN_SET or field == "model_type":
            raise CocaError(
                f"{where}: {ignore_option.format(field)}: got a field that changes the model, "
                "expected an inert one"
            )
    return {field: value for field, value in config.items() if field not in ignored}


def _family(model_type: object, where: str) -> Family:
    if model_type in [family.coca_config.model_type for family in FAMILIES.values()]:
        raise CocaError(
            f"{where}: got a CoCA checkpoint already (model_type {model_type!r}); train or "
            "evaluate it"
        )
    if isinstance(model_type, str) and model_type in REFUSED_FAMILIES:
        raise CocaError(f"{where}: {model_type!r} is refused: {REFUSED_FAMILIES[model_type]}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CocaError(
            f"{where}: got model_type {model_type!r}, supported: {', '.join(map(repr, FAMILIES))}"
        )
    return FAMILIES[model_type]


def _check_fields(config: Mapping, family: Family, where: str, ignore_option: str) -> None:
    name = config["model_type"]
    if config.get("auto_map"):
        raise CocaError(
            f"{where}: auto_map names the checkpoint's own code, which is never run; expected a "
            f"plain {name!r}; {ignore_option.format('auto_map')} leaves it out, if the weights are "
            f"those of transformers' {family.causal_lm.__name__}"
        )
    understood = family.understands()
    for field, value in config.items():
        if value is None or _is_inert(field) or field in understood or field == "auto_map":
            continue
        if field not in REFUSED_WHEN_SET:
            near = difflib.get_close_matches(field, understood, n=1)
            hint = f" (nearest known field: {near[0]})" if near else ""
            raise CocaError(
                f"{where}: {field}={value!r} is not understood for {name!r}{hint}; converting "
                f"could change the model; {ignore_option.format(field)} leaves it out, if it says "
                "nothing about weights or attention"
            )
        if value:
            raise CocaError(
                f"{where}: {field}={value!r} is not supported with CoCA for {name!r}; supported: "
                f"{REFUSED_WHEN_SET[field]}"
            )


def _check_positions(config: CocaConfig, family: Family, where: str) -> None:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CocaError(
            f"{where}: rope_type {rope_type!r} is not supported with CoCA; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if not family.partial_rotary and rotary_dim(config) != config.head_dim:
        partial = [name for name, other in FAMILIES.items() if other.partial_rotary]
        raise CocaError(
            f"{where}: partial_rotary_factor {config.rope_parameters['partial_rotary_factor']} is "
            f"not supported with CoCA for {family.config.model_type!r}; supported: 1, or less of "
            f"{', '.join(partial)}"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - MASKS.keys())
    if unknown:
        raise CocaError(
            f"{where}: layer type {unknown[0]!r} is not supported with CoCA; supported: "
            f"{', '.join(MASKS)}"
        )
