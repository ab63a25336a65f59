"""Runs the stages of a recipe, each from one directory to the next, so that a run can be killed at any moment.

From stage to stage go weights, checked by their hashes, and the place in the stream of blocks; the optimizer starts
anew. Weights are float32 throughout; `bf16: true` computes in bfloat16 beside them. What lies where: see `out.py`.
"""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import TensorBoardCallback, is_tensorboard_available

from coca_hf.card import LICENCE_FILES, write_card
from coca_hf.documents import local_files
from coca_hf.errors import CocaError
from coca_hf.train.checkpoint import check_room
from coca_hf.train.data import PackedBlocks, blocks_of
from coca_hf.train.flops import count_flops
from coca_hf.train.log import ProgressLine, SpeedMeter, StageLog, start_place
from coca_hf.train.model import (
    check_kernels,
    check_model,
    count_parameters,
    load_model,
    load_tokenizer,
    plain_model,
    stage_model,
    start_config,
    start_model,
    start_tokenizer,
)
from coca_hf.train.objectives import Objective, check_teacher, fuse_cross_entropy_, load_teacher
from coca_hf.train.out import (
    PARTIAL,
    RECORD,
    STOPPED,
    StageRun,
    check_base,
    check_before,
    check_inputs,
    check_out,
    last_checkpoint,
    locked,
    open_out,
    reading,
    saving_to,
    weights_hashes,
    write_whole,
)
from coca_hf.train.prepared import tokenizer_hash
from coca_hf.train.recipe import Recipe, Stage
from coca_hf.train.record import make_record
from coca_hf.train.stop import Stopped, StopRequest, stop_on_signals
from coca_hf.train.trainer import StageTrainer
from coca_hf.train.tree import nearest

CONVERSION_RECORD = "conversion.json"  # written by coca-convert; goes along from stage to stage


def run_recipe(recipe: Recipe, out_dir: str | Path, stage: str | None = None, resume: bool = False) -> Path:
    """Run the stages of a recipe in order, or only the one named `stage`; returns the directory of the last one.

    With `resume`, finished stages are skipped and an unfinished one continues from its last checkpoint, on any number
    of processes. Every process of a distributed run calls this; the main one prints and writes.

    Raises CocaError, before anything is written, for a stage, model, module name, source or combination of training
    options that does not work, for an `out_dir` that is not empty without `resume`, and for one of another recipe with
    it; later, for a loss that is not a number, and for a disk that is full. Raises Stopped after the checkpoint that
    SIGTERM or SIGUSR1, to any process, asks for.
    """
    out_dir = Path(out_dir)
    _check_parallelism()
    runs = _plan(recipe, out_dir)
    state = PartialState()
    chosen = [run for run in runs if stage in (None, run.stage.name)]
    if not chosen:
        names = [run.stage.name for run in runs]
        raise CocaError(
            f"--stage: got {stage!r}, expected one of {', '.join(names)}; nearest: {nearest(stage or '', names)}"
        )
    with locked(out_dir) if state.is_main_process else nullcontext():
        return _run_stages(recipe, out_dir, runs, chosen, state, resume)


def _check_parallelism() -> None:
    """Refuse layouts of `accelerate launch` in which several processes work on one block.

    torch's context parallelism has no kernel for a CPU, so that nothing here could test it.
    """
    for kind in ("CP", "SP", "TP"):
        size = os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")
        if size != "1":
            raise CocaError(
                f"parallelism_config_{kind.lower()}_size: got {size}, expected 1: coca-train has a block on one GPU; "
                f"for long blocks, set gradient_checkpointing and fused_cross_entropy, and shard with FSDP2"
            )


def _run_stages(
    recipe: Recipe, out_dir: Path, runs: list[StageRun], chosen: list[StageRun], state: PartialState, resume: bool
) -> Path:
    if state.is_main_process:  # where this fails, the launcher ends the other processes
        check_out(recipe, out_dir, resume)
        check_before(chosen[0])
        check_model(recipe)
        check_kernels(recipe)
        if recipe.teacher:
            check_teacher(recipe.teacher, start_config(recipe))
        blocks = blocks_of(recipe, start_tokenizer(recipe))
        blocks.check()
        prepared = blocks.prepared()
        state.print(
            f"data: {prepared.num_blocks:,} of {recipe.num_blocks(state.num_processes):,} blocks lie prepared in "
            f"{prepared.directory}"
            if prepared
            else "data: tokenised on the way, and again up to where a run resumes; --prepare does it once",
            flush=True,
        )
        open_out(recipe, out_dir)
        check_inputs(out_dir, _inputs(recipe, blocks, runs))
        (out_dir / STOPPED).unlink(missing_ok=True)
    state.wait_for_everyone()
    complete = _from_main_process(lambda: {run.directory for run in chosen if run.is_complete})
    held_out: Tensor | None = None
    with stop_on_signals() as stop:
        for run in chosen:
            if run.directory in complete:
                state.print(f"{run.directory}: complete, skipped", flush=True)
                if state.is_main_process:
                    _clear_trainer(run)  # a kill may have come between training.json and this
                continue
            if held_out is None:
                held_out = _from_main_process(lambda: _held_out(recipe))
            with _own_accelerator():
                _run_stage(recipe, run, state, held_out, stop)
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
                eval_on_start=True,  # see StageTrainer.evaluate
                **recipe.options(stage),
            )
            on_cpu = arguments.device.type == "cpu"  # asking joins the other processes
        arguments.dataloader_pin_memory &= not on_cpu  # torch warns where there is nothing to pin for
        if "tensorboard" in arguments.report_to and not is_tensorboard_available():
            if number == 1:
                PartialState().print("report_to: tensorboard is not installed; going on without it")
            arguments.report_to.remove("tensorboard")
        arguments.gradient_accumulation_steps = recipe.accumulation(stage, arguments.world_size)
        runs.append(StageRun(stage, str(before.directory) if before else recipe.start, before, directory, arguments))
    return runs


def _inputs(recipe: Recipe, blocks: PackedBlocks, runs: list[StageRun]) -> dict[str, Any]:
    """What decides the training and is not in the recipe itself. Data by size, so that it may be copied elsewhere."""
    return {
        "sources": [
            {file.name: f"{file.stat().st_size} bytes" for file in local_files(source.path)}
            for source in recipe.data.sources
        ],
        "tokenizer": tokenizer_hash(blocks.tokenizer),
        "model": weights_hashes(Path(recipe.model)) if recipe.model and Path(recipe.model).is_dir() else None,
        "blocks_per_step": {run.stage.name: run.blocks_per_step for run in runs},
    }


def _held_out(recipe: Recipe) -> Tensor:
    blocks = blocks_of(recipe, start_tokenizer(recipe)).held_out()
    return torch.stack(blocks) if blocks else torch.empty(0, recipe.data.seq_len, dtype=torch.int64)


def _from_main_process(make: Callable[[], Any]) -> Any:
    """What `make()` returns in the main process, in every process."""
    state = PartialState()
    made = [make() if state.is_main_process else None]
    if state.num_processes > 1:
        broadcast_object_list(made)
    return made[0]


def _run_stage(recipe: Recipe, run: StageRun, state: PartialState, held_out: Tensor, stop: StopRequest) -> None:
    if state.is_main_process:
        check_base(run)
        with saving_to(run.directory):
            run.trainer_dir.mkdir(parents=True, exist_ok=True)
            for half_written in (run.directory / PARTIAL, run.trainer_dir / PARTIAL):
                shutil.rmtree(half_written, ignore_errors=True)
    state.wait_for_everyone()

    options, data = recipe.stage_options(run.stage), recipe.data
    attention = options.attn_implementation
    base = load_model(run.base, None, attention) if run.before else start_model(recipe, attention)
    tokenizer = load_tokenizer(run.base) if run.before else start_tokenizer(recipe)
    use_cache = base.config.use_cache  # the Trainer turns it off
    if options.fused_cross_entropy:
        fuse_cross_entropy_(base, liger=options.fused_cross_entropy == "liger")
    model = stage_model(base, run.stage)
    trained, total = count_parameters(model)
    parameters = {"trained": trained, "total": total, "fraction": trained / total}
    checkpoint = _from_main_process(lambda: last_checkpoint(run.trainer_dir))
    step, place = _place(checkpoint) if checkpoint else (0, start_place(run.start_block))
    blocks = blocks_of(recipe, tokenizer, place["next_block"])
    log = StageLog(run.directory / "log.jsonl", data.seq_len, run.blocks_per_step, options.held_out_steps, place)
    meter = SpeedMeter(run.blocks_per_step * data.seq_len, count_flops(model, data.seq_len).model)
    objective = None
    if recipe.teacher and run.stage.needs_teacher:
        objective = Objective(run.stage.objective, load_teacher(recipe.teacher), run.stage.temperature)
    with _trainer_errors(run.stage):
        trainer = StageTrainer(
            model,
            run.arguments,
            default_data_collator,
            blocks,
            callbacks=[log],
            log=log,
            options=options,
            meter=meter,
            held_out=held_out,
            stop=stop,
            sources=lambda first, count: _in_words(blocks, first, count),
            objective=objective,
        )
    _set_callbacks(trainer, run)

    tokens = run.arguments.max_steps * run.blocks_per_step * data.seq_len
    state.print(
        f"{run.directory}: trains {trained:,} of {total:,} parameters ({trained / total:.1%}) for "
        f"{run.arguments.max_steps:,} steps, {tokens:,} tokens"
        + (f"; continues after step {step:,}" if checkpoint else ""),
        flush=True,
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step < run.arguments.max_steps:
        _stop(run, trainer, state)
    trainer.model = model = plain_model(trainer.model)
    model.config.use_cache = use_cache
    record = make_record(recipe, run, log, trainer.state, parameters, len(held_out))
    _complete(run, trainer, tokenizer, record, state)


def _in_words(blocks: PackedBlocks, first: int, count: int) -> str:
    """Of which sources a range of blocks is."""
    paths = [source.path for source in blocks.sources_of(first, count)]
    return ", ".join(f"{paths.count(path)} of {path}" for path in dict.fromkeys(paths))


def _set_callbacks(trainer: StageTrainer, run: StageRun) -> None:
    """Our progress for Hugging Face's; TensorBoard's files beside the stages, which are complete checkpoints."""
    for theirs in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(theirs)
    trainer.add_callback(ProgressLine(run.directory.name, show=not run.arguments.disable_tqdm))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(run.directory.parent / "tensorboard" / run.directory.name)


def _stop(run: StageRun, trainer: StageTrainer, state: PartialState) -> None:
    """Leave word for the launcher's script, whose launcher does not hand on exit codes. Raises Stopped."""
    facts = {"signal": trainer.stopping, "stage": run.stage.name, "step": trainer.state.global_step}
    if state.is_main_process:
        write_whole(run.directory.parent / STOPPED, json.dumps(facts) + "\n")
    state.wait_for_everyone()
    raise Stopped(
        f"{run.directory}: stopped by {facts['signal']} after step {facts['step']}, with a checkpoint; continue with "
        f"--resume"
    )


def _complete(
    run: StageRun, trainer: StageTrainer, tokenizer: PreTrainedTokenizerBase, record: dict, state: PartialState
) -> None:
    """Turn a trained stage into a complete checkpoint; training.json, which says so, comes last."""
    partial = run.directory / PARTIAL
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    check_room(run.directory, num_bytes, "the result")
    with saving_to(run.directory, num_bytes):
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # else nothing is saved
        trainer.save_model(str(partial))
        if state.is_main_process:
            (partial / "training_args.bin").unlink()  # a pickle, and training.json says more
            record["weights_xxh3_128"] = weights_hashes(partial)
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
    """Delete what only served to resume the stage."""
    for path in [*run.trainer_dir.glob("checkpoint-*"), run.trainer_dir / PARTIAL]:
        shutil.rmtree(path, ignore_errors=True)
    if run.trainer_dir.exists() and not any(run.trainer_dir.iterdir()):
        run.trainer_dir.rmdir()


def _place(checkpoint: Path) -> tuple[int, dict]:
    """Steps done, and `StageLog.place`, as a trainer's checkpoint keeps them."""
    with reading(checkpoint):
        kept = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return kept["global_step"], kept["stateful_callbacks"][StageLog.__name__]["attributes"]["place"]


@contextmanager
def _own_accelerator() -> Iterator[None]:
    """Let a stage choose its precision and be sharded: accelerate keeps both in globals, and a second one under FSDP
    would not shard at all.
    """
    AcceleratorState._reset_state()
    launched_as = PartialState().distributed_type
    try:
        yield
    finally:
        PartialState._shared_state["distributed_type"] = launched_as


@contextmanager
def _trainer_errors(stage: Stage) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CocaError(f"stages.{stage.name}: the trainer does not take these options: {reason}") from error
