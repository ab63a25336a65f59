"""Write and hash the weights of a layout: a few shards at a time, a block of each at a time.

The hashes, xxh3, find accidents. Whoever can change a shard in the staging directory can change the
manifest beside it as well, so that a cryptographic hash, 40 times slower, would protect no better.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from io import FileIO
from threading import Lock

import torch
import xxhash
from torch import Tensor

from coca_hf.convert.layout import Layout
from coca_hf.convert.staging import FinishedShard, Staging
from coca_hf.convert.tensors import Initialiser, TargetTensor
from coca_hf.errors import CocaError
from coca_hf.weights import INDEX, STORED_AS, WeightsFile

SHARDS_AT_ONCE = 3  # two to keep two processors busy, and one that waits for the disk

Progress = Callable[[int, int], None]


class WeightsWriter:
    """Writes the shards of `layout` that `staging` does not have yet."""

    def __init__(self, layout: Layout, staging: Staging, progress: Progress):
        self.layout, self.staging, self.progress = layout, staging, progress
        self._done, self._total = 0, layout.num_bytes(*layout.shards)
        self._lock, self._stopped = Lock(), False

    def write(self) -> None:
        with _one_thread_of_torch(), ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            try:
                self._keep_intact(pool)
                self._advance(self.layout.num_bytes(*self.staging.finished))
                missing = [
                    shard for shard in self.layout.shards if shard not in self.staging.finished
                ]
                for written in as_completed(
                    [pool.submit(self._write_shard, shard) for shard in missing]
                ):
                    written.result()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if len(self.layout.shards) > 1:
            weight_map = {
                target.name: shard
                for shard, targets in self.layout.shards.items()
                for target in targets
            }
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.staging.checkpoint / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _keep_intact(self, pool: ThreadPoolExecutor) -> None:
        """Drop the finished shards that are damaged, and all of them where the source changed."""
        finished = list(self.staging.finished.values())
        if not all(pool.map(self._is_source_as_read, finished)):
            self.staging.start_over(self.layout.made_from())
            return
        for facts, is_intact in zip(finished, pool.map(self._is_as_written, finished), strict=True):
            if not is_intact:
                del self.staging.finished[facts.shard]

    def _is_source_as_read(self, facts: FinishedShard) -> bool:
        known = self.layout.source.shapes()
        return all(
            name in known and self._hash(self.layout.source.blocks(name)) == expected
            for name, expected in facts.read.items()
        )

    def _is_as_written(self, facts: FinishedShard) -> bool:
        try:
            with contextlib.closing(WeightsFile(self.staging.checkpoint / facts.shard)) as file:
                found = {name: self._hash(file.blocks(name)) for name in file.tensors}
                return file.header == self._header(facts.shard) and found == facts.written
        except CocaError:  # absent or damaged
            return False

    def _write_shard(self, shard: str) -> None:
        layout = self.layout
        read: dict[str, str] = {}
        written: dict[str, str] = {}
        initialiser = layout.initialiser(partial(self._read, read))
        with (self.staging.checkpoint / shard).open("wb", buffering=0) as stream:
            _write(stream, memoryview(self._header(shard)))
            for target in layout.shards[shard]:
                if layout.is_copied(target):
                    read[target.source], written[target.name] = self._copy(target, stream)
                else:
                    made = layout.as_stored(target, self._made(target, initialiser))
                    written[target.name] = self._hash([made])
                    self._advance(_write(stream, bytes_of(made)))
        self.staging.record(
            FinishedShard(shard=shard, written=written, read=read, scales=initialiser.scales)
        )

    def _made(self, target: TargetTensor, initialiser: Initialiser) -> Tensor:
        # Also where it is not used: it notes the source's hash, and the scale of W_T.
        tensor = initialiser.make(target)
        return self.layout.calibrated.get(target.name, tensor)

    def _copy(self, target: TargetTensor, stream: FileIO) -> tuple[str, str]:
        """Returns the hashes of what was read and of what was written."""
        read = xxhash.xxh3_128()
        written = xxhash.xxh3_128() if self.layout.is_cast(target) else read
        for block in self._unless_stopped(self.layout.source.blocks(target.source)):
            read.update(bytes_of(block))
            data = bytes_of(self.layout.as_stored(target, block))
            if written is not read:
                written.update(data)
            self._advance(_write(stream, data))
        return read.hexdigest(), written.hexdigest()

    def _read(self, hashes: dict[str, str], name: str) -> Tensor:
        tensor = self.layout.source.read(name)
        hashes[name] = self._hash([tensor])
        return tensor

    def _header(self, shard: str) -> bytes:
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for target in self.layout.shards[shard]:
            dtype = self.layout.dtype_of(target)
            start, end = end, end + math.prod(target.shape) * dtype.itemsize
            entries[target.name] = {
                "dtype": STORED_AS[dtype],
                "shape": list(target.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _hash(self, blocks: Iterable[Tensor]) -> str:
        digest = xxhash.xxh3_128()
        for block in self._unless_stopped(blocks):
            digest.update(bytes_of(block))
        return digest.hexdigest()

    def _unless_stopped(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The blocks, until another shard has failed or the run is interrupted."""
        for block in blocks:
            if self._stopped:
                raise CancelledError
            yield block

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self.progress(self._done, self._total)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, row by row, as it will be stored."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@contextlib.contextmanager
def _one_thread_of_torch() -> Iterator[None]:
    """In each of our threads, which keep the processors busy without more of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(stream: FileIO, data: memoryview) -> int:
    """All of `data`, which one call to the system may not take; returns its bytes."""
    written = 0
    while written < len(data):
        written += stream.write(data[written:])
    return written
