"""Hugging Face's Trainer for one stage: the paper's schedule, checkpoints that are whole or absent, a log in JSON."""

import json
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from coca_hf.errors import CocaError
from coca_hf.train.objectives import Objective
from coca_hf.train.out import PARTIAL, saving_to, write_whole
from coca_hf.train.recipe import LinearBounds


class StageTrainer(Trainer):
    """A Trainer that stops at a loss that is not a number, and whose `checkpoint-N` directories are always whole."""

    objective: Objective | None = None  # set where something else than the text's next token is learned

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None):
        if self.objective is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        text = partial(super().compute_loss, model, inputs, True, num_items_in_batch)
        accumulated = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
        with self.accelerator.autocast():
            return self.objective(text, model, inputs, accumulated)

    def log(self, logs: dict, *args, **kwargs) -> None:
        if self.objective is not None and "loss" in logs:
            logs |= self.objective.take_means()
        super().log(logs, *args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """With `linear` and `start_lr` or `end_lr`, `linear_rate` at every step; else Hugging Face's schedule."""
        kwargs = self.args.lr_scheduler_kwargs
        if not kwargs or self.args.lr_scheduler_type != "linear":
            return super().create_scheduler(num_training_steps, optimizer)
        bounds = LinearBounds.model_validate(kwargs)
        warmup_steps, peak = self.args.get_warmup_steps(num_training_steps), self.args.learning_rate
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda step: linear_rate(step, warmup_steps, num_training_steps, peak, bounds) / peak,
        )
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """No batches after the last step: resumed there, Hugging Face's loop would take one step more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch=None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise CocaError(
                f"{self.args.output_dir}: the loss of step {self.state.global_step + 1} is {loss.item()}; checkpoints "
                f"up to here are kept; lower learning_rate (or max_grad_norm) and start again with another --out"
            )
        return loss

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """Let the Trainer write all its files under `partial`; then give the directory its name, in one step."""
        directory = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        with saving_to(directory):
            self.args.output_dir = str(directory / PARTIAL)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = str(directory)
            self.accelerator.wait_for_everyone()  # each process writes its random state
            if self.args.should_save:
                os.rename(directory / PARTIAL / name, directory / name)
                rotate_checkpoints(str(directory), save_total_limit=self.args.save_total_limit)


class StageLog(TrainerCallback, ExportableState):
    """Writes log.jsonl, and keeps the place in the stream of blocks and the seconds spent, which checkpoints carry."""

    def __init__(self, path: Path, seq_len: int, global_batch: int, next_block: int, seconds: float):
        self.path = path
        self.seq_len = seq_len
        self.global_batch = global_batch  # blocks a step
        self.next_block = next_block
        self._seconds_before = seconds
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that this stage has trained for, over all its resumptions."""
        return self._seconds_before + time.monotonic() - self._started

    def state(self) -> dict:
        return {"args": {}, "attributes": {"next_block": self.next_block, "seconds": self.seconds}}

    def on_train_begin(self, args, state, control, **kwargs):
        self._started = time.monotonic()
        if state.is_world_process_zero:
            self._forget_after(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.next_block += self.global_batch
        # A loss is a mean since the last log: were it to span a checkpoint, a resumed run would log other means.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            line = {
                "step": state.global_step,
                "loss": logs["loss"],
                **{key: value for key, value in logs.items() if key.startswith("loss_")},
                "learning_rate": logs["learning_rate"],
                "grad_norm": logs.get("grad_norm"),
                "tokens_seen": self.next_block * self.seq_len,
                "seconds": round(self.seconds, 3),
            }
            with saving_to(self.path.parent), self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _forget_after(self, step: int) -> None:
        """Drop the lines of steps that a killed run did after its last checkpoint; they are about to be done again."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        with saving_to(self.path.parent):
            write_whole(self.path, "".join(line + "\n" for line in kept))


def linear_rate(step: int, warmup_steps: int, num_steps: int, peak: float, bounds: LinearBounds) -> float:
    """The learning rate after `step` steps: from `start_lr` to `peak` over the warm-up, then to `end_lr`, linearly.

    As in Hugging Face's schedules, `peak` is the rate of step `warmup_steps` (counted from 0) and `end_lr` would be
    that of step `num_steps`, the first one not done.
    """
    if step < warmup_steps:
        return bounds.start_lr + (peak - bounds.start_lr) * step / warmup_steps
    return peak + (bounds.end_lr - peak) * (step - warmup_steps) / max(num_steps - warmup_steps, 1)
