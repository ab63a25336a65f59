"""Hidden states on disk: as many tokens as one likes, of which a few blocks are in memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

BATCH_TOKENS = 4096  # in memory at once, as far as blocks are no longer


class HiddenStates:
    """Blocks of hidden states, (n, m, hidden) in float32, in a file that is read and written.

    It is indexed by slices of blocks, as a tensor is. The file is not mapped into memory: its pages
    would count as ours, and a full disk would be a SIGBUS instead of an error. Reading raises
    OSError where the file is too short.
    """

    def __init__(self, file: Path, shape: tuple[int, int, int], first: int = 0):
        self.file, self.shape, self._first = file, shape, first

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, blocks: slice) -> Tensor:
        start, stop, _ = blocks.indices(len(self))
        count = (stop - start) * self._per_block
        numbers = np.fromfile(self.file, np.float32, count, offset=self._offset(start))
        if len(numbers) < count:
            raise OSError(f"{self.file} became shorter while it was read")
        return torch.from_numpy(numbers).view(-1, *self.shape[1:])

    def __setitem__(self, blocks: slice, states: Tensor) -> None:
        self.file.touch()
        with self.file.open("r+b") as stream:
            stream.seek(self._offset(blocks.indices(len(self))[0]))
            stream.write(states.float().cpu().contiguous().numpy().data)

    def split(self, *sizes: int) -> Iterator["HiddenStates"]:
        """Parts of so many blocks each, in the same file."""
        first = self._first
        for size in sizes:
            yield HiddenStates(self.file, (size, *self.shape[1:]), first)
            first += size

    def hash(self) -> str:
        digest = xxhash.xxh3_128()
        for blocks in batches(self):
            digest.update(self[blocks].numpy().data)
        return digest.hexdigest()

    @property
    def _per_block(self) -> int:
        return self.shape[1] * self.shape[2]

    def _offset(self, block: int) -> int:
        return 4 * (self._first + block) * self._per_block


def batches(states: Tensor | HiddenStates, most: int = BATCH_TOKENS) -> Iterator[slice]:
    """Slices of blocks that have `most` tokens at most, or are one block."""
    at_once = max(1, most // states.shape[1])
    return (slice(start, start + at_once) for start in range(0, len(states), at_once))
