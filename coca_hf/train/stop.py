"""Asking a run to stop so that nothing is lost: SIGTERM, and SIGUSR1, which SLURM can send before its time limit."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STOPPED = os.EX_TEMPFAIL if hasattr(os, "EX_TEMPFAIL") else 75
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(Exception):
    """A signal stopped the run after a checkpoint: run it again with --resume. The commands exit with EXIT_STOPPED."""


class StopRequest:
    """`signal`: the name of the one that came, or None."""

    signal: str | None = None


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
