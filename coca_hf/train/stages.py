"""Runs the stages of a recipe, each from one directory to the next, so that a run can be killed at any moment.

From stage to stage go weights and the place in the stream of blocks; the optimizer starts anew. Weights are float32
throughout; `bf16: true` computes in bfloat16 beside them. What lies where: see `out.py`.
"""

import gc
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import PreTrainedTokenizerBase, TrainingArguments, default_data_collator

from coca_hf.card import LICENCE_FILES, write_card
from coca_hf.documents import is_on_hub
from coca_hf.errors import CocaError
from coca_hf.train.data import PackedBlocks
from coca_hf.train.model import check_model, freeze_, load_model, load_tokenizer
from coca_hf.train.objectives import Objective, check_teacher, load_teacher
from coca_hf.train.out import (
    PARTIAL,
    RECORD,
    StageRun,
    check_before,
    check_out,
    last_checkpoint,
    open_out,
    saving_to,
    write_whole,
)
from coca_hf.train.recipe import Recipe, Stage
from coca_hf.train.trainer import StageLog, StageTrainer
from coca_hf.train.tree import nearest

CONVERSION_RECORD = "conversion.json"  # written by coca-convert; goes along from stage to stage


def run_recipe(recipe: Recipe, out_dir: str | Path, stage: str | None = None, resume: bool = False) -> Path:
    """Run the stages of a recipe in order, or only the one named `stage`; returns the directory of the last one.

    With `resume`, finished stages are skipped and an unfinished one continues from its last checkpoint. Every process
    of a distributed run calls this; the main one prints and writes.

    Raises CocaError, before anything is written, for a stage, model, module name, source or combination of training
    options that does not work, for an `out_dir` that is not empty without `resume`, and for one of another recipe with
    it; later, for a loss that is not a number, and for a disk that is full.
    """
    out_dir = Path(out_dir)
    runs = _plan(recipe, out_dir)
    state = PartialState()
    chosen = [run for run in runs if stage in (None, run.stage.name)]
    if stage and not chosen:
        names = [run.stage.name for run in runs]
        raise CocaError(f"--stage: got {stage!r}, expected one of {', '.join(names)}; nearest: {nearest(stage, names)}")
    if state.is_main_process:  # where this fails, the launcher ends the other processes
        check_out(recipe, out_dir, resume)
        check_before(chosen[0])
        check_model(recipe)
        if recipe.teacher:
            check_teacher(recipe.teacher, recipe.model)
        PackedBlocks(recipe.data.sources, load_tokenizer(recipe.model), recipe.data.seq_len).check()
        open_out(recipe, out_dir)
    state.wait_for_everyone()
    for run in chosen:
        if run.is_complete:
            state.print(f"{run.directory}: complete, skipped", flush=True)
            if state.is_main_process:
                _clear_trainer(run)  # a kill may have come between training.json and this
        else:
            _run_stage(recipe, run, state)
            gc.collect()  # the trainer refers to itself; free its model before the next is loaded
    return chosen[-1].directory


def _plan(recipe: Recipe, out_dir: Path) -> list[StageRun]:
    """Every stage with its options in TrainingArguments, which checks how they go together."""
    runs: list[StageRun] = []
    for number, stage in enumerate(recipe.stages, 1):
        before = runs[-1] if runs else None
        directory = out_dir / f"{number}-{stage.name}"
        with _trainer_errors(stage):
            arguments = TrainingArguments(
                output_dir=str(directory / "trainer"),
                remove_unused_columns=False,
                ignore_data_skip=True,  # a resumed stage's blocks start where its checkpoint was
                **recipe.options(stage),
            )
            on_cpu = arguments.device.type == "cpu"  # asking joins the other processes
        arguments.dataloader_pin_memory &= not on_cpu  # torch warns where there is nothing to pin for
        runs.append(StageRun(stage, str(before.directory) if before else recipe.model, before, directory, arguments))
    return runs


def _run_stage(recipe: Recipe, run: StageRun, state: PartialState) -> None:
    if state.is_main_process:
        with saving_to(run.directory):
            run.trainer_dir.mkdir(parents=True, exist_ok=True)
            for half_written in (run.directory / PARTIAL, run.trainer_dir / PARTIAL):
                shutil.rmtree(half_written, ignore_errors=True)
    state.wait_for_everyone()

    model, tokenizer = load_model(run.base), load_tokenizer(run.base)
    use_cache = model.config.use_cache  # the Trainer turns it off
    trained, total = freeze_(model, run.stage)
    checkpoint = last_checkpoint(run.trainer_dir)
    step, next_block, seconds = _place(checkpoint) if checkpoint else (0, run.start_block, 0.0)
    end_block = next_block + (run.arguments.max_steps - step) * run.global_batch
    data, tokens = recipe.data, (end_block - run.start_block) * recipe.data.seq_len
    blocks = PackedBlocks(data.sources, tokenizer, data.seq_len, data.seed, next_block)
    log = StageLog(run.directory / "log.jsonl", data.seq_len, run.global_batch, next_block, seconds)
    AcceleratorState._reset_state()  # or the stage before would fix the precision of this one
    with _trainer_errors(run.stage):
        trainer = StageTrainer(model, run.arguments, default_data_collator, blocks, callbacks=[log])
    if recipe.teacher and run.stage.needs_teacher:
        trainer.objective = Objective(run.stage.objective, load_teacher(recipe.teacher), run.stage.temperature)

    state.print(
        f"{run.directory}: trains {trained:,} of {total:,} parameters ({trained / total:.1%}) for "
        f"{run.arguments.max_steps:,} steps, {tokens:,} tokens"
        + (f"; continues after step {step:,}" if checkpoint else ""),
        flush=True,
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.config.use_cache = use_cache
    record = {
        "stage": {"name": run.stage.name, "train": run.stage.train},
        "base_model": run.base,
        "parameters": {"trained": trained, "total": total, "fraction": trained / total},
        "tokens": tokens,
        "tokens_seen": end_block * data.seq_len,
        "start_block": run.start_block,
        "end_block": end_block,
        "blocks_per_step": run.global_batch,
        "seconds": round(log.seconds, 3),
        **_losses(trainer),
        **_surroundings(run.arguments),
        "recipe": recipe.to_dict(),
    }
    record["stages"] = [*_stages_before(run), _summary(recipe, run, record)]
    _complete(run, trainer, tokenizer, record, state)


def _stages_before(run: StageRun) -> list[dict[str, Any]]:
    """The stages that the model `run` starts from has behind it, of this recipe and of those before it."""
    record = Path(run.base) / RECORD
    return json.loads(record.read_text()).get("stages", []) if record.exists() else []


def _summary(recipe: Recipe, run: StageRun, record: dict[str, Any]) -> dict[str, Any]:
    """What the records and the cards of later checkpoints say about this stage."""
    return {
        **record["stage"],
        "steps": run.arguments.max_steps,
        "seq_len": recipe.data.seq_len,
        "learning_rate": run.arguments.learning_rate,
        "sources": [
            {"path": source.path, "weight": source.weight, "on_hub": is_on_hub(source.path)}
            for source in recipe.data.sources
        ],
        **{key: record[key] for key in ("tokens", "final_loss", "hardware", "date")},
    }


def _complete(
    run: StageRun, trainer: StageTrainer, tokenizer: PreTrainedTokenizerBase, record: dict, state: PartialState
) -> None:
    """Turn a trained stage into a complete checkpoint; training.json, which says so, comes last."""
    partial = run.directory / PARTIAL
    with saving_to(run.directory):
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # else nothing is saved
        trainer.save_model(str(partial))
        if state.is_main_process:
            (partial / "training_args.bin").unlink()  # a pickle, and training.json says more
            tokenizer.save_pretrained(partial)
            if (Path(run.base) / CONVERSION_RECORD).exists():
                shutil.copy(Path(run.base) / CONVERSION_RECORD, partial)
                write_card(partial, record)
            for name in LICENCE_FILES:
                if (Path(run.base) / name).exists():
                    shutil.copy(Path(run.base) / name, partial)
            for path in partial.iterdir():
                target = run.directory / path.name
                if target.is_dir():  # moved by an earlier try
                    shutil.rmtree(target)
                os.replace(path, target)
            partial.rmdir()
            write_whole(run.directory / RECORD, json.dumps(record, indent=2) + "\n")
            _clear_trainer(run)
    state.wait_for_everyone()


def _clear_trainer(run: StageRun) -> None:
    """Delete what only served to resume the stage; logs of TensorBoard, if any, stay."""
    for path in [*run.trainer_dir.glob("checkpoint-*"), run.trainer_dir / PARTIAL]:
        shutil.rmtree(path, ignore_errors=True)
    if run.trainer_dir.exists() and not any(run.trainer_dir.iterdir()):
        run.trainer_dir.rmdir()


def _place(checkpoint: Path) -> tuple[int, int, float]:
    """Steps done, the next block and the seconds spent, as a trainer's checkpoint keeps them."""
    kept = json.loads((checkpoint / "trainer_state.json").read_text())
    log = kept["stateful_callbacks"][StageLog.__name__]["attributes"]
    return kept["global_step"], log["next_block"], log["seconds"]


def _losses(trainer: StageTrainer) -> dict[str, Any]:
    """Losses as they were logged, each the mean since the one before."""
    history = [
        {key: entry[key] for key in ("step", "loss", "learning_rate")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {"final_loss": history[-1]["loss"] if history else None, "loss_history": history}


def _surroundings(arguments: TrainingArguments) -> dict[str, Any]:
    cuda = arguments.device.type == "cuda"
    device = torch.cuda.get_device_name(arguments.device) if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    packages = ("coca-hf", "torch", "transformers", "accelerate", "datasets")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": {"device": device, "processes": arguments.world_size},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


@contextmanager
def _trainer_errors(stage: Stage) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CocaError(f"stages.{stage.name}: the trainer does not take these options: {reason}") from error
