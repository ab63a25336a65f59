"""Write safetensors files piece by piece, so that no shard has to fit in memory."""

import json
import math
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from coca_hf.convert.tensors import Piece
from coca_hf.weights import FLOATS

STORED_AS = {dtype: name for name, dtype in FLOATS.items()}


class ShardWriter:
    """A safetensors file in the making: its header, then the numbers of `pieces`, in their order, as they come.

    hash: xxh3 of what was written, to find accidents. Whoever can change a shard in the staging directory can change
    the manifest beside it as well, so that a cryptographic hash, 40 times slower, would protect no better.
    """

    def __init__(self, file: Path, pieces: list[tuple[Piece, torch.dtype]]):
        self.hash = xxhash.xxh3_128()
        self._stream = file.open("wb", buffering=0)
        self._write(memoryview(_header(pieces)))

    def write(self, numbers: Tensor) -> int:
        """Append them; returns their bytes."""
        data = bytes_of(numbers)
        self._write(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()

    def _write(self, data: memoryview) -> None:
        self.hash.update(data)
        while data:
            data = data[self._stream.write(data) :]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, row by row, as it will be stored."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def file_hash(file: Path) -> str | None:
    """The `ShardWriter.hash` that a file has now; None where there is none."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def _header(pieces: list[tuple[Piece, torch.dtype]]) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece, dtype in pieces:
        start, end = end, end + math.prod(piece.shape) * dtype.itemsize
        entries[piece.name] = {"dtype": STORED_AS[dtype], "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
