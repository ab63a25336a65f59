"""How rows are shown: as tables and figures on the page, and as a table in the terminal."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow
import rich.table
from pyarrow.parquet import read_table

from coca_hf.errors import CocaError
from coca_hf.evaluate.rows import label, last_trained_length
from coca_hf.page import FAR, Bullets, Curve, Figure, Grid, Key, Part, Plot

NBSP = "\N{NO-BREAK SPACE}"
TYPES = {  # of the columns of raw tables
    **{int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()},
    list[int]: pyarrow.list_(pyarrow.int64()),
}
T = TypeVar("T")
Points = Mapping[str, Iterable[tuple[Any, float | None]]]  # x and y, by line of a table
Spread = Callable[["Table", dict], tuple[float, float] | None]


@dataclass(frozen=True)
class Measurement:
    """How the rows of a task are read and shown.

    row: the type of its rows. settings: describes what the rows of a table share. cell: the text of
    a row's value, for rows that have one. parts: of the section on the page, from its tables. raw:
    the columns that the page reads from each raw table, and their types, of `TYPES`.
    """

    task: str
    title: str
    explanation: str
    row: Any
    settings: Callable[[dict], str]
    cell: Callable[[dict], str]
    parts: Callable[[list["Table"]], list[Part]]
    raw: dict[str, dict[str, Any]] = field(default_factory=dict)

    def show(self, row: dict) -> str:
        """The value of a row as tables show it."""
        if row["value"] is not None:
            return re.sub(r"^-(0\.0+)(?!\d)", r"\1", self.cell(row))  # no minus zero
        return "OOM" if (row.get("error") or "").startswith("OOM") else "none"


@dataclass
class Table:
    """Rows of one measurement with the same settings, whose values can be compared.

    number: 1 for the first table of its measurement. published: values by length of each published
    curve to show beside them, or its word for no value ("OOM"). ambiguous: names of several models
    in all tables of a page. models: the `identity` of each model of a page in order, so that a
    model has one colour on it; without, those of the rows.
    """

    measurement: Measurement
    rows: list[dict]
    number: int = 1
    published: dict[str, dict[int, float | str]] = field(default_factory=dict)
    ambiguous: frozenset[str] = frozenset()
    models: Sequence[tuple] = ()

    @property
    def settings(self) -> str:
        """The settings that the rows share, in words."""
        return self.measurement.settings(self.rows[0])

    @property
    def lengths(self) -> list[int]:
        """In tokens; rows of some benchmarks have none."""
        return sorted({row["length"] for row in self.rows if row["length"] is not None})

    @property
    def trained_lengths(self) -> list[int]:
        """In tokens, of all models whose trained length is known."""
        return sorted({length for row in self.rows if (length := last_trained_length(row))})

    @property
    def series(self) -> dict[str, list[dict]]:
        """The rows of each line of the table by its name, in order of length.

        The name is the model and its RoPE setting, with path and dtype if two lines share it, or if
        it is `ambiguous`.
        """
        lines: dict[tuple, list[dict]] = {}
        for row in self.rows:
            lines.setdefault((label(row), row["model_path"], row["dtype"]), []).append(row)
        count = Counter(name for name, _, _ in lines)
        return {
            (
                f"{name} ({path}, {dtype})"
                if count[name] > 1 or rows[0]["model"] in self.ambiguous
                else name
            ): sorted(rows, key=lambda row: row["length"] or 0)
            for (name, path, dtype), rows in lines.items()
        }

    def model_of(self, row: dict) -> str:
        """The name of a row's model, with its path if the name is `ambiguous`."""
        model = row["model"]
        return f"{model} ({row['model_path']})" if model in self.ambiguous else model

    @property
    def values(self) -> Points:
        """The values of each line by length."""
        return {
            name: [(row["length"], row["value"]) for row in rows]
            for name, rows in self.series.items()
        }

    @property
    def common_length(self) -> int | None:
        """The longest length at which all lines that have values have one, if any."""
        known = [
            lengths
            for rows in self.series.values()
            if (lengths := {row["length"] for row in rows if row["value"] is not None})
        ]
        return max(set.intersection(*known), default=None) if known else None

    @property
    def at(self) -> str:
        """The `common_length` in words, for captions."""
        return f", at length {self.common_length}" if self.common_length else ""

    @property
    def longest(self) -> dict[str, dict]:
        """The row of every line at the `common_length`. A line without it has its longest one that
        has a value, and a name with its length.
        """
        common, found = self.common_length, {}
        for name, rows in self.series.items():
            known = [row for row in rows if row["value"] is not None] or rows
            row = next((row for row in rows if row["length"] == common), known[-1])
            found[name if row["length"] == common else f"{name} at {row['length']}"] = row
        return found

    def named(self, name: str) -> str:
        """The name of a figure, unique among those of all tables."""
        return name if self.number == 1 else f"{name}-{self.number}"

    def curves(self, points: Points, marked: bool = True) -> list[Curve]:
        """A curve for each line that has points: its colour tells models apart, its dashes and
        markers RoPE settings.
        """
        models = list(dict.fromkeys([*self.models, *map(identity, self.rows)]))
        ropes = list(dict.fromkeys(["default", *(row["rope"] for row in self.rows)]))
        row_of = {name: rows[0] for name, rows in self.series.items()} | self.longest
        curves = []
        for name, some in points.items():
            row = row_of[name]
            color = models.index(identity(row))
            key = Key(name, color, ropes.index(row["rope"]), marked=marked)
            curves.append(Curve(key, *map(list, zip(*some, strict=True))))
        return curves

    def figure(
        self, name: str, alt: str, caption: str, points: Points, y_label: str, **options: Any
    ) -> Figure:
        """A figure of the `points` of each line. options: those of `Plot`, and `marked`."""
        curves = self.curves(points, options.pop("marked", True))
        return Figure(self.named(name), alt, caption, Plot(curves, y_label, **options))

    def by_layer(self, name: str, alt: str, caption: str, points: Points, y_label: str) -> Figure:
        """A figure of values by layer."""
        last = max(layer for some in points.values() for layer, _ in some)
        ticks = [*range(0, last + 1, max(1, last // 6))]
        axes = {"x_label": "layer", "x_scale": "linear", "y_scale": "linear", "ticks": ticks}
        return self.figure(name, alt, caption, points, y_label, **axes)

    def grid(self) -> Grid:
        """Model and RoPE setting against length, then the published values."""
        show = self.measurement.show
        lines = {
            name: {row["length"]: show(row) for row in rows} for name, rows in self.series.items()
        }
        for name, values in self.published.items():
            lines[f"paper: {name}"] = {
                n: value if isinstance(value, str) else show({"value": value})
                for n, value in values.items()
            }
        lengths = sorted({*self.lengths, *(n for line in self.published.values() for n in line)})
        columns: dict[int | None, str] = {length: str(length) for length in lengths}
        if any(row["length"] is None for row in self.rows):
            columns[None] = "value"
        return grid_of("model", lines, columns, frozenset(range(len(self.series), len(lines))))

    def missing(self) -> list[Part]:
        """Why rows have no value."""

        def place(row: dict) -> str:
            benchmark = f" on {row['benchmark']}" if "benchmark" in row else ""
            return benchmark + (f" at {row['length']}" if row["length"] is not None else "")

        reasons = [
            f"no value for {name}{place(row)}: {row['error']}"
            for name, rows in self.series.items()
            for row in rows
            if row["value"] is None
        ]
        return [Bullets(reasons)] if reasons else []

    def in_words(self) -> str:
        """The ends of every line, for readers who cannot see it."""
        show = self.measurement.show
        return " ".join(
            f"{name}: {show(rows[0])} at {rows[0]['length']}"
            + (f", {show(rows[-1])} at {rows[-1]['length']}." if len(rows) > 1 else ".")
            for name, rows in self.series.items()
        )

    def read_raw(self, row: dict, name: str) -> list[dict] | None:
        """The lines of a row's raw table; None if its file is absent.

        Raises CocaError if the file lacks columns that the measurement declares.
        """
        path, columns = row["raw"].get(name), self.measurement.raw[name]
        if path is None or not path.is_file():
            return None
        try:
            schema = pyarrow.schema(
                [pyarrow.field(key, TYPES[of], nullable=False) for key, of in columns.items()]
            )
            return read_table(path).select(schema.names).cast(schema).to_pylist()
        except (ValueError, OSError, KeyError, NotImplementedError) as error:  # pyarrow's errors
            raise CocaError(
                f"{path}: got no parquet file with columns {', '.join(columns)} as coca-eval "
                f"writes them; delete it and its row, and measure again"
            ) from error

    def raw_of_longest(self, name: str) -> dict[str, list[dict]]:
        """The lines of a raw table for the rows of `longest`."""
        found = {line: self.read_raw(row, name) for line, row in self.longest.items()}
        return {line: some for line, some in found.items() if some}


def identity(row: dict) -> tuple:
    """What a line of a table is of, whatever its RoPE setting."""
    return row["model"], row["model_path"], row["dtype"]


def text_settings(row: dict) -> str:
    """The documents of a row in words: their source, their number, where they are cut, and the seed
    if it is not 0.
    """
    count = len(row["document_names"])
    cut = f" cut to {row['max_tokens']} tokens" if row["max_tokens"] else ""
    seed = f", seed {row['seed']}" if row["seed"] else ""
    return f"{data_of(row)}, {count} document{'s' * (count > 1)}{cut}{seed}"


def data_of(row: dict) -> str:
    """The source of documents, with its options that are not the defaults."""
    asked = {"subset": row["subset"], "revision": row["data_revision"]}
    asked |= {name: row[name] for name in ("split", "column")}
    usual = {"split": "test", "column": "text"}
    given = [f"{key} {value}" for key, value in asked.items() if value and value != usual.get(key)]
    return ", ".join([row["data"], *given])


def each_table(parts: Callable[["Table"], Iterable[Part]]) -> Callable[[list["Table"]], list[Part]]:
    """The parts of every table in turn."""
    return lambda tables: [part for table in tables for part in parts(table)]


def grid_of(
    corner: str,
    lines: dict[str, dict[T, str]],
    columns: dict[T, str],
    muted: frozenset = frozenset(),
) -> Grid:
    """A table of cells by line and column. columns: their names. muted: numbers of lines."""
    cells = [[name, *(of_line.get(key, "") for key in columns)] for name, of_line in lines.items()]
    return Grid([corner, *columns.values()], cells, numbers_from=1, muted=muted)


def powers(base: int, points: Points) -> list[float]:
    """Ticks of a logarithmic axis: the powers of `base` between the points."""
    xs = [x for some in points.values() for x, _ in some]
    return [base**power for power in range(31) if min(xs) <= base**power <= max(xs)]


def against_length(
    table: Table, y_label: str, y_scale: str, spread: Spread | None = None
) -> list[Part]:
    """Figure and grid of values against length, and why values are missing.

    y_scale: of the `Plot`. spread: the band of a row.
    """
    curves = [
        replace(curve, band=[spread(table, row) for row in rows] if spread else None)
        for curve, rows in zip(table.curves(table.values), table.series.values(), strict=True)
    ]
    for style, (name, values) in enumerate(table.published.items()):
        known = {n: value for n, value in values.items() if not isinstance(value, str)}
        key = Key(f"paper: {name}", style=style, published=True)
        curves.append(Curve(key, [*known], [*known.values()]))
    caption = f"{table.measurement.title} against context length"
    notes = []
    if any(ends for curve in curves for ends in curve.band or []):
        notes.append(" Shaded: from the 10th to the 90th percentile of the documents.")
    if any(row["value"] is None or row["value"] > FAR for row in table.rows):
        notes.append(" A cross at the upper edge: no value, or one beyond the page.")
    if len(table.trained_lengths) > 1:
        lengths = {
            table.model_of(row): length
            for row in table.rows
            if (length := last_trained_length(row))
        }
        said = ", ".join(f"{length} ({model})" for model, length in lengths.items())
        notes.append(f" Trained at: {said}.")
    figure = Figure(
        table.named(table.measurement.task),
        f"{caption}. {table.in_words()}",
        f"{caption}: {table.settings}.{''.join(notes)}",
        Plot(curves, y_label, y_scale=y_scale, trained_lengths=table.trained_lengths),
    )
    return [figure, table.grid(), *table.missing()]


def results_table(measurement: Measurement, rows: list[dict]) -> rich.table.Table:
    """Rows of one task against length for the terminal: a line for each model and RoPE setting.

    Mode, benchmark, metric and filter tell lines apart if the rows have them.
    """
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    kinds = [name for name in ("mode", "benchmark", "metric") if name in rows[0]]
    filters = {row.get("filter") for row in rows if row["value"] is not None}
    kinds += ["filter"] * (len(filters) > 1)
    count = Counter(name for name, _ in {(row["model"], row["model_path"]) for row in rows})
    title = measurement.task + (" by context length" if lengths != [None] else "")
    columns = ("value" if length is None else str(length) for length in lengths)
    table = rich.table.Table("model", "rope", *kinds, *columns, title=title)
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
