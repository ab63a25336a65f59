"""The model of a stage: loaded, checked against the recipe, and frozen but for what the stage trains."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coca_hf.errors import CocaError
from coca_hf.train.recipe import Recipe, Stage
from coca_hf.train.tree import nearest


def check_model(recipe: Recipe) -> None:
    """Find out from the config alone whether every stage has something to train."""
    with torch.device("meta"):
        model = model_from_config(recipe)
    for stage in recipe.stages:
        freeze_(model, stage)


def model_from_config(recipe: Recipe) -> PreTrainedModel:
    """The recipe's model in float32, with random weights: for a device that keeps none, `meta` or a fake one."""
    with _loading(recipe.model):
        config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_model(name: str) -> PreTrainedModel:
    """A causal language model in float32. Raises CocaError unless every weight is there and no other."""
    with _loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "unexpected_keys") if report[kind]}
    if wrong:
        kinds = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(keys[:3])}" for kind, keys in wrong.items())
        raise CocaError(f"{name}: its weights are not those of {type(model).__name__}: {kinds}; convert it again")
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    with _loading(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def freeze_(model: nn.Module, stage: Stage) -> tuple[int, int]:
    """Let only the parameters that the stage names learn, in place; returns their number and that of all parameters.

    A name means every parameter that has it among the dotted parts of one of its names: `t_proj`, `mlp.up_proj`.

    Raises CocaError for a name that means none.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied weight has two
    wanted = [] if stage.train == "all" else stage.train
    for module in wanted:
        if not any(_has_part(name, module) for name in names):
            parts = {part for name in names for part in name.split(".")[:-1] if not part.isdigit()}
            raise CocaError(
                f"stages.{stage.name}.train: {type(model).__name__} has no parameters in {module!r}; "
                f"nearest: {nearest(module, sorted(parts))}"
            )
    model.requires_grad_(stage.train == "all")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(_has_part(name, module) for module in wanted):
            parameter.requires_grad_(True)
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def _has_part(parameter: str, module: str) -> bool:
    return f".{module}." in f".{parameter}."


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CocaError(f"{name}: cannot be loaded, expected a model directory or hub id: {reason}") from error
