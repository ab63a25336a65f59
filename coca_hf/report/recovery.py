"""The recovery curve of a training run: the loss in training and on held-out blocks."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.ticker import MaxNLocator
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from coca_hf.errors import CocaError
from coca_hf.models.hub import CONVERSION, TRAINING
from coca_hf.page import Curve, Figure, Fold, Grid, Key, Part, Plot, Section, Text

RECIPE, LOG = "recipe.yaml", "log.jsonl"
MADE = "How each number was made"  # in every page: a title of its end, or of a part of it
FEW = 3  # runs on one figure
# a stage's directory, and not a copy such as "1-k copy" beside it
_STAGE = re.compile(r"\d+-[\w-]+")
Kind = TypeVar("Kind", bound=BaseModel)
EXPLANATION = (
    "Loss in training, and, where data.held_out_blocks are kept out of it, on blocks that it "
    "never sees, before and after every stage. Not to be compared with perplexities of coca-eval: "
    "other text, no sliding windows."
)
OTHER_TEXT = (
    "The held-out losses are of different text, or of other tokens of it: compare the shapes of the "
    "curves, not the values."
)


class HeldOut(BaseModel):
    """Loss on held-out blocks, in nats per token; their number of tokens, and their hash."""

    before: float
    after: float
    tokens: int | None = None
    xxh3_128: str | None = None  # older records lack it


class Hardware(BaseModel):
    device: str
    processes: int


class Record(BaseModel):
    """The fields of a stage's training.json that the page shows."""

    tokens_seen: int
    held_out: HeldOut | None
    hardware: Hardware
    versions: dict[str, str]
    seconds: float
    date: str


class Calibration(BaseModel):
    seconds: float


class Conversion(BaseModel):
    """The fields of conversion.json that the page uses."""

    calibration: Calibration | None = None


class Line(BaseModel):
    """The fields of a line of log.jsonl that the page shows."""

    tokens_seen: int
    seconds: float
    held_out_loss: float | None = None
    # None for a bad first step
    loss: float | None = Field(validation_alias=AliasChoices("held_out_loss", "loss_lm", "loss"))


class Point(NamedTuple):
    """A loss in nats per token; None for a bad first step.

    seconds: of calibration and of training, earlier stages included.
    """

    tokens: int
    seconds: float
    loss: float | None


@dataclass
class StageCurve:
    """One stage. `held_out`: at least before and after it."""

    name: str
    training: list[Point] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    record: Record | None = None  # None if the stage is not complete


@dataclass
class Recovery:
    """The losses in a directory that coca-train wrote."""

    name: str
    stages: list[StageCurve]


def read_recovery(out_dir: Path) -> Recovery | None:
    """The curves in `out_dir`, unfinished stages included; None if coca-train has begun none there.

    Raises CocaError for a line of a log or a record that cannot be read. A last line without its
    end is left out: it is being written, or was when the run was killed.
    """
    if not (out_dir / RECIPE).is_file():
        return None
    found = (log.parent for log in out_dir.glob(f"*-*/{LOG}"))
    stages_of_run = (path for path in found if _STAGE.fullmatch(path.name))
    numbered = sorted((int(path.name.split("-")[0]), path) for path in stages_of_run)
    if not numbered:
        return None
    stages, seconds = [], 0.0
    for place, (_, directory) in enumerate(numbered):
        if place == 0 and (directory / CONVERSION).is_file():
            calibration = _read_record(directory / CONVERSION, Conversion).calibration
            seconds = calibration.seconds if calibration else 0.0
        stages.append(_read_stage(directory, seconds))
        seconds += stages[-1].record.seconds if stages[-1].record else 0.0
    return Recovery(out_dir.name, stages)


def recovery(recoveries: Sequence[Recovery]) -> Section | None:
    """Loss against tokens seen, and held-out loss before and after every complete stage."""
    if not recoveries:
        return None
    figures = [_figure("recovery", recoveries, "tokens", "tokens seen in the run")]
    if any(stage.held_out for run in recoveries for stage in run.stages):
        x_label = "seconds of the start's calibration and of the run"
        figures.append(_figure("recovery-seconds", recoveries, "seconds", x_label))
    losses = _losses(recoveries)
    tables = [losses] if losses.lines else []
    notices = [Text(OTHER_TEXT, notice=True)] if _hold_out_other_text(recoveries) else []
    parts: list[Part] = [Text(EXPLANATION), *notices, *figures, *tables, _makings(recoveries)]
    return Section("Recovery in training", [*parts])


def _hold_out_other_text(recoveries: Sequence[Recovery]) -> bool:
    """Whether held-out losses are known to be of different blocks."""
    found = [record.held_out for _, _, record in _complete(recoveries) if record.held_out]
    numbers, hashes = {one.tokens for one in found}, {one.xxh3_128 for one in found}
    return len(numbers - {None}) > 1 or len(hashes - {None}) > 1


def _figure(name: str, recoveries: Sequence[Recovery], axis: str, x_label: str) -> Figure:
    """Losses against `axis`, a field of points; for up to `FEW` runs also those in training."""
    curves: list[Curve] = []
    borders: list[tuple[float, str]] = []
    for number, run in enumerate(recoveries):
        kinds = {"held out": [stage.held_out for stage in run.stages]}
        if len(recoveries) <= FEW or not any(kinds["held out"]):
            kinds["training"] = [stage.training for stage in run.stages]
        for style, (kind, stages) in enumerate(kinds.items()):
            if points := [*itertools.chain(*stages)]:
                key = Key(f"{run.name}, {kind}", number, style, marked=not style)
                xs = [getattr(point, axis) for point in points]
                curves.append(Curve(key, xs, [point.loss for point in points]))
        for stage in run.stages if len(recoveries) == 1 else ():
            if points := stage.held_out or stage.training:
                borders.append((getattr(points[0], axis), stage.name))
    furthest = max((x for curve in curves for x in curve.xs), default=1)
    ticks = list(MaxNLocator(5, integer=True).tick_values(0, furthest)[:-1])
    axes: Any = {"y_scale": "linear", "x_scale": "linear", "ticks": ticks, "borders": borders}
    begin = f" Dashed: where the stages of {recoveries[0].name} begin." if borders else ""
    return Figure(
        name=name,
        alt=f"Loss against {x_label}; the table below has its values before and after every stage.",
        caption=f"Loss after conversion against {x_label}: on held-out blocks and, if there are at "
        f"most {FEW} runs, in training, as the mean between two lines of the log; whatever the "
        f"objective, the loss on the text.{begin}",
        drawing=Plot(curves, "loss (nats per token)", x_label, **axes),
    )


def _losses(recoveries: Sequence[Recovery]) -> Grid:
    lines = []
    for run, stage, record in _complete(recoveries):
        if record.held_out:
            losses = record.held_out.before, record.held_out.after
            cells = [f"{loss:.4f}" for loss in losses]
            cells += [f"{_perplexity(loss):,.2f}" for loss in losses]
            lines.append([run, stage, f"{record.tokens_seen:,}", *cells])
    header = ["run", "stage", "tokens seen", "loss before", "loss after"]
    return Grid([*header, "perplexity before", "perplexity after"], lines, numbers_from=2)


def _perplexity(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)  # exp would raise


def _makings(recoveries: Sequence[Recovery]) -> Fold:
    lines = []
    for run, stage, record in _complete(recoveries):
        versions = ", ".join(f"{package} {number}" for package, number in record.versions.items())
        where = f"{record.hardware.processes} x {record.hardware.device}"
        lines.append([run, stage, where, versions, f"{record.seconds:,.0f}", record.date])
    header = ["run", "stage", "machine", "versions", "seconds", "date"]
    return Fold(MADE, [Grid(header, lines, numbers_from=4)])


def _complete(recoveries: Sequence[Recovery]) -> Iterator[tuple[str, str, Record]]:
    for run in recoveries:
        for stage in run.stages:
            if stage.record is not None:
                yield run.name, stage.name, stage.record


def _read_stage(directory: Path, seconds: float) -> StageCurve:
    """seconds: before the stage."""
    stage = StageCurve(directory.name.partition("-")[2])
    for number, text in enumerate((directory / LOG).read_bytes().split(b"\n")[:-1], 1):
        where, remedy = f"{directory / LOG}, line {number}", "delete the line"
        line = _parsed(text, Line, f"{where}: got no line of coca-train's", remedy)
        points = stage.training if line.held_out_loss is None else stage.held_out
        points.append(Point(line.tokens_seen, seconds + line.seconds, line.loss))
    if (directory / TRAINING).is_file():
        stage.record = _read_record(directory / TRAINING, Record)
    return stage


def _read_record(path: Path, kind: type[Kind]) -> Kind:
    remedy = "restore the file, or train that stage again"
    return _parsed(path.read_bytes(), kind, f"{path}: got no record of coca-train's", remedy)


def _parsed(text: bytes, kind: type[Kind], problem: str, remedy: str) -> Kind:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise CocaError(f"{problem} ({reason}); {remedy}") from error
