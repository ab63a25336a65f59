"""The recovery curve of a training run: how the loss comes back, in training and on held-out blocks."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from coca_hf.errors import CocaError
from coca_hf.report.document import Figure, Fold, Grid, Section, Text
from coca_hf.report.plots import Curve, Key, line_figure

RECIPE, RECORD, LOG = "recipe.yaml", "training.json", "log.jsonl"
EXPLANATION = (
    "Loss in training, and, where data.held_out_blocks are kept out of it, on blocks that it never sees, before and "
    "after every stage. Not to be compared with perplexities of coca-eval: other text, no sliding windows."
)


@dataclass
class StageCurve:
    """One stage; losses in nats per token. `held_out`: (tokens seen, loss), before the stage and after it at least."""

    name: str
    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    record: dict[str, Any] | None = None  # training.json; None for a stage that is not complete


@dataclass
class Recovery:
    """What a directory that coca-train wrote says about its losses."""

    name: str
    stages: list[StageCurve]


def read_recovery(out_dir: Path) -> Recovery | None:
    """The curves in `out_dir`, or None where coca-train has not made it. Unfinished stages are read as far as they are.

    Raises CocaError for a line of a log that is none.
    """
    if not (out_dir / RECIPE).is_file():
        return None
    directories = [path.parent for path in out_dir.glob(f"*-*/{LOG}")]
    directories.sort(key=lambda path: int(path.name.split("-")[0]))
    return Recovery(out_dir.name, [_read_stage(directory) for directory in directories])


def recovery(recoveries: Sequence[Recovery]) -> Section | None:
    """Loss against tokens seen, and held-out loss and perplexity before and after every stage that is complete."""
    if not recoveries:
        return None
    curves: list[Curve] = []
    borders: list[tuple[float, str]] = []
    for number, run in enumerate(recoveries):
        for style, kind in enumerate(("held out", "training")):
            points = [point for stage in run.stages for point in (stage.training if style else stage.held_out)]
            if points:
                key = Key(f"{run.name}, {kind}", number, style, marked=not style)
                curves.append(
                    Curve(
                        key,
                        [tokens for tokens, _ in points],
                        [loss if math.isfinite(loss) else None for _, loss in points],
                    )
                )
        for stage in run.stages if number == 0 else ():
            if points := stage.held_out or stage.training:
                borders.append((points[0][0], stage.name))
    ticks = MaxNLocator(5, integer=True).tick_values(0, max((x for curve in curves for x in curve.xs), default=1))
    draw = line_figure(
        curves,
        "loss (nats per token)",
        "tokens seen in CoCA training",
        y_scale="linear",
        ticks=list(ticks[:-1]),
        x_scale="linear",
        borders=borders,
    )
    figure = Figure(
        name="recovery",
        alt="Loss against tokens seen in training; the table below has its values before and after every stage.",
        caption="How the loss comes back after conversion: on held-out blocks, and in training (the mean since the "
        f"line before). Dashed: where the stages of {recoveries[0].name} begin.",
        draw=draw,
        keys=[curve.key for curve in curves],
    )
    losses = _losses(recoveries)
    tables = [losses] if losses.lines else []
    return Section("Recovery in training", [Text(EXPLANATION), figure, *tables, _makings(recoveries)])


def _losses(recoveries: Sequence[Recovery]) -> Grid:
    lines = []
    for run, stage, record in _complete(recoveries):
        if held_out := record.get("held_out"):
            losses = held_out["before"], held_out["after"]
            cells = [f"{loss:.4f}" for loss in losses] + [f"{math.exp(loss):,.2f}" for loss in losses]
            lines.append([run, stage, f"{record['tokens_seen']:,}", *cells])
    header = ["run", "stage", "tokens seen", "loss before", "loss after", "perplexity before", "perplexity after"]
    return Grid(header, lines, numbers_from=2)


def _makings(recoveries: Sequence[Recovery]) -> Fold:
    lines = []
    for run, stage, record in _complete(recoveries):
        machine, packages = record.get("hardware", {}), record.get("versions", {})
        versions = ", ".join(f"{package} {number}" for package, number in packages.items())
        where = f"{machine.get('processes')} x {machine.get('device')}" if machine else ""
        lines.append([run, stage, where, versions, f"{record.get('seconds', 0):,.0f}", record.get("date", "")])
    return Fold("How these were made", [Grid(["run", "stage", "machine", "versions", "seconds", "date"], lines, 4)])


def _complete(recoveries: Sequence[Recovery]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for run in recoveries:
        for stage in run.stages:
            if stage.record is not None:
                yield run.name, stage.name, stage.record


def _read_stage(directory: Path) -> StageCurve:
    stage = StageCurve(directory.name.partition("-")[2])
    for number, text in enumerate((directory / LOG).read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            points = stage.held_out if "held_out_loss" in line else stage.training
            points.append((line["tokens_seen"], line.get("held_out_loss", line.get("loss"))))
        except (ValueError, TypeError, KeyError):
            raise CocaError(f"{directory / LOG}, line {number}: got no line of coca-train's; delete the line") from None
    if (directory / RECORD).is_file():
        stage.record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    return stage
