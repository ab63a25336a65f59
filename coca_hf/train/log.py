"""What people see of a stage while it trains: a progress bar and log.jsonl, with loss, speed and
memory.

TensorBoard, Weights & Biases and trackio get the same values through Hugging Face's callbacks
(`report_to`).
"""

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from coca_hf.errors import CocaError, one_line
from coca_hf.files import append_line, replace_text
from coca_hf.train.flops import peak_flops
from coca_hf.train.run_directory import saving_to

COLUMNS = (
    *("loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "mfu", "memory_bytes", "skipped_steps"),
)


@dataclass(eq=False)
class StageLog(TrainerCallback, ExportableState):
    """Writes log.jsonl, measures speed, and keeps the place of the stage: where it is in the stream
    of blocks, its time, its held-out losses.

    flops_per_token: for MFU, on GPUs. place: goes into every checkpoint; see `start_place`.
    """

    path: Path
    seq_len: int
    blocks_per_step: int
    flops_per_token: int
    held_out_steps: int
    place: dict

    def __post_init__(self):
        self._seconds_before = self.place["seconds"]
        self._started = self._measured = time.monotonic()
        self._measured_step = 0

    @property
    def seconds(self) -> float:
        """Seconds of training, resumed or not, without those of measuring the held-out loss."""
        return self._seconds_before + time.monotonic() - self._started

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the enclosed time from `seconds` and from the speed."""
        began = time.monotonic()
        yield
        paused = time.monotonic() - began
        self._started += paused
        self._measured += paused

    def restart_speed(self) -> None:
        """Exclude the time since the last call of `measure` from the speed."""
        self._measured = time.monotonic()

    def measure(self, step: int) -> dict[str, float]:
        """Tokens a second over all processes, from the last call to the end of step `step`; the
        peak of this process's memory in this stage, in bytes (on a CPU, its present memory); and MFU
        on a GPU of known peak.
        """
        state, now = PartialState(), time.monotonic()
        tokens = (step - self._measured_step) * self.blocks_per_step * self.seq_len
        tokens_per_second = tokens / max(now - self._measured, 1e-9)
        self._measured, self._measured_step = now, step
        gpu, memory = None, psutil.Process().memory_info().rss
        if state.device.type == "cuda":
            gpu = torch.cuda.get_device_name(state.device)
            memory = torch.cuda.max_memory_allocated()
        mfu = utilization(tokens_per_second, self.flops_per_token, gpu, state.num_processes)
        # TensorBoard's callback warns of values that are None
        known = {} if mfu is None else {"mfu": mfu}
        return {"tokens_per_second": tokens_per_second, "memory_bytes": memory, **known}

    def state(self) -> dict:
        return {"args": {}, "attributes": {"place": {**self.place, "seconds": self.seconds}}}

    def on_train_begin(self, args, state, control, **kwargs):
        self._started = self._measured = time.monotonic()
        self._measured_step = state.global_step
        if PartialState().device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # an earlier stage may have taken more
        if state.is_world_process_zero:
            self._forget_after(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.place["next_block"] += self.blocks_per_step
        last = state.global_step >= state.max_steps
        is_due = self.held_out_steps and state.global_step % self.held_out_steps == 0
        control.should_evaluate |= last or bool(is_due)
        # A logged loss is a mean since the last log. If it spanned a checkpoint, a resumed run
        # would log other means.
        control.should_log |= control.should_save or last

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.place["held_out"][str(state.global_step)] = metrics["eval_loss"]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        tokens_seen = self.place["next_block"] * self.seq_len
        place = {"tokens_seen": tokens_seen, "seconds": round(self.seconds, 3)}
        if "eval_loss" in logs:
            self._append({"step": state.global_step, "held_out_loss": logs["eval_loss"], **place})
        elif "loss" in logs:
            parts = {name: value for name, value in logs.items() if name.startswith("loss_")}
            values = {name: logs.get(name) for name in COLUMNS} | parts
            for name, value in values.items():
                if value is not None and not math.isfinite(value):
                    values[name] = None  # of a bad first step, which no running mean replaces
            self._append({"step": state.global_step, **values, **place})

    def _append(self, line: dict) -> None:
        with saving_to(self.path.parent):
            append_line(self.path, json.dumps(line))

    def _forget_after(self, step: int) -> None:
        """Drop the lines of steps after a killed run's last checkpoint, which are repeated."""
        is_resumed = step and self.path.exists()
        lines = self.path.read_text(errors="replace").splitlines() if is_resumed else []
        kept = [line for line in lines if (done := _step_of(line)) is not None and done <= step]
        with saving_to(self.path.parent):
            replace_text(self.path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> int | None:
    """The step of a line of the log; None for a line that a kill cut, or that is not ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def start_place(next_block: int) -> dict:
    """The place of a stage that begins at this block."""
    return {
        "next_block": next_block,
        "seconds": 0.0,
        "held_out": {},
        "running_loss": None,  # exponential mean of the losses of good steps
        "skipped_steps": 0,
        "run_id": uuid.uuid4().hex[:8],  # with which Weights & Biases resumes the stage's run
    }


@contextmanager
def wandb_run(arguments: TrainingArguments, run_id: str) -> Iterator[None]:
    """The run that Hugging Face's callback logs a stage to; a stage that resumes continues its own.

    By itself, the callback would log all stages to one run. Raises CocaError if Weights & Biases
    refuses to begin one.
    """
    if "wandb" not in arguments.report_to or not PartialState().is_main_process:
        yield
        return
    import wandb

    project = os.environ.get("WANDB_PROJECT", arguments.project)
    try:
        run = wandb.init(project=project, name=arguments.run_name, id=run_id, resume="allow")
    except wandb.Error as error:
        raise CocaError(
            f"report_to: wandb begins no run: {one_line(error)}; WANDB_MODE=offline needs no "
            f"account"
        ) from None
    with run:
        yield


def utilization(
    tokens_per_second: float, flops_per_token: float, gpu: str | None, num_gpus: int
) -> float | None:
    """MFU: the model's operations as a share of the GPUs' peak (PaLM, arXiv 2204.02311, appendix
    B); None without a GPU of known peak.
    """
    peak = peak_flops(gpu) if gpu else None
    return tokens_per_second * flops_per_token / (peak * num_gpus) if peak else None


class ProgressLine(TrainerCallback):
    """A progress bar on a terminal; otherwise, a line per logging interval."""

    def __init__(self, name: str):
        self.name = name
        self._bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._begun = time.monotonic(), state.global_step
        if state.is_world_process_zero and sys.stderr.isatty():
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.name, dynamic_ncols=True
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "eval_loss" in logs:
            held_out = f"held-out loss {logs['eval_loss']:.4f}"
            self._say(f"{self.name} step {state.global_step}: {held_out}")
        elif "loss" in logs and self._bar is not None:
            self._bar.set_postfix_str(_values(logs))
        elif "loss" in logs:
            began, first_step = self._begun
            done = max(state.global_step - first_step, 1)
            left = (time.monotonic() - began) / done * (state.max_steps - state.global_step)
            self._say(
                f"{self.name} step {state.global_step}/{state.max_steps}: {_values(logs)}, "
                f"{timedelta(seconds=round(left))} left"
            )

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.close()

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, flush=True)


def _values(logs: dict) -> str:
    speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in logs:
        speed += f", MFU {logs['mfu']:.1%}"
    loss = f"loss {logs['loss']:.4f}, lr {logs['learning_rate']:.3g}"
    return f"{loss}, {speed}, {logs['memory_bytes'] / 2**30:.1f} GiB"
