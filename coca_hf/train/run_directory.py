"""What a run of a recipe keeps on disk.

    OUT/recipe.yaml           the recipe with overrides and defaults, to run again as it is
    OUT/inputs.json           what the recipe's paths held, and blocks per step; for --resume
    OUT/1-k/                  a stage: with training.json, a complete checkpoint
    OUT/1-k/log.jsonl         a line per logging interval, and per held-out loss: log.py
    OUT/1-k/trainer/          checkpoint-N, to resume from, until the stage is complete
    OUT/2-qkv/ …
    OUT/tensorboard/1-k/ …    for `tensorboard --logdir OUT`
    OUT/stopped.json          there while a run that a signal stopped waits for --resume

Directories named `partial`, and hidden files with that ending, are being written. A run that is
killed leaves them, and the next one removes them.
"""

import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers import TrainingArguments

from coca_hf.errors import CocaError, one_line, short
from coca_hf.train.processes import is_lost_process
from coca_hf.train.recipe import Stage
from coca_hf.weights import read_json, size_in_words

RECORD = "training.json"
RECIPE = "recipe.yaml"
INPUTS = "inputs.json"
STOPPED = "stopped.json"
PARTIAL = "partial"
DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class ResolvedStage:
    """A stage of a recipe with all that a run adds to it: arguments, start and place on disk.

    base: the model that it starts from, which is the stage `before`, if any. base_directory: where
    the records, the card and the licence of `base` are; None for a model from scratch.
    """

    of_recipe: Stage
    base: str
    base_directory: Path | None
    before: "ResolvedStage | None"
    directory: Path
    arguments: TrainingArguments

    @property
    def name(self) -> str:
        return self.of_recipe.name

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
                f"{self.before.directory / RECORD}: got no end_block, expected the record of a "
                "stage; train that stage again"
            )
        return record["end_block"]

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one optimizer step takes, over all processes."""
        arguments = self.arguments
        return (
            arguments.train_batch_size
            * arguments.gradient_accumulation_steps
            * arguments.world_size
            // self.sharing
        )

    @property
    def sharing(self) -> int:
        """Processes that share a block."""
        parallelism = self.arguments.parallelism_config
        return parallelism.cp_size if parallelism else 1


def model_state(directory: Path) -> dict[str, str | None]:
    """What a model's directory holds: the hashes of its config and its weights."""
    return {"config.json": file_hash(directory / "config.json"), **weights_hashes(directory)}


def last_checkpoint(trainer_dir: Path) -> Path | None:
    """The newest `checkpoint-N`, or None. All are whole: they get their name when they are."""
    found = [
        path for path in trainer_dir.glob("checkpoint-*") if path.name.split("-")[1].isdecimal()
    ]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turn what torch, json and pickle raise for a damaged checkpoint into a CocaError."""
    try:
        yield
    except CocaError:
        raise
    except (*DAMAGE, CheckpointException) as error:
        reason = _reason(error)[:200]
        raise CocaError(
            f"{checkpoint}: cannot be read ({reason}); delete it: --resume then goes on from the "
            "one before it, or starts the stage again"
        ) from error


def check_base(stage: ResolvedStage) -> None:
    """Raises CocaError where the model that `stage` starts from is not what the stage before it
    wrote: its weights and, of a stage of this run, its config.
    """
    if stage.base_directory is None or not Path(stage.base).exists():
        return  # from scratch; or on the hub, which vouches for its files
    record = read_record(stage.base_directory)
    hashes = dict(record.get("weights_xxh3_128", {}))
    if stage.before and "config_xxh3_128" in record:
        hashes["config.json"] = record["config_xxh3_128"]
    for name, written in hashes.items():
        found = file_hash(stage.base_directory / name)
        if found != written:
            raise CocaError(
                f"{stage.base_directory / name}: got xxh3_128 {found or 'of no file'}, expected "
                f"{written} as {RECORD} beside it says; the file was damaged or replaced: restore "
                "it, or train that stage again with another --out"
            )


def read_record(directory: Path) -> dict[str, Any]:
    """A checkpoint's training.json, or {}. Raises CocaError where it is damaged."""
    path = directory / RECORD
    record = read_json(path) if path.exists() else {}
    kinds = {"end_block": int, "weights_xxh3_128": dict, "config_xxh3_128": str, "stages": list}
    for key, kind in kinds.items():
        if not isinstance(record.get(key, kind()), kind):
            raise CocaError(
                f"{path}: got {key} {short(record[key])}; restore the file, or train that stage "
                f"again"
            )
    return record


def weights_hashes(directory: Path) -> dict[str, str | None]:
    """The xxh3_128 of every file of weights of a checkpoint, in hexadecimal, by name."""
    return {path.name: file_hash(path) for path in sorted(directory.glob("*.safetensors*"))}


def file_hash(file: Path) -> str | None:
    """The xxh3_128 of a file; None where there is none."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


@contextmanager
def saving_to(directory: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn what a full or read-only disk makes torch, safetensors and Python raise into one line: a
    CocaError.

    num_bytes: how much is written in all, for the message; of a disk that is full, torch says
    something else.
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
            f"{directory}: cannot be written{needed}: {_reason(error)}; what was saved before is "
            "untouched: make room, then continue with --resume"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own message has the traceback of every process
        error = next((failure for failure, _ in error.failures.values()), error)
    return f"{type(error).__name__}: {one_line(error)}"
