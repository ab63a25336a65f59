"""Where a checkpoint is made: a hidden directory beside the destination, one writer at a time.

.DST.incomplete/lock            held by the one process that writes, until it ends or dies
.DST.incomplete/manifest.jsonl  what is made here and from what, then a line per finished shard
.DST.incomplete/calibrated/     a file per calibrated layer, which says itself from what it is made,
                                and the hidden states before the next layer
.DST.incomplete/checkpoint/     renamed to DST when it is complete
.DST.incomplete/replaced/       the former DST, from just before that rename until just after it

The directory is for its owner alone, and everything in it is a plain file or directory with one
name: whoever prepared a link there would have us empty or overwrite what it leads to.
"""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from coca_hf.errors import CocaError
from coca_hf.files import append_line, locked, sync


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
    """The staging directory of `target`, locked. Made by `locked_staging`."""

    def __init__(self, target: Path):
        self.target = target
        self.directory = staging_directory(target)
        self.checkpoint = self.directory / "checkpoint"
        self.calibrated = self.directory / "calibrated"
        self.begun = False
        self.former: Contents | None = (
            None  # of the target when the work began: what `publish` replaces
        )
        self.finished: dict[str, FinishedShard] = {}  # by name of the shard
        self._manifest = self.directory / "manifest.jsonl"
        self._replaced = self.directory / "replaced"
        self._lock = Lock()

    def check(self) -> None:
        """Raise CocaError for what we did not make, other than `replaced`, the former target."""
        for directory, directories, files in os.walk(self.directory):
            if Path(directory) == self.directory and self._replaced.name in directories:
                directories.remove(self._replaced.name)
            for name in (*directories, *files):
                _check_plain(Path(directory, name), is_directory=name in directories)

    def recover(self) -> None:
        """Put back a destination that an interrupted run had moved away to replace it.

        Raises CocaError where something else has taken its place meanwhile: both are kept.
        """
        if not os.path.lexists(self._replaced):
            return
        if not os.path.lexists(self.target):
            self._replaced.rename(self.target)
        elif not os.path.lexists(self.checkpoint):
            # It became the target: only the cleaning up is missing.
            _remove(self._replaced)
        else:
            raise CocaError(
                f"{self.target}: appeared while the checkpoint there was being replaced, which is "
                f"kept in {self._replaced}; move one of them elsewhere, then run the same command "
                "again"
            )

    def begin(self, made_from: str, shards: Collection[str]) -> None:
        """Keep the `shards` that an earlier run finished, if it made the same; remove the rest.

        made_from: whatever decides the shards' names and contents, other than the contents of the
        source.
        """
        self.begun = True
        finished = self._read_manifest(made_from)
        if finished is None:
            _remove(self.checkpoint)
            self.checkpoint.mkdir()
            self.start_over(made_from)
            return
        self.finished = {line.shard: line for line in finished if line.shard in shards}
        for file in self.checkpoint.iterdir():
            if file.name not in self.finished:
                _remove(file)

    def start_over(self, made_from: str) -> None:
        """Forget the shards that are finished: they will be written again, in the same places."""
        self.finished = {}
        self._manifest.unlink(missing_ok=True)
        append_line(self._manifest, json.dumps({"made_from": made_from}))

    def record(self, finished: FinishedShard) -> None:
        """Note a shard as finished, once it is on the disk. Several threads may."""
        sync(self.checkpoint / finished.shard)
        sync(self.checkpoint)
        with self._lock:
            self.finished[finished.shard] = finished
            append_line(self._manifest, json.dumps(asdict(finished)))

    def publish(self) -> None:
        """Put the finished checkpoint in place, replacing nothing but `former`.

        Raises OSError where the target is not what it was when the work began.
        """
        for path in (*self.checkpoint.rglob("*"), self.checkpoint):
            sync(path)
        if self.former is not None:
            self.target.rename(self._replaced)
            if contents_of(self._replaced) != self.former:  # `recover` puts it back
                raise OSError("the checkpoint there changed meanwhile, and is left as it is")
        try:
            # Fails where there is anything but an empty directory.
            self.checkpoint.rename(self.target)
        except OSError as error:
            if not os.path.lexists(self.target):
                raise
            raise OSError(
                "something appeared there meanwhile, and is left as it is; move it elsewhere"
            ) from error
        sync(self.target.parent)

    def has_results(self) -> bool:
        """Whether there is something to continue from."""
        return bool(self.finished) or any(self.calibrated.glob("*.safetensors"))

    def discard(self) -> None:
        """Remove everything but the lock."""
        self.finished = {}
        for path in (self._manifest, self.calibrated, self.checkpoint, self._replaced):
            _remove(path)

    def _read_manifest(self, made_from: str) -> list[FinishedShard] | None:
        """Its lines up to the first bad one, which a power failure may have cut; None: not ours."""
        try:
            first, *lines = self._manifest.read_text(encoding="utf-8").splitlines(keepends=True)
            if json.loads(first) != {"made_from": made_from} or not self.checkpoint.is_dir():
                return None
        except (FileNotFoundError, ValueError):
            return None
        finished: list[FinishedShard] = []
        # an earlier coca_hf may have written other fields
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            for text in lines:
                if not text.endswith("\n"):
                    break
                facts = json.loads(text)
                scales = {int(layer): of_heads for layer, of_heads in facts["scales"].items()}
                finished.append(FinishedShard(**facts | {"scales": scales}))
        return finished


Contents = list[tuple[str, int, int, int]]


def contents_of(path: Path) -> Contents | None:
    """Name, inode, size and change time of `path` and the files below it; None if absent."""
    if not os.path.lexists(path):
        return None
    found = path.lstat()
    contents = [(".", found.st_ino, 0, 0)]
    for directory, directories, files in os.walk(path):
        for name in (*directories, *files):
            file = Path(directory, name)
            found = file.lstat()
            changed = (0, 0) if name in directories else (found.st_size, found.st_mtime_ns)
            contents.append((str(file.relative_to(path)), found.st_ino, *changed))
    return sorted(contents)


def staging_directory(target: Path) -> Path:
    return target.parent / f".{target.name}.incomplete"


@contextlib.contextmanager
def locked_staging(target: Path) -> Iterator[Staging]:
    """Hold the staging directory of `target`.

    Afterwards it is gone, unless the body was interrupted with shards finished: then the next run
    continues from them. A CocaError is not an interruption: it would come again, and leaves nothing
    but calibrated layers, which took hours and may serve a run with another dtype.

    Raises CocaError where another process holds it, or where there is something in it that we do
    not make.
    """
    staging = Staging(target)
    # by us, from here on
    made = [parent for parent in staging.directory.parents if not parent.exists()]
    try:
        with lock(staging):
            staging.check()
            staging.recover()
            try:
                yield staging
            except BaseException as error:
                staging.recover()
                if staging.begun and isinstance(error, CocaError):
                    staging.finished = {}
                if staging.begun and not staging.has_results():
                    staging.discard()
                raise
            try:
                staging.discard()
            except OSError as error:
                raise CocaError(
                    f"{target}: is written; but what is left of the work cannot be removed: {error}"
                ) from error
    finally:
        with contextlib.suppress(OSError):  # until one that holds something
            for directory in (staging.directory, *made):
                directory.rmdir()


def lock(staging: Staging) -> contextlib.ExitStack:
    """Make the directory of `staging` and hold its lock. Raises CocaError where another does."""
    directory = staging.directory
    busy = f"{staging.target}: another conversion is writing it; wait for it or choose another name"
    held = contextlib.ExitStack()
    while True:
        for path in (directory, directory / "lock"):
            if os.path.lexists(path):
                _check_plain(path, is_directory=path == directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # Its last holder has just removed the directory.
            held.enter_context(locked(directory / "lock", busy))
            return held


def _check_plain(path: Path, is_directory: bool) -> None:
    """Raise CocaError for a link, a file with a second name, or what else we do not make."""
    found = path.lstat()
    is_plain = (
        stat.S_ISDIR(found.st_mode)
        if is_directory
        else stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    )
    if not is_plain:
        raise CocaError(f"{path}: is in the way, expected what coca-convert makes there; remove it")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
