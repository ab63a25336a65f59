"""What the processes of a run tell one another: results, errors, whose turn it is, when to stop.

SIGTERM, and SIGUSR1, which SLURM can send before its time limit, stop a run after a checkpoint.
"""

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import DistBackendError, DistNetworkError, PrefixStore
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store

from coca_hf.errors import CocaError

Made = TypeVar("Made")
LOOK_SECONDS = 0.2  # between two looks at the store
LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")  # what gloo says
SILENT = "Timed out waiting"  # what gloo says after ddp_timeout seconds
FAREWELL_SECONDS = 10.0  # that a failed process waits for the others to learn why
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(Exception):
    """A signal stopped the run, which can be continued. The commands exit with EXIT_STOPPED.

    Until it is given a message, it has the name of the signal and, within a stage, the last step.
    """


def announce(text: str) -> None:
    """Print in the main process; PartialState.print does so in one of every machine."""
    if PartialState().is_main_process:
        print(text, flush=True)


class StopRequest:
    """Whether this process was asked to stop.

    `came`: the name of the signal; or that the launcher has died, because the next launch would
    write to the same files; or None.
    """

    def __init__(self):
        self.signal: str | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def came(self) -> str | None:
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        return self.signal or ("the death of the launcher" if orphaned else None)

    def check(self) -> None:
        """Raises Stopped, with the name of the signal, if this process was asked to stop."""
        if came := self.came:
            raise Stopped(came)


def ignore_signals() -> None:
    """For a process that is about to say why it exits, which a signal would hide."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note signals that ask to stop; Python allows it only in the main thread."""
    request = StopRequest()

    def note(number, frame):
        request.signal = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_all_processes(make: Callable[[], Made]) -> Made:
    """`make()` in each process. Raises, in all of them, the CocaError that it raises in one."""
    made: Made | None = None
    errors: list[CocaError] = []
    try:
        made = make()
    except CocaError as error:
        errors.append(error)
    for of_any in gather_object(errors):
        raise of_any
    return cast(Made, made)


def from_main_process(make: Callable[[], Any]) -> Any:
    """`make()` of the main process, in every process. Raises its CocaError in every process."""
    is_main = PartialState().is_main_process
    made = [in_all_processes(lambda: make() if is_main else None)]
    broadcast_object_list(made)  # does nothing without a launcher
    return made[0]


def main_process_first(work: Callable[[Callable[[], None]], Made], stop: StopRequest) -> Made:
    """`work` in the main process, then in all others, which wait for it outside of collectives:
    these have a time limit, and Python handles no signal in them. `work` is given a function to
    call often, which raises Stopped, with the signal's name, after a signal to any process.

    Raises, in every process, the CocaError or Stopped that `work` raises in one.
    """
    state = PartialState()
    if state.num_processes == 1:
        return work(stop.check)
    board = _Board(from_main_process(lambda: uuid.uuid4().hex), state.num_processes, stop)
    try:
        if not state.is_main_process:
            board.wait_for(1, board.check)
        made = work(board.check)
        board.finish()
        # The others may continue at any moment: a signal no longer ends the wait.
        board.wait_for(state.num_processes, board.look)
    except (CocaError, Stopped) as error:
        board.part_with(error)
        raise
    return made


def is_lost_process(error: BaseException) -> bool:
    """Whether a collective failed because another process, or the connection to it, is lost."""
    if isinstance(error, CheckpointException):
        return any(is_lost_process(failure) for failure, _ in error.failures.values())
    text = str(error)
    return isinstance(error, DistBackendError | DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in text for words in (*LOST, SILENT))
    )


@contextmanager
def losing_processes() -> Iterator[None]:
    """Turn what collectives raise when another process ends into one line: a CocaError."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not is_lost_process(error):
            raise
        what = "another process of this run has ended, see its own message"
        if SILENT in str(error):
            what = "no answer from another process for training.ddp_timeout seconds"
            what += ": its machine is gone, or the network between"
        raise CocaError(f"{what}; continue with --resume") from error


class _Board:
    """Notes in the store by which the processes found one another; `name` is new for every use."""

    def __init__(self, name: str, num_processes: int, stop: StopRequest):
        self._store = PrefixStore(name, _get_default_store())
        self._num_processes, self._stop = num_processes, stop
        self._looked = 0.0

    def finish(self) -> None:
        self._reach(lambda: self._store.add("finished", 1))

    def wait_for(self, count: int, check: Callable[[], None]) -> None:
        """Wait until `count` processes have finished. Raises what `check` does."""
        while self._reach(lambda: self._store.add("finished", 0)) < count:
            check()
            time.sleep(LOOK_SECONDS)

    def check(self) -> None:
        """Raises the first error that a process noted, or Stopped after a signal to this one."""
        self._stop.check()
        self.look()

    def look(self) -> None:
        """Raises the first error that a process noted."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        if self._reach(lambda: self._store.check(["end"])):
            kind, text = json.loads(self._reach(lambda: self._store.get("end")))
            raise Stopped(text) if kind == "stop" else CocaError(text)
        self._looked = time.monotonic()

    def part_with(self, error: CocaError | Stopped) -> None:
        """Tell the others, and wait until they know: the store may end with this process."""
        kind = "stop" if isinstance(error, Stopped) else "error"
        deadline = time.monotonic() + FAREWELL_SECONDS
        try:
            self._store.compare_set("end", "", json.dumps([kind, str(error)]))
            parted = self._store.add("parted", 1)
            while parted < self._num_processes and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
                parted = self._store.add("parted", 0)
        except RuntimeError:  # the store is gone, and with it the others
            pass

    def _reach(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            self._stop.check()
            raise CocaError(
                "the process that connects the others has ended; start the run again with --resume"
            ) from error
