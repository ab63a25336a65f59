"""Files of a checkpoint: safetensors by their headers, pickles, strict JSON, and the records of
conversion and training; and sizes in words such as 5GB.

Nothing here trusts what it reads, because it reads other people's checkpoints. Files are not mapped
into memory: a file that shrinks would be a SIGBUS instead of an error, and its pages would count as
ours.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from coca_hf.errors import CocaError, first_line, library_errors, one_line, short

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADS = ("lm_head.weight", "embed_out.weight")
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
BLOCK_BYTES = 1 << 19  # small enough for the processor's cache
MAX_CONFIG_BYTES = 10_000_000
MAX_INDEX_BYTES = 100_000_000
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# and the types in which quantized weights are stored
TYPES = {**FLOATS, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8}
STORED_AS = {dtype: name for name, dtype in TYPES.items()}
UNITS = {"": 1} | {f"{letter}b": 1000**power for power, letter in enumerate(["", *"kmgt"])}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
# Fields of conversion.json and training.json that are read again, and their types
RECORDED: dict[str, type] = {"base": dict, "stages": list, "recipe": dict, "end_block": int}
RECORDED |= {"weights_xxh3_128": dict, "config_xxh3_128": str}


class StoredTensor(NamedTuple):
    """A tensor's type as the header names it, its shape, and its bytes from `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class WeightsFile:
    """An open safetensors file.

    `tensors` maps names to `StoredTensor`; `header` is its first bytes, as they are.

    Raises CocaError if the file is absent or not an ordinary file, or if safetensors finds that its
    header and its size do not agree in every byte.
    """

    def __init__(self, file: Path):
        self.file = file
        self._stream = open_regular(file)
        self.size = os.fstat(self._stream.fileno()).st_size
        try:
            with safe_open(file, "numpy"):  # checks the header
                self.header = self._read_header()
            self.tensors = _parse_header(self.header)
        except BaseException as error:
            self.close()
            if isinstance(error, (SafetensorError, ValueError)):
                problem = f"truncated or corrupted ({one_line(error)}); download it again"
                raise CocaError(f"{file}: {problem}") from error
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset`. Raises OSError if the file ends too early."""
        filled = 0
        while filled < len(buffer):
            count = os.preadv(self._stream.fileno(), [buffer[filled:]], offset + filled)
            if count == 0:
                raise OSError(f"{self.file} became shorter while it was read")
            filled += count

    def read(self, name: str) -> Tensor:
        """A tensor of a dtype in `TYPES`."""
        stored = self.tensors[name]
        # NumPy requests huge pages, which halves the time
        data = torch.from_numpy(np.empty(stored.num_bytes, np.uint8))
        self.read_into(data.numpy().data, stored.start)
        self._advise(stored, "DONTNEED")
        return data.view(TYPES[stored.dtype]).view(stored.shape)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The bytes of a tensor in order, as uint8.

        Blocks share a buffer, so use each one before you ask for the next.
        """
        stored = self.tensors[name]
        self._advise(stored, "WILLNEED")
        buffer = torch.empty(min(BLOCK_BYTES, stored.num_bytes), dtype=torch.uint8)
        for start in range(stored.start, stored.end, BLOCK_BYTES):
            block = buffer[: stored.end - start]
            self.read_into(block.numpy().data, start)
            yield block
        self._advise(stored, "DONTNEED")

    def _advise(self, stored: StoredTensor, what: str) -> None:
        """Advise the page cache, where bytes that were read would push out those that are needed."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            advice = getattr(os, f"POSIX_FADV_{what}")
            os.posix_fadvise(self._stream.fileno(), stored.start, stored.num_bytes, advice)

    def state(self) -> tuple[int, ...]:
        """Values that change whenever the open file is written to."""
        found = os.fstat(self._stream.fileno())
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        self._stream.close()

    def _read_header(self) -> bytes:
        length = bytearray(8)
        self.read_into(memoryview(length), 0)
        header = bytearray(8 + int.from_bytes(length, "little"))
        self.read_into(memoryview(header), 0)
        return bytes(header)


class LoadedFile:
    """The tensors of a file in memory, with the interface of `WeightsFile`."""

    def __init__(self, file: Path, tensors: dict[str, Tensor]):
        self.file, self._tensors, self.size = file, tensors, file.stat().st_size
        self.tensors = {
            name: StoredTensor(
                STORED_AS.get(tensor.dtype, str(tensor.dtype)), (*tensor.shape,), 0, tensor.nbytes
            )
            for name, tensor in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().resolve_neg().contiguous()

    def blocks(self, name: str) -> Iterator[Tensor]:
        yield from self.read(name).flatten().view(torch.uint8).split(BLOCK_BYTES)

    def state(self) -> tuple[int, ...]:
        found = self.file.stat()
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        self._tensors.clear()


def open_pickle(file: Path) -> LoadedFile:
    """Tensors that `torch.save` pickled, read by torch's unpickler for weights alone, which calls
    nothing that the file names.

    The numbers are mapped into memory. Raises CocaError for anything but a dictionary of tensors.
    """
    open_regular(file).close()
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip files and pickles have many ways to be wrong
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {named[1]}" if named else first_line(error)[:200]
        raise CocaError(
            f"{file}: cannot be read as tensors alone ({what}), and nothing in it was run; "
            "expected a dictionary of tensors as torch.save writes since 1.6; convert it where "
            "you trust it, with transformers' save_pretrained"
        ) from error
    expected = "expected a dictionary of dense tensors that lie in the file"
    if not isinstance(found, dict):
        raise CocaError(f"{file}: got a {type(found).__name__}, {expected}")
    size = file.stat().st_size
    for name, tensor in found.items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_here = is_dense and tensor.device.type == "cpu" and tensor.nbytes <= size
        if not isinstance(name, str) or not is_here:
            raise CocaError(f"{file}: got a {type(tensor).__name__}, {short(name)}, {expected}")
    return LoadedFile(file, found)


AnyFile = WeightsFile | LoadedFile


def open_weights(
    directory: Path, pickled: bool = False
) -> tuple[dict[str, AnyFile], dict[str, AnyFile]]:
    """The open files of a checkpoint's weights by name, and the file of each tensor.

    pickled: whether they are pickles; otherwise safetensors.

    Raises CocaError if a file is absent, outside the checkpoint or corrupted, or if index and files
    do not agree.
    """
    single_name, index_name = (PICKLE, PICKLE_INDEX) if pickled else (SINGLE, INDEX)
    single = os.path.lexists(directory / single_name)  # first, as in transformers
    weight_map = None if single else read_index(directory, index_name)
    files: dict[str, AnyFile] = {}
    try:
        for name in sorted(set(weight_map.values())) if weight_map else [single_name]:
            file = checkpoint_file(directory, name)
            files[name] = open_pickle(file) if pickled else WeightsFile(file)
        file_of: dict[str, AnyFile] = {}
        for weights in files.values():
            for tensor in weights.tensors:
                if tensor in file_of:
                    raise CocaError(
                        f"{directory}: tensor {tensor} is in {file_of[tensor].file.name} and in "
                        f"{weights.file.name}, expected it once; download the checkpoint again"
                    )
                file_of[tensor] = weights
        for tensor, name in (weight_map or {}).items():
            if file_of.get(tensor) is not files[name]:
                problem = f"tensor {tensor} is not in {name}; download the checkpoint again"
                raise CocaError(f"{directory / index_name}: {problem}")
    except BaseException:
        for weights in files.values():
            weights.close()
        raise
    return files, file_of


def checkpoint_file(directory: Path, name: str) -> Path:
    """The file `name` of a checkpoint. Links may lead within it, and to blobs of its hub cache.

    Raises CocaError if `name` is not a plain name or its links lead elsewhere, where a checkpoint
    has nothing to read.
    """
    if not name or Path(name).name != name or name in (".", "..") or "\0" in name:
        raise CocaError(
            f"{directory}: got the file name {name!r}, expected a file in the directory itself"
        )
    return file_within(directory, name)


def file_within(directory: Path, name: str) -> Path:
    """The same for a `name` that we chose ourselves, relative to the checkpoint."""
    with library_errors(f"{directory / name}: its links lead nowhere; copy the file there"):
        home, target = directory.resolve(), (directory / name).resolve()
    repository = home.parent.parent
    is_hub_cache = home.parent.name == "snapshots" and repository.name.startswith("models--")
    blobs = repository / "blobs" if is_hub_cache else home
    if target.parent != blobs and home not in target.parents:
        raise CocaError(
            f"{directory / name}: is a link to {target}, outside the checkpoint; expected a file "
            "in the directory itself; copy it there if you trust it"
        )
    return directory / name


def read_index(directory: Path, name: str = INDEX) -> dict[str, str]:
    """The file of every tensor by name, from the index of a sharded checkpoint."""
    index = directory / name
    if not os.path.lexists(index):
        raise CocaError(
            f"{directory}: got no weights, expected {name.removesuffix('.index.json')} or {name}"
        )
    weight_map = read_json(checkpoint_file(directory, name), MAX_INDEX_BYTES).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise CocaError(f"{index}: got no weight_map, expected one from tensor names to file names")
    return weight_map


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises CocaError for anything else, for duplicate keys, and beyond `max_bytes`.
    """
    with open_regular(file) as stream:
        text = stream.read(max_bytes + 1)
    if len(text) > max_bytes:
        size = file.stat().st_size
        raise CocaError(
            f"{file}: got {size} bytes, expected at most {max_bytes}; is this the right file?"
        )
    with library_errors(f"{file}: not JSON"):
        content = parse_json(text)
    if not isinstance(content, dict):
        raise CocaError(f"{file}: got a {type(content).__name__}, expected a JSON object")
    return content


def read_record(file: Path) -> dict[str, Any]:
    """A checkpoint's conversion.json or training.json; {} if it has none.

    Raises CocaError for a file that coca_hf cannot have written.
    """
    record = read_json(file) if os.path.lexists(file) else {}
    for field, kind in RECORDED.items():
        if not isinstance(record.get(field, kind()), kind):
            raise CocaError(
                f"{file}: got {field} {short(record[field])}, expected {kind.__name__}; restore the "
                "file, or make the checkpoint again"
            )
    return record


def parse_json(text: bytes) -> Any:
    """Strict JSON in UTF-8.

    Raises ValueError also for a duplicate key, because readers differ in which one they take.
    """
    return json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)


def open_regular(file: Path):
    """Open an ordinary file, unbuffered. Raises CocaError if it is absent or, say, a pipe."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CocaError(
                f"{file}: is not an ordinary file, expected one; copy the checkpoint again"
            )
        return file.open("rb", buffering=0)
    except FileNotFoundError:
        raise CocaError(
            f"{file}: no such file, expected a complete checkpoint, which has one"
        ) from None
    except (OSError, RuntimeError) as error:
        raise CocaError(f"{file}: cannot be read ({error})") from error


def is_derived(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor follows from others: a tied head, or the angles and masks of old files."""
    if name in HEADS:
        return bool(getattr(config, "tie_word_embeddings", False))
    return name.endswith(("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"))


def parse_size(text: str, where: str) -> int:
    """Bytes in `5GB`, `500MB`, `1.5GiB` or plain bytes; `where` begins the CocaError for others."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = UNITS.get(match[2].lower(), 0) if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if size < 1:
        raise CocaError(f"{where}: got {text!r}, expected a size as in 500MB, 5GB or 24GiB")
    return size


def _parse_header(header: bytes) -> dict[str, StoredTensor]:
    """Raises ValueError for a tensor that comes twice, or that is a list, which safetensors reads."""
    entries = parse_json(header[8:])
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"tensor {name}: got a {type(entry).__name__}, expected an object")
        start, end = (len(header) + offset for offset in entry["data_offsets"])
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), start, end)
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} comes twice")
        content[key] = value
    return content
