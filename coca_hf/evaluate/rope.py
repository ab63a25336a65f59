"""RoPE settings as values: `default`, `linear:8`, `dynamic:4`, put on a live model without loading it again.

Dynamic NTK is made stateless: its base is computed once, for the length that is evaluated, so that no row depends on
the rows before it and decoding with a cache equals the full forward.
"""

import copy
import math
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coca_hf.errors import CocaError
from coca_hf.models.rotary import ntk_base

_UNTRAINED = ("default", "dynamic")  # RoPE types that reach beyond the trained length without training
FORMS = "default, linear:FACTOR, dynamic:FACTOR (a factor of at least 1, as in dynamic:4)"


class Rope(NamedTuple):
    kind: str  # default, linear or dynamic
    factor: float = 1.0

    def __str__(self) -> str:
        return self.kind if self.kind == "default" else f"{self.kind}:{self.factor:g}"


def parse_ropes(text: str) -> list[Rope]:
    """`"default,dynamic:4"` as settings, in order, each once. Raises CocaError for anything that is not of `FORMS`."""
    return list(dict.fromkeys(_parse_rope(part.strip()) for part in text.split(",")))


def _parse_rope(text: str) -> Rope:
    kind, colon, number = text.partition(":")
    if text == "default":
        return Rope("default")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind not in ("linear", "dynamic") or not colon or not 1 <= factor < math.inf:
        raise CocaError(f"--rope: got {text!r}, expected {FORMS}, or several with commas between them")
    return Rope(kind, factor)


def check_rope(model: PreTrainedModel, rope: Rope) -> None:
    """Raise CocaError where `rope` cannot be put on `model`: no rotary embedding, or one that is already scaled."""
    if rope.kind == "default":
        return
    parameters = getattr(_text_config(model), "rope_parameters", None)
    if not parameters or not _rotary_modules(model):
        raise CocaError(
            f"--rope {rope}: got {type(model).__name__}, which has no rotary embedding that can be changed; "
            f"use --rope default"
        )
    if parameters["rope_type"] != "default":
        raise CocaError(
            f"--rope {rope}: the checkpoint already has the RoPE setting {parameters['rope_type']}, expected an "
            f"unscaled one; use --rope default to evaluate it as it is"
        )
    if "original_max_position_embeddings" in parameters:
        raise CocaError(
            f"--rope {rope}: the checkpoint has a RoPE base made for {_text_config(model).max_position_embeddings} "
            f"tokens already, expected an unscaled one; use --rope default to evaluate it as it is"
        )


def use_rope_(model: PreTrainedModel, rope: Rope, total_len: int) -> None:
    """Rebuild the rotary embeddings of `model` in place, always from the checkpoint's config, which stays as it is.

    total_len: the tokens of the longest sequence that follows, prompt and new tokens together. It fixes the base of
    dynamic NTK (the paper's table 1, "employed without fine-tuning"), also where the checkpoint itself asks for dynamic
    NTK and `rope` is `default`.

    Raises CocaError as `check_rope` does.
    """
    check_rope(model, rope)
    for parent, name, rotary in _rotary_modules(model):
        config = copy.deepcopy(_text_config(model))
        parameters = config.rope_parameters
        kind, factor = rope
        if kind == "default" and parameters["rope_type"] == "dynamic":
            kind, factor = "dynamic", parameters["factor"]
        if kind == "linear":
            parameters.update(rope_type="linear", factor=factor)
        elif kind == "dynamic":
            trained_len = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
            rotary_dim = 2 * rotary.inv_freq.numel()
            base = ntk_base(parameters["rope_theta"], factor, total_len, trained_len, rotary_dim)
            parameters.update(rope_type="default", rope_theta=base)
        setattr(parent, name, type(rotary)(config=config).to(rotary.inv_freq.device))


def trained_length(model: PreTrainedModel) -> int | None:
    """The tokens that the config says the model was trained for; None where it does not say."""
    return config_trained_length(_text_config(model))


def config_trained_length(config: PreTrainedConfig) -> int | None:
    """The same for a text config. `coca-convert --ntk-length` extends without training and keeps the trained length."""
    rope = getattr(config, "rope_parameters", None) or {}
    trained_len = rope.get("original_max_position_embeddings") if rope.get("rope_type") in _UNTRAINED else None
    return trained_len or getattr(config, "max_position_embeddings", None)


def warn_beyond_trained(
    model: PreTrainedModel, ropes: list[Rope], lengths: list[int], new_tokens: int = 0
) -> str | None:
    """One line for whoever evaluates past the trained length without a RoPE setting made for it, else None."""
    made_for = getattr(_text_config(model), "max_position_embeddings", None)
    beyond = [length for length in lengths if made_for and length + new_tokens > made_for]
    if not beyond or Rope("default") not in ropes:
        return None
    return (
        f"lengths {', '.join(map(str, beyond))}{f' and {new_tokens} new tokens' if new_tokens else ''} are beyond the "
        f"{made_for} tokens the model was made for, and --rope default extends nothing; --rope dynamic:4 does"
    )


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _rotary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str, Any]]:
    """Parent, name and module of every rotary embedding that is built from one set of `rope_parameters`."""
    config = _text_config(model)
    if "rope_type" not in (getattr(config, "rope_parameters", None) or {}):  # absent, or one set per kind of layer
        return []
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
        and hasattr(child, "inv_freq")
        and isinstance(getattr(child, "config", None), type(config))
    ]
