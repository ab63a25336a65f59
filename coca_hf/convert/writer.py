"""Write and hash the weights of a layout, in a staging directory that becomes the destination.

A few shards are written at a time, and a block of each at a time. The staging directory is a hidden
one beside the destination, with one writer at a time:

.DST.incomplete/lock            held by the process that writes, until it ends or dies
.DST.incomplete/manifest.jsonl  what is made here and from what, then a line per finished shard
.DST.incomplete/calibrated/     a file per calibrated layer, which says what it was made from, and
                                the hidden states before the next layer
.DST.incomplete/checkpoint/     renamed to DST when it is complete
.DST.incomplete/replaced/       the former DST, from just before that rename until just after it

The directory is for its owner alone, and everything in it is a plain file or directory with one
name. Otherwise, whoever prepared a link there could have us empty or overwrite what it leads to.

The hashes, xxh3, find accidents. Whoever can change a shard in the staging directory can change the
manifest beside it, too, so a cryptographic hash, 40 times slower, would protect no better.
"""

import contextlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import torch
import xxhash
from torch import Tensor

from coca_hf.convert.layout import Layout
from coca_hf.errors import CocaError
from coca_hf.files import append_line, locked, sync
from coca_hf.weights import INDEX, STORED_AS, WeightsFile

SHARDS_AT_ONCE = 3  # two keep two processors busy, and one waits for the disk
PROCESS_BYTES = 700_000_000  # of Python with torch and transformers

Progress = Callable[[int, int], None]
Contents = list[tuple[str, int, int, int]]


@dataclass(frozen=True)
class FinishedShard:
    """A line of the manifest.

    written: hashes of the shard's tensors; read: of the source's; scales: see `Initialiser`.
    """

    shard: str
    written: dict[str, str]
    read: dict[str, str]
    scales: dict[int, list[float]]


class Staging:
    """The staging directory of `target`; `lock` makes it.

    former: the contents of the target when the work began, which `publish` replaces. finished: the
    finished shards by name.
    """

    def __init__(self, target: Path):
        self.target = target
        self.directory = staging_directory(target)
        self.checkpoint = self.directory / "checkpoint"
        self.calibrated = self.directory / "calibrated"
        self.begun = False
        self.former: Contents | None = None
        self.finished: dict[str, FinishedShard] = {}
        self._manifest = self.directory / "manifest.jsonl"
        self._replaced = self.directory / "replaced"
        self._lock = Lock()

    def check(self) -> None:
        """Raise CocaError for what we did not make, except in `replaced`, the former target."""
        for path in self.directory.rglob("*"):
            if not (self._replaced.is_dir() and self._replaced in (path, *path.parents)):
                _check_plain(path, path.is_dir())

    def recover(self) -> None:
        """Put back a destination that an interrupted run had moved away to replace it, and remove
        what a run left that was killed after `publish`.

        Raises CocaError if something else has taken its place in the meantime; both are kept.
        """
        if os.path.lexists(self._replaced):
            if not os.path.lexists(self.target):
                self._replaced.rename(self.target)
            elif not os.path.lexists(self.checkpoint):
                _remove(self._replaced)  # the new checkpoint is in place
            else:
                raise CocaError(
                    f"{self.target}: appeared while the checkpoint there was being replaced, which "
                    f"is kept in {self._replaced}; move one of them elsewhere, then run the same "
                    "command again"
                )
        is_published = self._manifest.exists() and not os.path.lexists(self.checkpoint)
        if is_published and os.path.lexists(self.target):
            self.discard()

    def begin(self, made_from: str | None, shards: Collection[str]) -> None:
        """Keep the `shards` that an earlier run finished, if it made the same; remove the rest.

        made_from: decides the shards' names and contents, together with the numbers of the source;
        None if that is not known yet, and nothing is removed.
        """
        self.begun = True
        if made_from is None:
            self.checkpoint.mkdir(exist_ok=True)
            return
        finished = self._read_manifest(made_from)
        if finished is None:
            # `recover` takes a manifest without a checkpoint for what `publish` leaves
            self._manifest.unlink(missing_ok=True)
            _remove(self.checkpoint)
            self.checkpoint.mkdir()
            self.start_over(made_from)
            return
        append_line(self._manifest, "")  # ends a line that was cut
        self.finished = {line.shard: line for line in finished if line.shard in shards}
        for file in self.checkpoint.iterdir():
            if file.name not in self.finished:
                _remove(file)

    def start_over(self, made_from: str) -> None:
        """Forget the finished shards, which will be written again in the same places."""
        self.finished = {}
        self._manifest.unlink(missing_ok=True)
        append_line(self._manifest, json.dumps({"made_from": made_from}))

    def record(self, finished: FinishedShard) -> None:
        """Note that a shard is finished, once it is on the disk. Thread-safe."""
        sync(self.checkpoint / finished.shard)
        sync(self.checkpoint)
        with self._lock:
            self.finished[finished.shard] = finished
            append_line(self._manifest, json.dumps(asdict(finished)))

    def publish(self) -> None:
        """Put the finished checkpoint in place, replacing nothing but `former`.

        Raises OSError if the target is not what it was when the work began.
        """
        for path in (*self.checkpoint.rglob("*"), self.checkpoint):
            sync(path)
        if self.former is not None:
            self.target.rename(self._replaced)
            if contents_of(self._replaced) != self.former:  # `recover` puts it back
                raise OSError("the checkpoint there changed meanwhile, and is left as it is")
        try:
            # fails unless there is nothing, or an empty directory
            self.checkpoint.rename(self.target)
        except OSError as error:
            if not os.path.lexists(self.target):
                raise
            raise OSError(
                "something appeared there meanwhile, and is left as it is; move it elsewhere"
            ) from error
        sync(self.target.parent)

    def discard(self) -> None:
        """Remove everything but the lock; the manifest last, so that `recover` can finish it."""
        self.finished = {}
        for path in (self.calibrated, self.checkpoint, self._replaced, self._manifest):
            _remove(path)

    def _read_manifest(self, made_from: str) -> list[FinishedShard] | None:
        """Its lines but those that a power failure cut; None if it is not ours."""
        try:
            first, *lines = self._manifest.read_text(encoding="utf-8").splitlines()
            if json.loads(first) != {"made_from": made_from} or not self.checkpoint.is_dir():
                return None
        except (FileNotFoundError, ValueError):
            return None
        finished: list[FinishedShard] = []
        for line in lines:
            # an earlier coca_hf may have written other fields
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                facts = json.loads(line)
                scales = {int(layer): of_heads for layer, of_heads in facts["scales"].items()}
                finished.append(FinishedShard(**facts | {"scales": scales}))
        return finished


def contents_of(path: Path) -> Contents | None:
    """Name, inode, size and change time of `path` and the files below it; None if it is absent."""
    if not os.path.lexists(path):
        return None
    contents = []
    for file in (path, *path.rglob("*")):
        found = file.lstat()
        is_directory = stat.S_ISDIR(found.st_mode)
        changed = (0, 0) if is_directory else (found.st_size, found.st_mtime_ns)
        contents.append((str(file.relative_to(path)), found.st_ino, *changed))
    return sorted(contents)


def staging_directory(target: Path) -> Path:
    return target.parent / f".{target.name}.incomplete"


@contextlib.contextmanager
def locked_staging(target: Path) -> Iterator[Staging]:
    """Hold the staging directory of `target`, as in `lock`.

    It is removed afterwards, unless the body was interrupted with shards finished: the next run
    continues from them. A CocaError is not an interruption, because it would come again. It leaves
    only calibrated layers, which took hours and may serve a run with another dtype.
    """
    with lock(target) as staging:
        staging.recover()
        try:
            yield staging
        except BaseException as error:
            staging.recover()
            if staging.begun and isinstance(error, CocaError):
                staging.finished = {}
            can_continue = staging.finished or any(staging.calibrated.glob("*.safetensors"))
            if staging.begun and not can_continue:
                staging.discard()
            raise
        try:
            staging.discard()
        except OSError as error:
            raise CocaError(
                f"{target}: is written; but what is left of the work cannot be removed: {error}"
            ) from error


@contextlib.contextmanager
def lock(target: Path) -> Iterator[Staging]:
    """Make and hold the staging directory of `target`, and remove it afterwards if it is empty.

    Raises CocaError if another process holds it or it has something that we do not make.
    """
    staging = Staging(target)
    directory, file = staging.directory, staging.directory / "lock"
    busy = f"{target}: another conversion is writing it; wait for it or choose another name"
    made = [parent for parent in directory.parents if not parent.exists()]
    with contextlib.ExitStack() as held:
        held.callback(_remove_empty, directory, *made)
        is_locked = False
        while not is_locked:
            for path in (directory, file):
                if os.path.lexists(path):
                    _check_plain(path, is_directory=path == directory)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # absent if the last holder has just removed the directory
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(locked(file, busy))
                is_locked = True
        staging.check()
        yield staging


def _remove_empty(*directories: Path) -> None:
    with contextlib.suppress(OSError):  # stops at the first one that is not empty
        for directory in directories:
            directory.rmdir()


def _check_plain(path: Path, is_directory: bool) -> None:
    """Raise CocaError for a link, a file with a second name, or anything else we do not make."""
    found = path.lstat()
    is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    if not (stat.S_ISDIR(found.st_mode) if is_directory else is_file):
        raise CocaError(f"{path}: is in the way, expected what coca-convert makes there; remove it")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
                missing = [s for s in self.layout.shards if s not in self.staging.finished]
                for written in as_completed([pool.submit(self._write_shard, s) for s in missing]):
                    written.result()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if len(self.layout.shards) > 1:
            shards = self.layout.shards.items()
            weight_map = {target.name: shard for shard, targets in shards for target in targets}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.staging.checkpoint / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _keep_intact(self, pool: ThreadPoolExecutor) -> None:
        """Drop the finished shards that are damaged, or all of them if the source has changed."""
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
        with (self.staging.checkpoint / shard).open("wb") as stream:
            stream.write(self._header(shard))
            for target in layout.shards[shard]:
                if layout.is_copied(target):
                    blocks = self._noted(read, target.source, layout.source.blocks(target.source))
                else:  # calibrated tensors are made, too, to note the source's hash and W_T's scale
                    made = initialiser.make(target)
                    blocks = iter([layout.calibrated.get(target.name, made)])
                stored = (layout.as_stored(target, block) for block in blocks)
                for block in self._noted(written, target.name, stored):
                    self._advance(stream.write(bytes_of(block)))
        self.staging.record(
            FinishedShard(shard=shard, written=written, read=read, scales=initialiser.scales)
        )

    def _read(self, hashes: dict[str, str], name: str) -> Tensor:
        tensor = self.layout.source.read(name)
        hashes[name] = self._hash([tensor])
        return tensor

    def _noted(
        self, hashes: dict[str, str], name: str, blocks: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """The blocks, until another shard fails or the run is interrupted; notes their hash."""
        digest = xxhash.xxh3_128()
        for block in blocks:
            if self._stopped:
                raise CancelledError
            digest.update(bytes_of(block))
            yield block
        hashes[name] = digest.hexdigest()

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
        hashes: dict[str, str] = {}
        for _ in self._noted(hashes, "", blocks):
            pass
        return hashes[""]

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self.progress(self._done, self._total)


def memory_bytes(layout: Layout) -> int:
    """The memory that writing `layout` takes, estimated from the shapes.

    Each shard in progress holds the queries and keys that one layer's `W_T` is made from, about
    twice. A GGUF model is in memory as a whole, in float32.
    """
    source, layers = layout.source, dict[int, int]()
    for target in layout.targets:
        if not layout.is_copied(target) or target.module == "q_proj":
            num_bytes = math.prod(target.source_shape) * source.dtype(target.source).itemsize
            layers[target.layer] = layers.get(target.layer, 0) + num_bytes
    at_once = min(SHARDS_AT_ONCE, len(layout.shards)) * 2 * max(layers.values(), default=0)
    loaded = sum(map(math.prod, source.shapes().values())) * 4 if source.kind == "gguf" else 0
    return PROCESS_BYTES + at_once + loaded


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, in the order in which it is stored."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@contextlib.contextmanager
def _one_thread_of_torch() -> Iterator[None]:
    """Our own threads keep the processors busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
