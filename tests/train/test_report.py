"""What is made of a finished run: the card of each stage, the recovery curve and its page."""

import math

from huggingface_hub import ModelCard
from typer.testing import CliRunner

from coca_cli.evaluate import app as evaluate_app
from coca_hf.report.recovery import read_recovery
from tests.train.results import STAGES, log_lines, record


def test_every_loss_of_a_real_run_is_on_its_curve(real_unbroken):
    run = read_recovery(real_unbroken)
    assert [stage.name for stage in run.stages] == ["k", "qkv", "full"]
    before = 0
    for name, stage in zip(STAGES, run.stages, strict=True):
        lines, kept = log_lines(real_unbroken / name), record(real_unbroken / name)
        logged = [(line["tokens_seen"], line["loss"]) for line in lines]
        assert [(point.tokens, point.loss) for point in stage.training] == logged
        after, held_out = kept["tokens_seen"], kept["held_out"]
        ends = [(before, held_out["before"]), (after, held_out["after"])]
        assert [(point.tokens, point.loss) for point in stage.held_out] == ends
        before = after
    points = [point for stage in run.stages for point in [*stage.held_out[:1], *stage.training]]
    seconds = [point.seconds for point in points]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    [blocks] = {stage.record.held_out.xxh3_128 for stage in run.stages}
    assert blocks is not None


def test_the_page_of_a_real_run_has_its_figures_and_its_table(real_unbroken, tmp_path):
    arguments = ["report", str(real_unbroken), "--out", str(tmp_path / "page")]
    result = CliRunner().invoke(evaluate_app, arguments)
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "page/report.md").read_text()
    for stage in STAGES:
        kept = record(real_unbroken / stage)
        losses = [kept["held_out"][moment] for moment in ("before", "after")]
        cells = [f"{kept['tokens_seen']:,}", *(f"{loss:.4f}" for loss in losses)]
        cells += [f"{math.exp(loss):,.2f}" for loss in losses]
        assert f"| out | {stage[2:]} | {' | '.join(cells)} |" in page
        device = f"| out | {stage[2:]} | 1 x {kept['hardware']['device']} |"
        assert device in page.replace("\\_", "_")
    for figure in ("recovery", "recovery-seconds"):
        assert f"({figure}.png)" in page
        assert (tmp_path / f"page/{figure}.png").read_bytes().startswith(b"\x89PNG")


LEARNING_RATES = {"1-k": "0.001", "2-qkv": "0.001", "3-full": "0.0005"}


def test_every_stage_has_a_card_with_all_stages_up_to_it(unbroken):
    for number, stage in enumerate(LEARNING_RATES, 1):
        card = ModelCard.load(unbroken / stage / "README.md")
        kept, lines = record(unbroken / stage), card.text.splitlines()
        rows = [line for line in lines if line.startswith(("| k |", "| qkv |", "| full |"))]
        assert len(rows) == len(kept["stages"]) == number
        assert f"| {kept['final_loss']:.3f} | {kept['seconds']:,.0f} |" in rows[-1]
        assert f"| {kept['tokens']} | 20 | {LEARNING_RATES[stage]} |" in rows[-1]
        assert sum(summary["tokens"] for summary in kept["stages"]) == kept["tokens_seen"]
        assert kept["stages"][-1]["seconds"] == kept["seconds"] > 0
        assert f"Tokens seen in CoCA training: {kept['tokens_seen']:,}." in card.text
        assert "- digits.jsonl, weight 1" in card.text
        assert "trained before" not in card.text
    assert "q\\_proj, t\\_proj, v\\_proj" in card.text
    assert "| full | all | lm | 4 |" in card.text


def test_the_card_names_adapters_objectives_and_the_teacher(train, tiny_llama_dir):
    mixed = "stages.k.objective={lm: 0.5, distill: 0.25}"
    stage = train(f"teacher={tiny_llama_dir}", mixed, "stages.k.lora={r: 3, alpha: 6}")
    text = ModelCard.load(stage / "README.md").text.replace("\\_", "_")
    told = f"0.5 lm + 0.25 distill, teacher {tiny_llama_dir.name}"
    assert f"| k | LoRA r 3 on t_proj | {told} | 3 |" in text
    assert "Training keeps the weights in float32" in text
