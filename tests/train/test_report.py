"""The recovery curve of a directory that coca-train wrote, against its logs and records."""

import math

from typer.testing import CliRunner

from coca_cli.evaluate import app as evaluate_app
from coca_hf.report.recovery import read_recovery
from tests.train.results import log_lines, record

STAGES = ["1-k", "2-qkv", "3-full"]


def test_every_loss_of_a_real_run_is_on_its_curve(real_unbroken):
    run = read_recovery(real_unbroken)
    assert [stage.name for stage in run.stages] == ["k", "qkv", "full"]
    before = 0
    for name, stage in zip(STAGES, run.stages, strict=True):
        lines, kept = log_lines(real_unbroken / name), record(real_unbroken / name)
        assert [(point.tokens, point.loss) for point in stage.training] == [
            (line["tokens_seen"], line["loss"]) for line in lines
        ]
        after, held_out = kept["tokens_seen"], kept["held_out"]
        ends = [(before, held_out["before"]), (after, held_out["after"])]
        assert [(point.tokens, point.loss) for point in stage.held_out] == ends
        before = after
    seconds = [
        point.seconds for stage in run.stages for point in [*stage.held_out[:1], *stage.training]
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def test_the_page_of_a_real_run_has_its_figures_and_its_table(real_unbroken, tmp_path):
    result = CliRunner().invoke(
        evaluate_app, ["report", str(real_unbroken), "--out", str(tmp_path / "page")]
    )
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "page/report.md").read_text()
    for stage in STAGES:
        kept = record(real_unbroken / stage)
        losses = [kept["held_out"][moment] for moment in ("before", "after")]
        cells = [f"{kept['tokens_seen']:,}", *(f"{loss:.4f}" for loss in losses)]
        cells += [f"{math.exp(loss):,.2f}" for loss in losses]
        assert f"| out | {stage[2:]} | {' | '.join(cells)} |" in page
        assert f"| out | {stage[2:]} | 1 x {kept['hardware']['device']} |" in page.replace(
            "\\_", "_"
        )
    for figure in ("recovery", "recovery-seconds"):
        assert f"({figure}.png)" in page
        assert (tmp_path / f"page/{figure}.png").read_bytes().startswith(b"\x89PNG")
