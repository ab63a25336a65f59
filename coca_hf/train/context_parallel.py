"""Context parallelism: GPUs in groups of `context_parallel_size` share a block, each with a part of
its tokens.

transformers' Trainer cuts every batch along its tokens, with their positions and shifted labels;
torch computes attention over the parts as a ring (arXiv 2310.01889); Accelerate brings them
together, under FSDP2. `blocks.DealtBlocks` deals every process of a group the same block; here,
what cannot be served is refused. A part has tokens of the beginning and of the end, so that all
GPUs have as much to do: what a model computes must depend on `position_ids` alone, as the rotary
embeddings of CoCA do, given the length of the whole block (`rope_length`).

Our tests ran it on a CPU alone, with another attention in place of torch's ring.
"""

import os

from accelerate import ParallelismConfig
from transformers import PreTrainedModel, TrainingArguments

from coca_hf.errors import CocaError
from coca_hf.models.attention import layer_types
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES

DEVICES = ("cuda",)  # that torch's ring attention has kernels for


def context_parallel(arguments: TrainingArguments, size: int, where: str) -> ParallelismConfig:
    """Accelerate's configuration for groups of `size` processes, 2 or more.

    Raises CocaError for a layout of processes that cannot be so.
    """
    given, device = f"{where}: got context_parallel_size {size}", arguments.device.type
    if device not in DEVICES:
        without = f"on a {device}, for which torch has no ring attention"
        raise CocaError(f"{given} {without}; expected GPUs, or leave it out")
    if (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("FSDP_VERSION")) != ("true", "2"):
        raise CocaError(
            f"{given} without FSDP2, expected it; start with `accelerate launch --config_file "
            f"recipes/accelerate/8gpu.yaml`"
        )
    return ParallelismConfig(cp_size=size, dp_shard_size=arguments.world_size // size)


def check_model_for_context_parallel(model: PreTrainedModel, where: str) -> None:
    """Raises CocaError for a model that does not compute on parts what it does on whole blocks."""
    config = model.config
    is_coca = config.model_type.startswith("coca_")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    reasons = {
        "attention without SDPA": config._attn_implementation != "sdpa",
        "sliding windows": set(layer_types(config)) != {"full_attention"},
        "attention that Accelerate does not find by the name self_attn": not any(
            name.endswith("self_attn") for name, _ in model.named_modules()
        ),
        "positions in its mask": "alibi" in config.model_type,
        "attention with dropout": bool(getattr(config, "attention_dropout", 0)),
        f"rope_type {rope_type} of transformers' own": rope_type in LENGTH_DEPENDENT_ROPE_TYPES
        and not is_coca,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise CocaError(
            f"{where}: context_parallel_size cannot be used with {type(model).__name__}: it has "
            f"{found[0]}"
        )
