"""Training blocks on disk: read through a memory map, and hashed before they are used.

    DIR/KEY/made-of.json     what the blocks are made of; KEY is its hash
    DIR/KEY/source-0.bin …   the blocks of each source in the order of its documents, 2 or 4 bytes
                             a token
    DIR/KEY/held-out.bin     the blocks that the loss is measured on
    DIR/KEY/order.bin        the source of every training block and its number in that source's file
    DIR/KEY/state.json       how many rows of these files count, the hash of every part of them, and
                             how far every source is read

Only what `state.json` counts is read. It is replaced once those rows are on disk, so that a
preparation can be killed, continued, and prolonged while a training reads what is there.
"""

import json
import os
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset

from coca_hf.convert.calibration_text import skipped_positions
from coca_hf.errors import CocaError
from coca_hf.files import replace_text
from coca_hf.train.recipe import Data

ANSWER = 2**31  # beside a token that is an answer; more than any token
AGAIN = "`coca-train RECIPE --prepare` makes them again"
Part = tuple[int, str]  # where it ends, in rows, and its xxh3_128


class Damaged(CocaError):
    """Prepared blocks are not what was written."""


class Rows:
    """An array (rows, width) in a file. A part is hashed before the first of its rows is read."""

    def __init__(self, path: Path, dtype: str, width: int, parts: Sequence[Part]):
        self.path, self.dtype, self.width = path, np.dtype(dtype), width
        self.parts = [(end, digest) for end, digest in parts]
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return self.parts[-1][0] if self.parts else 0

    def __getitem__(self, number: int) -> np.ndarray:
        """Row `number`, (width,). Raises Damaged where its part is not what was written."""
        part = bisect_right(self.parts, number, key=lambda part: part[0])
        if part not in self._checked:
            self.check(part)
        return self._rows[number]

    def check(self, part: int) -> None:
        """Raises Damaged where a part is not what was written."""
        first = self.parts[part - 1][0] if part else 0
        end, written = self.parts[part]
        if xxhash.xxh3_128_hexdigest(self._rows[first:end].data) != written:
            raise Damaged(
                f"{self.path}: got another xxh3_128 of rows {first} to {end - 1} than when they "
                f"were prepared; the file was changed; {AGAIN}"
            )
        self._checked.add(part)

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @cached_property
    def _rows(self) -> np.ndarray:
        expected = len(self) * self.row_bytes
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < expected:
            raise Damaged(
                f"{self.path}: got {found:,} bytes, expected the {expected:,} that were prepared; "
                f"{AGAIN}"
            )
        return np.memmap(self.path, self.dtype, "r", shape=(len(self), self.width))


class GrowingRows(Rows):
    """Rows that can be appended. Opening the file drops what lies behind its last part."""

    def __enter__(self) -> "GrowingRows":
        self._file: BinaryIO = open(self.path, "a+b")
        self._file.truncate(len(self) * self.row_bytes)
        self._hash, self.written = xxhash.xxh3_128(), len(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def append(self, rows: np.ndarray) -> None:
        """rows: (rows, width). Raises OSError where they cannot be written."""
        content = rows.astype(self.dtype).tobytes()
        self._file.write(content)
        self._file.flush()
        self._hash.update(content)
        self.written += len(rows)

    def read(self, number: int) -> np.ndarray:
        """Row `number`, (width,), which need not be in a part yet."""
        self._file.seek(number * self.row_bytes)  # what is appended still goes to the end
        return np.frombuffer(self._file.read(self.row_bytes), self.dtype)

    def end_part(self) -> None:
        """Bring all rows to the disk, and what was appended since the last part into one."""
        os.fsync(self._file.fileno())
        if self.written > len(self):
            self.parts.append((self.written, self._hash.hexdigest()))
            self._hash = xxhash.xxh3_128()


class Blocks:
    """The prepared blocks of `data` in a directory: `len` of them, each an example for the trainer.

    dtypes: those of the sources' files; a source with answers has uint32.

    Raises Damaged for a state that is not what was written, and CocaError where it cannot be read.
    """

    def __init__(self, directory: Path, data: Data, dtypes: Sequence[str]):
        self.directory, self._data = directory, data
        self.state = _read_state(directory)
        files = layouts(directory, data.seq_len, dtypes, self.state["parts"])
        rows = {name: Rows(*layout) for name, layout in files.items()}
        self._order, self._held_out = rows["order"], rows["held-out"]
        self._sources = [rows[f"source-{number}"] for number in range(len(dtypes))]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Block `number` as `input_ids` and `labels`, (seq_len,), int64, with the same tokens.

        The model shifts the labels. With a synthetic source, `answers` (seq_len,) says which tokens
        are answers. With `skip_positions`, `position_ids` rise to at most that many, and
        `attention_mask`, of ones, says that what follows a gap is not another document.

        Raises Damaged where a file is not what was written.
        """
        source, row = self._order[number]
        marked = torch.from_numpy(self._sources[source][row].astype("int64"))
        ids = marked % ANSWER
        example = {"input_ids": ids, "labels": ids.clone()}
        if self._data.has_answers:
            example["answers"] = marked >= ANSWER
        if reach := self._data.skip_positions:
            seed = random.Random(f"{self._data.seed} positions {number}").getrandbits(63)
            [positions] = skipped_positions(1, self._data.seq_len, reach, seed)
            example |= {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        return example

    @property
    def held_out(self) -> Tensor:
        """The held-out blocks, (blocks, seq_len), int64; every source gives its share if it can."""
        rows = [self._held_out[row] for row in range(len(self._held_out))]
        blocks = np.array(rows, dtype="int64").reshape(-1, self._data.seq_len)
        return torch.from_numpy(blocks)

    @property
    def num_bytes(self) -> int:
        files = (self._order, self._held_out, *self._sources)
        return sum(len(rows) * rows.row_bytes for rows in files)

    def sources_of(self, first: int, count: int) -> str:
        """The sources of a range of blocks, in words."""
        numbers = [self._order[number][0] for number in range(first, first + count)]
        names = [self._data.sources[number].name for number in numbers]
        return ", ".join(f"{names.count(name)} of {name}" for name in dict.fromkeys(names))

    def check(self) -> None:
        """Raises Damaged where any file is not what was written."""
        for rows in (self._order, self._held_out, *self._sources):
            for part in range(len(rows.parts)):
                rows.check(part)


class DealtBlocks(IterableDataset):
    """What one process reads of `blocks`, from block `first` on: every `groups`-th batch.

    Processes that share their blocks (context parallelism) are one `group` and read the same. A
    step therefore takes consecutive blocks, in the same order on any number of processes.
    """

    def __init__(self, blocks: Blocks, first: int, batch_size: int, group: int, groups: int):
        self.blocks, self.first, self.batch_size = blocks, first, batch_size
        self.group, self.groups = group, groups

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        begin, stride = self.first + self.group * self.batch_size, self.groups * self.batch_size
        for batch in range(begin, len(self.blocks) - self.batch_size + 1, stride):
            for number in range(batch, batch + self.batch_size):
                yield self.blocks[number]


def layouts(
    directory: Path, seq_len: int, dtypes: Sequence[str], parts: dict[str, list[Part]]
) -> dict[str, tuple[Path, str, int, list[Part]]]:
    """The arguments of `Rows` for every file of a directory."""
    sizes = {f"source-{number}": (dtype, seq_len) for number, dtype in enumerate(dtypes)}
    sizes |= {"held-out": ("uint32", seq_len), "order": ("uint32", 2)}
    return {
        name: (directory / f"{name}.bin", *size, parts.get(name, []))
        for name, size in sizes.items()
    }


def save_state(directory: Path, state: dict[str, Any]) -> None:
    kept = {"xxh3_128": _state_hash(state), "state": state}
    replace_text(directory / "state.json", json.dumps(kept))


def _read_state(directory: Path) -> dict[str, Any]:
    path = directory / "state.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if _state_hash(kept["state"]) != kept["xxh3_128"]:
            raise ValueError("another hash than when it was written")
    except FileNotFoundError:
        raise Damaged(f"{path}: got no such file; {AGAIN}") from None
    except OSError as error:  # nothing is made again because a disk did not answer
        raise CocaError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: cannot be read ({type(error).__name__}); {AGAIN}") from error
    return kept["state"]


def _state_hash(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())
