"""The sections of a page. `SECTIONS` is the page, in order; what there are no rows for is left out."""

from collections.abc import Callable

from coca_hf.report.against_length import (
    AXES,
    EXPLANATIONS,
    TITLES,
    Measured,
    against_length,
    curve_figure,
    curves_of,
    finite,
    in_words,
    keys_of,
    missing_values,
    numbered,
    show,
    trained_lengths,
    values,
    xs_of,
)
from coca_hf.report.boundary import boundary
from coca_hf.report.document import Bullets, Code, Fold, Grid, Section, Text
from coca_hf.report.passkey import passkey
from coca_hf.report.plots import Curve
from coca_hf.report.recovery import recovery
from coca_hf.report.rows import SWAPPED, Table, data_of, read_raw, shots_of, trained_length

LITTLE_TRAINING = 1_000_000_000  # tokens; the paper trained on 7.5 billion a stage


def models(measured: Measured) -> Section | None:
    """Which models, and how much training stands behind their numbers."""
    if not measured.rows:
        return None
    found = {(row["model"], row["model_path"], row["dtype"]): row for row in measured.rows}
    lines = []
    for (name, _, dtype), row in found.items():
        form = f"CoCA, {row['coca_constraint']}" if row["coca_constraint"] else row.get("model_type") or ""
        if kept := row.get("coca_kept_layers"):
            form += f", layers kept: {len(kept)}"
        seen = f"{row['tokens_seen']:,}" if row["tokens_seen"] is not None else ""
        length = trained_length(row)
        lines.append([name, form, dtype, f"{length:,}" if length else "", seen])
    header = ["model", "attention", "dtype", "trained length", "tokens seen"]
    return Section("Models", [Grid(header, lines, numbers_from=3), *_notice(measured.rows), *_changed(measured.rows)])


def perplexity(measured: Measured) -> Section | None:
    return against_length("perplexity", measured)


def position_loss(measured: Measured) -> Section | None:
    """Loss against the index of a token, of the longest length of every model and RoPE setting."""
    parts: list = [Text(EXPLANATIONS["position-loss"])]
    tables = measured.of_task("position-loss")
    for number, table in enumerate(tables, 1):
        keys, curves = keys_of(table, marked=False), []
        for name, rows in table.series.items():
            if buckets := read_raw(rows[-1], "buckets"):
                firsts = sorted({bucket["first"] for bucket in buckets})
                sums = {first: [0.0, 0] for first in firsts}
                for bucket in buckets:
                    sums[bucket["first"]][0] += bucket["nll"]
                    sums[bucket["first"]][1] += bucket["tokens"]
                ends = [first + table.rows[0]["bucket"] for first in firsts]
                curves.append(Curve(keys[name], ends, [finite(sums[first][0] / sums[first][1]) for first in firsts]))
        if curves:
            last = max(x for curve in curves for x in curve.xs)
            parts.append(
                curve_figure(
                    numbered("position-loss", number),
                    "Loss in nats per token against the index of the token in its window: the table beside it says "
                    "how the windows do as a whole.",
                    f"Loss against the token's index, in the longest windows: {table.settings}.",
                    curves,
                    AXES["position-loss"],
                    x_label="token index",
                    y_scale="linear",
                    trained_lengths=trained_lengths(table),
                    ticks=[2**power for power in range(4, 31) if min(xs_of(curves)) <= 2**power <= last],
                )
            )
        parts += [values(table), *_ranges(table), *missing_values(table)]
    return Section(TITLES["position-loss"], parts) if tables else None


def _ranges(table: Table) -> list[Grid]:
    """Perplexity by ranges of the token's index, of the longest length of every model and RoPE setting."""
    found = {name: rows[-1].get("ranges") or [] for name, rows in table.series.items()}
    columns = sorted({(part["first"], part["end"]) for parts in found.values() for part in parts})
    if len(columns) < 2:
        return []
    lines = []
    for name, parts in found.items():
        cells = {(p["first"], p["end"]): show({"task": "position-loss", "value": p["perplexity"]}) for p in parts}
        lines.append([name, *(cells.get(column, "") for column in columns)])
    header = ["perplexity of tokens", *(f"{first:,} to {end:,}" for first, end in columns)]
    return [Grid(header, lines, numbers_from=1)]


def copying(measured: Measured) -> Section | None:
    tables = measured.of_task("copying")
    parts: list = [Text(EXPLANATIONS["copying"])]
    for table in tables:
        parts += [Text(f"Copied: {table.settings}."), values(table), *missing_values(table)]
    return Section(TITLES["copying"], parts) if tables else None


def recall(measured: Measured) -> Section | None:
    return against_length("recall", measured)


def attention_maps(measured: Measured) -> Section | None:
    """Divergence of attention against layer, of the longest length of every model and RoPE setting."""
    parts: list = [Text(EXPLANATIONS["attention-maps"])]
    tables = measured.of_task("attention-maps")
    for number, table in enumerate(tables, 1):
        keys, curves = keys_of(table), []
        for name, rows in table.series.items():
            if heads := read_raw(rows[-1], "heads"):
                layers: dict[int, list[float]] = {}
                for head in heads:
                    layers.setdefault(head["layer"], []).append(head["divergence"])
                curves.append(Curve(keys[name], [*layers], [sum(some) / len(some) for some in layers.values()]))
        if curves:
            last = max(xs_of(curves))
            parts.append(
                curve_figure(
                    numbered("attention-maps", number),
                    "Divergence of attention against layer: the table beside it has the means.",
                    f"Divergence from the original's attention, mean over heads, against layer: {table.settings}.",
                    curves,
                    "divergence (nats)",
                    x_label="layer",
                    x_scale="linear",
                    y_scale="linear",
                    ticks=list(range(0, int(last) + 1, max(1, int(last) // 6))),
                )
            )
        parts += [values(table), *missing_values(table)]
    return Section(TITLES["attention-maps"], parts) if tables else None


def layers(measured: Measured) -> Section | None:
    """Harm against layer, of the longest length of every model and RoPE setting, and the order to keep layers in."""
    parts: list = [Text(EXPLANATIONS["layers"])]
    tables = measured.of_task("layers")
    for number, table in enumerate(tables, 1):
        found = {name: lines for name, rows in table.series.items() if (lines := read_raw(rows[-1], "layers"))}
        keys = keys_of(table)
        curves = [
            Curve(keys[name], [e["layer"] for e in some], [e["harm"] for e in some]) for name, some in found.items()
        ]
        if curves:
            last = max(xs_of(curves))
            parts.append(
                curve_figure(
                    numbered("layers", number),
                    "Harm against layer: the table beside it has the divergence of the whole model.",
                    f"Harm of each layer's conversion: {table.settings}.",
                    curves,
                    "harm (nats per token)",
                    x_label="layer",
                    x_scale="linear",
                    y_scale="linear",
                    ticks=list(range(0, int(last) + 1, max(1, int(last) // 6))),
                )
            )
        parts += [values(table), _whole(table), *_orders(table), *missing_values(table)]
        parts += [Fold(f"Layers of {name}, swapped alone", [_swapped(lines)]) for name, lines in found.items()]
    return Section(TITLES["layers"], parts) if tables else None


def _whole(table: Table) -> Grid:
    """The measures of the models as they are, the original's first."""
    lines = []
    for name, rows in table.series.items():
        for label, prefix in ((rows[-1]["baseline"], "baseline_"), (name, "")):
            numbers = [rows[-1].get(f"{prefix}{text}") for text in ("perplexity", "copy", "again")]
            lines.append([label, *("" if number is None else f"{number:.2f}" for number in numbers)])
    return Grid(["as they are", "perplexity", "second copy (nats)", "read again (nats)"], lines, numbers_from=1)


def _orders(table: Table) -> list[Bullets]:
    orders = {name: rows[-1].get("order") or [] for name, rows in table.series.items()}
    items = [f"{name}: keep first {', '.join(map(str, order))}" for name, order in orders.items() if order]
    return [Bullets(items)] if items else []


def _swapped(lines: list[dict]) -> Grid:
    """What each layer does when it alone is converted, and when it alone is the original's."""
    header = ["layer", "harm", *(name.replace("_", ", ") for name in SWAPPED)]
    cells = [[str(line["layer"]), *(f"{line[name]:.3f}" for name in ("harm", *SWAPPED))] for line in lines]
    return Grid(header, cells, numbers_from=0)


def tasks(measured: Measured) -> Section | None:
    """Benchmark and metric against model."""
    tables = measured.of_task("tasks")
    names = list(dict.fromkeys(name for table in tables for name in table.series))
    lines = []
    for table in tables:
        row = table.rows[0]
        for length in table.lengths or (None,):
            cells = {
                name: show(found) for name, rows in table.series.items() for found in rows if found["length"] == length
            }
            at = f" at {length}" if length else ""
            shots = shots_of(row)
            what = [f"{row['benchmark']}{at}", row["dimension"] or "", f"{row['metric']} ({row['filter']})", shots]
            lines.append([*what, *(cells.get(name, "") for name in names)])
    grid = Grid(["benchmark", "dimension", "metric", "shots", *names], lines, numbers_from=4)
    missing = [part for table in tables for part in missing_values(table)]
    return Section(TITLES["tasks"], [Text(EXPLANATIONS["tasks"]), grid, *missing]) if tables else None


def speed(measured: Measured) -> Section | None:
    parts: list = [Text(EXPLANATIONS["speed"])]
    tables = measured.of_task("speed")
    for number, table in enumerate(tables, 1):
        mode = table.rows[0]["mode"]
        parts.append(
            curve_figure(
                numbered("speed", number),
                f"Median seconds of {mode} against length. {in_words(table)}",
                f"Median seconds of {table.settings}, against length.",
                curves_of(table),
                "seconds",
                x_label="length (tokens)",
            )
        )
        parts += [values(table), _memory(table), *missing_values(table)]
    return Section(TITLES["speed"], parts) if tables else None


def makings(measured: Measured) -> Section | None:
    """How each number was made: the settings of every row, its machine, and the commands."""
    if not measured.rows:
        return None
    parts: list = []
    for table in measured.tables:
        parts.append(Fold(f"{TITLES[table.task]}: {table.settings}", [*_making(table), *_documents(table)]))
    if absent := [path for row in measured.rows for path in row["raw"].values() if not path.is_file()]:
        parts.append(
            Text(
                f"{len(absent)} files of raw results are not beside their rows: what is drawn from them is "
                f"left out (the first: {absent[0]}).",
                notice=True,
            )
        )
    commands = dict.fromkeys(row["command"] for row in measured.rows)
    paths = dict.fromkeys(f"{row['model']}: {row['model_path']}" for row in measured.rows)
    parts.append(Fold("Commands and paths", [Code("\n".join(commands)), Bullets(list(paths))]))
    return Section("How each number was made", parts)


SECTIONS: list[Callable[[Measured], Section | None]] = [
    models,
    perplexity,
    position_loss,
    passkey,
    copying,
    recall,
    attention_maps,
    layers,
    boundary,
    tasks,
    speed,
    lambda measured: recovery(measured.recoveries),
    makings,
]


def _notice(rows: list[dict]) -> list[Text]:
    """The one sentence that must stand before the numbers of a model that has hardly been trained."""
    seen = {
        row["model"]: row["tokens_seen"]
        for row in rows
        if row["tokens_seen"] is not None and row["tokens_seen"] < LITTLE_TRAINING
    }
    if not seen:
        return []
    names = ", ".join(f"{model}: {tokens:,}" for model, tokens in seen.items())
    return [
        Text(
            f"Little training. Tokens seen: {names}. The paper trained on 7.5 billion tokens in each of three stages; "
            f"minutes of training show the machinery, not the paper's result.",
            notice=True,
        )
    ]


def _changed(rows: list[dict]) -> list[Text]:
    """What must stand before numbers of one name that are of several models or texts."""
    several = {
        "its files": {row["model"]: len(row["model_states"]) for row in rows if len(row["model_states"]) > 1},
        "its documents": {row["model"]: len(row["text_states"]) for row in rows if len(row["text_states"]) > 1},
    }
    return [
        Text(
            f"{model}: its rows are of {count} states of {what}; of each measurement the latest row is shown, so "
            f"numbers of one line may not belong together.",
            notice=True,
        )
        for what, counts in several.items()
        for model, count in counts.items()
    ]


def _memory(table: Table) -> Fold:
    """Peak memory and tokens per second, model against length."""
    header = ["model", "length", "tokens per second", "peak memory", "memory of"]
    lines = [
        [
            name,
            str(row["length"]),
            "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
            "" if row["peak_bytes"] is None else _size(row["peak_bytes"]),
            row["memory_kind"] or "",
        ]
        for name, rows in table.series.items()
        for row in rows
    ]
    return Fold("Memory and throughput", [Grid(header, lines, numbers_from=1)])


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _making(table: Table) -> list:
    """A line for each number, and the machines and versions that made them."""
    header = ["model", "length", "stride", "tokens", "seed", "dtype", "seconds", "date", "made with"]
    machines: dict[str, int] = {}
    lines = []
    for name, rows in table.series.items():
        for row in rows:
            machine = machines.setdefault(surroundings(row), len(machines) + 1)
            length, stride, seed = (
                "" if row.get(key) is None else str(row[key]) for key in ("length", "stride", "seed")
            )
            tokens = "" if row.get("tokens") is None else f"{row['tokens']:,}"
            cells = [name, length, stride, tokens, seed, row["dtype"]]
            lines.append([*cells, f"{row['seconds']:.1f}", row["date"], f"[{machine}]"])
    return [
        Grid(header, lines, numbers_from=1),
        Bullets([f"[{number}] {machine}" for machine, number in machines.items()]),
    ]


def surroundings(row: dict) -> str:
    """The machine and the versions of a row."""
    versions = row["versions"] | ({"commit": row["commit"]} if row.get("commit") else {})
    return f"{row['device']}; {', '.join(f'{package} {number}' for package, number in versions.items())}"


def _documents(table: Table) -> list:
    row = table.rows[0]
    if "document_names" not in row:
        return []
    skipped = [f"{name} (empty or too short, left out)" for name in row.get("skipped_documents", [])]
    return [Fold(f"Documents of {data_of(row)}", [Bullets([*row["document_names"], *skipped])])]
