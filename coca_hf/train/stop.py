"""Asking a run to stop so that nothing is lost: SIGTERM, and SIGUSR1, which SLURM can send before its time limit."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STOPPED = os.EX_TEMPFAIL if hasattr(os, "EX_TEMPFAIL") else 75
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(Exception):
    """A signal stopped the run, which can be continued. The commands exit with EXIT_STOPPED."""


class StopRequest:
    """`came`: the name of the signal that came, or that the launcher has died, which would leave its processes alone to
    write where the next launch writes; else None.
    """

    def __init__(self):
        self.signal: str | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def came(self) -> str | None:
        orphaned = self._launcher is not None and os.getppid() != self._launcher
        return self.signal or ("the death of the launcher" if orphaned else None)


def ignore_signals() -> None:
    """For a process that ends with EXIT_STOPPED: the launcher may end it once more, and so hide that code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note the signals that ask to stop instead of dying of them. Outside the main thread, none is noted."""
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
