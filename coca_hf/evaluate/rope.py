"""RoPE settings as values, put on a loaded model: `default`, `linear:8`, `dynamic:4`, `yarn:8`.

`linear` is position interpolation; `yarn` is transformers' YaRN for a model trained at its own
length. YaRN's factor is on cosine and sine, so CoCA's scores have it squared, as those of a plain
model do.

Dynamic NTK is made stateless: its base is computed once, for the length that is evaluated, so that
no row depends on the rows before it and decoding with a cache equals the full forward.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coca_hf.errors import CocaError
from coca_hf.models.rotary import ntk_base, unscaled_len

_UNTRAINED = ("default", "dynamic")  # RoPE types that extend the length without training
KINDS = ("linear", "dynamic", "yarn")
_WITH_FACTOR = ", ".join(f"{kind}:FACTOR" for kind in KINDS)
FORMS = f"default, {_WITH_FACTOR} (a factor of at least 1, as in dynamic:4)"


class Rope(NamedTuple):
    """A RoPE setting. kind: default, or one of `KINDS`."""

    kind: str
    factor: float = 1.0

    def __str__(self) -> str:
        if self.kind == "default":
            return self.kind
        short = f"{self.factor:g}"
        return f"{self.kind}:{short if float(short) == self.factor else repr(self.factor)}"


def parse_ropes(text: str) -> list[Rope]:
    """`"default,dynamic:4"` as settings, in order, each once.

    Raises CocaError for anything that is not of `FORMS`.
    """
    return list(dict.fromkeys(_parse_rope(part.strip()) for part in text.split(",")))


def _parse_rope(text: str) -> Rope:
    kind, colon, number = text.partition(":")
    if text == "default":
        return Rope("default")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind not in KINDS or not colon or not 1 <= factor < math.inf:
        expected = f"{FORMS}, or several with commas between them"
        raise CocaError(f"--rope: got {text!r}, expected {expected}")
    return Rope(kind, factor)


def check_rope(model: PreTrainedModel, rope: Rope) -> None:
    """Raise CocaError where `model` has no rotary embedding, or one that is already scaled."""
    if rope.kind == "default":
        return
    parameters = getattr(_text_config(model), "rope_parameters", None)
    if not parameters or not rotary_modules(model):
        raise CocaError(
            f"--rope {rope}: got {type(model).__name__}, which has no rotary embedding that can be "
            f"changed; use --rope default"
        )
    if parameters["rope_type"] != "default":
        raise CocaError(
            f"--rope {rope}: the checkpoint already has the RoPE setting "
            f"{parameters['rope_type']}, expected an unscaled one; use --rope default to evaluate "
            f"it as it is"
        )
    if "original_max_position_embeddings" in parameters:
        made_for = _text_config(model).max_position_embeddings
        raise CocaError(
            f"--rope {rope}: the checkpoint has a RoPE base made for {made_for} tokens already, "
            f"expected an unscaled one; use --rope default to evaluate it as it is"
        )


def use_rope_(model: PreTrainedModel, rope: Rope, total_len: int) -> None:
    """Rebuild the rotary embeddings of `model` in place, from the checkpoint's unchanged config.

    total_len: the tokens of the longest sequence that follows, prompt and new tokens together. It
    fixes the base of dynamic NTK (the paper's table 1, "employed without fine-tuning"), also where
    the checkpoint itself asks for dynamic NTK and `rope` is `default`.

    Raises CocaError as `check_rope` does.
    """
    check_rope(model, rope)
    for parent, name, rotary in rotary_modules(model):
        config = copy.deepcopy(_text_config(model))
        parameters = config.rope_parameters
        kind, factor = rope
        if kind == "default" and parameters["rope_type"] == "dynamic":
            kind, factor = "dynamic", parameters["factor"]
        trained_len = unscaled_len(config)
        if kind == "linear":
            parameters.update(rope_type="linear", factor=factor)
        elif kind == "yarn":
            parameters.update(
                rope_type="yarn", factor=factor, original_max_position_embeddings=trained_len
            )
        elif kind == "dynamic":
            rotary_dim = 2 * rotary.inv_freq.numel()
            seq_len = torch.tensor(total_len, dtype=torch.float64)  # may overflow: angles of zero
            base = ntk_base(parameters["rope_theta"], factor, seq_len, trained_len, rotary_dim)
            parameters.update(rope_type="default", rope_theta=base.item())
        setattr(parent, name, type(rotary)(config=config).to(rotary.inv_freq.device))


def trained_length(config: PreTrainedConfig) -> int | None:
    """Tokens that the config says the model was trained for; None where it does not say.

    `coca-convert --ntk-length` extends a model without training and keeps its trained length.
    """
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    trained_len = (
        rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in _UNTRAINED
        else None
    )
    return trained_len or getattr(config, "max_position_embeddings", None)


def warn_beyond_trained(
    model: PreTrainedModel, ropes: list[Rope], lengths: list[int], new_tokens: int = 0
) -> str | None:
    """One line about lengths past what a static RoPE setting was made for; None without such.

    `default` is made for the config's `max_position_embeddings`, `linear` and `yarn` for their
    factor times this; dynamic NTK has no such length.
    """
    config = _text_config(model)
    made_for = getattr(config, "max_position_embeddings", None)
    dynamic = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "dynamic"
    parts = []
    for rope in ropes:
        if not made_for or rope.kind == "dynamic" or dynamic:
            continue
        reach = made_for * rope.factor
        beyond = [str(length) for length in lengths if length + new_tokens > reach]
        if beyond:
            new = f" and {new_tokens} new tokens" if new_tokens else ""
            lengths_beyond = f"lengths {', '.join(beyond)}{new}"
            parts.append(f"{lengths_beyond} are beyond the {int(reach)} tokens of --rope {rope}")
    remedy = "; --rope dynamic:4 extends it" if rotary_modules(model) else ""
    return f"{'; '.join(parts)}, as the model was made{remedy}" if parts else None


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def rotary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str, Any]]:
    """Parent, name and module of every rotary embedding.

    None where the config has no `rope_parameters`, or one set of them for each kind of layer.
    """
    config = _text_config(model)
    if "rope_type" not in (getattr(config, "rope_parameters", None) or {}):
        return []
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
        and hasattr(child, "inv_freq")
        and isinstance(getattr(child, "config", None), type(config))
    ]
