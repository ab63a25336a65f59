"""The memory of one GPU over a stage's steps, measured without one.

Two optimizer steps of the real model, frozen, checkpointed and sharded (FSDP2, by Accelerate's own
function) as the stage will be, run under fake tensors, which have shapes and sizes but no contents,
in a fake process group of the size asked for. On one GPU nothing is sharded. What no tensor shows
is not in it: the CUDA context, NCCL's buffers, workspaces of kernels, fragmentation.
"""

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
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

from coca_hf.train.model import model_from_config, shapes_only, stage_model
from coca_hf.train.objectives import fuse_cross_entropy_
from coca_hf.train.recipe import Recipe, Stage
from coca_hf.train.trainer import sharded_precision

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
_BLOCK_BYTES = 512  # CUDA's allocator gives whole ones
_NEED_A_GPU = ("bf16", "fp16", "tf32", "fsdp", "torch_compile", "use_cpu")


@dataclass(frozen=True)
class Setting:
    """What the peak of memory depends on beside model, stage and `seq_len`, and may be changed."""

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
    """Bytes on one GPU by category: at the moment when they are most, and when the optimizer is
    about to step.

    weights: this GPU's share of the parameters; activations: with the logits and what is
    recomputed; other: weights gathered from other GPUs, gradients of activations, buffers of
    communication, casts and the optimizer's temporaries.
    """

    at_peak: dict[str, int]
    at_step: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def measure(recipe: Recipe, stage: Stage, setting: Setting) -> Memory:
    """The memory of one GPU over two optimizer steps of a stage; nothing is computed or left.

    The first step makes the optimizer's state, the second has it from the start.
    """
    arguments = planned_arguments(recipe, stage)
    with _fake_processes(setting.world_size) as mesh, FakeTensorMode():
        own = recipe.stage_options(stage)
        # Kernels of others need not be here, and take what SDPA does
        base = model_from_config(recipe, "eager" if own.attn_implementation == "eager" else None)
        if own.fused_cross_entropy:
            fuse_cross_entropy_(base)  # Liger's kernel takes only real tensors
        # peft moves adapters to where they are already, and fake parameters cannot be moved
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model: Any = stage_model(base, stage)
        if setting.checkpointing:
            plain = model.gradient_checkpointing_enable  # its name before transformers 5.23
            enable = getattr(model, "activation_checkpointing_enable", plain)
            enable(dict(arguments.gradient_checkpointing_kwargs or {}) or None)
        _prepare_(model.train(), recipe.options(stage), mesh)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        if "foreach" in inspect.signature(kind).parameters and not options.get("fused"):
            options["foreach"] = True  # as torch chooses on a GPU
        # On the shards as plain tensors: for an optimizer's operation on DTensors, torch works out
        # shapes with tensors of the whole size, which would be counted
        shards = [nn.Parameter(_local(parameter)) for parameter in _learning(model)]
        optimizer = kind(shards, **options)
        whole = torch.zeros(setting.batch_size, recipe.data.seq_len, dtype=torch.int64)
        part = whole[:, : recipe.data.seq_len // setting.sharing].contiguous()
        with shapes_only(base), MemoryTracker(model, optimizer) as tracker:
            if recipe.data.held_out_blocks:
                _measure_held_out(model, base.get_output_embeddings(), whole)
            for _ in range(2):
                _step(model, optimizer, part, accumulated=min(setting.accumulation, 2))
    return Memory(tracker.at_peak, tracker.at_step)


@torch.no_grad()
def _measure_held_out(model: nn.Module, head: nn.Module, ids: Tensor) -> None:
    """A batch of `held_out_loss` before the first step, of blocks that GPUs do not share."""
    model.eval()
    head.train()
    model(input_ids=ids, labels=ids, use_cache=False)
    model.train()


def planned_arguments(recipe: Recipe, stage: Stage) -> TrainingArguments:
    """The stage's options, except those that TrainingArguments takes only where a GPU is."""
    options = recipe.options(stage)
    options = {key: options[key] for key in options if not key.startswith(_NEED_A_GPU)}
    return TrainingArguments(output_dir="plan", **{**options, "use_cpu": True})


def _prepare_(model: PreTrainedModel, options: dict[str, Any], mesh: Any) -> None:
    """Mixed precision and sharding, in place, as by `Accelerator.prepare`; the CPU is the GPU."""
    precision = next((name for name in ("bf16", "fp16") if options.get(name)), "no")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    if precision != "no":
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
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
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, accumulated: int
) -> None:
    """An optimizer step as the Trainer does it: gradients are exchanged after the last backward."""
    for number in range(accumulated):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == accumulated - 1)
        tokens = torch.tensor(ids.numel() * accumulated)
        loss = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=tokens)["loss"]
        loss.backward()
    del loss
    shards = optimizer.param_groups[0]["params"]
    for parameter, shard in zip(_learning(model), shards, strict=True):
        shard.grad = None if parameter.grad is None else _local(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()


def _learning(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, without its history."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def _fake_processes(world_size: int) -> Iterator[Any]:
    """A mesh over a pretended process group of `world_size` members, or None for one process."""
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
    """Counts the bytes of living tensors, by category, after every operation inside.

    What is made while gradients are recorded, as they also are in recomputation, is an activation.
    What is made without is other, unless it becomes the gradient of a parameter or a state of the
    optimizer. (torch's own MemTracker does not take frozen parameters, and its FSDPMemTracker no
    model that is not sharded.)
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.at_peak, self.at_step, self._now = (dict.fromkeys(CATEGORIES, 0) for _ in range(3))
        self._optimizer = optimizer
        self._entries = WeakIdKeyDictionary()  # storage -> [category, bytes]
        self._learning = _learning(model)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
        self._sharded = [parameter for group in groups if group for parameter in group.fsdp_params]
        for parameter in model.parameters():
            self._count(parameter, "weights")
        for buffer in model.buffers():
            self._count(buffer, "other")

    def __enter__(self):
        self._fake_mode = active_fake_mode()
        self._hooks = (
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        )
        self._resize = resize = torch.UntypedStorage.resize_

        # FSDP frees and allocates by it, unseen by modes
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage in self._entries:
                self._set_bytes(self._entries[storage], storage.nbytes())

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back with this process's part
        result = function(*args, **kwargs or {})
        if active_fake_mode() is self._fake_mode:  # otherwise DTensor works out shapes
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._entries:
                    self._count(tensor, "activations" if torch.is_grad_enabled() else "other")
            if sum(self._now.values()) > sum(self.at_peak.values()):
                self._find_gradients()
                self.at_peak = dict(self._now)
        return result

    def _before_step(self, *_: Any) -> None:
        self._find_gradients()
        self.at_step = dict(self._now)

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
        """Count a tensor's storage under a category, if it was under another or under none."""
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
