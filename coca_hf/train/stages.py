"""Runs the stages of a recipe, each from one directory to the next, so that a run can be killed.

`preflight` refuses what does not work; then the blocks are prepared, and each stage runs in turn.
From stage to stage go weights, checked by their hashes, and the place in the stream of blocks; each
stage has an optimizer of its own. Weights are float32 throughout; `bf16: true` computes in bfloat16
beside them. `run_directory.py` lists what is on disk.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState

from coca_hf.train.blocks import Blocks
from coca_hf.train.data import Corpus
from coca_hf.train.log import announce
from coca_hf.train.model import start_tokenizer
from coca_hf.train.one_stage import clear_trainer, note_stop, run_stage, stop_before
from coca_hf.train.preflight import Checked, preflight
from coca_hf.train.processes import (
    Stopped,
    StopRequest,
    check_stop,
    from_main_process,
    losing_processes,
    main_process_first,
    stop_on_signals,
)
from coca_hf.train.recipe import Recipe
from coca_hf.train.run_directory import ResolvedStage
from coca_hf.weights import size_in_words


def run_recipe(
    recipe: Recipe, out_dir: str | Path, stage: str | None = None, resume: bool = False
) -> Path:
    """Run the stages of a recipe, or only the one named `stage`; returns the last one's directory.

    With `resume`, finished stages are skipped and an unfinished one continues from its last
    checkpoint, on any number of processes. Every process of a distributed run calls this; the main
    one prints, writes, and prepares the blocks that are not in `data.prepared` yet. Where a host
    does not see them there, one of its own processes prepares them, too.

    Raises CocaError, before anything is written, for what `preflight` refuses; later, for a loss
    that is not a number, and for a disk that is full. Raises Stopped after the checkpoint that
    SIGTERM or SIGUSR1, to any process, asks for, and where no stage is at work.
    """
    with stop_on_signals() as stop, ExitStack() as until_the_end, losing_processes():
        checked = preflight(recipe, Path(out_dir), stage, resume, until_the_end, stop)
        return _run_stages(checked, stop)


def _run_stages(checked: Checked, stop: StopRequest) -> Path:
    state, stages = PartialState(), checked.stages
    complete = from_main_process(lambda: {stage.directory for stage in stages if stage.is_complete})
    blocks: Blocks | None = None
    for stage in stages:
        if stage.directory in complete:
            announce(f"{stage.directory}: complete, skipped")
            if state.is_main_process:
                clear_trainer(stage)  # a kill may have come between training.json and this
            continue
        stop_before(stage, state, stop)
        if blocks is None:
            blocks = _prepared(checked, stage, stop)
        with _own_accelerator():
            run_stage(checked.recipe, stage, state, blocks, stop)
        gc.collect()  # the trainer refers to itself; free its model before the next is loaded
    return stages[-1].directory


def _prepared(checked: Checked, stage: ResolvedStage, stop: StopRequest) -> Blocks:
    """The training blocks, in every process. Raises Stopped where a signal comes before."""
    corpus = Corpus(checked.recipe.data, start_tokenizer(checked.recipe))
    corpus.pin_(checked.commits)
    try:
        return main_process_first(lambda check: _blocks(corpus, checked.num_blocks, check), stop)
    except Stopped as stopped:
        note_stop(stage.directory.parent, {"signal": str(stopped), "stage": stage.name})
        raise Stopped(
            f"{stage.directory}: stopped by {stopped} before it began; the blocks that are "
            f"prepared are kept; continue with --resume"
        ) from None


def prepare_recipe(recipe: Recipe, world_size: int) -> tuple[Blocks, int]:
    """The blocks that all stages take on `world_size` processes, prepared, and their number.

    Blocks that are there are checked. Raises CocaError as `Corpus.prepare` does, and Stopped, after
    what is done is on disk, where SIGTERM or SIGUSR1 comes.
    """
    corpus, num_blocks = Corpus(recipe.data, start_tokenizer(recipe)), recipe.num_blocks(world_size)
    with stop_on_signals() as stop:
        try:
            return corpus.prepare(num_blocks, lambda: check_stop(stop)), num_blocks
        except Stopped as stopped:
            raise Stopped(
                f"{corpus.directory}: stopped by {stopped}; the same command continues"
            ) from None


def _blocks(corpus: Corpus, num_blocks: int, check: Callable[[], None]) -> Blocks:
    """So many blocks, prepared if they are not there; what is done, and where, is printed."""
    if corpus.has(num_blocks):
        blocks = corpus.blocks()
    else:
        announce(f"data: preparing {num_blocks:,} blocks in {corpus.directory}")
        blocks = corpus.prepare(num_blocks, check)
        _name_others(corpus)
    announce(
        f"data: {len(blocks):,} blocks, {size_in_words(blocks.num_bytes)}, in {blocks.directory}"
    )
    return blocks


def _name_others(corpus: Corpus) -> None:
    """Say where there are blocks that this recipe does not read, and how large they are."""
    parent = corpus.directory.parent
    others = [path for path in parent.glob("*/state.json") if path.parent != corpus.directory]
    if others:
        files = [file for path in others for file in path.parent.glob("*.bin")]
        size = size_in_words(sum(file.stat().st_size for file in files))
        announce(
            f"data: {parent} also holds blocks of other recipes or data ({len(others)} "
            f"directories, {size}); delete those that no run needs"
        )


@contextmanager
def _own_accelerator() -> Iterator[None]:
    """Let a stage choose its precision and be sharded, both of which accelerate keeps in globals."""
    AcceleratorState._reset_state()
    launched_as = PartialState().distributed_type
    try:
        yield
    finally:
        PartialState._shared_state["distributed_type"] = launched_as
