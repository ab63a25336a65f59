"""The same recipe on two processes (DDP over gloo, launched by Accelerate) and on one."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import yaml
from transformers import Trainer

from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe

TWO_PROCESSES = {  # Accelerate starts several processes on a CPU only under this name, or with MPI
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_process_port": 29531,
    "mixed_precision": "no",
}


def launch(tmp_path, *arguments) -> subprocess.CompletedProcess:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(TWO_PROCESSES))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "two.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def lines(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


@pytest.mark.real
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(recipe_path, unbroken, tmp_path):
    halves = ["training.per_device_train_batch_size=2", "stages.qkv.per_device_train_batch_size=1"]
    accumulated = "stages.qkv.gradient_accumulation_steps=2"
    result = launch(
        tmp_path, "-m", "coca_hf.train", str(recipe_path), "--out", str(tmp_path / "out"), *halves, accumulated
    )
    assert result.returncode == 0, result.stderr
    for stage in ("1-k", "2-qkv", "3-full"):
        ours, theirs = lines(tmp_path / "out" / stage), lines(unbroken / stage)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], abs=1e-4)
        assert [line["tokens_seen"] for line in ours] == [line["tokens_seen"] for line in theirs]
        assert json.loads((tmp_path / "out" / stage / "training.json").read_text())["hardware"]["processes"] == 2
    assert result.stdout.count("parameters") == 3  # a line per stage, from the main process
    assert result.stdout.count("checkpoint: ") == 1


BROKEN = """
from coca_hf.train.trainer import StageTrainer
plain = StageTrainer.training_step
def step(self, *args):
    if self.state.global_step == 3:
        raise SystemExit(5)
    return plain(self, *args)
StageTrainer.training_step = step
from coca_hf.cli import train
train()
"""


@pytest.mark.real
@pytest.mark.skipif(
    "map_location = self.args.device" in inspect.getsource(Trainer._load_optimizer_and_scheduler),
    reason="this transformers (5.16.1 does) loads optimizers to the device cpu:0, unknown to torch; GPUs are fine",
)
def test_two_processes_resume_from_the_checkpoint_that_two_wrote(recipe_path, tmp_path):
    arguments = [str(recipe_path), "training.per_device_train_batch_size=2", "stages.k.max_steps=4", "--stage", "k"]
    (tmp_path / "broken.py").write_text(BROKEN)
    broken = launch(tmp_path, str(tmp_path / "broken.py"), *arguments, "--out", str(tmp_path / "out"))
    assert broken.returncode != 0
    assert (tmp_path / "out/1-k/trainer/checkpoint-2").exists()
    resumed = launch(tmp_path, "-m", "coca_hf.train", *arguments, "--out", str(tmp_path / "out"), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 2" in resumed.stdout
    run_recipe(load_recipe(recipe_path, ["stages.k.max_steps=4"]), tmp_path / "one", stage="k")
    ours, theirs = lines(tmp_path / "out/1-k"), lines(tmp_path / "one/1-k")
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    assert [line["tokens_seen"] for line in ours] == [line["tokens_seen"] for line in theirs]
