"""Runs the stages of a recipe, each from one directory to the next, so that a run can be killed at any moment.

From stage to stage go weights, checked by their hashes, and the place in the stream of blocks; the optimizer starts
anew. Weights are float32 throughout; `bf16: true` computes in bfloat16 beside them. What lies where: see `out.py`.
"""

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from tqdm.auto import tqdm
from transformers import TrainingArguments
from transformers.integrations import is_tensorboard_available

from coca_hf.documents import local_files
from coca_hf.errors import CocaError, library_errors
from coca_hf.train.blocks import Blocks
from coca_hf.train.context_parallel import context_parallel
from coca_hf.train.data import Corpus, tokenizer_hash
from coca_hf.train.log import announce, check_loggers
from coca_hf.train.model import check_kernels, check_model, check_vocabulary, start_config, start_tokenizer
from coca_hf.train.objectives import check_teacher
from coca_hf.train.one_stage import clear_trainer, note_stop, run_stage, stop_before
from coca_hf.train.origin import located
from coca_hf.train.out import (
    STOPPED,
    StageRun,
    check_before,
    check_inputs,
    check_out,
    locked,
    model_state,
    noted_commits,
    open_out,
)
from coca_hf.train.processes import (
    check_stop,
    from_main_process,
    losing_processes,
    main_process_first,
)
from coca_hf.train.recipe import Recipe
from coca_hf.train.stop import Stopped, StopRequest, stop_on_signals
from coca_hf.train.trainer import check_optimizer
from coca_hf.train.tree import nearest, short
from coca_hf.weights import size_in_words

MODELS = ("model", "teacher", "tokenizer")  # of a recipe, that may be on the hub
SHARD = "shard with FSDP2, and set context_parallel_size in the recipe for blocks too long for one GPU"


def run_recipe(recipe: Recipe, out_dir: str | Path, stage: str | None = None, resume: bool = False) -> Path:
    """Run the stages of a recipe in order, or only the one named `stage`; returns the directory of the last one.

    With `resume`, finished stages are skipped and an unfinished one continues from its last checkpoint, on any number
    of processes. Every process of a distributed run calls this; the main one prints and writes.

    Raises CocaError, before anything is written, for a stage, model, module name, source or combination of training
    options that does not work, for an `out_dir` that is not empty without `resume`, and for one of another recipe with
    it; later, for a loss that is not a number, and for a disk that is full. Raises Stopped after the checkpoint that
    SIGTERM or SIGUSR1, to any process, asks for, and where no stage is at work.

    The main process first prepares the blocks that are not in `data.prepared` yet. Where a host does
    not see them there, one of its own processes does, too.
    """
    out_dir = Path(out_dir)
    with stop_on_signals() as stop, ExitStack() as held, losing_processes():
        _check_parallelism()
        runs = _plan(recipe, out_dir)
        chosen = [run for run in runs if stage in (None, run.stage.name)]
        if not chosen:
            names = [run.stage.name for run in runs]
            raise CocaError(
                f"--stage: got {short(stage)}, expected one of {', '.join(names)}; nearest: "
                f"{nearest(stage or '', names)}"
            )
        from_main_process(lambda: held.enter_context(locked(out_dir)))
        return _run_stages(recipe, out_dir, runs, chosen, PartialState(), resume, stop)


def prepare_recipe(recipe: Recipe, world_size: int) -> tuple[Blocks, int]:
    """Prepare the blocks that all stages take on so many processes; returns them, and how many that is.

    Blocks that are there are checked. Raises CocaError as `Corpus.prepare` does, and Stopped, after
    what is done is on disk, where SIGTERM or SIGUSR1 comes.
    """
    corpus, num_blocks = Corpus(recipe.data, start_tokenizer(recipe)), recipe.num_blocks(world_size)
    with stop_on_signals() as stop:
        try:
            return _prepare(corpus, num_blocks, lambda: check_stop(stop)), num_blocks
        except Stopped as stopped:
            raise Stopped(f"{corpus.directory}: stopped by {stopped}; the same command continues") from None


def _prepare(corpus: Corpus, num_blocks: int, check: Callable[[], None]) -> Blocks:
    """`Corpus.prepare`, with a progress bar on a terminal."""
    is_shown = PartialState().is_main_process and sys.stderr.isatty()
    with tqdm(total=num_blocks, desc="preparing blocks", dynamic_ncols=True, leave=False, disable=not is_shown) as bar:
        return corpus.prepare(num_blocks, lambda done: bar.update(done - bar.n), check)


def _blocks(corpus: Corpus, num_blocks: int, check: Callable[[], None]) -> Blocks:
    """So many blocks, prepared if they are not there; what is done, and where, is printed."""
    if corpus.has(num_blocks):
        blocks = corpus.blocks()
    else:
        announce(f"data: preparing {num_blocks:,} blocks in {corpus.directory}")
        blocks = _prepare(corpus, num_blocks, check)
        _name_others(corpus)
    announce(f"data: {len(blocks):,} blocks, {size_in_words(blocks.num_bytes)}, in {blocks.directory}")
    return blocks


def _name_others(corpus: Corpus) -> None:
    """Say where there are blocks that this recipe does not read, and how large they are."""
    parent = corpus.directory.parent
    others = [path for path in parent.glob("*/state.json") if path.parent != corpus.directory]
    if others:
        num_bytes = sum(file.stat().st_size for path in others for file in path.parent.glob("*.bin"))
        announce(
            f"data: {parent} also holds blocks of other recipes or data ({len(others)} directories, "
            f"{size_in_words(num_bytes)}); delete those that no run needs"
        )


def _check_parallelism() -> None:
    """Refuse parallelism that `accelerate launch` brings and the recipe does not know of."""
    for kind, instead in {"CP": "set context_parallel_size in the recipe", "SP": SHARD, "TP": SHARD}.items():
        size = os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")
        if size != "1":
            raise CocaError(f"parallelism_config_{kind.lower()}_size: got {size}, expected 1: {instead}")


def _check_and_open(
    given: Recipe, out_dir: Path, runs: list[StageRun], chosen: list[StageRun], resume: bool
) -> tuple[dict[str, tuple[str, Path]], list[str | None]]:
    """Everything that can be told before the first stage; then OUT is begun, or its run goes on.

    Returns where the recipe's model, teacher and tokenizer are, on the hub at which commit; and the
    commits of its data sets.
    """
    check_out(given, out_dir, resume)
    check_before(chosen[0])
    noted, on_hub = noted_commits(out_dir, len(given.data.sources))
    names = {key: name for key in MODELS if (name := getattr(given, key))}
    places = {key: located(on_hub.get(key, name)) for key, name in names.items()}
    recipe = _at(given, places)
    check_model(recipe)
    check_kernels(recipe)
    for run in runs:
        check_optimizer(run.arguments, f"stages.{run.stage.name}")
    if recipe.teacher:
        check_teacher(recipe.teacher, start_config(recipe))
    corpus = Corpus(recipe.data, start_tokenizer(recipe))
    check_vocabulary(corpus.tokenizer, start_config(recipe))
    commits = corpus.pin_(noted)
    if not corpus.has(_num_blocks(runs, chosen)):  # otherwise nothing asks for the sources
        corpus.check()
    open_out(given, out_dir)
    check_inputs(out_dir, _inputs(places, recipe, corpus, commits, runs))
    (out_dir / STOPPED).unlink(missing_ok=True)
    return places, commits


def _run_stages(
    recipe: Recipe,
    out_dir: Path,
    runs: list[StageRun],
    chosen: list[StageRun],
    state: PartialState,
    resume: bool,
    stop: StopRequest,
) -> Path:
    places, commits = from_main_process(lambda: _check_and_open(recipe, out_dir, runs, chosen, resume))
    recipe = _at(recipe, places)
    directory = places["model"][1] if recipe.model else None
    num_blocks = _num_blocks(runs, chosen)
    chosen = [
        run if run.before else dataclasses.replace(run, base=recipe.start, base_directory=directory) for run in chosen
    ]
    complete = from_main_process(lambda: {run.directory for run in chosen if run.is_complete})
    blocks: Blocks | None = None
    for run in chosen:
        if run.directory in complete:
            announce(f"{run.directory}: complete, skipped")
            if state.is_main_process:
                clear_trainer(run)  # a kill may have come between training.json and this
            continue
        stop_before(run, state, stop)
        if blocks is None:
            blocks = _prepared(recipe, commits, num_blocks, run, stop)
        with _own_accelerator():
            run_stage(recipe, run, state, blocks, stop)
        gc.collect()  # the trainer refers to itself; free its model before the next is loaded
    return chosen[-1].directory


def _num_blocks(runs: list[StageRun], chosen: list[StageRun]) -> int:
    """The blocks that all stages take together, up to the last chosen one."""
    return sum(run.arguments.max_steps * run.blocks_per_step for run in runs[: runs.index(chosen[-1]) + 1])


def _prepared(recipe: Recipe, commits: list[str | None], num_blocks: int, run: StageRun, stop: StopRequest) -> Blocks:
    """The training blocks, in every process. Raises Stopped where a signal comes before."""
    corpus = Corpus(recipe.data, start_tokenizer(recipe))
    corpus.pin_(commits)
    try:
        return main_process_first(lambda check: _blocks(corpus, num_blocks, check), stop)
    except Stopped as stopped:
        note_stop(run.directory.parent, {"signal": str(stopped), "stage": run.stage.name})
        raise Stopped(
            f"{run.directory}: stopped by {stopped} before it began; the blocks that are prepared are "
            f"kept; continue with --resume"
        ) from None


def _plan(recipe: Recipe, out_dir: Path) -> list[StageRun]:
    """Every stage with its options in TrainingArguments, which checks how they go together."""
    runs: list[StageRun] = []
    for number, stage in enumerate(recipe.stages, 1):
        before = runs[-1] if runs else None
        directory = out_dir / f"{number}-{stage.name}"
        with library_errors(f"stages.{stage.name}: the trainer does not take these options"):
            arguments = TrainingArguments(
                output_dir=str(directory / "trainer"),
                remove_unused_columns=False,
                ignore_data_skip=True,  # a resumed stage's blocks start where its checkpoint was
                eval_on_start=True,  # see StageTrainer.evaluate
                **recipe.options(stage),
            )
            on_cpu = arguments.device.type == "cpu"  # asking joins the other processes
        if arguments.n_gpu > 1:  # transformers would split every batch over them, with nn.DataParallel
            if number == 1:
                launch = (
                    f"accelerate launch --config_file LAYOUT --num_processes {arguments.n_gpu} -m coca_hf.train RECIPE"
                )
                announce(
                    f"one process is one GPU: this one takes the first of {arguments.n_gpu}; for all of them: {launch} "
                    f"(LAYOUT: recipes/accelerate/8gpu.yaml)"
                )
            arguments._n_gpu = 1
        arguments.parallelism_config = context_parallel(
            arguments, recipe.stage_options(stage).context_parallel_size, f"stages.{stage.name}"
        )
        arguments.dataloader_pin_memory &= not on_cpu  # torch warns where there is nothing to pin for
        if "tensorboard" in arguments.report_to and not is_tensorboard_available():
            if number == 1:
                announce("report_to: tensorboard is not installed; going on without it")
            arguments.report_to.remove("tensorboard")
        check_loggers(arguments, f"stages.{stage.name}")
        arguments.run_name = f"{arguments.run_name or out_dir.resolve().name}/{directory.name}"
        arguments.gradient_accumulation_steps = recipe.accumulation(stage, arguments.world_size)
        base, base_directory = (str(before.directory), before.directory) if before else (recipe.start, None)
        runs.append(StageRun(stage, base, base_directory, before, directory, arguments))
    return runs


def _at(recipe: Recipe, places: dict[str, tuple[str, Path]]) -> Recipe:
    return recipe.model_copy(update={key: name for key, (name, _) in places.items()})


def _inputs(
    places: dict[str, tuple[str, Path]],
    recipe: Recipe,
    corpus: Corpus,
    commits: list[str | None],
    runs: list[StageRun],
) -> dict[str, Any]:
    """What decides the training and is not in the recipe itself. Data by size, so that it may be copied elsewhere."""
    on_hub = {key: name for key, (name, _) in places.items() if not Path(name).exists()}
    local = {key: model_state(directory) for key, (_, directory) in places.items() if key not in on_hub}
    local.pop("tokenizer", None)  # by its hash
    return {
        "sources": [
            {file.name: f"{file.stat().st_size} bytes" for file in local_files(source.path)}
            for source in recipe.data.sources
            if source.path
        ],
        **({"commits": commits} if any(commits) else {}),
        "tokenizer": tokenizer_hash(corpus.tokenizer),
        **local,
        **({"hub": on_hub} if on_hub else {}),
        "blocks_per_step": {run.stage.name: run.blocks_per_step for run in runs},
    }


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
