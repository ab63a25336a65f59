"""What a recipe costs on GPUs that one does not have: parameters, operations, time, and the peak of
memory per GPU.

Memory is measured, not estimated. Two optimizer steps of the real model, frozen, checkpointed and
sharded (FSDP2, by Accelerate's own function) as in the stage, run under fake tensors, which have
shapes and sizes but no contents, in a fake process group of the wanted size. One GPU alone is not
sharded. `RESERVE` is left free for what no tensor shows: the CUDA context, NCCL's buffers,
workspaces of kernels, fragmentation.
"""

import dataclasses
import inspect
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from rich.table import Table
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel, Trainer, TrainingArguments

from coca_hf.errors import CocaError, library_errors
from coca_hf.train import objectives
from coca_hf.train.flops import PEAK_FLOPS, count_flops, count_teacher_flops, peak_flops
from coca_hf.train.model import (
    count_parameters,
    model_from_config,
    round_matrices_,
    shapes_only,
    stage_model,
    start_config,
    teacher_from_config,
)
from coca_hf.train.objectives import (
    chunk_cross_entropy_,
    distillation_loss,
    fuse_cross_entropy_,
)
from coca_hf.train.preflight import (
    check_head,
    check_model,
    check_model_for_context_parallel,
    check_optimizer,
    check_overrides,
    check_positions,
    check_teacher,
)
from coca_hf.train.recipe import Recipe, Stage, check_stage
from coca_hf.train.trainer import sharded_precision

RESERVE = 0.1  # of a GPU's memory
GIB = 2**30
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
EXCHANGED = "the keys and values that GPUs exchange"
_BLOCK_BYTES = 512  # CUDA's allocator gives whole blocks
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NEED_A_GPU = ("bf16", "fp16", "tf32", "torch_compile", "use_cpu")


@dataclass(frozen=True)
class Setting:
    """The settings on which the peak of memory depends, besides model, stage and `seq_len`."""

    world_size: int
    batch_size: int  # blocks per device and forward
    accumulation: int
    checkpointing: bool
    sharing: int = 1  # GPUs that have a part of each block

    @property
    def global_batch(self) -> int:
        return self.world_size // self.sharing * self.batch_size * self.accumulation


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at their peak, by category.

    weights: this GPU's share of the parameters, and all of the teacher's; activations: with the
    logits and what is recomputed; other: weights gathered from other GPUs, gradients of
    activations, buffers of communication, casts and the optimizer's temporaries.
    """

    at_peak: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class StagePlan:
    """A stage of a plan. `change`: what to set if it does not fit; None if it does."""

    name: str
    trained: int
    total: int
    tokens: int
    flops: int
    seconds: float
    setting: Setting
    memory: Memory
    change: str | None


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

    def advice(self) -> list[str]:
        """What does not fit and what to set, then what the numbers do not count."""
        changes = [f"stages.{stage.name}: {stage.change}" for stage in self.stages if stage.change]
        return changes + self.notes


def plan_recipe(
    recipe: Recipe, world_size: int = 1, gpu_memory: float = 80, gpu: str = "H100", mfu: float = 0.4
) -> Plan:
    """Plan every stage for `world_size` GPUs with `gpu_memory` GiB each and the peak of `gpu`.

    If a stage does not fit, these are tried, in order, at the same number of blocks per optimizer
    step: gradient checkpointing, smaller batches that are accumulated, a fused cross-entropy, GPUs
    that share a block, more GPUs.

    Raises CocaError for a GPU that is not in `PEAK_FLOPS`, impossible numbers, options that the
    trainer does not take, a recipe that trains on the CPU, and a process group that is open already.
    """
    peak = peak_flops(gpu)
    if peak is None:
        raise CocaError(f"--gpu: got {gpu!r}, expected one of {', '.join(PEAK_FLOPS)}")
    if world_size < 1 or not 0 < gpu_memory < math.inf or not 0 < mfu <= 1:
        raise CocaError(
            f"got --world-size {world_size}, --gpu-memory {gpu_memory:g}, --mfu {mfu:g}; expected "
            "one GPU or more, memory above 0 GiB and an MFU above 0, at most 1"
        )
    if dist.is_initialized():
        raise CocaError(
            "--plan: got a process group, expected none: start it without accelerate launch"
        )
    check_model(recipe)
    student = start_config(recipe)
    check_head(recipe.start, student)
    if recipe.teacher:
        check_teacher(recipe, student)
    stages: list[StagePlan] = []
    notes = [
        f"a stage fits if its peak leaves {RESERVE:.0%} of the memory free, for what no tensor shows"
    ]
    try:  # a model of another size can be planned
        check_overrides(recipe)
    except CocaError as refusal:
        notes.append(f"training would refuse this: {refusal}")
    if notice := check_positions(recipe, student):
        notes.append(notice)
    for stage in recipe.stages:
        options = recipe.trainer_options(stage)
        if options.get("use_cpu"):
            raise CocaError(
                f"stages.{stage.name}: got use_cpu, but a plan is for GPUs; add "
                f"training.use_cpu=false"
            )
        missing = {
            "torch_compile": options.get("torch_compile"),
            "answer_weight": stage.answer_weight,
            EXCHANGED: recipe.own_options(stage).context_parallel_size > 1,
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
    check_optimizer(arguments, f"stages.{stage.name}")
    setting = Setting(
        world_size,
        arguments.per_device_train_batch_size,
        recipe.accumulation(stage, world_size),
        bool(arguments.gradient_checkpointing),
        recipe.own_options(stage).context_parallel_size,
    )
    tokens = arguments.max_steps * setting.global_batch * seq_len
    flops = count_flops(recipe, stage)
    if stage.needs_teacher:
        flops += count_teacher_flops(recipe)
    flops *= tokens
    memory = measure(recipe, stage, setting)
    usable = gpu_bytes * (1 - RESERVE)
    return StagePlan(
        stage.name,
        trained,
        total,
        tokens,
        flops,
        flops / (flops_per_second * world_size),
        setting,
        memory,
        None if memory.peak <= usable else _change(recipe, stage, setting, usable),
    )


def _change(recipe: Recipe, stage: Stage, setting: Setting, usable: float) -> str:
    """What to set to make the stage fit: the first of `_levers` that does."""
    for changed_stage, changed in _levers(recipe, stage, setting):
        memory = measure(recipe, changed_stage, changed)
        if memory.peak <= usable:
            words = _words(stage.name, changed_stage is not stage, setting, changed)
            without = f", without {EXCHANGED}" if changed.sharing > setting.sharing else ""
            return f"does not fit; it does with {words} ({memory.peak / GIB:.1f} GiB{without})"
    return (
        "does not fit, and nothing helps at this global batch; lower data.seq_len or take GPUs with "
        "more memory"
    )


def _levers(recipe: Recipe, stage: Stage, setting: Setting) -> Iterator[tuple[Stage, Setting]]:
    """Changes that need less memory at the same global batch."""
    if not setting.checkpointing:
        setting = dataclasses.replace(setting, checkpointing=True)
        yield stage, setting
    smaller = setting
    while smaller.batch_size % 2 == 0:
        batch_size, accumulation = smaller.batch_size // 2, smaller.accumulation * 2
        smaller = dataclasses.replace(smaller, batch_size=batch_size, accumulation=accumulation)
        yield stage, smaller
    if not recipe.own_options(stage).fused_cross_entropy and not stage.needs_logits:
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
    options = recipe.own_options(_with(stage, "context_parallel_size", sharing))
    try:
        check_stage(stage, options, recipe.data)
        with torch.device("meta"):
            model = model_from_config(recipe, options.attn_implementation)
        check_model_for_context_parallel(model, stage.name)
    except ValueError:
        return False
    return world_size % sharing == 0


def _with(stage: Stage, option: str, value: Any) -> Stage:
    return stage.model_copy(update={"training": {**stage.training, option: value}})


def _words(stage: str, is_fused: bool, before: Setting, after: Setting) -> str:
    """What is changed, as overrides and options of the command."""
    is_changed = {
        "gradient_checkpointing=true": after.checkpointing != before.checkpointing,
        "fused_cross_entropy=true": is_fused,
        f"context_parallel_size={after.sharing}": after.sharing != before.sharing,
        f"per_device_train_batch_size={after.batch_size}": after.batch_size != before.batch_size,
        f"gradient_accumulation_steps={after.accumulation}": after.accumulation
        != before.accumulation,
    }
    words = [f"stages.{stage}.{name}" for name, changed in is_changed.items() if changed]
    more = [f"--world-size {after.world_size}"] * (after.world_size != before.world_size)
    return " ".join(words + more)


def plan_table(plan: Plan) -> Table:
    """A plan as a table: what stages train and cost, and a GPU's memory at its peak."""
    table = Table(
        title=f"{plan.world_size} x {plan.gpu}, {plan.gpu_bytes / GIB:g} GiB each, "
        f"at MFU {plan.mfu:g} of {plan.peak_flops / 1e12:g} TFLOPS (dense bf16)",
    )
    table.add_column("on one GPU at the moment of its peak")
    columns = []
    for stage in plan.stages:
        table.add_column(stage.name, justify="right")
        setting, hours, at_peak = stage.setting, stage.seconds / 3600, stage.memory.at_peak
        columns.append(
            {
                "parameters trained": f"{stage.trained / 1e6:,.1f}M "
                f"({stage.trained / stage.total:.1%})",
                "batch x accumulation": f"{setting.batch_size} x {setting.accumulation}",
                "tokens": _tokens_in_words(stage.tokens),
                "FLOPs": f"{stage.flops:.3g}",
                "time": f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min",
                "GPU hours": f"{hours * plan.world_size:,.1f}",
                **{f"GiB of {kind}": f"{at_peak[kind] / GIB:.2f}" for kind in CATEGORIES},
                "GiB at the peak": f"{stage.memory.peak / GIB:.2f}",
                "fits": "no" if stage.change else "yes",
            }
        )
    for name in columns[0]:
        table.add_row(name, *(cells[name] for cells in columns))
    return table


def _tokens_in_words(tokens: int) -> str:
    return f"{tokens / 1e9:.3g}B" if tokens >= 10_000_000 else f"{tokens:,}"


def measure(recipe: Recipe, stage: Stage, setting: Setting) -> Memory:
    """The memory of one GPU over two optimizer steps of a stage, without computing anything.

    The first step makes the optimizer's state; the second has it from the start.
    """
    arguments = planned_arguments(recipe, stage)
    with _fake_processes(setting.world_size) as mesh, FakeTensorMode():
        own = recipe.own_options(stage)
        # Kernels of other packages need not be installed here, and take as much memory as SDPA
        base = model_from_config(recipe, "eager" if own.attn_implementation == "eager" else None)
        if own.fused_cross_entropy:
            fuse_cross_entropy_(base)
        elif stage.needs_objective:
            chunk_cross_entropy_(base)
        teacher = _teacher(recipe, stage) if stage.needs_teacher else None
        # peft moves adapters to the device where they already are, and fake tensors cannot move
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model: Any = stage_model(base, stage)
        if setting.checkpointing:
            plain = model.gradient_checkpointing_enable  # its name before transformers 5.23
            enable = getattr(model, "activation_checkpointing_enable", plain)
            enable(dict(arguments.gradient_checkpointing_kwargs or {}) or None)
        _prepare_(model.train(), recipe.trainer_options(stage), mesh)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        if "foreach" in inspect.signature(kind).parameters and not options.get("fused"):
            options["foreach"] = True  # as torch chooses on a GPU
        # The shards as plain tensors: for an optimizer's operations on DTensors, torch works out
        # shapes with tensors of the full size, which would be counted
        shards = [nn.Parameter(_local(parameter)) for parameter in _learning(model)]
        optimizer = kind(shards, **options)
        whole = torch.zeros(setting.batch_size, recipe.data.seq_len, dtype=torch.int64)
        part = whole[:, : recipe.data.seq_len // setting.sharing].contiguous()
        # Fake tensors are on the CPU, and the chunks those of a GPU
        rows = patch.object(objectives, "_CHUNK_TOKENS_OF_CPU", objectives._CHUNK_TOKENS)
        with shapes_only(base), rows, MemoryTracker(model, optimizer, teacher) as tracker:
            if recipe.data.held_out_blocks:  # measured before the first step, on whole blocks
                with torch.no_grad():
                    model.eval()
                    base.get_output_embeddings().train()  # as in `held_out_loss`
                    model(input_ids=whole, labels=whole, use_cache=False)
                    model.train()
            for _ in range(2):
                accumulated = min(setting.accumulation, 2)
                _step(model, optimizer, part, accumulated, teacher)
    return Memory(tracker.at_peak)


def planned_arguments(recipe: Recipe, stage: Stage) -> TrainingArguments:
    """The stage's options, except those that TrainingArguments refuses without a GPU."""
    given = recipe.trainer_options(stage).items()
    options = {key: value for key, value in given if not key.startswith(_NEED_A_GPU)}
    with library_errors(f"stages.{stage.name}: the trainer does not take these options"):
        return TrainingArguments(output_dir="plan", use_cpu=True, **options)


def _precision(options: Mapping[str, Any]) -> str:
    return next((name for name in _DTYPES if options.get(name)), "no")


def _teacher(recipe: Recipe, stage: Stage) -> PreTrainedModel:
    """The teacher as a stage has it: `load_teacher`, without contents, under autocast."""
    teacher = teacher_from_config(recipe).requires_grad_(False)
    if dtype := _DTYPES.get(_precision(recipe.trainer_options(stage))):
        round_matrices_(teacher, dtype)
        teacher.forward = torch.autocast("cpu", dtype=dtype)(teacher.forward)
    return teacher


def _prepare_(model: PreTrainedModel, options: dict[str, Any], mesh: Any) -> None:
    """Mixed precision and sharding, in place, as `Accelerator.prepare` does; on the CPU."""
    precision = _precision(options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    if dtype := _DTYPES.get(precision):
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=dtype)(model.forward))
        plugin.mixed_precision_policy = sharded_precision(dtype)
    if mesh is not None:
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh={("fsdp",): mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=["fsdp"]),
            mixed_precision=precision,
            device=torch.device("cpu"),
            is_main_process=False,
        )
        fsdp2_prepare_model(accelerator, model)


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    accumulated: int,
    teacher: PreTrainedModel | None,
) -> None:
    """An optimizer step as in the Trainer, which exchanges gradients after the last backward."""
    for number in range(accumulated):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == accumulated - 1)
        _loss(model, ids, accumulated, teacher).backward()
    shards = optimizer.param_groups[0]["params"]
    for parameter, shard in zip(_learning(model), shards, strict=True):
        shard.grad = None if parameter.grad is None else _local(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()


def _loss(
    model: nn.Module, ids: Tensor, accumulated: int, teacher: PreTrainedModel | None
) -> Tensor:
    """That of the text and, with a teacher, its divergence, as in `Objective`."""
    tokens = torch.tensor(ids.numel() * accumulated)
    outputs = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=tokens)
    if teacher is None:
        return outputs["loss"]
    with torch.no_grad():
        theirs = teacher(input_ids=ids, use_cache=False).logits
    return outputs["loss"] + distillation_loss(outputs["logits"], theirs)


def _learning(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def _fake_processes(world_size: int) -> Iterator[Any]:
    """A mesh over a fake process group of `world_size` members, or None for one process."""
    if world_size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        # Outside of the fake mode: it computes with its ranks
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live tensors, by category, after every operation inside.

    A tensor made while gradients are recorded, which includes recomputation, is an activation. Any
    other is `other`, unless it becomes the gradient of a parameter or a state of the optimizer.
    (torch's own MemTracker does not support frozen parameters, and its FSDPMemTracker supports only
    sharded models.)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        teacher: nn.Module | None = None,
    ):
        super().__init__()
        self.at_peak, self._now = (dict.fromkeys(CATEGORIES, 0) for _ in range(2))
        self._optimizer = optimizer
        self._entries = WeakIdKeyDictionary()  # storage -> [category, bytes]
        self._learning = _learning(model)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
        self._sharded = [parameter for group in groups if group for parameter in group.fsdp_params]
        for counted in (model, teacher) if teacher else (model,):
            for parameter in counted.parameters():
                self._count(parameter, "weights")
            for buffer in counted.buffers():
                self._count(buffer, "other")

    def __enter__(self):
        self._fake_mode = active_fake_mode()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        self._resize = resize = torch.UntypedStorage.resize_

        # FSDP frees and allocates by it, which dispatch modes do not see
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage in self._entries:
                self._set_bytes(self._entries[storage], storage.nbytes())

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # called again with this process's part
        result = function(*args, **kwargs or {})
        if active_fake_mode() is self._fake_mode:  # if not, DTensor works out shapes
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._entries:
                    self._count(tensor, "activations" if torch.is_grad_enabled() else "other")
            if sum(self._now.values()) > sum(self.at_peak.values()):
                self._find_gradients()
                self.at_peak = dict(self._now)
        return result

    def _find_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self._learning]
        for parameter in self._sharded:
            gradients.append(parameter.unsharded_accumulated_grad)
            gradients.append(getattr(getattr(parameter, "_unsharded_param", None), "grad", None))
        for gradient in gradients:
            if gradient is not None:
                self._count(gradient, "gradients")

    def _after_step(self, *_: Any) -> None:
        for state in tree_leaves(dict(self._optimizer.state)):
            if isinstance(state, Tensor):
                self._count(state, "optimizer")

    def _count(self, tensor: Tensor, category: str) -> None:
        """Count a tensor's storage under this category only."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        entry = self._entries.get(storage)
        if entry is None:
            entry = self._entries[storage] = [category, 0]
            weakref.finalize(storage, self._set_bytes, entry, 0)
        elif entry[0] != category:
            self._set_bytes(entry, 0)
            entry[0] = category
        self._set_bytes(entry, storage.nbytes())

    def _set_bytes(self, entry: list, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        self._now[entry[0]] += num_bytes - entry[1]
        entry[1] = num_bytes
