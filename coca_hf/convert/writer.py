"""Write the weights of a plan: a few shards at a time, each a block at a time, hashing the tensors as they go by.

The hashes, xxh3, find accidents. Whoever can change a shard in the staging directory can change the manifest beside it
as well, so that a cryptographic hash, 40 times slower, would protect no better.
"""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from io import FileIO
from threading import Lock

import torch
import xxhash
from torch import Tensor

from coca_hf.convert.plan import Plan
from coca_hf.convert.staging import FinishedShard, Staging
from coca_hf.convert.tensors import Maker, TargetTensor, check_query_bias, stored_as
from coca_hf.errors import CocaError
from coca_hf.weights import FLOATS, INDEX, WeightsFile

SHARDS_AT_ONCE = 3  # two to keep two processors busy, and one that waits for the disk
STORED_AS = {dtype: name for name, dtype in FLOATS.items()}

Progress = Callable[[int, int], None]


class WeightsWriter:
    """Writes the shards of `plan` that `staging` does not have yet."""

    def __init__(self, plan: Plan, staging: Staging, progress: Progress):
        self.plan, self.staging, self.progress = plan, staging, progress
        self._done, self._total = 0, plan.num_bytes(*plan.shards)
        self._lock, self._stopped = Lock(), False

    def check(self, known: Collection[TargetTensor] = ()) -> None:
        """Refuse what `write` would refuse of any tensor, before layers are calibrated for hours.

        Only what calibration itself makes of W_Q and W_T cannot be known yet. known: tensors that need no check.
        """
        plan = self.plan
        maker = Maker(plan.config, plan.targets, plan.source.read, plan.src, plan.released)
        names = {target.name for target in known}
        for target in [target for target in plan.targets if target.name not in names]:
            is_cast = plan.source.dtype(target.source) != plan.dtype_of(target)
            if not plan.is_copied(target):
                made = maker.make(target)
                if target.module != "t_proj":  # calibration replaces that one
                    self._as_stored(target, made)
            elif is_cast or target.is_query_bias:
                for block in plan.source.blocks(target.source):
                    self._as_stored(target, block)

    def write(self) -> None:
        with _one_thread_of_torch(), ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            try:
                self._keep_intact(pool)
                self._advance(self.plan.num_bytes(*self.staging.finished))
                missing = [shard for shard in self.plan.shards if shard not in self.staging.finished]
                for written in as_completed([pool.submit(self._write_shard, shard) for shard in missing]):
                    written.result()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if len(self.plan.shards) > 1:
            weight_map = {target.name: shard for shard, targets in self.plan.shards.items() for target in targets}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.staging.checkpoint / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _keep_intact(self, pool: ThreadPoolExecutor) -> None:
        """Drop the finished shards that are damaged; all of them where the source is another than it was."""
        finished = list(self.staging.finished.values())
        if not all(pool.map(self._is_source_as_read, finished)):
            self.staging.start_over(self.plan.made_from())
            return
        for facts, is_intact in zip(finished, pool.map(self._is_as_written, finished), strict=True):
            if not is_intact:
                del self.staging.finished[facts.shard]

    def _is_source_as_read(self, facts: FinishedShard) -> bool:
        known = self.plan.source.shapes()
        return all(
            name in known and self._hash(self.plan.source.blocks(name)) == expected
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
        plan = self.plan
        read: dict[str, str] = {}
        written: dict[str, str] = {}
        maker = Maker(plan.config, plan.targets, partial(self._read, read), plan.src, plan.released)
        with (self.staging.checkpoint / shard).open("wb", buffering=0) as stream:
            _write(stream, memoryview(self._header(shard)))
            for target in plan.shards[shard]:
                if plan.is_copied(target):
                    read[target.source], written[target.name] = self._copy(target, stream)
                else:
                    made = self._as_stored(target, self._made(target, maker), plan.config.num_key_value_heads)
                    written[target.name] = self._hash([made])
                    self._advance(_write(stream, bytes_of(made)))
        self.staging.record(FinishedShard(shard=shard, written=written, read=read, scales=maker.scales))

    def _made(self, target: TargetTensor, maker: Maker) -> Tensor:
        tensor = maker.make(target)  # also where it is not used: it notes the source's hash, and the scale of W_T
        return self.plan.calibrated.get(target.name, tensor)

    def _copy(self, target: TargetTensor, stream: FileIO) -> tuple[str, str]:
        """Returns the hashes of what was read and of what was written: one and the same where the type stays."""
        read = xxhash.xxh3_128()
        written = read if self.plan.source.dtype(target.source) == self.plan.dtype_of(target) else xxhash.xxh3_128()
        for block in self._unless_stopped(self.plan.source.blocks(target.source)):
            read.update(bytes_of(block))
            data = bytes_of(self._as_stored(target, block))
            if written is not read:
                written.update(data)
            self._advance(_write(stream, data))
        return read.hexdigest(), written.hexdigest()

    def _read(self, hashes: dict[str, str], name: str) -> Tensor:
        tensor = self.plan.source.read(name)
        hashes[name] = self._hash([tensor])
        return tensor

    def _as_stored(self, target: TargetTensor, numbers: Tensor, num_heads: int = 1) -> Tensor:
        stored = stored_as(self.plan.dtype_of(target), numbers, target, self.plan.src, num_heads)
        check_query_bias(self.plan.config, target, stored, self.plan.src)
        return stored

    def _header(self, shard: str) -> bytes:
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for target in self.plan.shards[shard]:
            dtype = self.plan.dtype_of(target)
            start, end = end, end + math.prod(target.shape) * dtype.itemsize
            entries[target.name] = {"dtype": STORED_AS[dtype], "shape": list(target.shape), "data_offsets": [start, end]}
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
    """In each of ours, which keep the processors busy: more of torch's would only be in their way."""
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
