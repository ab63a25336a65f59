"""What a person sees while rows are made.

A terminal shows a bar for all rows and one for each row. Elsewhere, as in the log of a cluster's
job, each row is a line, and a row that takes long has one every few minutes:

    position-loss  default  8192: 30 of 73 batches
    passkey  default  4096: 3 of 8 rows, about 12 min left
"""

import time
from collections.abc import Callable, Iterable, Iterator

from rich import progress as rich
from rich.console import Console
from rich.text import Text

SILENT_SECONDS = 120  # within a row, where there is no terminal


class Progress:
    """How far a run is, on a console; silent by default.

    The time left follows from the rows made in this run, each weighted by its length: the time of a
    row is nearly proportional to its length for most measurements. clock: seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self.console, self.clock = console or Console(quiet=True), clock
        columns = (
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            _TimeLeft(),
        )
        hidden = self.console.quiet or not self.console.is_interactive
        self.bars = rich.Progress(*columns, console=self.console, get_time=clock, disable=hidden)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bars.live.is_started:  # stopping bars that never started prints an empty line
            self.bars.stop()

    def __call__(self, items: list, description: str) -> Iterable:
        """The items of a loop within a row."""
        if self.bars.disable:
            return self._in_lines(items, description)
        self.bars.start()
        return self.bars.track(items, description=description)

    def _in_lines(self, items: list, description: str) -> Iterator:
        said = self.clock()
        for done, item in enumerate(items):
            if self.clock() - said >= SILENT_SECONDS:
                said = self.clock()
                line = f"{description}: {done} of {len(items)} batches"
                self.console.print(line, soft_wrap=True, markup=False)
            yield item

    def begin(self, missing: list[dict], asked: int, noun: str) -> None:
        """Announce rows with the settings `missing`, of `asked` in all. noun: what is counted."""
        self.began, self.noun, self.asked = self.clock(), noun, asked
        self.done = asked - len(missing)
        self.weight_left, self.weight_made = sum(map(_weight, missing)), 0
        if missing:
            self.bars.start()
            self.bar = self.bars.add_task(noun, total=asked, completed=self.done, left="")

    def finish(self, settings: dict) -> None:
        """Count the row of these settings as made."""
        self.done += 1
        self.weight_made += _weight(settings)
        self.weight_left -= _weight(settings)
        seconds = (self.clock() - self.began) * self.weight_left / self.weight_made
        left = f"about {_duration(seconds)}" if self.weight_left else ""
        self.bars.update(self.bar, completed=self.done, left=left)
        if not self.console.is_interactive:
            names = ("task", "mode", "benchmark", "rope", "length")
            row = "  ".join(str(settings[name]) for name in names if settings.get(name) is not None)
            of_all = f"{self.done} of {self.asked} {self.noun}" + (f", {left} left" if left else "")
            self.console.print(f"{row}: {of_all}", soft_wrap=True)


class _TimeLeft(rich.TimeRemainingColumn):
    """The estimate of `Progress` for the bar of all rows, rich's own for the others."""

    def render(self, task: rich.Task) -> Text:
        return Text(task.fields["left"]) if "left" in task.fields else super().render(task)


def _weight(settings: dict) -> int:
    return settings["length"] or settings["trained_length"] or 1


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 100 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.0f} h"
