"""scripts/cluster/slurm.sh under a SLURM of its own, with two nodes on this machine, a task each."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.train.layouts import DDP, Run, succeed
from tests.train.results import STAGES, record

ROOT = Path(__file__).parents[2]
BINARIES = f"{os.environ['PATH']}:/usr/sbin:/sbin"
DAEMONS = ["munged", "slurmctld", "slurmd", "sbatch"]
MISSING = [name for name in DAEMONS if not shutil.which(name, path=BINARIES)]
SECONDS = 300  # that anything may take on a busy machine
SETTINGS = ["stages.k.max_steps=300", "stages.qkv.logging_steps=1", "training.save_steps=25"]
# Nodes have addresses for names, so that MASTER_ADDR is reached; MASTER_PORT comes from the job's
# number. A job fills both nodes, so that another has to pre-empt it.
CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[{ports[1]},{ports[2]}] CPUs=1 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=600
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING), reason=f"no SLURM here: {', '.join(MISSING)} not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons are started as root"),
]


def until(condition, what):
    """Waits until `condition` returns something true, and returns it; `what` describes the wait."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not after {SECONDS} s: {what()}"
        time.sleep(0.1)
    return found


class Slurm:
    """A running SLURM."""

    def __init__(self, directory: Path):
        self.directory, self.conf = directory, directory / "slurm.conf"
        self.daemons: list[subprocess.Popen] = []
        self.jobs: list[str] = []
        self.environment = os.environ | {
            "PATH": f"{directory}/bin:{Path(sys.executable).parent}:{BINARIES}",
            "SLURM_CONF": str(self.conf),
            "LAYOUT": "recipes/accelerate/2cpu.yaml",
        }

    def keep_layout(self) -> None:
        """Ask `accelerate`, which imports torch, once for what every start of the job needs."""
        asked = '. scripts/cluster/layout.sh "$LAYOUT" && env | grep -E "^(ACCELERATE|FSDP)_"'
        told = self.ask("bash", "-c", asked)
        (self.directory / "bin").mkdir()
        (self.directory / "bin/accelerate").write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
        (self.directory / "bin/accelerate").chmod(0o755)

    def start(self) -> None:
        directory = self.directory
        with ExitStack() as held:
            free = [held.enter_context(socket.create_server(("", 0))) for _ in range(3)]
            ports = [server.getsockname()[1] for server in free]
        host = socket.gethostname().split(".")[0]
        self.conf.write_text(CONF.format(directory=directory, ports=ports, host=host))
        (directory / "gres.conf").write_text("NodeName=127.0.0.[1-2] Name=gpu File=/dev/null\n")
        (directory / "munge.key").write_bytes(os.urandom(1024))
        (directory / "munge.key").chmod(0o600)
        kinds = ("key", "pid", "log", "seed")
        files = [f"--{kind}-file={directory}/munge.{kind}" for kind in kinds]
        files.append(f"--socket={directory}/munge.socket")
        self._start("munged", "--foreground", "--force", *files)
        until((directory / "munge.socket").exists, self._printed)
        self._start("slurmctld", "-D")
        for node in ("127.0.0.1", "127.0.0.2"):
            self._start("slurmd", "-D", "-N", node)
        self.keep_layout()
        until(lambda: self.ask("sinfo", "-h", "-o%T %D").split() == ["idle", "2"], self._printed)

    def _start(self, *command: str) -> None:
        with (self.directory / "printed").open("a") as printed:
            streams = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
            self.daemons.append(subprocess.Popen(command, env=self.environment, **streams))

    def _printed(self) -> str:
        return (self.directory / "printed").read_text()

    def ask(self, *command: str) -> str:
        """What a command prints; "" if SLURM refuses."""
        options = {"env": self.environment, "cwd": ROOT, "capture_output": True, "text": True}
        return subprocess.run(command, **options).stdout.strip()

    def submit(self, *arguments: str) -> str:
        size = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
        self.jobs.append(self.ask("sbatch", "--parsable", *size, *arguments))
        return self.jobs[-1]

    def state(self, job: str) -> dict[str, str]:
        facts = self.ask("scontrol", "show", "job", job).split()
        return dict(fact.split("=", 1) for fact in facts if "=" in fact)

    def until_state(self, job: str, state: str, restarts: int) -> dict[str, str]:
        """Wait until a job that has restarted this often is in this state."""

        def reached():
            now = self.state(job)
            assert int(now["Restarts"]) <= restarts, now
            return now if (now["JobState"], now["Restarts"]) == (state, str(restarts)) else None

        return until(reached, lambda: f"{state}: {self.state(job)}")

    def hurry(self, job: str) -> None:
        """Restart a requeued job after 3 s, not 2 min; its nodes would refuse it at once."""
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")

    def rank(self, job: str, rank: int) -> psutil.Process | None:
        """The process that SLURM started as a task of a job, if it exists."""
        wanted = {"SLURM_JOB_ID": job, "RANK": str(rank), "SLURM_CONF": str(self.conf)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_task = process.environ().items() >= wanted.items()
                if is_task and process.parent().name().startswith("slurmstepd"):
                    return process
        return None

    def end(self) -> None:
        """End the daemons, and the jobs that a failed test has left."""
        while left := [process for process in psutil.process_iter() if self._started(process)]:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, 10)
        for daemon in self.daemons:
            daemon.wait()

    def _started(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            # they have a title instead of their environment
            steps = tuple(f"slurmstepd: [{job}." for job in self.jobs)
            if " ".join(process.cmdline()).startswith(steps):
                return True
            return process.environ().get("SLURM_CONF") == str(self.conf)
        return False


@pytest.fixture
def slurm():
    # pytest's own is too long a name for a socket
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    running = Slurm(directory)
    try:
        running.start()
        yield running
    finally:
        running.end()
        shutil.rmtree(directory, ignore_errors=True)


def steps(out: Path) -> int:
    """The steps of the first stage that log.jsonl has."""
    log = out / "1-k/log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def final_losses(out: Path) -> list:
    kept = [record(out / stage) for stage in STAGES]
    return [(of["final_loss"], of["held_out"], of["hardware"]["processes"]) for of in kept]


def test_a_job_killed_then_told_to_stop_then_pre_empted_ends_with_the_losses_of_an_unbroken_run(
    slurm, real_recipe, tmp_path
):
    out, log, unbroken = tmp_path / "out", tmp_path / "job.log", tmp_path / "unbroken"
    script = ["scripts/cluster/slurm.sh", str(real_recipe), *SETTINGS, "--out", str(out)]
    command = ["--gpus-per-node=1", f"--output={log}", *script]

    killed = slurm.submit(*command)
    until(lambda: list(out.glob("1-k/trainer/checkpoint-*")), log.read_text)
    slurm.rank(killed, 1).send_signal(signal.SIGKILL)
    ended = slurm.until_state(killed, "FAILED", restarts=0)
    assert ended["ExitCode"] not in ("0:0", "75:0"), log.read_text()
    assert slurm.rank(killed, 0) is None

    job = slurm.submit(*command)
    until(lambda: "continues after step" in log.read_text(), log.read_text)
    before = steps(out)
    until(lambda: steps(out) > before, log.read_text)
    slurm.ask("scancel", "--signal=USR1", job)
    slurm.until_state(job, "PENDING", restarts=1)
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] in ("SIGUSR1", "a signal to another process"), log.read_text()
    assert (out / f"1-k/trainer/checkpoint-{stopped['step']}/state").exists()

    slurm.hurry(job)
    until(lambda: f"continues after step {stopped['step']}" in log.read_text(), log.read_text)
    until(lambda: steps(out) > stopped["step"], log.read_text)
    urgent = slurm.submit("--partition=high", f"--output={tmp_path}/urgent.log", "--wrap=true")
    slurm.until_state(job, "PENDING", restarts=2)
    stopped = json.loads((out / "stopped.json").read_text())
    assert stopped["signal"] in ("SIGTERM", "a signal to another process"), log.read_text()
    slurm.until_state(urgent, "COMPLETED", restarts=0)

    slurm.hurry(job)
    ended = slurm.until_state(job, "COMPLETED", restarts=2)
    assert ended["ExitCode"] == "0:0"
    assert log.read_text().count("1-k: trains") == 4  # one process says so, at every start
    succeed(tmp_path, [Run([real_recipe, *SETTINGS, "--out", unbroken], DDP)])
    assert final_losses(out) == final_losses(unbroken)
