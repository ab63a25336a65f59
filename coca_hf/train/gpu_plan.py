"""What a recipe costs on GPUs one does not have: parameters, operations, time, and the peak of
memory per GPU.

Memory is measured, not estimated: see `memory.py`. `RESERVE` is left free for what no tensor shows.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from coca_hf.errors import CocaError
from coca_hf.train.flops import PEAK_FLOPS, TokenFlops, count_flops, peak_flops
from coca_hf.train.memory import CATEGORIES, Memory, Setting, measure, planned_arguments
from coca_hf.train.model import (
    count_parameters,
    model_from_config,
    stage_model,
    start_config,
)
from coca_hf.train.preflight import (
    check_model,
    check_model_for_context_parallel,
    check_positions,
)
from coca_hf.train.recipe import Recipe, Stage, check_context_parallel

RESERVE = 0.1  # of a GPU's memory
GIB = 2**30
EXCHANGED = "the keys and values that GPUs exchange"


@dataclass(frozen=True)
class StagePlan:
    """A stage of a plan. `change`: what to set where it does not fit; None where it does."""

    name: str
    trained: int
    total: int
    tokens: int
    token_flops: TokenFlops
    seconds: float
    setting: Setting
    memory: Memory
    fits: bool
    change: str | None

    @property
    def flops(self) -> int:
        return self.tokens * self.token_flops.model


@dataclass(frozen=True)
class Plan:
    """A recipe's stages on `world_size` GPUs of `gpu_bytes` that do `mfu` of `peak_flops`."""

    gpu: str
    peak_flops: float
    mfu: float
    world_size: int
    gpu_bytes: int
    notes: list[str]
    stages: list[StagePlan]

    def to_dict(self) -> dict[str, Any]:
        stages = [
            {**dataclasses.asdict(stage), "flops": stage.flops, "peak_bytes": stage.memory.peak}
            for stage in self.stages
        ]
        return {**dataclasses.asdict(self), "reserve": RESERVE, "stages": stages}

    def advice(self) -> list[str]:
        """What does not fit and what to set, then what the numbers are without."""
        return [
            f"stages.{stage.name}: {stage.change}" for stage in self.stages if stage.change
        ] + self.notes


def plan_recipe(
    recipe: Recipe, world_size: int = 1, gpu_memory: float = 80, gpu: str = "H100", mfu: float = 0.4
) -> Plan:
    """Plan every stage for `world_size` GPUs with `gpu_memory` GiB each and the peak of `gpu`.

    Where a stage does not fit, these are tried, in order, at the same number of blocks per
    optimizer step: gradient checkpointing, smaller batches that are accumulated, a fused
    cross-entropy, GPUs that share a block, more GPUs.

    Raises CocaError for a GPU that is not in `PEAK_FLOPS`, numbers that cannot be, a recipe that
    trains on the CPU, and where a process group is open already.
    """
    peak = peak_flops(gpu)
    if peak is None:
        raise CocaError(f"--gpu: got {gpu!r}, expected one of {', '.join(PEAK_FLOPS)}")
    if world_size < 1 or not 0 < gpu_memory < math.inf or not 0 < mfu <= 1:
        raise CocaError(
            f"got --world-size {world_size}, --gpu-memory {gpu_memory:g}, --mfu {mfu:g}; expected "
            "one GPU or more, memory above 0 GB and an MFU above 0, at most 1"
        )
    if dist.is_initialized():
        raise CocaError(
            "--plan: got a process group, expected none: start it without accelerate launch"
        )
    check_model(recipe)
    stages: list[StagePlan] = []
    free = f"{RESERVE:.0%} of the memory free"
    notes = [f"a stage fits whose peak leaves {free}, for what no tensor shows"]
    if notice := check_positions(recipe, start_config(recipe)):
        notes.append(notice)
    for stage in recipe.stages:
        options = recipe.options(stage)
        if options.get("use_cpu"):
            raise CocaError(
                f"stages.{stage.name}: got use_cpu, but a plan is for GPUs; add "
                f"training.use_cpu=false"
            )
        missing = {
            "torch_compile": options.get("torch_compile"),
            "the teacher": stage.needs_teacher,
            "answer_weight": stage.answer_weight,
            EXCHANGED: recipe.stage_options(stage).context_parallel_size > 1,
        }
        used = [name for name, is_used in missing.items() if is_used]
        notes += [f"stages.{stage.name}: planned without {name}" for name in used]
        stages.append(_plan_stage(recipe, stage, world_size, gpu_memory * GIB, mfu * peak))
    return Plan(gpu, peak, mfu, world_size, int(gpu_memory * GIB), notes, stages)


def _plan_stage(
    recipe: Recipe, stage: Stage, world_size: int, gpu_bytes: float, flops_per_second: float
) -> StagePlan:
    with torch.device("meta"):
        model = stage_model(model_from_config(recipe), stage)
    trained, total = count_parameters(model)
    arguments, seq_len = planned_arguments(recipe, stage), recipe.data.seq_len
    setting = Setting(
        world_size,
        arguments.per_device_train_batch_size,
        recipe.accumulation(stage, world_size),
        bool(arguments.gradient_checkpointing),
        recipe.stage_options(stage).context_parallel_size,
    )
    tokens = arguments.max_steps * setting.global_batch * seq_len
    token_flops = count_flops(model, seq_len)
    memory = measure(recipe, stage, setting)
    usable = gpu_bytes * (1 - RESERVE)
    return StagePlan(
        stage.name,
        trained,
        total,
        tokens,
        token_flops,
        tokens * token_flops.model / (flops_per_second * world_size),
        setting,
        memory,
        fits=memory.peak <= usable,
        change=None if memory.peak <= usable else _change(recipe, stage, setting, usable),
    )


def _change(recipe: Recipe, stage: Stage, setting: Setting, usable: float) -> str:
    """What to set so that the stage fits: the first that does of `_levers`."""
    for changed_stage, changed in _levers(recipe, stage, setting):
        memory = measure(recipe, changed_stage, changed)
        if memory.peak <= usable:
            words = _words(changed_stage is not stage, setting, changed)
            without = f", without {EXCHANGED}" if changed.sharing > setting.sharing else ""
            return f"does not fit; it does with {words} ({memory.peak / GIB:.1f} GiB{without})"
    nothing = "does not fit, and nothing helps at this global batch"
    return f"{nothing}; lower data.seq_len or take GPUs with more memory"


def _levers(recipe: Recipe, stage: Stage, setting: Setting) -> Iterator[tuple[Stage, Setting]]:
    """What needs less memory at the same global batch."""
    if not setting.checkpointing:
        setting = dataclasses.replace(setting, checkpointing=True)
        yield stage, setting
    smaller = setting
    while smaller.batch_size % 2 == 0:
        batch_size, accumulation = smaller.batch_size // 2, smaller.accumulation * 2
        smaller = dataclasses.replace(smaller, batch_size=batch_size, accumulation=accumulation)
        yield stage, smaller
    needs_logits = "distill" in stage.objective or stage.answer_weight
    if not recipe.stage_options(stage).fused_cross_entropy and not needs_logits:
        stage = _with(stage, "fused_cross_entropy", True)
        yield stage, smaller
    while _can_share(recipe, stage, smaller.world_size, smaller.sharing * 2):
        sharing, accumulation = smaller.sharing * 2, smaller.accumulation * 2
        smaller = dataclasses.replace(smaller, sharing=sharing, accumulation=accumulation)
        yield stage, smaller
    while setting.accumulation % 2 == 0 or setting.batch_size % 2 == 0:
        fewer = "accumulation" if setting.accumulation % 2 == 0 else "batch_size"
        changed = {"world_size": setting.world_size * 2, fewer: getattr(setting, fewer) // 2}
        setting = dataclasses.replace(setting, **changed)
        yield stage, setting


def _can_share(recipe: Recipe, stage: Stage, world_size: int, sharing: int) -> bool:
    """Whether `sharing` GPUs can share each block."""
    options = recipe.stage_options(_with(stage, "context_parallel_size", sharing))
    try:
        check_context_parallel(stage, options, recipe.data)
        with torch.device("meta"):
            model = model_from_config(recipe, options.attn_implementation)
        check_model_for_context_parallel(model, stage.name)
    except ValueError:
        return False
    return world_size % sharing == 0


def _with(stage: Stage, option: str, value: Any) -> Stage:
    return stage.model_copy(update={"training": {**stage.training, option: value}})


def _words(is_fused: bool, before: Setting, after: Setting) -> str:
    """How to say what is changed."""
    batches = (
        f"per_device_train_batch_size={after.batch_size} "
        f"gradient_accumulation_steps={after.accumulation}"
    )
    changes = {
        "gradient_checkpointing=true": after.checkpointing != before.checkpointing,
        "fused_cross_entropy=true": is_fused,
        f"context_parallel_size={after.sharing}": after.sharing != before.sharing,
        f"--world-size {after.world_size}": after.world_size != before.world_size,
        batches: (after.batch_size, after.accumulation) != (before.batch_size, before.accumulation),
    }
    return " ".join(words for words, is_changed in changes.items() if is_changed)


def plan_table(plan: Plan) -> Table:
    """A plan as people read it: what stages train and take, and a GPU's memory at its peak."""
    table = Table(
        title=f"{plan.world_size} x {plan.gpu}, {plan.gpu_bytes / GIB:g} GB each, "
        f"at MFU {plan.mfu:g} of {plan.peak_flops / 1e12:g} TFLOPS (dense bf16)",
    )
    lines: dict[str, list[str]] = {}
    for stage in plan.stages:
        setting = stage.setting
        cells = {
            "parameters trained": f"{stage.trained / 1e6:,.1f}M ({stage.trained / stage.total:.1%})",
            "batch x accumulation": f"{setting.batch_size} x {setting.accumulation}",
            "tokens": f"{stage.tokens / 1e9:.3g}B",
            "FLOPs": f"{stage.flops:.3g}",
            "time": _time(stage.seconds),
            "GPU hours": f"{stage.seconds * plan.world_size / 3600:,.1f}",
            **{
                f"GiB of {category}": f"{stage.memory.at_peak[category] / GIB:.2f}"
                for category in CATEGORIES
            },
            "GiB at the peak": f"{stage.memory.peak / GIB:.2f}",
            "fits": "yes" if stage.fits else "no",
        }
        for name, cell in cells.items():
            lines.setdefault(name, []).append(cell)
    table.add_column("on one GPU at the moment of its peak")
    for stage in plan.stages:
        table.add_column(stage.name, justify="right")
    for name, values in lines.items():
        table.add_row(name, *values)
    return table


def _time(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
