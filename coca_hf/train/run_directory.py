"""What a run of a recipe keeps on disk, and whether a recipe may continue what is there.

    OUT/recipe.yaml           the recipe with overrides and defaults, to run again as it is
    OUT/inputs.json           what the recipe's paths held, and blocks per step; for --resume
    OUT/1-k/                  a stage; a complete checkpoint if it has training.json
    OUT/1-k/log.jsonl         a line per logging interval, and per held-out loss: log.py
    OUT/1-k/trainer/          checkpoint-N, to resume from, until the stage is complete
    OUT/2-qkv/ …
    OUT/tensorboard/1-k/ …    for `tensorboard --logdir OUT`
    OUT/stopped.json          exists while a run that a signal stopped waits for --resume

Directories named `partial`, and hidden files with that ending, are unfinished. A run that is killed
leaves them, and the next one removes them.
"""

import errno
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers import TrainingArguments

from coca_hf.errors import CocaError, one_line, short
from coca_hf.files import file_hash, is_unfinished, remove_unfinished, replace_text, size_in_words
from coca_hf.models.hub import TRAINING
from coca_hf.train.processes import is_lost_process
from coca_hf.train.recipe import Recipe, Stage, StageOptions, read_tree, recipe_text
from coca_hf.weights import read_json, read_record

RECIPE = "recipe.yaml"
INPUTS = "inputs.json"
STOPPED = "stopped.json"
LOCK = ".lock"
PARTIAL = "partial"
# errno of an OSError that damage causes: none if we raise it, EINVAL if torch reads a cut-off file
OF_DAMAGE = (None, errno.ENOENT, errno.EINVAL)
MOST_CHANGES = 8  # that a message lists
UNTOUCHED = "what was saved before is untouched: make room, then continue with --resume"
MAY_CHANGE = (  # keys that --resume may change: how steps are computed, skipped, kept and logged
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("activation_checkpointing", "torch_compile", "attn_implementation", "fused_cross_entropy"),
    *("report_to", "disable_tqdm", "save_steps", "save_total_limit", "ddp_timeout"),
    *("context_parallel_size", "max_bad_steps", "spike_factor", "prepared"),
    *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
)


@dataclass(frozen=True)
class ResolvedStage:
    """A stage of a recipe with everything that a run adds: arguments, start and place on disk.

    blocks_per_step: blocks that one optimizer step takes, over all processes. base: the model that
    the stage starts from, which is that of the stage `before`, if any. base_directory: the
    directory with the records, the card and the licence of `base`; None for a model from scratch.
    """

    of_recipe: Stage
    own_options: StageOptions
    arguments: TrainingArguments
    blocks_per_step: int
    base: str
    base_directory: Path | None
    before: "ResolvedStage | None"
    directory: Path

    @property
    def name(self) -> str:
        return self.of_recipe.name

    @property
    def trainer_dir(self) -> Path:
        return self.directory / "trainer"

    @property
    def is_complete(self) -> bool:
        return (self.directory / TRAINING).exists()

    @property
    def start_block(self) -> int:
        """The first block of the stream that no earlier stage has seen."""
        if self.before is None:
            return 0
        file = self.before.directory / TRAINING
        record = read_record(file)
        if "end_block" not in record:
            raise CocaError(
                f"{file}: got no end_block, expected the record of a stage; train that stage again"
            )
        return record["end_block"]

    @property
    def num_blocks(self) -> int:
        """The blocks that it takes in total."""
        return self.arguments.max_steps * self.blocks_per_step


def check_out(recipe: Recipe, out_dir: Path, resume: bool) -> None:
    """Raises CocaError for a file, and for a directory that is not empty; with `resume`, for one
    that coca-train did not make, or made from another recipe, naming the differences.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise CocaError(
            f"{out_dir}: got a file, expected a directory or nothing; choose another --out"
        )
    if not _is_used(out_dir, recipe):
        return
    if not resume:
        raise CocaError(
            f"{out_dir}: not empty; continue what is there with --resume, or choose another --out"
        )
    if not (out_dir / RECIPE).exists():
        raise CocaError(
            f"{out_dir}: got a directory without {RECIPE}, expected one that coca-train made"
        )
    before, now = (
        {
            key: value
            for key, value in _flat(tree).items()
            if key.rpartition(".")[2] not in MAY_CHANGE
        }
        for tree in (read_tree(out_dir / RECIPE), recipe.to_dict())
    )
    if changes := _changes(before, now):
        raise CocaError(
            f"{out_dir}: cannot --resume with another recipe: {changes}; give the one that it was "
            f"started with ({out_dir / RECIPE}; put new paths there if its files were moved), or "
            "choose another --out"
        )


def noted_inputs(out_dir: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The inputs that the run in `out_dir` began with; None for a new run. `commits` has the commit
    of each source that is a data set on the hub, otherwise None; `hub`, the models on the hub with
    their commits.

    Raises CocaError if the file is missing or damaged.
    """
    if not _is_used(out_dir, recipe):
        return None
    path, remedy = out_dir / INPUTS, "restore the file, or choose another --out"
    if not path.exists():
        raise CocaError(
            f"{path}: missing, expected the record of the data and models that the run began with; "
            f"{remedy}"
        )
    inputs = read_json(path)
    commits, hub, count = inputs.get("commits"), inputs.get("hub", {}), len(recipe.data.sources)
    if not (isinstance(hub, dict) and all(isinstance(name, str) for name in hub.values())):
        raise CocaError(f"{path}: got hub {short(hub)}, expected names of models; {remedy}")
    if commits is not None and not (isinstance(commits, list) and len(commits) == count):
        raise CocaError(
            f"{path}: got commits {short(commits)}, expected one for each of {count} "
            f"sources; {remedy}"
        )
    return inputs


def check_inputs(out_dir: Path, noted: dict[str, Any] | None, inputs: dict[str, Any]) -> None:
    """Raises CocaError if the contents of the recipe's paths, or the size of a step, are not those
    that the run in `out_dir` began with: its stages would not form one training run.
    """
    if noted is not None and (changes := _changes(_flat(noted), _flat(inputs))):
        remedy = "restore them"
        if _flat(noted) | {"blocks": None} == _flat(inputs) | {"blocks": None}:
            remedy = (
                "restore the data, continue with the version of coca_hf that the run began with,"
            )
        if noted.get("blocks_per_step") != inputs["blocks_per_step"]:
            remedy += (
                ", keep the product of processes, per_device_train_batch_size and "
                "gradient_accumulation_steps,"
            )
        raise CocaError(
            f"{out_dir}: cannot --resume on other inputs: {changes}; {remedy} or choose another --out"
        )


def check_same(inputs: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises CocaError if some inputs of this process, `here`, are not those of the main one."""
    theirs = _flat({key: inputs.get(key) for key in here})
    if changes := _changes(theirs, _flat(here), ("is", "here")):
        raise CocaError(
            f"{platform.node()}, process {PartialState().process_index}: got other inputs than the "
            f"main process: {changes}; copy the main process's, or keep them where all machines "
            "see them"
        )


def begin_out(out_dir: Path, recipe: Recipe, inputs: dict[str, Any]) -> None:
    """Make the directory with its recipe and inputs, unless a run has begun there.

    Raises CocaError if it cannot be written.
    """
    with saving_to(out_dir):
        if not _is_used(out_dir, recipe):
            out_dir.mkdir(parents=True, exist_ok=True)
            (out_dir / INPUTS).unlink(missing_ok=True)
            replace_text(out_dir / RECIPE, recipe_text(recipe))
        if not (out_dir / INPUTS).exists():
            replace_text(out_dir / INPUTS, json.dumps(inputs, indent=2) + "\n")
        remove_unfinished(out_dir)
        (out_dir / STOPPED).unlink(missing_ok=True)


def _changes(
    before: dict[str, Any], now: dict[str, Any], words: tuple[str, str] = ("was", "now")
) -> str:
    absent = "absent"

    def said(tree: dict[str, Any], key: str) -> str:
        value = tree.get(key, absent)
        return value if isinstance(value, str) and len(value) < MOST_CHANGES * 20 else short(value)

    changed = [key for key in before | now if before.get(key, absent) != now.get(key, absent)]
    listed = [
        f"{key} {words[0]} {said(before, key)}, {words[1]} {said(now, key)}" for key in changed
    ]
    more = [f"and {len(listed) - MOST_CHANGES:,} more"] if len(listed) > MOST_CHANGES else []
    return "; ".join(listed[:MOST_CHANGES] + more)


def _is_used(out_dir: Path, recipe: Recipe) -> bool:
    """Whether a run has begun there, or the directory has files other than prepared blocks and what
    a run of this recipe writes before it begins.
    """
    blocks, own = Path(recipe.data.prepared).resolve(), out_dir.resolve()
    files = [path for path in own.rglob("*") if not path.is_dir()]
    before = {path for path in files if path.parent == own and is_unfinished(path)} | {own / LOCK}
    with suppress(OSError, UnicodeDecodeError):
        if (own / RECIPE).read_text(encoding="utf-8") == recipe_text(recipe):
            before |= {own / RECIPE, own / INPUTS}
    are_inside = own in blocks.parents
    return any(path not in before and not (are_inside and blocks in path.parents) for path in files)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """A tree's values by their dotted paths, and the names of stages in order, to compare two
    recipes.
    """
    if isinstance(tree, dict) and tree:
        items = {str(key): value for key, value in tree.items()}
    elif isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        items = {str(item.get("name", number)): item for number, item in enumerate(tree)}
    else:
        return {path: tree}
    order = {path: [*items]} if isinstance(tree, list) else {}
    return order | {
        key: value
        for name, item in items.items()
        for key, value in _flat(item, f"{path}.{name}".strip(".")).items()
    }


def saved_checkpoints(trainer_dir: Path) -> list[Path]:
    """Every `checkpoint-N`, the newest last. All are whole: they get that name when complete."""
    numbers = (path.name.partition("-")[2] for path in trainer_dir.glob("checkpoint-*"))
    steps = sorted(int(number) for number in numbers if number.isdecimal())
    return [trainer_dir / f"checkpoint-{step}" for step in steps]


def last_checkpoint(trainer_dir: Path) -> Path | None:
    return next(reversed(saved_checkpoints(trainer_dir)), None)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn what is raised for a damaged checkpoint, and by the file system, into a CocaError."""
    try:
        yield
    except CocaError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        cause = _cause(error)
        if is_lost_process(error):
            raise
        # Ctrl-C, too, which torch collects from the processes like an error
        if isinstance(cause, MemoryError | torch.OutOfMemoryError | KeyboardInterrupt):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno not in OF_DAMAGE:
            raise CocaError(
                f"{checkpoint}: cannot be read now ({_reason(error)[:200]}); nothing is known to be "
                "wrong with it: run it again with --resume"
            ) from error
        raise CocaError(
            f"{checkpoint}: cannot be read ({_reason(error)[:200]}); delete it: --resume then "
            "continues from the one before it, or starts the stage again"
        ) from error


def check_base(stage: ResolvedStage, check_stop: Callable[[], None]) -> None:
    """Raises CocaError if the weights that `stage` starts from are not as they were written, or if
    the config of the stage before it is not.
    """
    if stage.base_directory is None or not Path(stage.base).exists():
        return  # from scratch, or on the hub, which checks its files
    record = read_record(stage.base_directory / TRAINING)
    hashes = dict(record.get("weights_xxh3_128", {}))
    if stage.before and "config_xxh3_128" in record:
        hashes["config.json"] = record["config_xxh3_128"]
    for name, written in hashes.items():
        found = file_hash(stage.base_directory / name, check_stop)
        if found != written:
            raise CocaError(
                f"{stage.base_directory / name}: got xxh3_128 {found or 'of no file'}, expected "
                f"{written} as {TRAINING} beside it says; the file was damaged or replaced: restore "
                "it, or train that stage again with another --out"
            )


def check_unchanged(
    recipe: Recipe, inputs: dict[str, Any], keys: Iterable[str], check_stop: Callable[[], None]
) -> None:
    """Raises CocaError if the model or teacher of a recipe, by its key, is no longer that of
    `inputs`: it may be loaded hours after the run began.
    """
    for key in keys:
        if key not in inputs:  # on the hub, which keeps a commit as it is, or there is none
            continue
        directory = Path(getattr(recipe, key))
        if changes := _changes(inputs[key], model_hashes(directory, check_stop)):
            raise CocaError(
                f"{directory}: changed since the run began: {changes}; restore it and continue "
                "with --resume, or choose another --out"
            )


def model_hashes(directory: Path, check_stop: Callable[[], None]) -> dict[str, str | None]:
    """The xxh3_128 of a model's config and of its weights, by the files' names."""
    of_config = {"config.json": file_hash(directory / "config.json")}
    return of_config | weights_hashes(directory, check_stop)


def weights_hashes(
    directory: Path, check_stop: Callable[[], None] = lambda: None
) -> dict[str, str | None]:
    """The xxh3_128 of every weights file of a checkpoint, in hexadecimal, by name."""
    files = sorted([*directory.glob("*.safetensors*"), *directory.glob("pytorch_model*.bin*")])
    return {path.name: file_hash(path, check_stop) for path in files}


@contextmanager
def saving_to(directory: Path, what: str = "", num_bytes: int = 0) -> Iterator[None]:
    """Turn the errors of torch, safetensors and Python on a full or read-only disk into a CocaError.

    num_bytes: how much is written in total, which torch's errors do not say. If given, every
    process must call this; raises CocaError, in all of them, if the disk lacks room for `what`.
    """
    if num_bytes:
        free_bytes = [shutil.disk_usage(directory).free]
        broadcast_object_list(free_bytes)
        if free_bytes[0] < num_bytes:
            raise CocaError(
                f"{directory}: got {size_in_words(free_bytes[0])} free, expected "
                f"{size_in_words(num_bytes)} for {what}; {UNTOUCHED}"
            )
    try:
        yield
    except CocaError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        of_disk = isinstance(error, OSError | RuntimeError | SafetensorError | CheckpointException)
        of_disk |= "(os error " in str(error)  # tokenizers raises Exception itself
        if isinstance(cause := _cause(error), KeyboardInterrupt):  # Ctrl-C, as in `reading`
            raise cause from None
        if is_lost_process(error) or not of_disk:
            raise
        free = size_in_words(shutil.disk_usage(directory).free) if num_bytes else ""
        needed = f" ({size_in_words(num_bytes)} needed, {free} free)" if num_bytes else ""
        raise CocaError(
            f"{directory}: cannot be written{needed}: {_reason(error)}; {UNTOUCHED}"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The first error behind a CheckpointException, whose message has all processes' tracebacks."""
    if isinstance(error, CheckpointException):
        return next((failure for failure, _ in error.failures.values()), error)
    return error


def _reason(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {one_line(cause)}"
