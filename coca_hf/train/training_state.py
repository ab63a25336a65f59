"""What a stage resumes from: the parameters that it trains and the optimizer's state, in
`checkpoint-N/state`.

By torch.distributed.checkpoint, any layout of processes (one, DDP, FSDP2 with full or sharded state
dicts) reads what any other wrote. Frozen parameters are not in it; the model that the stage starts
from has them. torch keeps it in pickles, and would run what they say; here nothing is called that
is not a name of `_KNOWN`, or that torch takes for data.
"""

import enum
import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
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
from torch.optim import Optimizer

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


def save_state(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Every process calls this, with the wrapped model. Raises CheckpointException."""
    writer = dcp.FileSystemWriter(checkpoint / STATE)
    with _alone_is_fine():
        dcp.save(_state(model, optimizer), storage_writer=writer)


def load_state(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Fill the wrapped model and its optimizer with what any layout of processes saved."""
    state = _state(model, optimizer)
    with _alone_is_fine():
        dcp.load(state, storage_reader=_Reader(checkpoint / STATE), planner=_Planner())
    set_model_state_dict(model, state["model"], options=OPTIONS)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=OPTIONS)


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that `save_state` writes, over all processes."""
    tensors: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    # numel of a sharded tensor is that of the whole
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state(model: nn.Module, optimizer: Optimizer) -> dict:
    return {
        "model": get_model_state_dict(model, options=OPTIONS),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # of Python 3.11.0 to 3.11.3, for enums
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
        """A tensor's part of a file, which is a zip archive. torch does not look at its sums."""
        part = io.BytesIO(super()._slice_file(file, sinfo).read())
        with zipfile.ZipFile(part) as archive:
            if archive.testzip() is not None:
                raise OSError(f"{sinfo.relative_path}: got another CRC-32 than was written")
        part.seek(0)
        return part


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # raises where it is more than data
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
