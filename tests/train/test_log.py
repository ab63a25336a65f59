"""What people see of a run: the bar or its lines, log.jsonl, TensorBoard's event files."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerState
from transformers.integrations import integration_utils

from coca_hf.train.log import ProgressLine, StageLog, start_place, utilization
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe

STEPS = 4


@pytest.fixture(scope="module")
def shown(real_recipe, tmp_path_factory):
    """OUT of one stage with logging's default options, and what it printed."""
    directory = tmp_path_factory.mktemp("shown")
    tree = yaml.safe_load(real_recipe.read_text())
    for key in ("report_to", "disable_tqdm"):
        del tree["training"][key]
    tree["stages"] = [{"name": "k", "train": ["t_proj"], "max_steps": STEPS, "held_out_steps": 2}]
    (directory / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with redirect_stdout(io.StringIO()) as printed:
        run_recipe(load_recipe(directory / "recipe.yaml"), directory / "out")
    return directory / "out", printed.getvalue()


def logged(out) -> list[dict]:
    return [json.loads(line) for line in (out / "1-k/log.jsonl").read_text().splitlines()]


def test_tensorboard_has_the_losses_and_rates_of_the_log_beside_the_stages(shown):
    out, _ = shown
    events = EventAccumulator(str(out / "tensorboard/1-k")).Reload()
    lines = [line for line in logged(out) if "loss" in line]
    for key in ("loss", "learning_rate", "tokens_per_second", "memory_bytes"):
        scalars = events.Scalars(f"train/{key}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
        assert [scalar.value for scalar in scalars] == pytest.approx([line[key] for line in lines])
    held_out = [line["held_out_loss"] for line in logged(out) if "held_out_loss" in line]
    assert [scalar.value for scalar in events.Scalars("eval/loss")] == pytest.approx(held_out)


def test_in_a_directory_that_runs_share_every_stage_has_events_of_its_own(
    train, tmp_path, monkeypatch
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "shared"))
    monkeypatch.setattr(integration_utils.logger, "warning", pytest.fail)  # of values it drops
    train("training.report_to=tensorboard", "stages.qkv.max_steps=1", stage="k")
    train("training.report_to=tensorboard", "stages.qkv.max_steps=1", stage="qkv", resume=True)
    for stage, steps in (("1-k", [1, 2, 3]), ("2-qkv", [1])):
        events = EventAccumulator(str(tmp_path / "shared/out" / stage)).Reload()
        assert [scalar.step for scalar in events.Scalars("train/loss")] == steps


def test_every_line_of_the_log_has_time_speed_and_memory_and_no_mfu_on_a_cpu(shown):
    seconds = [line["seconds"] for line in logged(shown[0])]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0
    for line in logged(shown[0]):
        if "loss" in line:
            assert line["tokens_per_second"] > 0
            assert line["memory_bytes"] > 2**20
            assert line["mfu"] is None


def test_the_held_out_loss_is_measured_before_after_and_at_every_interval(shown):
    lines = [line for line in logged(shown[0]) if "held_out_loss" in line]
    measured = {line["step"]: line["held_out_loss"] for line in lines}
    assert sorted(measured) == [0, 2, STEPS]
    kept = json.loads((shown[0] / "1-k/training.json").read_text())["held_out"]
    assert (kept["before"], kept["after"]) == (measured[0], measured[STEPS])


def test_without_a_terminal_an_interval_is_a_line(shown):
    out, printed = shown
    values = r"loss \d\.\d{4}, lr [\d.e-]+, [\d,]+ tokens/s, \d+\.\d GiB, \d:\d\d:\d\d left"
    lines = re.findall(rf"^1-k step \d/{STEPS}: {values}$", printed, re.MULTILINE)
    assert len(lines) == STEPS
    losses = [f"loss {line['loss']:.4f}" for line in logged(out) if "loss" in line]
    assert all(loss in line for loss, line in zip(losses, lines, strict=True))
    assert len(re.findall(r"1-k step [024]: held-out loss \d\.\d{4}\n", printed)) == 3


def test_a_line_is_in_a_file_as_soon_as_it_is_printed(tmp_path):
    bar, state = ProgressLine("1-k"), TrainerState(global_step=3, is_world_process_zero=True)
    with (tmp_path / "job.log").open("w") as file, redirect_stdout(file):
        bar.on_log(None, state, None, logs={"eval_loss": 2.25})
        assert (tmp_path / "job.log").read_text() == "1-k step 3: held-out loss 2.2500\n"


def test_on_a_terminal_a_bar_has_the_same_values(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    bar, state = ProgressLine("1-k"), TrainerState(max_steps=9, is_world_process_zero=True)
    bar.on_train_begin(None, state, None)
    state.global_step = 3
    bar.on_step_end(None, state, None)
    measured = {"tokens_per_second": 12345.6, "mfu": 0.412, "memory_bytes": 3.5 * 2**30}
    bar.on_log(None, state, None, logs={"loss": 2.5, "learning_rate": 1e-4, **measured})
    bar.on_log(None, state, None, logs={"eval_loss": 2.25})
    bar.on_train_end(None, state, None)
    printed = capsys.readouterr()
    assert "loss 2.5000, lr 0.0001, 12,346 tokens/s, MFU 41.2%, 3.5 GiB" in printed.err
    assert "3/9" in printed.err
    assert "1-k step 3: held-out loss 2.2500" in printed.err
    assert printed.out == ""


def test_mfu_is_the_models_share_of_what_the_gpus_can_do():
    expected = pytest.approx(50_000 * 7e9 / (2 * 312e12))
    assert utilization(50_000, 7e9, "NVIDIA A100-SXM4-80GB", 2) == expected
    assert utilization(50_000, 7e9, "NVIDIA RTX A4000", 2) is None
    assert utilization(50_000, 7e9, None, 2) is None


def test_measuring_the_held_out_loss_is_not_training_time(tmp_path, monkeypatch):
    now = iter([100.0, 107.0, 117.0, 120.0, 121.0])  # made, measuring from and until, asked twice
    monkeypatch.setattr("coca_hf.train.log.time.monotonic", lambda: next(now))
    log = StageLog(tmp_path / "log.jsonl", 8, 6, 1, 0, start_place(0) | {"seconds": 5.0})
    with log.pause():  # between two lines of the log
        pass
    assert log.seconds == 5 + 7 + 3
    assert log.measure(step=3)["tokens_per_second"] == 3 * 6 * 8 / (7 + 4)


def test_the_peak_of_memory_is_that_of_the_stage_and_not_of_an_earlier_one(tmp_path, monkeypatch):
    peak = [9 * 2**30]  # of an earlier stage

    def forget() -> None:
        peak[0] = 0

    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    monkeypatch.setattr("coca_hf.train.log.PartialState", lambda: on_a_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget)
    log = StageLog(tmp_path / "log.jsonl", 8, 6, 1, 0, start_place(0))
    log.on_train_begin(None, TrainerState(is_world_process_zero=False), None)
    peak[0] += 2**30
    assert log.measure(step=1)["memory_bytes"] == 2**30
