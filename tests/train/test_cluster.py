"""The launch files of scripts/cluster: SLURM's with stand-ins (see test_slurm.py), torchrun's."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.layouts import FSDP2
from tests.train.results import assert_same_losses, log_lines, logged

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "scripts/cluster"


def command(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (directory / name).chmod(0o755)


@pytest.fixture
def stand_ins(tmp_path) -> Path:
    """A PATH with an `srun` that starts two tasks and returns the higher exit code, and the
    other commands that slurm.sh calls.

    Signals reach the tasks before they listen. `$STATE` is the job's state after they have ended.
    """
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    command(
        bin_dir,
        "srun",
        '[ "$2" = --cpus-per-task=3 ] || exit 9\nshift 2\n'
        'for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" || code=$?; done\nexit "${code:-0}"',
    )
    scontrol = (
        f'case $1 in show) echo first; echo second;; *) echo "$@" >> {tmp_path}/scontrol.log;; esac'
    )
    command(bin_dir, "scontrol", scontrol)
    layout = "echo ACCELERATE_MIXED_PRECISION=no; echo FSDP_VERSION=2; echo RANK=9"
    command(bin_dir, "accelerate", layout)
    command(bin_dir, "squeue", "echo $STATE")
    python = "kill -TERM $$; kill -USR1 $$\n"
    python += f'echo "$RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $FSDP_VERSION $*" >> {tmp_path}/python.log\nexit $CODE'
    command(bin_dir, "python", python)
    return bin_dir


def of_slurm(stand_ins: Path, tasks: int, **others) -> dict[str, str]:
    """The environment of a SLURM job."""
    slurm = {"SLURM_JOB_ID": 42, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": 2}
    slurm |= {"SLURM_NTASKS_PER_NODE": tasks, "SLURM_CPUS_PER_TASK": 3, "SLURM_SUBMIT_DIR": ROOT}
    slurm |= {"PATH": f"{stand_ins}:{os.environ['PATH']}", **others}
    return os.environ | {name: str(value) for name, value in slurm.items()}


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (0, "RUNNING", ""),
        (75, "RUNNING", "requeue 42\n"),
        (75, "COMPLETING", ""),  # after scancel, which the real requeue would undo
        (1, "RUNNING", ""),
        (2, "RUNNING", ""),
    ],
)
def test_slurm_requeues_only_on_75_unless_cancelled_and_always_resumes(
    stand_ins, tmp_path, code, state, requeued
):
    environment = of_slurm(stand_ins, tasks=2, CODE=code, STATE=state)
    script = [str(CLUSTER / "slurm.sh"), "recipes/recover.yaml", "model=a b"]
    result = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    (tmp_path / "scontrol.log").touch()
    assert (tmp_path / "scontrol.log").read_text() == requeued
    asked = "-m coca_hf.train recipes/recover.yaml model=a b --resume"
    expected = f"0/2 0 first 2 {asked}\n1/2 1 first 2 {asked}\n"
    assert (tmp_path / "python.log").read_text() == expected


def test_slurm_starts_nothing_from_outside_the_repository(stand_ins, tmp_path):
    environment = of_slurm(stand_ins, tasks=2, CODE=0, STATE="RUNNING", SLURM_SUBMIT_DIR=tmp_path)
    script = [str(CLUSTER / "slurm.sh"), "recipe.yaml"]
    result = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"{tmp_path}: not the repository; submit the job from there\n"
    assert not (tmp_path / "python.log").exists()


def test_slurm_waits_for_its_tasks_if_the_signal_reaches_the_script(stand_ins, tmp_path):
    command(stand_ins, "srun", f"touch {tmp_path}/running; sleep 1; exit 75")
    environment = of_slurm(stand_ins, tasks=1, STATE="RUNNING")
    running = subprocess.Popen([str(CLUSTER / "slurm.sh"), "recipe.yaml"], env=environment)
    while not (tmp_path / "running").exists():
        assert running.poll() is None
        time.sleep(0.02)
    running.terminate()
    assert running.wait() == 75
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"


def test_slurm_is_asked_for_the_signal_ahead_of_the_limit_and_for_the_layouts_processes():
    options = re.findall(r"^#SBATCH (\S+)", (CLUSTER / "slurm.sh").read_text(), re.MULTILINE)
    size = {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8"}
    assert {*size, "--signal=USR1@600", "--requeue"} <= set(options)


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_bash(script):
    checks = [["bash", "-n"], *([["shellcheck", "-x"]] if shutil.which("shellcheck") else [])]
    for check in checks:
        result = subprocess.run([*check, str(script)], capture_output=True, text=True, cwd=ROOT)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_layout_of_gpus_tells_processes_what_those_of_the_tests_are_told():
    layout = "recipes/accelerate/8gpu.yaml"
    command = f"unset ${{!FSDP*}}; . scripts/cluster/layout.sh {layout} && env"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kwargs = {"env": {**os.environ, "PATH": path}, "capture_output": True, "text": True}
    result = subprocess.run(["bash", "-ec", command], cwd=ROOT, **kwargs)
    told = dict(line.partition("=")[::2] for line in result.stdout.splitlines())
    assert FSDP2.items() <= told.items(), result.stderr


def torchrun(recipe: Path, out: Path, printed: Path, *words: str) -> subprocess.Popen:
    """A running torchrun.sh, with two processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"NODES": 1, "GPUS": 2, "HOST": "127.0.0.1", "PORT": port, "RESTARTS": 1}
    settings |= {"OMP_NUM_THREADS": 1, "LAYOUT": "recipes/accelerate/2cpu.yaml"}
    settings["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    script = [str(CLUSTER / "torchrun.sh"), str(recipe), *words, "--out", str(out)]
    with printed.open("w") as file:
        return subprocess.Popen(script, env=environment, stdout=file, stderr=file)


def process_of_rank(rank: str, running: subprocess.Popen) -> psutil.Process | None:
    for child in psutil.Process(running.pid).children():
        with contextlib.suppress(psutil.Error):  # it is starting, or has ended
            if child.environ().get("RANK") == rank:
                return child
    return None


@pytest.mark.real
def test_torchrun_starts_again_after_a_kill_stops_at_sigterm_and_ends_with_the_losses_of_one_process(
    real_recipe, tmp_path
):
    """Twenty seconds: torch is imported by torchrun and twice by each process."""
    out, settings = tmp_path / "out", ["stages.k.max_steps=200"]
    recipe = load_recipe(real_recipe, settings)
    unbroken = run_recipe(recipe, tmp_path / "unbroken", stage="k")
    printed = tmp_path / "printed"
    running = torchrun(real_recipe, out, printed, "--stage", "k", *settings)

    def wait_for(found):
        while not found():
            assert running.poll() is None, printed.read_text()
            time.sleep(0.005)

    def resumed() -> list[str]:
        return re.findall(r"continues after step (\d+)", " ".join(printed.read_text().split()))

    wait_for(lambda: list(out.glob("1-k/trainer/checkpoint-*")))
    process_of_rank("1", running).kill()
    wait_for(resumed)
    before = len(log_lines(out / "1-k"))
    wait_for(lambda: len(log_lines(out / "1-k")) > before)
    running.terminate()
    assert running.wait(240) == 1, printed.read_text()  # torchrun's own, whatever the processes'
    assert [0 < int(step) < 200 for step in resumed()] == [True]
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] in ("SIGTERM", "a signal to another process")
    assert (out / f"1-k/trainer/checkpoint-{stopped['step']}/state").exists()
    assert json.loads((out / "inputs.json").read_text())["blocks_per_step"]["k"] == 4
    run_recipe(recipe, out, stage="k", resume=True)
    assert logged(out / "1-k", "step") == list(range(1, 201))
    assert_same_losses(out / "1-k", unbroken)
