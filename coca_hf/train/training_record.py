"""training.json: what a stage was, what it made, from which code, and how its losses went."""

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from coca_hf.checkout import commit
from coca_hf.documents import is_on_hub
from coca_hf.models.hub import without_paths
from coca_hf.train.log import StageLog
from coca_hf.train.recipe import Recipe
from coca_hf.train.run_directory import ResolvedStage, read_record

PACKAGES = ("coca-hf", "torch", "transformers", "accelerate", "datasets")


def make_record(
    recipe: Recipe,
    stage: ResolvedStage,
    log: StageLog,
    state: TrainerState,
    parameters: dict,
    held_out_blocks: int,
) -> dict[str, Any]:
    """The record of a trained stage, without the hashes of its files and without local paths, which
    OUT/recipe.yaml has. Losses in nats per token.
    """
    # Each the mean since the one before
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    end_block = stage.start_block + stage.arguments.max_steps * stage.blocks_per_step
    record = {
        "stage": {"name": stage.name, "train": stage.of_recipe.train},
        "base_model": stage.base,
        "parameters": parameters,
        "tokens": (end_block - stage.start_block) * recipe.data.seq_len,
        "tokens_seen": end_block * recipe.data.seq_len,
        "start_block": stage.start_block,
        "end_block": end_block,
        "blocks_per_step": stage.blocks_per_step,
        "seconds": round(log.seconds, 3),
        "skipped_steps": log.place["skipped_steps"],
        "final_loss": losses[-1] if losses else None,  # log.jsonl beside it has all of them
        "held_out": _held_out(log, recipe.data.seq_len, held_out_blocks),
        **_surroundings(stage.arguments),
        "recipe": recipe.to_dict(),
    }
    record["stages"] = [*_stages_before(stage), _summary(recipe, stage, record)]
    return without_paths(record)


def _held_out(log: StageLog, seq_len: int, num_blocks: int) -> dict[str, Any] | None:
    """Before step 0 and after the last. `tokens`: those predicted, all but one of a block."""
    if not num_blocks:
        return None
    losses = list(log.place["held_out"].values())
    return {
        "blocks": num_blocks,
        "tokens": num_blocks * (seq_len - 1),
        "before": losses[0],
        "after": losses[-1],
    }


def _stages_before(stage: ResolvedStage) -> list[dict[str, Any]]:
    """The stages that the model has behind it, of this recipe and of those before it."""
    return read_record(stage.base_directory).get("stages", []) if stage.base_directory else []


def _summary(recipe: Recipe, stage: ResolvedStage, record: dict[str, Any]) -> dict[str, Any]:
    """What the records and the cards of later checkpoints say about this stage."""
    return {
        **record["stage"],
        "steps": stage.arguments.max_steps,
        "seq_len": recipe.data.seq_len,
        "learning_rate": stage.arguments.learning_rate,
        "sources": [
            {
                "path": source.name,
                "weight": source.weight,
                "on_hub": bool(source.path) and is_on_hub(source.path),
                "commit": source.commit,
            }
            for source in recipe.data.sources
        ],
        **{key: record[key] for key in ("tokens", "final_loss", "held_out", "hardware", "date")},
    }


def _surroundings(arguments: TrainingArguments) -> dict[str, Any]:
    cuda = arguments.device.type == "cuda"
    device = (
        torch.cuda.get_device_name(arguments.device)
        if cuda
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": {"device": device, "processes": arguments.world_size},
        "versions": {
            "python": platform.python_version(),
            **{name: number for name in PACKAGES if (number := _version(name))},
        },
        "commit": commit(),
    }


def _version(package: str) -> str | None:
    """None where it is run from a directory: no reason to lose a trained stage."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
