"""Weights & Biases and trackio by name: each stage is a run, with the steps and the values of
log.jsonl.

Nothing leaves this machine: Weights & Biases writes its offline files, trackio its local data base.
"""

import functools
import json
import os
import signal
import sqlite3
import struct
from collections import Counter

import pytest
import yaml

from coca_hf import CocaError
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.conftest import refused
from tests.train.conftest import make_recipe_tree
from tests.train.layouts import Run, before_each_step, launch, succeed
from tests.train.results import STAGES, log_lines

wandb = pytest.importorskip("wandb")
LOGGERS = ["training.report_to=[wandb,trackio]", "training.project=tiny"]
# of LevelDB's log format, in which Weights & Biases writes its files
BLOCK, HEAD, COMPLETE = (2**15, 7, (1, 4))


def log_to(directory, then=None):
    """Let both loggers write to `directory`, on this machine."""
    names = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    names |= {"WANDB_DIR": directory / "wandb-runs", "TRACKIO_DIR": directory / "trackio"}
    (directory / "wandb-runs").mkdir(exist_ok=True)
    os.environ.update({name: str(value) for name, value in names.items()})
    if then:
        then()


def die_in_step_4():
    """As `kill -9` would, in step 4 of stage qkv, which takes 5 steps."""

    def die_in_stage_2(trainer):
        if "2-qkv" in trainer.args.output_dir and trainer.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_step(die_in_stage_2)


@pytest.fixture(scope="module")
def logged(tiny_coca_dir, texts, tmp_path_factory):
    """A directory with OUT, `tiny-run`: stage 2 of 3 was killed in step 4 and resumed."""
    pytest.importorskip("trackio")  # not above: on import it reads where to write
    directory = tmp_path_factory.mktemp("logged")
    (directory / "recipe.yaml").write_text(yaml.safe_dump(make_recipe_tree(tiny_coca_dir, texts)))
    arguments = [directory / "recipe.yaml", "--out", directory / "tiny-run", *LOGGERS]
    dying = functools.partial(log_to, directory, die_in_step_4)
    assert launch(directory, [Run(arguments, hook=dying)], processes=1).wait() == -signal.SIGKILL
    resume = Run([*arguments, "--resume"], hook=functools.partial(log_to, directory))
    assert "continues after step 2" in succeed(directory, [resume], processes=1)
    return directory


def wandb_records(file):
    """The records of a run that Weights & Biases wrote, split at the ends of the file's blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = file.read_bytes(), HEAD, b""
    while place + HEAD <= len(content):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in COMPLETE:
            yield Record.FromString(record)
            record = b""


def of_wandb(directory):
    """The project, the run's name and every row's values; a kill loses what was in memory."""
    for file in wandb_files(directory):
        records = list(wandb_records(file))
        run = next((record.run for record in records if record.HasField("run")), None)
        for row in (record.history.item for record in records if record.HasField("history")):
            values = {item.nested_key[0]: json.loads(item.value_json) for item in row}
            yield run.project, run.display_name, values


def wandb_files(directory):
    return list((directory / "wandb-runs/wandb").glob("offline-run-*/*.wandb"))


def of_trackio(directory):
    with sqlite3.connect(directory / "trackio/tiny.db") as base:
        for name, row in base.execute("select run_name, metrics from metrics"):
            yield "tiny", name, json.loads(row)


@pytest.mark.real
@pytest.mark.parametrize("rows_of", [of_wandb, of_trackio])
def test_every_stage_is_a_run_with_the_losses_and_rates_of_its_log_at_every_step(logged, rows_of):
    rows = list(rows_of(logged))
    runs = {("tiny", f"tiny-run/{stage}") for stage in STAGES}
    assert {(project, name) for project, name, _ in rows} == runs
    for stage in STAGES:
        own = [row for _, name, row in rows if name == f"tiny-run/{stage}" and "train/loss" in row]
        keys, of_row = ("loss", "learning_rate"), ("train/loss", "train/learning_rate")
        logs = log_lines(logged / "tiny-run" / stage)
        lines = {line["step"]: [line[key] for key in keys] for line in logs}
        found = {row["train/global_step"]: [row[key] for key in of_row] for row in own}
        resumed_after = 2 if stage == "2-qkv" else 0
        assert found.items() <= lines.items()
        assert found.keys() >= {step for step in lines if step > resumed_after}


@pytest.mark.real
def test_a_resumed_stage_continues_its_run_of_wandb(logged):
    assert sorted(Counter(file.name for file in wandb_files(logged)).values()) == [1, 1, 2]


NOT_THERE = {
    "tensorboard": "TensorBoardCallback requires tensorboard to be installed",
    "wandb": "WandbCallback requires wandb to be installed. Run `pip install wandb`.",
    "trackio": "TrackioCallback requires trackio to be installed. Run `pip install trackio`.",
    "wandbb": "wandbb is not supported, only",
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_a_logger_that_is_not_there_is_refused_before_anything_is_written(
    recipe_path, tmp_path, monkeypatch, name
):
    utils = "transformers.integrations.integration_utils"
    for package in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setattr(f"{utils}.is_{package}_available", lambda: False)
    recipe = load_recipe(recipe_path, [f"training.report_to={name}"])
    refused(f"stages.k.report_to: {NOT_THERE[name]}", run_recipe, recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("trackio", "Project name 'llama_system' is not allowed"),
        ("wandb", "got WANDB_LOG_MODEL=end, expected false: a stage is not complete when"),
    ],
)
def test_settings_of_a_logger_that_do_not_work_are_refused(
    recipe_path, tmp_path, monkeypatch, logger, message
):
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    settings = [f"training.report_to={logger}", "training.project=llama_system"]
    with pytest.raises(CocaError, match=rf"stages\.k\.report_to: {message}"):
        run_recipe(load_recipe(recipe_path, settings), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_an_account_that_is_missing_is_one_line(train, monkeypatch):
    def init(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    message = "report_to: wandb begins no run: No API key configured.; WANDB_MODE=offline needs no account"
    refused(message, train, "training.report_to=wandb", stage=None)
