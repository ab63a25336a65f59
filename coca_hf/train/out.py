"""What a run of a recipe keeps on disk, and when it may go on.

    OUT/recipe.yaml           the recipe, overrides and defaults filled in; can be run again as it is
    OUT/inputs.json           what the recipe's paths held, and the blocks of a step; --resume checks them
    OUT/1-k/                  a stage: with training.json in it, a complete checkpoint that loads alone
    OUT/1-k/log.jsonl         a line per logging interval (see log.py), and one per measurement of the held-out loss
    OUT/1-k/trainer/          checkpoint-N, to resume from; they are deleted when the stage is complete
    OUT/2-qkv/ …
    OUT/tensorboard/1-k/ …    for `tensorboard --logdir OUT`
    OUT/stopped.json          there while a run that a signal stopped waits for --resume; launchers lose its exit code

Files and directories named `partial` are being written; a run that is killed leaves them, and the next one drops them.
"""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers import TrainingArguments

from coca_hf.errors import CocaError, one_line
from coca_hf.train.processes import is_lost_process
from coca_hf.train.recipe import Recipe, Stage
from coca_hf.train.tree import read_tree, short
from coca_hf.weights import read_json, size_in_words

RECORD = "training.json"
RECIPE = "recipe.yaml"
INPUTS = "inputs.json"
STOPPED = "stopped.json"
PARTIAL = "partial"
MOST_CHANGES = 8  # that a message lists
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError, pickle.UnpicklingError)
LAYOUT = (  # keys that may change with --resume: how the same steps are computed, and which are skipped
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("activation_checkpointing", "torch_compile", "attn_implementation", "fused_cross_entropy", "report_to"),
    *("disable_tqdm", "save_steps", "save_total_limit", "dataloader_num_workers", "context_parallel_size"),
    *("max_bad_steps", "spike_factor", "prepared"),
    *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
)


@dataclass(frozen=True)
class StageRun:
    """A stage of a recipe with its place on disk. `base` is the model it starts from: the stage `before`, if any.

    base_directory: where the records, the card and the licence of `base` are; None for a model from scratch.
    """

    stage: Stage
    base: str
    base_directory: Path | None
    before: "StageRun | None"
    directory: Path
    arguments: TrainingArguments

    @property
    def trainer_dir(self) -> Path:
        return self.directory / "trainer"

    @property
    def is_complete(self) -> bool:
        return (self.directory / RECORD).exists()

    @property
    def start_block(self) -> int:
        """The first block of the stream that no earlier stage has seen."""
        if self.before is None:
            return 0
        record = read_record(self.before.directory)
        if "end_block" not in record:
            raise CocaError(
                f"{self.before.directory / RECORD}: got no end_block, expected the record of a stage; train that stage "
                f"again"
            )
        return record["end_block"]

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one optimizer step takes, over all processes."""
        arguments = self.arguments
        return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size // self.sharing

    @property
    def sharing(self) -> int:
        """Processes that share a block."""
        parallelism = self.arguments.parallelism_config
        return parallelism.cp_size if parallelism else 1


def check_out(recipe: Recipe, out_dir: Path, resume: bool) -> None:
    """Refuse a directory that this recipe must not write to.

    Raises CocaError for a file, for a directory that is not empty without `resume`, and with it for one that coca-train
    did not make, or made by another recipe (naming what differs).
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise CocaError(f"{out_dir}: got a file, expected a directory or nothing; choose another --out")
    if not _is_used(out_dir):
        return
    if not resume:
        raise CocaError(f"{out_dir}: not empty; continue what is there with --resume, or choose another --out")
    if not (out_dir / RECIPE).exists():
        raise CocaError(f"{out_dir}: got a directory without {RECIPE}, expected one that coca-train made")
    before, now = _flat(read_tree(out_dir / RECIPE)), _flat(recipe.to_dict())
    for tree in (before, now):
        for key in [key for key in tree if key.rpartition(".")[2] in LAYOUT]:
            del tree[key]
    if changes := _changes(before, now):
        raise CocaError(
            f"{out_dir}: cannot --resume with another recipe: {changes}; give the one it was started with "
            f"({out_dir / RECIPE}), or choose another --out"
        )


def model_state(directory: Path) -> dict[str, str | None]:
    """What a model's directory holds: the hashes of its config and its weights."""
    return {"config.json": _file_hash(directory / "config.json"), **weights_hashes(directory)}


def check_inputs(out_dir: Path, inputs: dict[str, Any]) -> None:
    """Note what the recipe's paths hold and how large a step is, or compare it with what was noted.

    Raises CocaError where it is not the same: the stages would not be of one training.
    """
    path = out_dir / INPUTS
    if not path.exists():
        write_whole(path, json.dumps(inputs, indent=2) + "\n")
    elif changes := _changes(_flat(read_json(path)), _flat(inputs)):
        raise CocaError(
            f"{out_dir}: cannot --resume on other inputs: {changes}; restore them, keep the product of processes, "
            f"per_device_train_batch_size and gradient_accumulation_steps, or choose another --out"
        )


def noted_commits(out_dir: Path, num_sources: int) -> tuple[list[str | None] | None, dict[str, str]]:
    """The commits at which the run in `out_dir` reads data sets on the hub, one for each source, or None for a new run;
    and its models on the hub with theirs.

    Raises CocaError where the file is damaged.
    """
    path = out_dir / INPUTS
    inputs = read_json(path) if path.exists() and _is_used(out_dir) else {}
    commits, hub = inputs.get("commits"), inputs.get("hub", {})
    if not (isinstance(hub, dict) and all(isinstance(name, str) for name in hub.values())):
        raise CocaError(
            f"{path}: got hub {short(hub)}, expected names of models; restore the file, or choose another --out"
        )
    if commits is not None and not (isinstance(commits, list) and len(commits) == num_sources):
        raise CocaError(
            f"{path}: got commits {short(commits)}, expected one for each of {num_sources} sources; restore the file, "
            f"or choose another --out"
        )
    return commits, hub


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    def said(tree: dict[str, Any], key: str) -> str:
        value = tree.get(key, "absent")
        return value if isinstance(value, str) and len(value) < MOST_CHANGES * 20 else short(value)

    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    listed = [f"{key} was {said(before, key)}, now {said(now, key)}" for key in changed[:MOST_CHANGES]]
    return "; ".join(listed + [f"and {len(changed) - MOST_CHANGES:,} more"] * (len(changed) > MOST_CHANGES))


def check_before(run: StageRun) -> None:
    """Raises CocaError where the stage that `run` starts from is not complete."""
    if run.before and not run.before.is_complete:
        raise CocaError(
            f"--stage {run.stage.name}: starts from {run.before.directory}, which is not complete; "
            f"run --stage {run.before.stage.name} first"
        )


@contextmanager
def locked(out_dir: Path) -> Iterator[None]:
    """Hold the directory; the system frees it when the process dies. Raises CocaError where another one holds it."""
    with saving_to(out_dir):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out_dir.parent / f".{out_dir.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CocaError(f"{out_dir}: another coca-train is writing it; wait for it, or choose another --out") from None
    except OSError as error:
        raise CocaError(f"{out_dir}: cannot be written: {error.strerror}; choose another --out") from None
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def open_out(recipe: Recipe, out_dir: Path) -> None:
    """Make the directory, with its recipe in it, unless it is there. Raises CocaError where it cannot be written."""
    if not _is_used(out_dir):
        with saving_to(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            (out_dir / INPUTS).unlink(missing_ok=True)
            write_whole(out_dir / RECIPE, yaml.safe_dump(recipe.to_dict(), sort_keys=False))


def last_checkpoint(trainer_dir: Path) -> Path | None:
    """The newest `checkpoint-N` of a stage, or None. All of them are whole: they get their name when they are."""
    found = [path for path in trainer_dir.glob("checkpoint-*") if path.name.split("-")[1].isdecimal()]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn what a damaged checkpoint makes torch, json and pickle raise into one line: a CocaError."""
    try:
        yield
    except CocaError:
        raise
    except (*DAMAGE, CheckpointException) as error:
        reason = _reason(error)[:200]
        raise CocaError(
            f"{checkpoint}: cannot be read ({reason}); delete it: --resume then goes on from the one before it, or "
            f"starts the stage again"
        ) from error


def check_base(run: StageRun) -> None:
    """Raises CocaError where the weights that `run` starts from are not those that the stage before it wrote."""
    if run.base_directory is None or not Path(run.base).exists():
        return  # from scratch; or on the hub, which vouches for its files
    for name, written in read_record(run.base_directory).get("weights_xxh3_128", {}).items():
        found = _file_hash(run.base_directory / name)
        if found != written:
            raise CocaError(
                f"{run.base_directory / name}: got xxh3_128 {found or 'of no file'}, expected {written} as {RECORD} "
                f"beside it says; the file was damaged or replaced: restore it, or train that stage again with another "
                f"--out"
            )


def read_record(directory: Path) -> dict[str, Any]:
    """What a checkpoint's training.json says; nothing where there is none. Raises CocaError where it is damaged."""
    path = directory / RECORD
    record = read_json(path) if path.exists() else {}
    for key, kind in {"end_block": int, "weights_xxh3_128": dict, "stages": list}.items():
        if not isinstance(record.get(key, kind()), kind):
            raise CocaError(f"{path}: got {key} {short(record[key])}; restore the file, or train that stage again")
    return record


def weights_hashes(directory: Path) -> dict[str, str | None]:
    """The xxh3_128 of every file of weights of a checkpoint, in hexadecimal, by name."""
    return {path.name: _file_hash(path) for path in sorted(directory.glob("*.safetensors*"))}


def _file_hash(file: Path) -> str | None:
    """The xxh3_128 of a file; None where there is none."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, and a run that is killed, finds the old one or the new one."""
    partial = path.with_name(f"{path.name}.{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def saving_to(directory: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn what a full or read-only disk makes torch, safetensors and Python raise into one line: a CocaError.

    num_bytes: how much is written in all, for the message; of a disk that is full, torch says something else.
    """
    try:
        yield
    except CocaError:
        raise
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if is_lost_process(error):
            raise  # the disk has nothing to do with it
        free = size_in_words(shutil.disk_usage(directory).free) if num_bytes else ""
        needed = f" ({size_in_words(num_bytes)} needed, {free} free)" if num_bytes else ""
        raise CocaError(
            f"{directory}: cannot be written{needed}: {_reason(error)}; what was saved before is untouched: make room, "
            f"then continue with --resume"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own message has the traceback of every process
        error = next((failure for failure, _ in error.failures.values()), error)
    return f"{type(error).__name__}: {one_line(error)}"


def _is_used(out_dir: Path) -> bool:
    """Whether anything was begun there, or it is somebody else's."""
    files = (path for path in out_dir.rglob("*") if not path.is_dir())
    return any(path.name not in (RECIPE, INPUTS) and path.suffix != f".{PARTIAL}" for path in files)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """A tree's values by their dotted paths, stages by name: what two recipes are compared by."""
    if isinstance(tree, dict):
        items = {str(key): value for key, value in tree.items()}
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        items = {str(item.get("name", number)): item for number, item in enumerate(tree)}
    else:
        return {path: tree}
    return {
        key: value for name, item in items.items() for key, value in _flat(item, f"{path}.{name}".strip(".")).items()
    }
