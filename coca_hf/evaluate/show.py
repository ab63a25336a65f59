"""What a person sees while rows are made: a bar with the time left for each, and a small table at the end."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from coca_hf.evaluate.batches import Track


@contextmanager
def progress_on(console: Console) -> Iterator[Track]:
    """A `Track` that draws a bar on `console` for every list it wraps."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=console.quiet)

    def track(items: list, description: str) -> Iterable:
        progress.start()
        return progress.track(items, description=description)

    try:
        yield track
    finally:
        if progress.live.is_started:  # stopping what never started would print an empty line
            progress.stop()


def results_table(rows: Iterable[dict]) -> Table:
    """Model and RoPE setting, or what else tells lines apart, against length, in the order of `rows` of one task."""
    rows = list(rows)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    kinds = [name for name in ("mode", "benchmark", "metric") if name in rows[0]]
    columns = ("value" if length is None else str(length) for length in lengths)
    table = Table("model", "rope", *kinds, *columns, title=_title(rows[0]))
    lines: dict[tuple, dict] = {}
    for row in rows:
        lines.setdefault(tuple(str(row[name]) for name in ("model", "rope", *kinds)), {})[row["length"]] = row
    for line, by_length in lines.items():
        table.add_row(*line, *(show_value(by_length[n]) if n in by_length else "" for n in lengths))
    return table


def _title(row: dict) -> str:
    titles = {"speed": "seconds of a step by sequence length", "tasks": "tasks"}
    return titles.get(row["task"], f"{row['task']} by context length")


def show_value(row: dict) -> str:
    """Perplexity to four digits, shares to two places, seconds to three digits, or the row's error."""
    if row["value"] is None:
        return row["error"]
    if row["task"] == "speed":
        return f"{row['value']:.3g}" + (f" ({row['ratio']:.2f}x)" if row["ratio"] else "")
    return f"{row['value']:.2f}" if row["task"] == "passkey" or row["value"] < 1e4 else f"{row['value']:.3g}"
