"""One stage: its model, trained by `StageTrainer` from its last checkpoint on, and made a complete checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    default_data_collator,
)
from transformers.integrations import TensorBoardCallback

from coca_hf.card import write_card
from coca_hf.errors import CocaError, library_errors, one_line
from coca_hf.files import remove_unfinished, replace_text
from coca_hf.models.hub import LICENCE_FILES
from coca_hf.train.blocks import Blocks, DealtBlocks
from coca_hf.train.checkpoint import check_room
from coca_hf.train.flops import count_flops
from coca_hf.train.log import ProgressLine, SpeedMeter, StageLog, announce, start_place, wandb_run
from coca_hf.train.model import (
    count_parameters,
    load_config,
    load_model,
    load_tokenizer,
    plain_model,
    stage_model,
    start_config,
    start_model,
    start_tokenizer,
    unfilled_model,
    weights_are_sent_here,
)
from coca_hf.train.objectives import (
    Objective,
    chunk_cross_entropy_,
    fuse_cross_entropy_,
    load_teacher,
)
from coca_hf.train.out import (
    PARTIAL,
    RECORD,
    STOPPED,
    StageRun,
    check_base,
    last_checkpoint,
    reading,
    saving_to,
    weights_hashes,
)
from coca_hf.train.processes import from_main_process, in_all_processes
from coca_hf.train.recipe import Recipe
from coca_hf.train.record import make_record
from coca_hf.train.stop import Stopped, StopRequest
from coca_hf.train.trainer import StageTrainer

CONVERSION_RECORD = "conversion.json"  # written by coca-convert; goes along from stage to stage


def run_stage(recipe: Recipe, run: StageRun, state: PartialState, blocks: Blocks, stop: StopRequest) -> None:
    if state.is_main_process:
        check_base(run)
        with saving_to(run.directory):
            run.trainer_dir.mkdir(parents=True, exist_ok=True)
            for half_written in (run.directory / PARTIAL, run.trainer_dir / PARTIAL):
                shutil.rmtree(half_written, ignore_errors=True)
            remove_unfinished(run.directory)
    state.wait_for_everyone()

    options, data = recipe.stage_options(run.stage), recipe.data
    base, tokenizer, objective = in_all_processes(lambda: _load(recipe, run))
    use_cache = base.config.use_cache  # the Trainer turns it off
    if options.fused_cross_entropy:
        fuse_cross_entropy_(base, liger=options.fused_cross_entropy == "liger")
    elif objective is not None:
        chunk_cross_entropy_(base)
    model = stage_model(base, run.stage)
    trained, total = count_parameters(model)
    parameters = {"trained": trained, "total": total, "fraction": trained / total}
    checkpoint = from_main_process(lambda: last_checkpoint(run.trainer_dir))
    step, place = _place(checkpoint) if checkpoint else (0, start_place(run.start_block))
    held_out = blocks.held_out
    group, groups = state.process_index // run.sharing, state.num_processes // run.sharing
    log = StageLog(run.directory / "log.jsonl", data.seq_len, run.blocks_per_step, options.held_out_steps, place)
    meter = SpeedMeter(run.blocks_per_step * data.seq_len, count_flops(model, data.seq_len).model)
    with library_errors(f"stages.{run.stage.name}: the trainer does not take these options"):
        trainer = StageTrainer(
            model,
            run.arguments,
            default_data_collator,
            DealtBlocks(blocks, place["next_block"], run.arguments.train_batch_size, group, groups),
            callbacks=[log],
            log=log,
            options=options,
            meter=meter,
            held_out=held_out,
            stop=stop,
            sources=blocks.sources_of,
            objective=objective,
        )
    _set_callbacks(trainer, run)

    tokens = run.arguments.max_steps * run.blocks_per_step * data.seq_len
    announce(
        f"{run.directory}: trains {trained:,} of {total:,} parameters ({trained / total:.1%}) for "
        f"{run.arguments.max_steps:,} steps of {run.blocks_per_step:,} blocks, {tokens:,} tokens"
        + ("" if options.global_batch_size else " (other numbers of processes have other steps: set global_batch_size)")
        + (f"; continues after step {step:,}" if checkpoint else "")
    )
    try:
        with wandb_run(run.arguments, place.get("run_id")):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OSError as error:  # of what logs beside us, such as TensorBoard, on a disk that is full
        raise CocaError(
            f"{run.directory}: {one_line(error)}; what was saved before is untouched: continue with --resume"
        ) from error
    if (step := trainer.state.global_step) < run.arguments.max_steps:
        facts = {"signal": trainer.stopping, "stage": run.stage.name, "step": step}
        _stop(run, state, facts, f"after step {step}, with a checkpoint")
    trainer.model = model = plain_model(trainer.model)
    model.config.use_cache = use_cache
    record = make_record(recipe, run, log, trainer.state, parameters, len(held_out))
    _complete(run, trainer, tokenizer, record, state)


def _load(recipe: Recipe, run: StageRun) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Objective | None]:
    """The model that the stage starts from, its tokenizer, and its objective where that is not plain `lm`."""
    attention = recipe.stage_options(run.stage).attn_implementation
    if weights_are_sent_here():
        base = unfilled_model(load_config(run.base) if run.before else start_config(recipe), attention)
    else:
        base = load_model(run.base, None, attention) if run.before else start_model(recipe, attention)
    tokenizer = load_tokenizer(run.base) if run.before else start_tokenizer(recipe)
    if run.stage.objective == {"lm": 1.0} and not run.stage.answer_weight:
        return base, tokenizer, None
    teacher = None
    if recipe.teacher and run.stage.needs_teacher:
        teacher = load_teacher(recipe.teacher, "eager" if "attention-maps" in run.stage.objective else None)
    return base, tokenizer, Objective(run.stage.objective, teacher, run.stage.temperature, run.stage.answer_weight)


def _set_callbacks(trainer: StageTrainer, run: StageRun) -> None:
    """Our progress for Hugging Face's; TensorBoard's files beside the stages, which are complete checkpoints."""
    for theirs in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(theirs)
    trainer.add_callback(ProgressLine(run.directory.name, show=not run.arguments.disable_tqdm))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(run.directory.parent / "tensorboard" / run.directory.name)


def stop_before(run: StageRun, state: PartialState, stop: StopRequest) -> None:
    """Raises Stopped, in every process, where a signal came to one of them while no stage was at work."""
    asked = [signal for signal in gather_object([stop.came]) if signal]
    if asked:
        _stop(run, state, {"signal": asked[0], "stage": run.stage.name}, "before it began")


def _stop(run: StageRun, state: PartialState, facts: dict[str, Any], when: str) -> None:
    """Leave word for the launcher's script, whose launcher does not hand on exit codes. Raises Stopped."""
    note_stop(run.directory.parent, facts)
    state.wait_for_everyone()
    raise Stopped(f"{run.directory}: stopped by {facts['signal']} {when}; continue with --resume")


def note_stop(out_dir: Path, facts: dict[str, Any]) -> None:
    """Note, in the main process, what stopped the run."""
    if PartialState().is_main_process:
        replace_text(out_dir / STOPPED, json.dumps(facts) + "\n")


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
            for name in (CONVERSION_RECORD, *LICENCE_FILES):
                if run.base_directory and (run.base_directory / name).exists():
                    shutil.copy(run.base_directory / name, partial)
            if (partial / CONVERSION_RECORD).exists():
                write_card(partial, record)
            for path in partial.iterdir():
                target = run.directory / path.name
                if target.is_dir():  # moved by an earlier try
                    shutil.rmtree(target)
                os.replace(path, target)
            partial.rmdir()
            replace_text(run.directory / RECORD, json.dumps(record, indent=2) + "\n")
            clear_trainer(run)
    state.wait_for_everyone()


def clear_trainer(run: StageRun) -> None:
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
