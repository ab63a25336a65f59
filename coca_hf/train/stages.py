"""A run, from the recipe to the last checkpoint: its stages, each from one directory to the next.

`preflight` refuses what does not work; then the blocks are prepared, and the stages run in turn,
each trained by `StageTrainer` from its last checkpoint. A stage hands on its weights, checked by
their hashes, and the place in the stream of blocks; each has an optimizer of its own. Weights are
float32 throughout; `bf16: true` computes in bfloat16. `run_directory.py` lists the files on disk.
"""

import functools
import gc
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    default_data_collator,
)
from transformers.integrations import TensorBoardCallback

from coca_hf.card import write_card
from coca_hf.documents import is_on_hub
from coca_hf.errors import CocaError, library_errors, one_line
from coca_hf.files import file_hash, remove_unfinished, replace_text, size_in_words, sync
from coca_hf.models.hub import CONVERSION, TRAINING, without_paths
from coca_hf.provenance import commit, now, versions
from coca_hf.train import model as models
from coca_hf.train.data import Blocks, Corpus, DealtBlocks
from coca_hf.train.flops import count_flops
from coca_hf.train.log import ProgressLine, StageLog, start_place, wandb_run
from coca_hf.train.objectives import Objective, chunk_cross_entropy_, fuse_cross_entropy_
from coca_hf.train.preflight import check_positions, preflight
from coca_hf.train.processes import (
    Stopped,
    StopRequest,
    announce,
    from_main_process,
    in_all_processes,
    losing_processes,
    main_process_first,
    stop_on_signals,
)
from coca_hf.train.recipe import Recipe, has_bounds
from coca_hf.train.run_directory import (
    PARTIAL,
    STOPPED,
    ResolvedStage,
    check_base,
    check_same,
    check_unchanged,
    last_checkpoint,
    model_hashes,
    reading,
    saved_checkpoints,
    saving_to,
    weights_hashes,
)
from coca_hf.train.trainer import StageTrainer
from coca_hf.weights import read_record

PACKAGES = ("coca-hf", "torch", "transformers", "accelerate", "datasets")
# The fields of a stage's record that the records of later stages repeat
CARRIED_ON = ("tokens", "seconds", "final_loss", "held_out", "hardware", "date")


def run_recipe(
    recipe: Recipe, out_dir: str | Path, stage: str | None = None, resume: bool = False
) -> Path:
    """Run the stages of a recipe, or only the one named `stage`; returns the last one's directory.

    With `resume`, finished stages are skipped and an unfinished one continues from its last
    checkpoint, on any number of processes. Every process of a distributed run calls this; the main
    one prints, writes, and prepares the blocks that are not in `data.prepared` yet. On a host that
    does not see them there, one of its own processes prepares them, too.

    Raises CocaError, before OUT is written, for what `preflight` refuses; later, for a loss that is
    not a number, and for a full disk. Raises Stopped after SIGTERM or SIGUSR1 to any process: within
    a stage, after a checkpoint.
    """
    with stop_on_signals() as stop, ExitStack() as until_the_end, losing_processes():
        recipe, stages, num_blocks, inputs = preflight(
            recipe, Path(out_dir), stage, resume, until_the_end, stop
        )
        complete = from_main_process(
            lambda: {each.directory for each in stages if each.is_complete}
        )
        blocks: Blocks | None = None
        for each in stages:
            if each.directory in complete:
                announce(f"{each.directory}: complete, skipped")
                if PartialState().is_main_process:
                    _clear_trainer(each)  # a kill may have come between training.json and this
                continue
            with _noting_a_stop(each):
                ready = functools.partial(
                    _prepared_blocks, each, recipe, num_blocks, inputs, blocks
                )
                blocks = main_process_first(ready, stop)
                with _own_accelerator():
                    _run_stage(recipe, each, blocks, stop)
            gc.collect()  # the trainer refers to itself; free its model before the next is loaded
            if each.arguments.torch_compile:
                torch.compiler.reset()  # what it compiled counts towards the next one's limit
        return stages[-1].directory


def prepare_recipe(recipe: Recipe, world_size: int) -> tuple[Blocks, int]:
    """The blocks that all stages take on `world_size` processes, prepared, and their number.

    Blocks that exist already are checked. Raises CocaError as `check_positions` and `Corpus.prepare`
    do, and Stopped after SIGTERM or SIGUSR1, once what is done is on disk.
    """
    if notice := check_positions(recipe, models.start_config(recipe)):
        announce(notice)
    num_blocks = recipe.num_blocks(world_size)
    with stop_on_signals() as stop:
        try:
            blocks = _corpus(recipe, stop.check).prepare(num_blocks)
        except Stopped as stopped:
            raise Stopped(
                f"{recipe.data.prepared}: stopped by {stopped}; the same command continues"
            ) from None
    announce("\n".join(blocks.read_of_sources()))
    return blocks, num_blocks


def _corpus(recipe: Recipe, check_stop: Callable[[], None]) -> Corpus:
    tokenizer, vocab_size = models.start_tokenizer(recipe), models.start_config(recipe).vocab_size
    return Corpus(recipe.data, tokenizer, vocab_size, check_stop)


@contextmanager
def _noting_a_stop(stage: ResolvedStage) -> Iterator[None]:
    """Say where a stage was stopped, and write it down for the launch script, because launchers
    hide exit codes. Raises Stopped.
    """
    try:
        yield
    except Stopped as stopped:
        signal, *step = stopped.args
        facts = {"signal": signal, "stage": stage.name}
        when = "before it began; the blocks that are prepared are kept"
        if step:
            [facts["step"]] = step
            when = f"after step {facts['step']}, with a checkpoint"
        if PartialState().is_main_process:
            note = stage.directory.parent / STOPPED
            try:
                replace_text(note, json.dumps(facts) + "\n")
            except OSError as error:  # the exit code still says it
                announce(f"{note}: got {one_line(error)}, expected to write it; the run is stopped")
        PartialState().wait_for_everyone()
        raise Stopped(
            f"{stage.directory}: stopped by {signal} {when}; continue with --resume"
        ) from None


def _prepared_blocks(
    stage: ResolvedStage,
    recipe: Recipe,
    num_blocks: int,
    inputs: dict[str, Any],
    blocks: Blocks | None,
    check_stop: Callable[[], None],
) -> Blocks:
    """Check the weights that a stage starts from, and prepare the blocks unless an earlier stage
    has. Prints what is done, and where.

    Raises CocaError if this machine has other text or another teacher than the main process, or if
    a model or teacher has changed since the run began.
    """
    check_stop()
    is_main = PartialState().is_main_process
    if is_main:
        check_base(stage, check_stop)
    if blocks is not None:
        if is_main and stage.of_recipe.needs_teacher:
            check_unchanged(recipe, inputs, ["teacher"], check_stop)
        return blocks
    corpus = _corpus(recipe, check_stop)
    if not is_main:
        here: dict[str, Any] = {"sources": corpus.files, "blocks": corpus.directory.name}
        if "teacher" in inputs and PartialState().is_local_main_process:
            here["teacher"] = model_hashes(Path(str(recipe.teacher)), check_stop)
        check_same(inputs, here)
    if corpus.has(num_blocks):
        blocks = corpus.blocks()
    else:
        announce(f"data: preparing {num_blocks:,} blocks in {corpus.directory}")
        blocks = corpus.prepare(num_blocks)
        if is_main:  # perhaps hours later
            check_base(stage, check_stop)
            check_unchanged(recipe, inputs, ["model", "teacher"], check_stop)
    taken = f"; this run takes the first {num_blocks:,}" if len(blocks) > num_blocks else ""
    size = size_in_words(blocks.num_bytes)
    announce(f"data: {len(blocks):,} blocks, {size}, in {blocks.directory}{taken}")
    announce("\n".join(blocks.read_of_sources()))
    if (found := len(blocks.held_out)) < recipe.data.held_out_blocks:
        announce(
            f"data.held_out_blocks: got text for {found:,} of {recipe.data.held_out_blocks:,}, because "
            "a tenth of a source is held out at most"
        )
    return blocks


@contextmanager
def _own_accelerator() -> Iterator[None]:
    """Let a stage choose precision and sharding, both of which accelerate keeps in globals."""
    AcceleratorState._reset_state()
    launched_as = PartialState().distributed_type
    try:
        yield
    finally:
        PartialState._shared_state["distributed_type"] = launched_as


def _run_stage(recipe: Recipe, stage: ResolvedStage, blocks: Blocks, stop: StopRequest) -> None:
    from_main_process(lambda: _begin(stage))
    options, arguments, seq_len = stage.own_options, stage.arguments, recipe.data.seq_len
    base, tokenizer, objective = in_all_processes(lambda: _load(recipe, stage))
    use_cache = base.config.use_cache  # the Trainer turns it off
    if options.fused_cross_entropy:
        fuse_cross_entropy_(base)
    elif objective is not None:
        chunk_cross_entropy_(base)
    model = models.stage_model(base, stage.of_recipe, arguments.seed)
    trained, total = models.count_parameters(model)
    checkpoint = from_main_process(lambda: last_checkpoint(stage.trainer_dir))
    step, place = _place(checkpoint) if checkpoint else (0, start_place(stage.start_block))
    sharing = options.context_parallel_size
    group, groups = arguments.process_index // sharing, arguments.world_size // sharing
    log = StageLog(
        stage.directory / "log.jsonl",
        seq_len,
        stage.blocks_per_step,
        count_flops(recipe, stage.of_recipe) if arguments.device.type == "cuda" else 0,
        options.held_out_steps,
        place,
    )
    with library_errors(f"stages.{stage.name}: the trainer does not take these options"):
        trainer = StageTrainer(
            model,
            arguments,
            default_data_collator,
            DealtBlocks(blocks, place["next_block"], arguments.train_batch_size, group, groups),
            log=log,
            own_options=options,
            held_out=blocks.held_out,
            stop=stop,
            objective=objective,
        )
    _set_callbacks(trainer, stage)
    # Accelerate turns it on for torch_compile without bf16, and leaves it on for later stages
    torch.backends.cuda.matmul.allow_tf32 = bool(arguments.tf32)

    steps, per_step = arguments.max_steps, stage.blocks_per_step
    said = (
        f"{stage.directory}: trains {trained:,} of {total:,} parameters ({trained / total:.1%}) "
        f"for {steps:,} step{'s' * (steps > 1)} of {per_step:,} block{'s' * (per_step > 1)}, "
        f"{stage.num_blocks * seq_len:,} tokens"
    )
    if not options.global_batch_size:
        said += " (other numbers of processes have other steps: set global_batch_size)"
    announce(said + (f"; continues after step {step:,}" if checkpoint else ""))
    _announce_surprises(recipe, stage)
    try:
        with wandb_run(arguments, place["run_id"]):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OSError as error:  # of other loggers, such as TensorBoard, on a full disk
        elsewhere = os.environ.get("TENSORBOARD_LOGGING_DIR")
        where = f"{stage.directory} or {elsewhere}" if elsewhere else stage.directory
        raise CocaError(
            f"{where}: {one_line(error)}; what was saved before is untouched: continue with --resume"
        ) from error
    if (step := trainer.state.global_step) < arguments.max_steps:
        raise Stopped(trainer.stopping, step)
    if stage.of_recipe.lora:
        trainer.model = trainer.model.merge_and_unload()
    trainer.model.config.use_cache = use_cache
    parameters = {"trained": trained, "total": total, "fraction": trained / total}
    _complete(stage, trainer, tokenizer, _make_record(recipe, stage, trainer, parameters))


def _announce_surprises(recipe: Recipe, stage: ResolvedStage) -> None:
    """Say where a stage does otherwise than its recipe seems to say."""
    where = f"stages.{stage.name}"
    if expected := recipe.batch_in_file(stage.of_recipe):
        announce(
            f"{where}: takes {stage.blocks_per_step:,} blocks a step, not the {expected:,} of the "
            "recipe's file, for which its header gives cost and results"
        )
    if recipe.teacher and not stage.of_recipe.needs_teacher:
        announce(f"{where}: learns nothing from the teacher: no objective is distill")
    for override in recipe.overrides_without_effect(stage.of_recipe):
        announce(f"{where}: keeps its own, not {override}; override it there, too, if you mean it")
    if (seed := recipe.trainer_options(stage.of_recipe).get("seed")) is not None:
        announce(
            f"{where}: got seed {seed}, which draws adapters, dropout and noise; data.seed draws the "
            "blocks"
        )
    if stage.own_options.held_out_steps and not recipe.data.held_out_blocks:
        announce(f"{where}: measures no held-out loss: data.held_out_blocks is 0")
    arguments, given = stage.arguments, recipe.trainer_options(stage.of_recipe)
    if arguments.gradient_checkpointing_kwargs and not arguments.gradient_checkpointing:
        announce(
            f"{where}: recomputes nothing: gradient_checkpointing_kwargs need "
            "gradient_checkpointing=true"
        )
    of_optimizer = StageTrainer.get_optimizer_cls_and_kwargs(arguments)[1]
    taken_as = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
    if unused := [key for key in taken_as if key in given and taken_as[key] not in of_optimizer]:
        announce(f"{where}: optim {arguments.optim.value} does not take {', '.join(unused)}")
    max_steps = arguments.max_steps
    warmup_steps = arguments.get_warmup_steps(max_steps)
    if has_bounds(arguments) and "start_lr" in arguments.lr_scheduler_kwargs and not warmup_steps:
        announce(f"{where}: never has the rate start_lr: warmup_steps is 0")
    if warmup_steps >= max_steps:
        announce(
            f"{where}: got warmup_steps {warmup_steps:,} of {max_steps:,} steps, expected fewer, "
            "so that the warm-up ends"
        )


def _begin(stage: ResolvedStage) -> None:
    with saving_to(stage.directory):
        stage.trainer_dir.mkdir(parents=True, exist_ok=True)
        for half_written in (stage.directory / PARTIAL, stage.trainer_dir / PARTIAL):
            shutil.rmtree(half_written, ignore_errors=True)
        remove_unfinished(stage.directory)


def _load(
    recipe: Recipe, stage: ResolvedStage
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Objective | None]:
    """The model that the stage starts from, its tokenizer, and its objective unless plain `lm`."""
    own, attention = stage.of_recipe, stage.own_options.attn_implementation
    start = recipe
    if stage.before:  # which has saved a tokenizer, and a config with the recipe's fields
        start = recipe.model_copy(update={"model": stage.base, "tokenizer": None, "config": {}})
    make = models.unfilled_model if models.weights_are_sent_here() else models.start_model
    base = make(start, attention)
    tokenizer = models.start_tokenizer(start)
    if not own.needs_objective:
        return base, tokenizer, None
    teacher = None
    if recipe.teacher and own.needs_teacher:
        dtype = torch.bfloat16 if stage.arguments.bf16 else torch.float32
        dtype = torch.float16 if stage.arguments.fp16 else dtype
        teacher = models.load_teacher(recipe.teacher, dtype)
    objective = Objective(own.objective, teacher, own.answer_weight)
    return base, tokenizer, objective


def _place(checkpoint: Path) -> tuple[int, dict]:
    """Steps done, and `StageLog.place`, from a trainer's checkpoint."""
    with reading(checkpoint):
        kept = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        log = kept["stateful_callbacks"][StageLog.__name__]
        return kept["global_step"], log["attributes"]["place"]


def _set_callbacks(trainer: StageTrainer, stage: ResolvedStage) -> None:
    """Our progress instead of Hugging Face's; TensorBoard's files beside the stages."""
    for theirs in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(theirs)
    if not stage.arguments.disable_tqdm:
        trainer.add_callback(ProgressLine(stage.directory.name))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            place = stage.directory.parent / "tensorboard" / stage.directory.name
            if given := callback.logging_dir:  # TENSORBOARD_LOGGING_DIR, which runs share
                place = Path(given) / str(stage.arguments.run_name)
            callback.logging_dir = str(place)


def _make_record(
    recipe: Recipe, stage: ResolvedStage, trainer: StageTrainer, parameters: dict[str, Any]
) -> dict[str, Any]:
    """training.json without the hashes of files, and without local paths, which OUT/recipe.yaml
    has. Losses are in nats per token. `stages`: all stages behind the model, of any recipe.
    """
    arguments, seq_len, log = stage.arguments, recipe.data.seq_len, trainer.stage_log
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    final_loss = losses[-1] if losses and math.isfinite(losses[-1]) else None
    held_out_blocks = len(trainer.held_out)
    held_out = log.place["held_out"]  # by step, in words: a checkpoint keeps it as JSON
    device = f"{platform.machine()}, {os.cpu_count()} cores"
    if arguments.device.type == "cuda":
        device = torch.cuda.get_device_name(arguments.device)
    end_block = stage.start_block + stage.num_blocks
    record: dict[str, Any] = {
        "stage": stage.of_recipe.model_dump(exclude={"training"}, exclude_defaults=True),
        "base_model": stage.base,
        "parameters": parameters,
        "tokens": stage.num_blocks * seq_len,
        "tokens_seen": end_block * seq_len,
        "start_block": stage.start_block,
        "end_block": end_block,
        "blocks": trainer.train_dataset.blocks.directory.name,
        "blocks_per_step": stage.blocks_per_step,
        "seconds": round(log.seconds, 3),
        "skipped_steps": log.place["skipped_steps"],
        "final_loss": final_loss,  # log.jsonl beside it has all of them
        "held_out": {
            "blocks": held_out_blocks,
            "tokens": held_out_blocks * (seq_len - 1),  # those that are predicted
            "xxh3_128": xxhash.xxh3_128_hexdigest(trainer.held_out.numpy().data),
            "before": held_out["0"],
            "after": held_out[str(arguments.max_steps)],
        }
        if held_out_blocks
        else None,
        "date": now(),
        "hardware": {"device": device, "processes": arguments.world_size},
        "versions": versions(*PACKAGES),
        "commit": commit(),
        "recipe": recipe.to_dict(),
    }
    sources = [
        {
            "path": source.name,
            "weight": source.weight,
            "on_hub": bool(source.path) and is_on_hub(source.path),
            "commit": source.commit,
        }
        for source in recipe.data.sources
    ]
    summary = {
        **record["stage"],
        "steps": arguments.max_steps,
        "seq_len": seq_len,
        "learning_rate": arguments.learning_rate,
        "teacher": recipe.teacher if stage.of_recipe.needs_teacher else None,
        "sources": sources,
        **{key: record[key] for key in CARRIED_ON},
    }
    before = read_record(stage.base_directory / TRAINING) if stage.base_directory else {}
    return without_paths({**record, "stages": [*before.get("stages", []), summary]})


def _complete(
    stage: ResolvedStage, trainer: StageTrainer, tokenizer: PreTrainedTokenizerBase, record: dict
) -> None:
    """Turn a trained stage into a complete checkpoint; training.json, which says so, comes last."""
    partial = stage.directory / PARTIAL
    num_bytes = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    with saving_to(stage.directory, "the result", num_bytes):
        if trainer.is_fsdp_enabled:
            # Otherwise nothing is saved
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(partial))
        if PartialState().is_main_process:
            (partial / "training_args.bin").unlink()  # a pickle; training.json says more
            for path in partial.glob("*.safetensors"):  # which safetensors gives to its owner alone
                shutil.copymode(partial / "config.json", path)
            record["weights_xxh3_128"] = weights_hashes(partial)
            record["config_xxh3_128"] = file_hash(partial / "config.json")
            tokenizer.save_pretrained(partial)
            for pattern in models.HANDED_ON:
                for path in stage.base_directory.glob(pattern) if stage.base_directory else ():
                    if path.is_file():
                        shutil.copy(path, partial)
            if (partial / CONVERSION).exists():
                write_card(partial, record)
            for path in partial.rglob("*"):
                sync(path)  # before training.json says that they are complete
            for path in partial.iterdir():
                target = stage.directory / path.name
                if target.is_dir():  # moved by an earlier try
                    shutil.rmtree(target)
                os.replace(path, target)
            partial.rmdir()
            replace_text(stage.directory / TRAINING, json.dumps(record, indent=2) + "\n")
            _clear_trainer(stage)
    PartialState().wait_for_everyone()


def _clear_trainer(stage: ResolvedStage) -> None:
    """Delete what only served to resume the stage, but no copy of it that a user made."""
    for path in [*saved_checkpoints(stage.trainer_dir), stage.trainer_dir / PARTIAL]:
        shutil.rmtree(path, ignore_errors=True)
    if stage.trainer_dir.exists() and not any(stage.trainer_dir.iterdir()):
        stage.trainer_dir.rmdir()
