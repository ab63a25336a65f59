"""The Trainer of a stage: the paper's schedule, whole checkpoints, bad steps skipped.

A checkpoint holds the parameters that the stage trains and the optimizer's state, in
`checkpoint-N/state`. torch.distributed.checkpoint writes it for any layout of processes (one, DDP,
FSDP2 with full or sharded state dicts) to read. Frozen parameters are not in it; the model that the
stage starts from has them. torch keeps it in pickles, and would execute their contents; here they
can only name what is in `_KNOWN`, and what torch accepts as data.
"""

import enum
import io
import math
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer import SCHEDULER_NAME

from coca_hf.errors import CocaError
from coca_hf.files import sync
from coca_hf.train.log import StageLog
from coca_hf.train.objectives import Objective
from coca_hf.train.processes import StopRequest
from coca_hf.train.recipe import LinearBounds, StageOptions, has_bounds
from coca_hf.train.run_directory import PARTIAL, reading, saved_checkpoints, saving_to

RUNNING_SHARE = 0.02  # of a step's loss in the running mean, which therefore spans about 50 steps
STATE = "state"
_KNOWN = {  # what `.metadata` is made of
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def sharded_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """FSDP2 that computes in `dtype`, sums gradients in float32 and does not round the loss.

    Accelerate's own policy rounds both to `dtype`: in bfloat16 a loss of 3 to steps of 1/64.
    """
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


class StageTrainer(Trainer):
    """A Trainer whose `checkpoint-N` are always whole, for any layout of processes to resume from.

    train_dataset: `DealtBlocks`. log: its `place` goes into checkpoints. own_options: those that
    transformers does not have. held_out: blocks (num_blocks, seq_len), may be empty. stop: asks for
    a checkpoint and an end after the current step. objective: None if only the text's next token is
    learned.
    """

    def __init__(
        self,
        *args,
        log: StageLog,
        own_options: StageOptions,
        held_out: Tensor,
        stop: StopRequest,
        objective: Objective | None = None,
        **kwargs,
    ):
        super().__init__(*args, callbacks=[log], **kwargs)
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin and (policy := plugin.mixed_precision_policy):
            plugin.mixed_precision_policy = sharded_precision(policy.param_dtype)
        self.stage_log, self.own_options = log, own_options
        self.held_out, self.stop, self.objective = held_out, stop, objective
        self.stopping: str | None = None  # the signal, once all processes know it
        self.control: TrainerControl
        self._step_loss = torch.zeros((), device=self.args.device)
        self._norm = 0.0  # of the step's gradient
        self._random_state_of: str | None = None  # a checkpoint, to restore before the first step
        self._bad_in_a_row = 0
        self._lacks_a_loss = False  # the mean since the last log has a 0 from `training_step`
        self.add_callback(_EveryStep(self))

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None
    ):
        if self.args.parallelism_config and self.model.config.model_type.startswith("coca_"):
            # This process has only a part of the block
            inputs = {**inputs, "rope_length": self.stage_log.seq_len}
        of_model = {name: tensor for name, tensor in inputs.items() if name != "answers"}
        if self.objective is None:
            return super().compute_loss(model, of_model, return_outputs, num_items_in_batch)
        accumulated = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
        with self.accelerator.autocast():
            loss, outputs = super().compute_loss(model, of_model, True, num_items_in_batch)
            return self.objective(loss, outputs["logits"], inputs, accumulated)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None):
        """`linear_rate` with `start_lr` or `end_lr`, otherwise Hugging Face's schedule."""
        if not has_bounds(self.args):
            return super().create_scheduler(num_training_steps, optimizer)
        bounds = LinearBounds.model_validate(self.args.lr_scheduler_kwargs)
        warmup_steps, peak = self.args.get_warmup_steps(num_training_steps), self.args.learning_rate
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda step: linear_rate(step, warmup_steps, num_training_steps, peak, bounds) / peak,
        )
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process's own blocks, which Accelerate must not distribute again."""
        return DataLoader(
            self.train_dataset,
            self._train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """No batches after the last step: resumed there, Hugging Face's loop would take one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        # Hugging Face's loop restores it only if it skips batches itself
        if self._random_state_of:
            self._load_rng_state(self._random_state_of)
            self._random_state_of = None
        return samples

    def _load_rng_state(self, checkpoint: str) -> None:
        with reading(Path(checkpoint)):
            if not any(Path(checkpoint).glob("rng_state*.pth")):
                raise FileNotFoundError("rng_state.pth is not there")
            super()._load_rng_state(checkpoint)

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch=None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss += loss
        running = self.stage_log.place["running_loss"] or 0.0
        running /= self.current_gradient_accumulation_steps
        # A loss that is not a number would hide the mean of all others
        return loss.nan_to_num(running, running, running)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        self._norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return norm

    def end_of_backward(self) -> None:
        """Before every optimizer step, agree on its loss and on stopping, and skip it if it is bad.

        Raises CocaError after `max_bad_steps` bad steps in a row.
        """
        is_asked = self._step_loss.new_tensor(self.stop.came is not None)
        mine = torch.stack([self._step_loss, is_asked])
        total, asked = reduce(mine, "sum").tolist()
        loss = total / self.args.world_size
        self._step_loss = torch.zeros_like(self._step_loss)
        if asked:
            self.stopping = self.stop.came or "a signal to another process"
        place, factor = self.stage_log.place, self.own_options.spike_factor
        running = place["running_loss"]
        spiked = factor is not None and running is not None and loss > factor * running
        is_finite = math.isfinite(self._norm)
        if math.isfinite(loss) and not spiked and (is_finite or self._scaled_too_high()):
            mean = loss if running is None else running + RUNNING_SHARE * (loss - running)
            place["running_loss"] = mean
            if is_finite:
                self._bad_in_a_row = 0
            else:
                place["skipped_steps"] += 1  # by the scaler
            return
        self._bad_in_a_row += 1
        self._lacks_a_loss |= running is None and not math.isfinite(loss)
        place["skipped_steps"] += 1
        if self._bad_in_a_row >= self.own_options.max_bad_steps:
            raise CocaError(self._bad_step(loss, spiked))
        self.optimizer.zero_grad(set_to_none=True)

    def _scaled_too_high(self) -> bool:
        """Whether float16's scaler can still halve its scale, as it does after an overflow."""
        return self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1

    def _bad_step(self, loss: float, spiked: bool) -> str:
        step, place = self.state.global_step + 1, self.stage_log.place
        what = f"the loss of step {step} is {loss:g}"
        if spiked:
            mean = place["running_loss"]
            what += (
                f", more than {self.own_options.spike_factor:g} times the running mean {mean:.4g}"
            )
        elif math.isfinite(loss):
            what += f", but its gradient's norm is {self._norm}"
        first, count = place["next_block"], self.stage_log.blocks_per_step
        sources = self.train_dataset.blocks.sources_of(first, count)
        blocks = f"blocks {first} to {first + count - 1} ({sources})"
        most = self.own_options.max_bad_steps
        stage = Path(self.args.output_dir).parent.name.partition("-")[2]
        return (
            f"{self.args.output_dir}: {what}, bad step {self._bad_in_a_row} in a row "
            f"(max_bad_steps: {most}), on {blocks}; the last checkpoints are kept: skip more with "
            f"--resume stages.{stage}.max_bad_steps={3 * most} (if that ends here too, the newest "
            "checkpoint may be bad: delete it), or lower learning_rate (or max_grad_norm) and "
            "start again with another --out"
        )

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """The held-out loss, at the start and whenever `StageLog` asks for it."""
        resumed = self.state.global_step > 0 and not self.control.should_evaluate
        if resumed or not len(self.held_out):
            self.control.should_evaluate = False
            return {}
        with self.stage_log.pause():
            head, batch_size = self.model.get_output_embeddings(), self.args.train_batch_size
            loss = held_out_loss(self.model_wrapped, head, self.held_out, batch_size)
        metrics = {"eval_loss": loss}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs: dict, *args, **kwargs) -> None:
        if "loss" in logs:
            if self._lacks_a_loss:
                logs["loss"], self._lacks_a_loss = math.nan, False
            logs.update(self.stage_log.measure(self.state.global_step))
            logs.update(self.objective.take_means() if self.objective else {})
            logs["skipped_steps"] = self.stage_log.place["skipped_steps"]
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the result of the stage; `save_state` is enough for a checkpoint."""
        if not _internal_call:
            super().save_model(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save a tied weight once: FSDP2 gathers it under both its names."""
        if state_dict is not None:
            once = {name for name, _ in self.model.named_parameters()}
            twice = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
            state_dict = {name: state_dict[name] for name in state_dict if name not in twice - once}
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """Let the Trainer write its files under `partial`, then rename the directory."""
        directory = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        num_bytes = state_bytes(self.model, self.optimizer.optimizer)
        with saving_to(directory, name, num_bytes):
            self.args.output_dir = str(directory / PARTIAL)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = str(directory)
            self.accelerator.wait_for_everyone()  # each process writes its part
            if self.args.should_save:
                for path in sorted((directory / PARTIAL / name).rglob("*"), reverse=True):
                    sync(path)
                os.rename(directory / PARTIAL / name, directory / name)
                sync(directory)
                if (limit := self.args.save_total_limit or 0) > 0:
                    for path in saved_checkpoints(directory)[:-limit]:
                        shutil.rmtree(path)  # transformers would take a user's copies for ours
            self.accelerator.wait_for_everyone()
        self.stage_log.restart_speed()  # every save follows a line of the log

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_state(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Does nothing: parameters come with the optimizer's state, once the model is wrapped."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with reading(Path(checkpoint)):
                load_state(self.model, self.optimizer.optimizer, Path(checkpoint))
                scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
                self.lr_scheduler.load_state_dict(scheduler)
            self._random_state_of = checkpoint


class _EveryStep(TrainerCallback):
    """Calls the trainer at points where Hugging Face's loop has no method to override."""

    def __init__(self, trainer: StageTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # resumed, it has those of the checkpoint

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.end_of_backward()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.stopping:
            control.should_save = control.should_log = control.should_training_stop = True


@torch.no_grad()
def held_out_loss(model: nn.Module, head: nn.Module, blocks: Tensor, batch_size: int) -> float:
    """Mean loss, in nats, over every predicted token of `blocks` (num_blocks, seq_len).

    head: the model's head; it stays in training mode, the only one in which a fused cross-entropy
    keeps the logits out of memory. Every process calls this with all blocks and computes its share;
    the mean does not depend on the number of processes.
    """
    state = PartialState()
    share = blocks[state.process_index :: state.num_processes]
    most_blocks = -(-len(blocks) // state.num_processes)
    was_training = model.training
    model.eval()
    head.train()
    total = 0.0
    # The same number in every process: a forward of a sharded model needs all of them
    for start in range(0, most_blocks, batch_size):
        rows = share[start : start + batch_size]
        batch = (rows if len(rows) else blocks[:1]).to(state.device)
        total += model(input_ids=batch, labels=batch, use_cache=False).loss.item() * len(rows)
    model.train(was_training)
    return sum(gather_object([total])) / len(blocks)


def linear_rate(
    step: int, warmup_steps: int, num_steps: int, peak: float, bounds: LinearBounds
) -> float:
    """The rate after `step` steps: from `start_lr` to `peak` over the warm-up, then to `end_lr`.

    As in Hugging Face's schedules, `peak` is the rate of step `warmup_steps` (counted from 0) and
    `end_lr` would be that of step `num_steps`, the first one not taken.
    """
    if step < warmup_steps:
        return bounds.start_lr + (peak - bounds.start_lr) * step / warmup_steps
    return peak + (bounds.end_lr - peak) * (step - warmup_steps) / max(num_steps - warmup_steps, 1)


def save_state(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Every process calls this, with the wrapped model. Raises CheckpointException."""
    writer = dcp.FileSystemWriter(checkpoint / STATE)
    with _without_warning():
        dcp.save(_state(model, optimizer), storage_writer=writer)


def load_state(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Load what any layout of processes saved into the wrapped model and its optimizer."""
    state = _state(model, optimizer)
    with _without_warning():
        dcp.load(state, storage_reader=_Reader(checkpoint / STATE), planner=_Planner())
    set_model_state_dict(model, state["model"], options=OPTIONS)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=OPTIONS)
    if not state["has_stepped"]:
        optimizer.state.clear()


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that `save_state` writes, over all processes."""
    tensors: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    # numel of a sharded tensor is that of the whole
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _without_warning() -> Iterator[None]:
    """Torch warns if there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield


def _state(model: nn.Module, optimizer: Optimizer) -> dict:
    has_stepped = bool(optimizer.state)  # all steps so far may have been bad
    state = {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
        "has_stepped": has_stepped,
    }
    if not has_stepped:  # torch has made one, by a step without gradients that Adam would count
        optimizer.state.clear()
    return state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle enums
            return _member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(
                f"got {module}.{name} in .metadata, which no checkpoint of ours names"
            )
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """A member of an enum, and nothing else."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(
            f"got attribute {name} in .metadata, expected an enum's member"
        )
    return kind[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """A tensor's part of a file: a zip archive, whose checksums torch does not verify."""
        part = io.BytesIO(super()._slice_file(file, sinfo).read())
        with zipfile.ZipFile(part) as archive:
            if archive.testzip() is not None:
                raise OSError(f"{sinfo.relative_path}: got another CRC-32 than was written")
        part.seek(0)
        return part


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # raises for more than data
        plain.seek(0)
        super().load_bytes(read_item, plain)
