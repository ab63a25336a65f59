"""The same recipe on two processes (DDP over gloo), on one, and by `accelerate launch`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.train.layouts import DDP, Run, succeed
from tests.train.results import STAGES, assert_same_losses, logged, record

pytestmark = pytest.mark.real
LAYOUT = Path(__file__).parents[2] / "recipes/accelerate/2cpu.yaml"
TWO_PROCESSES = yaml.safe_load(LAYOUT.read_text())
HALVES = ["training.per_device_train_batch_size=2", "stages.qkv.per_device_train_batch_size=1"]


def test_two_processes_have_the_losses_of_one_with_the_same_batch(recipe_path, unbroken, tmp_path):
    out = tmp_path / "out"
    accumulated = "stages.qkv.gradient_accumulation_steps=2"
    printed = succeed(tmp_path, [Run([recipe_path, "--out", out, *HALVES, accumulated], DDP)])
    for stage in STAGES:
        assert_same_losses(out / stage, unbroken / stage)
        for key in ("step", "tokens_seen"):
            assert logged(out / stage, key) == logged(unbroken / stage, key)
        assert record(out / stage)["hardware"]["processes"] == 2
    assert printed.count("parameters") == 3  # a line per stage, from the main process
    assert printed.count("checkpoint: ") == 1


def test_accelerate_launch_trains_a_recipe_on_the_processes_of_its_layout(recipe_path, tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAYOUT)]
    arguments = [str(recipe_path), "--stage", "k", "stages.k.max_steps=1", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "-m", "coca_hf.train", *arguments, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("parameters") == result.stdout.count("checkpoint: ") == 1
    kept = record(tmp_path / "out/1-k")
    assert (kept["hardware"]["processes"], kept["tokens"]) == (2, 2 * 4 * 20)
