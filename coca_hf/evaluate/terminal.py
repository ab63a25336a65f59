"""What a person sees while rows are made, and the table at the end.

On a terminal there is a bar over all rows and one for each; elsewhere, as in the log of a cluster's
job, a line for each row:

    passkey  default  4096: 3 of 8 rows, about 12 min left
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.rows import Progress


@contextmanager
def progress_on(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """A `Progress` that shows on `console` how far rows are. clock: seconds."""
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        _TimeLeft(),
    )
    silent = console.quiet or not console.is_interactive
    bars = rich.Progress(*columns, console=console, get_time=clock, disable=silent)
    try:
        yield _ShownProgress(bars, console, clock)
    finally:
        if bars.live.is_started:  # stopping what never started would print an empty line
            bars.stop()


class _TimeLeft(rich.TimeRemainingColumn):
    """The estimate of `_ShownProgress` for the bar over rows, rich's for the others."""

    def render(self, task: rich.Task) -> Text:
        return Text(task.fields["left"]) if "left" in task.fields else super().render(task)


class _ShownProgress(Progress):
    """The time left follows from the rows made so far, each weighted by its length.

    The time of a row is nearly proportional to its length for most measurements. Rows that were
    there before do not count.
    """

    def __init__(self, bars: rich.Progress, console: Console, clock: Callable[[], float]):
        self.bars, self.console, self.clock = bars, console, clock

    def __call__(self, items: list, description: str) -> Iterable:
        self.bars.start()
        return self.bars.track(items, description=description)

    def begin(self, missing: list[dict], asked: int, noun: str = "rows") -> None:
        self.began, self.noun, self.asked = self.clock(), noun, asked
        self.done = asked - len(missing)
        self.weight_left, self.weight_made = sum(map(_weight, missing)), 0
        if missing:
            self.bars.start()
            self.bar = self.bars.add_task(noun, total=asked, completed=self.done, left="")

    def finish(self, settings: dict) -> None:
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


def _weight(settings: dict) -> int:
    return settings["length"] or settings["trained_length"] or 1


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 100 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.0f} h"


def results_table(rows: Iterable[dict]) -> Table:
    """Rows of one task against length: a line for each model and RoPE setting, in their order.

    Mode, benchmark, metric and filter tell lines apart where the rows have them.
    """
    rows = list(rows)
    measurement = MEASUREMENTS[rows[0]["task"]]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    kinds = [name for name in ("mode", "benchmark", "metric") if name in rows[0]]
    filters = {row.get("filter") for row in rows if row["value"] is not None}
    kinds += ["filter"] * (len(filters) > 1)
    count = Counter(name for name, _ in {(row["model"], row["model_path"]) for row in rows})
    title = measurement.task + (" by context length" if lengths != [None] else "")
    columns = ("value" if length is None else str(length) for length in lengths)
    table = Table("model", "rope", *kinds, *columns, title=title)
    lines: dict[tuple, dict] = {}
    for row in rows:
        model = row["model_path" if count[row["model"]] > 1 else "model"]
        line = (model, *(str(row[name]) for name in ("rope", *kinds)))
        lines.setdefault(line, {})[row["length"]] = row
    for line, by_length in lines.items():
        cells = (by_length.get(length) for length in lengths)
        shown = ["" if row is None else row["error"] or measurement.show(row) for row in cells]
        table.add_row(*line, *shown)
    return table
