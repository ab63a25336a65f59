"""What a person sees while rows are made, and a small table at the end.

On a terminal a bar over all rows and one for each; elsewhere, as in the log of a cluster's job, a line for each row:

    passkey  default  4096: 3 of 8 rows, about 12 min left
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from coca_hf.evaluate.rows import Track


@contextmanager
def progress_on(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Track]:
    """A `Track` that shows on `console` how far rows are. clock: seconds."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        _Left(),
    )
    bars = Progress(*columns, console=console, get_time=clock, disable=console.quiet or not console.is_interactive)
    try:
        yield _Shown(bars, console, clock)
    finally:
        if bars.live.is_started:  # stopping what never started would print an empty line
            bars.stop()


class _Left(TimeRemainingColumn):
    """Of the bar over rows the estimate of `_Shown`, of others rich's."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["left"]) if "left" in task.fields else super().render(task)


class _Shown(Track):
    """The time left is that of the rows made so far, each weighed by its length; what was there before counts in none.

    For most tasks the time of a row is nearly proportional to its length.
    """

    def __init__(self, bars: Progress, console: Console, clock: Callable[[], float]):
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
            named = (settings.get(name) for name in ("task", "mode", "benchmark", "rope", "length"))
            of_all = f"{self.done} of {self.asked} {self.noun}" + (f", {left} left" if left else "")
            row = "  ".join(str(name) for name in named if name is not None)
            self.console.print(f"{row}: {of_all}", soft_wrap=True)


def _weight(settings: dict) -> int:
    return settings["length"] or settings["trained_length"] or 1


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60)):
        if seconds < 100 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.0f} h"


def results_table(rows: Iterable[dict]) -> Table:
    """Model and RoPE setting, or what else tells lines apart, against length, in the order of `rows` of one task."""
    rows = list(rows)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    kinds = [name for name in ("mode", "benchmark", "metric") if name in rows[0]]
    kinds += ["filter"] * (len({row.get("filter") for row in rows if row["value"] is not None}) > 1)
    paths = {(row["model"], row["model_path"]) for row in rows}
    shared = {name for name, count in Counter(name for name, _ in paths).items() if count > 1}
    columns = ("value" if length is None else str(length) for length in lengths)
    table = Table("model", "rope", *kinds, *columns, title=_title(rows[0]))
    lines: dict[tuple, dict] = {}
    for row in rows:
        model = row["model_path" if row["model"] in shared else "model"]
        lines.setdefault((model, *(str(row[name]) for name in ("rope", *kinds))), {})[row["length"]] = row
    for line, by_length in lines.items():
        table.add_row(*line, *(show_value(by_length[n]) if n in by_length else "" for n in lengths))
    return table


def _title(row: dict) -> str:
    titles = {"speed": "seconds of a step by sequence length", "tasks": "tasks"}
    return titles.get(row["task"], f"{row['task']} by context length")


def show_value(row: dict) -> str:
    """Perplexity to four digits, shares to two places, seconds to three digits, or the row's error.

    In brackets: of speed times the baseline, of answers that were scored the nats of a digit or token.
    """
    if row["value"] is None:
        return row["error"]
    if row["task"] == "speed":
        return f"{row['value']:.3g}" + (f" ({row['ratio']:.2f}x)" if row["ratio"] else "")
    if row["task"] in ("passkey", "recall"):
        nats = row.get("nats_per_digit", row.get("nll"))
        return f"{row['value']:.2f}" + ("" if nats is None else f" ({nats:.2f} nats)")
    value = round(row["value"], 2) + 0.0 if abs(row["value"]) < 1e4 else row["value"]  # + 0.0: no -0.00
    return f"{value:.2f}" if value < 1e4 else f"{value:.3g}"
