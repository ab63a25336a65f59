"""The recovery curve of a training run: how the loss comes back, in training and on held-out blocks."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from coca_hf.errors import CocaError
from coca_hf.report.plots import COLORS, STYLE

RECIPE, RECORD, LOG = "recipe.yaml", "training.json", "log.jsonl"


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


def recovery_png(recoveries: Sequence[Recovery]) -> bytes:
    """Loss against tokens seen: thin lines in training, points on held-out blocks, stages parted by dashed lines."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained", facecolor="white")
        axes = figure.subplots()
        for number, recovery in enumerate(recoveries):
            color = COLORS[number % len(COLORS)]
            training = [point for stage in recovery.stages for point in stage.training]
            held_out = [point for stage in recovery.stages for point in stage.held_out]
            axes.plot(*_columns(training), color=color, linewidth=1, alpha=0.5, label=f"{recovery.name}, training")
            axes.plot(*_columns(held_out), color=color, marker="o", linewidth=2, label=f"{recovery.name}, held out")
            for stage in recovery.stages:
                points = stage.held_out or stage.training
                if not points:
                    continue
                place: Any = {"transform": axes.get_xaxis_transform(), "fontsize": 9, "color": "#666666"}
                axes.axvline(points[0][0], color="#888888", linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
                if number == 0:
                    axes.text(points[0][0], 1.02, f" {stage.name}", ha="left", **place)
        axes.set_xlabel("tokens seen in CoCA training")
        axes.set_ylabel("loss, nats per token (lower is better)")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()


def recovery_markdown(recoveries: Sequence[Recovery]) -> str:
    """Held-out loss and perplexity before and after every stage that is complete."""
    lines = [
        "| run | stage | tokens seen | held-out loss before | after | perplexity before | after |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for recovery in recoveries:
        for stage in recovery.stages:
            if stage.record is None or not stage.record.get("held_out"):
                continue
            before, after = stage.record["held_out"]["before"], stage.record["held_out"]["after"]
            cells = [recovery.name, stage.name, f"{stage.record['tokens_seen']:,}", f"{before:.4f}", f"{after:.4f}"]
            cells += [f"{math.exp(before):,.2f}", f"{math.exp(after):,.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
