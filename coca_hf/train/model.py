"""The model of a stage: loaded, with the recipe's config, and frozen except for what it trains.

A model, teacher or tokenizer is a directory, or `owner/name` on the hub, optionally with
`@revision`: a branch, a tag or a commit. A run uses the commit that each has when the run begins.
"""

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import DistributedType
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    masking_utils,
)
from transformers.utils import ADAPTER_CONFIG_NAME, GENERATION_CONFIG_NAME

from coca_hf.errors import CocaError, library_errors, nearest, short
from coca_hf.models.hub import CARD, CONVERSION, LICENCE_FILES, RECORDS
from coca_hf.tokens import FOREIGN_TOKENIZERS, NO_TOKENIZER
from coca_hf.train.recipe import Recipe, Stage

# Patterns of files that every stage copies from the model that it starts from
HANDED_ON = (CONVERSION, *FOREIGN_TOKENIZERS, *LICENCE_FILES)
# Fields with an item for every layer that configs compute from others, unless they are given
LISTED_BY_LAYER = ("layer_types", "no_rope_layers")
LOAD_IN_ONE_PROCESS = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # of Accelerate's configuration


def loading(name: str) -> AbstractContextManager[None]:
    """Turns what the libraries raise for a model's files into one line: a CocaError."""
    return library_errors(f"{name}: cannot be loaded, expected a model directory or hub id")


def building(config: PreTrainedConfig) -> AbstractContextManager[None]:
    """Turns what the libraries raise for a config's values into one line: a CocaError."""
    return library_errors(f"config: no {type(config).__name__} model can be made of it")


def located(name: str) -> tuple[str, Path]:
    """`name` at its present commit, and its directory: for a model on the hub, without weights.

    Raises CocaError if there is no such model.
    """
    if Path(name).exists():
        return name, Path(name)
    path, _, revision = name.partition("@")
    files = ["config.json", GENERATION_CONFIG_NAME, ADAPTER_CONFIG_NAME, "tokenizer_config.json"]
    files += [CARD, *RECORDS, *HANDED_ON]
    with loading(name):
        directory = Path(snapshot_download(path, revision=revision or None, allow_patterns=files))
    return f"{path}@{directory.name}", directory


def _origin(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` that say where to load from."""
    path, _, revision = name.partition("@")
    if Path(name).exists() or not revision:
        return {"pretrained_model_name_or_path": name}
    return {"pretrained_model_name_or_path": path, "revision": revision}


def load_config(name: str) -> PreTrainedConfig:
    with loading(name):
        return AutoConfig.from_pretrained(**_origin(name), trust_remote_code=False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    with library_errors(f"{name}: {NO_TOKENIZER}") if Path(name).is_dir() else loading(name):
        return AutoTokenizer.from_pretrained(**_origin(name), trust_remote_code=False)


def load_model(
    name: str, config: PreTrainedConfig | None = None, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A causal language model in float32, with the checkpoint's config by default, and all weights
    in every process.

    Raises CocaError unless every weight is there and no other.
    """
    # If this is set, transformers below 5.23 leaves zeros in all processes of a machine but the
    # first
    with loading(name), patch.dict(os.environ, {LOAD_IN_ONE_PROCESS: "false"}):
        model, report = AutoModelForCausalLM.from_pretrained(
            **_origin(name),
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation=attn_implementation,
        )
    wrong = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, report[kind]))[:3])}"
        for kind in ("missing_keys", "unexpected_keys")
        if report[kind]
    ]
    if wrong:
        raise CocaError(
            f"{name}: its weights are not those of {type(model).__name__}: {'; '.join(wrong)}; "
            "convert it again"
        )
    return model


@functools.lru_cache(maxsize=1)
def load_teacher(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The teacher of a recipe, loaded once for all stages that want the same; see
    `round_matrices_`.
    """
    teacher = load_model(name)
    round_matrices_(teacher, dtype)
    _give_rows_their_own_angles_(teacher)
    return teacher


def round_matrices_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep a model's matrices in `dtype`, the one that autocast multiplies in, in place.

    That halves their memory and saves rounding them in every step; the rest, and embeddings that the
    head shares, stay in float32.
    """
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embeddings:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def _give_rows_their_own_angles_(model: PreTrainedModel) -> None:
    """Let transformers' longrope take the factors of every row from that row's last position, in
    place, as CoCA's does.

    By itself, it takes those of the longest row for a whole batch. With `skip_positions` the blocks
    of a batch have different last positions, so a block would have other angles beside others.
    """
    for module in model.modules():
        is_theirs = type(module).__module__.startswith("transformers.")
        if is_theirs and getattr(module, "rope_type", None) == "longrope":
            module.forward = functools.partial(_angles_by_row, module.forward)


def _angles_by_row(angles: Callable, x: Tensor, position_ids: Tensor, *args, **kwargs):
    """Cosines and sines, each (rows, m, d), of every row of `position_ids` alone."""
    rows = [angles(x, row, *args, **kwargs) for row in position_ids.split(1)]
    return tuple(torch.cat(part) for part in zip(*rows, strict=True))


def start_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(recipe.tokenizer or recipe.model))  # a recipe has one of the two


def start_config(recipe: Recipe) -> PreTrainedConfig:
    """The config of the first stage's model: the checkpoint's, or one from scratch, with the
    recipe's overrides.

    An override that is a mapping, such as `rope_parameters`, changes the entries that it names and
    keeps the others.

    Raises CocaError for a field that the model's config does not have (naming the nearest) or of
    another type, for one that would change nothing, for a factor of a RoPE type that has none, and
    for more positions with dynamic NTK.
    """
    overrides = dict(recipe.config)
    if recipe.model is None:
        tokenizer = start_tokenizer(recipe)
        # Without defaults: head_dim is derived from the overridden width
        kept = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kept[key] = getattr(tokenizer, key)
        with loading(recipe.start):
            config = AutoConfig.for_model(overrides.pop("model_type"), **kept)
    else:
        config = load_config(recipe.model)
        kept = config.to_dict()
    kind = type(config).__name__
    known = sorted(field.name for field in dataclasses.fields(type(config)))
    merged = {}
    for key, value in overrides.items():
        if key not in known:
            closest = nearest(str(key), known)
            raise CocaError(f"config: {kind} has no {short(key)}; nearest: {closest}")
        if key == "dtype":
            raise CocaError(
                f"config.dtype: got {short(value)}, but a run keeps its weights in float32; leave it "
                "out, and give training.bf16=true to compute in bfloat16"
            )
        before = getattr(config, key)
        if isinstance(before, dict) and not isinstance(value, dict):
            raise CocaError(
                f"config.{key}: got {short(value)}, expected a mapping, such as {short(before)}"
            )
        merged[key] = {**before, **value} if isinstance(before, dict) else value
    if not merged:
        return config
    vocab_size, rope = merged.get("vocab_size"), merged.get("rope_parameters")
    if recipe.model is not None:
        _keep_trained_length_(merged, config)
    elif isinstance(vocab_size, int) and vocab_size < kept["vocab_size"]:
        raise CocaError(
            f"config.vocab_size: got {vocab_size}, expected at least the tokenizer's "
            f"{kept['vocab_size']}"
        )
    rope = rope if isinstance(rope, dict) else {}
    if "factor" in rope and rope.get("rope_type", "default") == "default":
        raise CocaError(
            f"config.rope_parameters: got a factor of {rope['factor']} with rope_type default, "
            "which has none; add rope_type, such as linear, dynamic or yarn, or leave factor out"
        )
    with library_errors(f"config: {kind} does not take it"):
        overridden = type(config)(**{**kept, **merged})
    _check_layers_follow(overridden, kept, merged)
    return overridden


def _check_layers_follow(
    overridden: PreTrainedConfig, kept: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """Raises CocaError for an override such as `max_window_layers` that transformers would ignore,
    because the checkpoint's config lists what follows from it for every layer.

    overridden: the config of the fields `kept` with the `overrides`.
    """
    kind = type(overridden)
    for listed in LISTED_BY_LAYER:
        if listed in overrides or kept.get(listed) is None:
            continue
        try:
            before, now = (
                getattr(kind(**{**fields, listed: None}), listed)
                for fields in (kept, {**kept, **overrides})
            )
        except Exception:  # configs raise anything: this one needs its list
            continue
        if now not in (before, getattr(overridden, listed)):
            names = [key for key in overrides if overrides[key] != kept.get(key)]
            raise CocaError(
                f"config.{', '.join(names)}: would not change {listed}, which the checkpoint's "
                f"config lists for every layer; give config.{listed} too"
            )


def _keep_trained_length_(overrides: dict[str, Any], checkpoint: PreTrainedConfig) -> None:
    """If a checkpoint's positions are raised, let its RoPE still be scaled from those that it was
    trained on, in place: transformers would take the raised number for it.

    Raises CocaError for dynamic NTK, whose config has one length only.
    """
    length = overrides.get("max_position_embeddings")
    trained = getattr(checkpoint, "max_position_embeddings", None)
    rope = overrides.get("rope_parameters", getattr(checkpoint, "rope_parameters", None))
    if not (isinstance(length, int) and trained and length > trained and isinstance(rope, dict)):
        return
    if rope.get("rope_type") == "dynamic":
        raise CocaError(
            f"config.max_position_embeddings: got {length} with rope_type dynamic, which scales only "
            f"what is longer, expected the checkpoint's {trained}; leave it out"
        )
    if rope.get("rope_type") in ("llama3", "yarn", "longrope"):
        overrides["rope_parameters"] = {"original_max_position_embeddings": trained, **rope}


def model_from_config(recipe: Recipe, attn_implementation: str | None = None) -> PreTrainedModel:
    """The recipe's model in float32 with random weights, or without memory on the meta device."""
    config = start_config(recipe)
    with building(config):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )


def teacher_from_config(recipe: Recipe) -> PreTrainedModel:
    """As `model_from_config`, the recipe's teacher."""
    of_teacher = {"model": recipe.teacher, "tokenizer": None, "config": dict[str, Any]()}
    return model_from_config(recipe.model_copy(update=of_teacher)).eval()


def start_model(recipe: Recipe, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model of the first stage, in float32: the recipe's checkpoint, or one from scratch.

    From scratch, every module draws its weights from `data.seed` and its own name, so models with
    different attention have the same weights in the parameters that they share.
    """
    if recipe.model is not None:
        return load_model(recipe.model, start_config(recipe), attn_implementation)
    model = model_from_config(recipe, attn_implementation)
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            torch.manual_seed(zlib.crc32(f"{recipe.data.seed} {name}".encode()))
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            model._init_weights(module)
    model.tie_weights()
    return model


def is_sharded() -> bool:
    """Whether Accelerate will shard the weights of a stage among the processes, by FSDP2."""
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    # Otherwise Accelerate does not shard
    return PartialState().distributed_type is DistributedType.MULTI_GPU and all(
        os.environ.get(name, "").lower() == value for name, value in launched.items()
    )


def weights_are_sent_here() -> bool:
    """Whether Accelerate will send this process its shard of the main process's weights."""
    in_one = os.environ.get(LOAD_IN_ONE_PROCESS, "").lower() == "true"
    return not PartialState().is_main_process and is_sharded() and in_one


def unfilled_model(recipe: Recipe, attn_implementation: str | None = None) -> PreTrainedModel:
    """A model for weights that are sent here: its parameters have addresses, by which Accelerate
    identifies them, but take no memory.
    """
    with init_empty_weights(include_buffers=False):
        model = model_from_config(recipe, attn_implementation)
    model._apply(
        lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
    )
    model.tie_weights()
    return model


def stage_model(model: PreTrainedModel, stage: Stage, seed: int = 0) -> nn.Module:
    """`model` as the stage trains it: frozen in place except for what the stage names, or wrapped
    with its adapters, which `seed` and the name of the stage initialise.

    Raises CocaError for a module that the model does not have, and for `lora` without peft.
    """
    freeze_(model, stage)
    _give_rows_their_own_angles_(model)
    if stage.lora is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise CocaError(
            f"stages.{stage.name}.lora: needs peft: pip install 'coca-hf[peft]'"
        ) from None
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    wanted = [] if stage.train == "all" else stage.train
    if others := [part for part in wanted if not any(_has_part(name, part) for name in linear)]:
        raise CocaError(
            f"stages.{stage.name}.train: got {', '.join(others)} with lora, expected linear layers "
            "other than the head; leave out the others, or lora"
        )
    targets = [name for name in linear if any(_has_part(name, part) for part in wanted)]
    config = LoraConfig(
        r=stage.lora.r,
        lora_alpha=stage.lora.alpha,
        lora_dropout=stage.lora.dropout,
        target_modules=targets or linear,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        # The same in every process, and in a run that resumes
        torch.manual_seed(zlib.crc32(f"{seed} {stage.name}".encode()))
        return get_peft_model(model, config)


def freeze_(model: nn.Module, stage: Stage) -> None:
    """Train only the parameters that the stage names, in place.

    A name selects every parameter with it among the dotted parts of one of its names: `t_proj`,
    `mlp.up_proj`.

    Raises CocaError for a name that selects none.
    """
    # A tied weight has two names
    parameters = list(model.named_parameters(remove_duplicate=False))
    wanted = [] if stage.train == "all" else stage.train
    model.requires_grad_(stage.train == "all")
    for module in wanted:
        named = [parameter for name, parameter in parameters if _has_part(name, module)]
        if not named:
            parts = {part for name, _ in parameters for part in name.split(".")[:-1]}
            words = sorted(part for part in parts if not part.isdigit())
            raise CocaError(
                f"stages.{stage.name}.train: {type(model).__name__} has no parameters in "
                f"{module!r}; nearest: {nearest(module, words)}"
            )
        for parameter in named:
            parameter.requires_grad_(True)


def _has_part(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters are trained, and how many there are."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


@contextmanager
def shapes_only(model: PreTrainedModel) -> Iterator[None]:
    """Let a model run on tensors without contents, which transformers' own code reads to find
    several sequences in a block, and positions beyond the trained length.
    """
    for module in model.modules():
        is_theirs = type(module).__module__.startswith("transformers.")
        if is_theirs and isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"
    with patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield
