"""What a LLaMA checkpoint holds: which configurations and tensors are understood, and what each becomes in CoCA."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from transformers import LlamaConfig

from coca_hf.errors import CocaError
from coca_hf.models.llama import CocaLlamaConfig
from coca_hf.models.rotary import SUPPORTED_ROPE_TYPES

Shape = tuple[int, ...]

UNDERSTOOD_FIELDS = {field.name for field in dataclasses.fields(LlamaConfig)} | {"rope_theta", "rope_scaling"}
# Written by transformers and by model authors over the years; they say nothing about weights or attention. Nor do names
# that begin with an underscore.
# fmt: off
INERT_FIELDS = {
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "is_llama_config",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "typical_p", "unk_token_id", "use_bfloat16",
}
# fmt: on
# These change the model when they are set, in ways that CoCA does not follow.
REFUSED_WHEN_SET = {
    "add_cross_attention",
    "cross_attention_hidden_size",
    "pruned_heads",
    "quantization_config",
    "rope_interleaved",
    "sliding_window",
    "tie_encoder_decoder",
}


def coca_config(config: Mapping, constraint: str, where: str) -> CocaLlamaConfig:
    """The CoCA configuration of a LLaMA `config.json`; `where` names it in errors.

    Raises CocaError for another architecture, a field that is not understood, or a value that CoCA does not support.
    """
    model_type = config.get("model_type")
    if model_type == CocaLlamaConfig.model_type:
        raise CocaError(f"{where}: got a CoCA checkpoint already (model_type {model_type!r}); train or evaluate it")
    if model_type != "llama":
        raise CocaError(f"{where}: got model_type {model_type!r}, supported: 'llama'")
    if config.get("auto_map"):
        raise CocaError(
            f"{where}: auto_map names the checkpoint's own code, which is never run; expected a plain LLaMA; remove "
            f"auto_map if the weights are plain LLaMA's"
        )
    for field, value in config.items():
        if field in REFUSED_WHEN_SET and value:
            remedy = "; load it dequantized and save it first" if field == "quantization_config" else ""
            raise CocaError(f"{where}: {field}={value!r} is not supported with CoCA{remedy}")
        known = UNDERSTOOD_FIELDS | INERT_FIELDS | REFUSED_WHEN_SET | {"auto_map"}
        if field not in known and not field.startswith("_"):
            near = difflib.get_close_matches(field, UNDERSTOOD_FIELDS, n=1)
            hint = f" (nearest known field: {near[0]})" if near else ""
            raise CocaError(f"{where}: {field}={value!r} is not understood{hint}; converting could change the model")
    fields = {field: value for field, value in config.items() if field in UNDERSTOOD_FIELDS}
    fields.pop("transformers_version", None)
    fields["architectures"] = ["CocaLlamaForCausalLM"]
    if "torch_dtype" in config:
        fields.setdefault("dtype", config["torch_dtype"])
    try:
        result = CocaLlamaConfig(**fields, coca_constraint=constraint)
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{where}: {' '.join(str(error).split())}") from error
    rope_type = result.rope_parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CocaError(
            f"{where}: rope_type {rope_type!r} is not supported with CoCA; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return result


def expected_tensors(config: LlamaConfig, released_layout: bool) -> dict[str, Shape]:
    """Name and shape of every tensor of the source, in the order of the model.

    released_layout: the authors' checkpoints, whose full-width `t_proj` stands in the place of `k_proj`.
    """
    hidden, d = config.hidden_size, config.head_dim
    query_rows, key_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        attention = {
            "q_proj": (query_rows, hidden),
            "t_proj" if released_layout else "k_proj": (key_rows, hidden),
            "v_proj": (key_rows, hidden),
            "o_proj": (hidden, query_rows),
        }
        mlp = {
            "gate_proj": (config.intermediate_size, hidden),
            "up_proj": (config.intermediate_size, hidden),
            "down_proj": (hidden, config.intermediate_size),
        }
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (hidden,)
        for block, shapes, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
            for name, shape in shapes.items():
                tensors[f"{prefix}{block}.{name}.weight"] = shape
                if bias:
                    tensors[f"{prefix}{block}.{name}.bias"] = shape[:1]
        tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def is_derived(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor of the source follows from the others, so that it is not carried over."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and bool(config.tie_word_embeddings))


def check_tensors(shapes: Mapping[str, Shape], config: LlamaConfig, where: str) -> dict[str, Shape]:
    """The source's expected tensors, after comparing them with the `shapes` found.

    Raises CocaError naming the first tensor that is missing, not understood or of the wrong shape.
    """
    expected = expected_tensors(config, released_layout=any(name.endswith("t_proj.weight") for name in shapes))
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CocaError(f"{where}: tensor {missing[0]} is missing{_and_more(missing)}; is the checkpoint complete?")
    unknown = [name for name in shapes if name not in expected and not is_derived(name, config)]
    if unknown:
        raise CocaError(f"{where}: tensor {unknown[0]} is not understood{_and_more(unknown)}; expected plain LLaMA")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CocaError(f"{where}: tensor {name} has shape {shapes[name]}, expected {shape} from config.json")
    return expected


def _and_more(names: Iterable[str]) -> str:
    more = len(list(names)) - 1
    return f" (and {more} more)" if more else ""
