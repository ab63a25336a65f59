"""What a person sees while rows are made: a bar with the time left for each, and a small table at the end."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from coca_hf.evaluate.perplexity import Track


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
    progress = Progress(*columns, console=console)

    def track(items: list, description: str) -> Iterable:
        progress.start()
        return progress.track(items, description=description)

    try:
        yield track
    finally:
        if progress.live.is_started:  # stopping what never started would print an empty line
            progress.stop()


def results_table(rows: Iterable[dict]) -> Table:
    """Model and RoPE setting against length, in the order of `rows`, which are all of one task."""
    rows = list(rows)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    table = Table("model", "rope", *map(str, lengths), title=f"{rows[0]['task']} by context length")
    values = {(row["model"], row["rope"], row["length"]): show_value(row) for row in rows}
    for model, rope in dict.fromkeys((row["model"], row["rope"]) for row in rows):
        table.add_row(model, rope, *(values.get((model, rope, length), "") for length in lengths))
    return table


def show_value(row: dict) -> str:
    """Perplexity to four digits, accuracy to two places, or the row's error."""
    if row["value"] is None:
        return row["error"]
    return f"{row['value']:.2f}" if row["task"] == "passkey" or row["value"] < 1e4 else f"{row['value']:.3g}"
