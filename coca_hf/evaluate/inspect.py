"""Describe a checkpoint and the size of its cache, from its config and the headers of its weights,
without loading it.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from coca_hf.card import content_in_words, kept_in_words
from coca_hf.convert.config import FAMILIES, cache_numbers, check_not_quantized
from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.loaded_model import trained_length
from coca_hf.files import size_in_words
from coca_hf.models.alibi import AlibiLlamaConfig
from coca_hf.models.decoder import CocaConfig
from coca_hf.weights import (
    FLOATS,
    StoredTensor,
    checkpoint_file,
    is_derived,
    open_weights,
    read_json,
)

STORED = {stored: str(dtype).removeprefix("torch.") for stored, dtype in FLOATS.items()}
BYTES = {STORED[stored]: dtype.itemsize for stored, dtype in FLOATS.items()}


def inspect_checkpoint(directory: Path, memory_bytes: int | None = None) -> dict[str, Any]:
    """Family, constraint, RoPE, lengths in tokens, parameters, and bytes of weights and of the
    cache of one sequence.

    CoCA's cache is the half-width one that `generate` uses (`models/cache.py`), of full width in
    kept layers; `kv_bytes_per_token_standard` is that of other engines. With `memory_bytes`, also
    the longest context whose cache fits beside the weights, without activations; None if the cache
    stops growing (sliding windows).

    Raises CocaError if the directory is not a complete checkpoint of safetensors, has another
    family than those that coca-convert takes and ALiBi's, or is quantized.
    """
    if not directory.is_dir():
        got = "got a file" if directory.exists() else "no such directory"
        expected = "a checkpoint directory as save_pretrained writes it"
        raise CocaError(f"{directory}: {got}, expected {expected}")
    config = _read_config(directory)
    files, file_of = open_weights(directory)
    tensors = {
        name: weights.tensors[name]
        for name, weights in file_of.items()
        if not is_derived(name, config)
    }
    for weights in files.values():
        weights.close()
    dtype = _dtype(config, tensors)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    weight_bytes = parameters * BYTES[dtype]  # as transformers loads them, not as they are stored
    _check_layers(directory, config, tensors)
    numbers = cache_numbers(config)
    is_coca = isinstance(config, CocaConfig)
    facts: dict[str, Any] = {
        "checkpoint": str(directory),
        "family": config.model_type.removeprefix("coca_"),
        "constraint": config.coca_constraint if is_coca else None,
        "kept_layers": sorted(config.coca_kept_layers) if is_coca else None,
        "kept_window": config.coca_kept_window if is_coca else None,
        "windowed_layers": config.windowed_layers() if is_coca else None,
        "content_pairs": config.coca_content_pairs if is_coca else None,
        "content_layers": sorted(config.coca_content_layers) if is_coca else None,
        "rope": _rope(config),
        "trained_length": trained_length(config),
        "max_length": getattr(config, "max_position_embeddings", None),
        "parameters": parameters,
        "dtype": dtype,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": numbers["growing"] * BYTES[dtype],
        "kv_bytes_fixed": numbers["fixed"] * BYTES[dtype],
        "kv_bytes_per_token_standard": numbers["standard"] * BYTES[dtype],
    }
    if memory_bytes is not None:
        facts["memory_bytes"] = memory_bytes
        left = memory_bytes - weight_bytes - facts["kv_bytes_fixed"]
        per_token = facts["kv_bytes_per_token"]
        growing = max(left, 0) // per_token if per_token else None
        facts["longest_context"] = 0 if left < 0 else growing
    return facts


def describe(facts: dict[str, Any]) -> str:
    """`inspect_checkpoint`'s facts as lines for a person."""
    attention = f"CoCA, {facts['constraint']}" if facts["constraint"] else "plain"
    if facts["kept_layers"]:
        attention += f"; the original's in {kept_in_words(facts)}"
    if content := content_in_words(facts):
        attention += f"; content pairs: {content}"
    trained, longest = facts["trained_length"], facts["max_length"]
    extended = f" (set up for {longest:,})" if trained and longest and longest != trained else ""
    cache = f"{facts['kv_bytes_per_token']:,} bytes per token"
    standard = facts["kv_bytes_per_token_standard"]
    if facts["constraint"] and standard:
        share = facts["kv_bytes_per_token"] / standard
        cache += f", {share:.1%} of a standard cache's {standard:,}"
    if facts["kv_bytes_fixed"]:
        cache += f", and {facts['kv_bytes_fixed']:,} bytes for sliding windows"
    weights = size_in_words(facts["weight_bytes"])
    lines = {
        "family": f"{facts['family']}, {attention}",
        "RoPE": facts["rope"] or "none",
        "trained length": (f"{trained:,} tokens" if trained else "not said") + extended,
        "parameters": f"{facts['parameters']:,} in {facts['dtype']}, {weights}",
        "key/value cache": cache,
    }
    if "memory_bytes" in facts:
        memory = size_in_words(facts["memory_bytes"])
        context, counted = facts["longest_context"], "one sequence, activations not counted"
        if context is None:
            lines["longest context"] = f"any in {memory}: the cache stops growing"
        elif context == 0:
            lines["longest context"] = f"none: {memory} do not hold the weights and a token"
        else:
            fits = f"{context:,} tokens in {memory} beside the weights"
            lines["longest context"] = f"{fits}, {counted}"
    return "\n".join(
        [facts["checkpoint"], *(f"  {name:<17} {value}" for name, value in lines.items())]
    )


def _read_config(directory: Path) -> PreTrainedConfig:
    file = checkpoint_file(directory, "config.json")
    fields = read_json(file)
    model_type = fields.get("model_type")
    if str(model_type).removeprefix("coca_") not in (*FAMILIES, AlibiLlamaConfig.model_type):
        raise CocaError(
            f"{file}: got model_type {model_type!r}, expected a family of coca-convert: "
            f"{', '.join(FAMILIES)}"
        )
    try:
        config = CONFIG_MAPPING[model_type](
            **{k: v for k, v in fields.items() if k not in ("model_type", "auto_map")}
        )
    except Exception as error:  # the validators of transformers raise several kinds
        raise CocaError(f"{file}: {one_line(error)}") from error
    check_not_quantized(str(file), config)
    for length in (trained_length(config), getattr(config, "max_position_embeddings", None)):
        if not isinstance(length, int | None):
            expected = "a whole number of tokens"
            raise CocaError(f"{file}: got a length of {length!r}, expected {expected}")
    return config


def _dtype(config: PreTrainedConfig, tensors: dict[str, StoredTensor]) -> str:
    """The type of weights and cache when transformers loads the checkpoint: the config's, otherwise
    the commonest.
    """
    if config.dtype is not None:
        name = str(config.dtype).removeprefix("torch.")
    else:
        stored = Counter[str]()
        for tensor in tensors.values():
            stored[tensor.dtype] += tensor.num_bytes
        name = STORED.get(max(stored, key=lambda dtype: stored[dtype], default=""), "float32")
    return name if name in BYTES else "float32"


def _check_layers(
    directory: Path, config: PreTrainedConfig, tensors: dict[str, StoredTensor]
) -> None:
    layers = {match[1] for name in tensors if (match := re.search(r"\.(\d+)\.", name))}
    if len(layers) != config.num_hidden_layers:
        raise CocaError(
            f"{directory}: got weights of {len(layers)} layers, expected {config.num_hidden_layers} "
            "from config.json; is it complete?"
        )


def _rope(config: PreTrainedConfig) -> str | None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    if "rope_type" not in rope:  # one set for each kind of layer
        return json.dumps(rope, sort_keys=True)
    parts = [str(rope["rope_type"]), f"base {_shown(rope.get('rope_theta'))}"]
    if "factor" in rope:
        parts.append(f"factor {_shown(rope['factor'])}")
    if rope["rope_type"] == "default" and "original_max_position_embeddings" in rope:
        parts.append(f"NTK base for {config.max_position_embeddings:,} tokens")
    return ", ".join(parts)


def _shown(value: Any) -> str:
    """A number with thousands separated; anything else as it is."""
    return f"{value:,.10g}" if isinstance(value, int | float) else repr(value)
