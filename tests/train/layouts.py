"""Running coca-train in several processes on a CPU: DDP or FSDP2 over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

# Accelerate shards only where it believes to be on GPUs, and on a CPU falls back to DDP without a word.
FSDP_ON_CPU = """
import sys
from accelerate import PartialState
from accelerate.utils import DistributedType
from coca_hf.train import stages
plan = stages._plan
def plan_and_pretend(*arguments):
    runs = plan(*arguments)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return runs
stages._plan = plan_and_pretend
"""
RUN = "\nfrom coca_hf.cli import train\ntrain()\n"
FSDP2 = {  # what `accelerate launch` makes of an FSDP2 configuration
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def command_and_environment(
    script_dir: Path, arguments: list[str], processes: int = 2, fsdp: dict | None = None, code: str = ""
) -> tuple[list[str], dict[str, str]]:
    """To run coca-train in so many processes, after `code`; `fsdp`: changes to `FSDP2`, None for DDP."""
    script = script_dir / f"train-{processes}-{'ddp' if fsdp is None else 'fsdp'}.py"
    sharded = fsdp is not None and processes > 1
    script.write_text((FSDP_ON_CPU if sharded else "") + code + RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({**FSDP2, **fsdp} if sharded else {})}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launcher += ["--master-port", str(free_port())]
    return [*launcher, str(script), *arguments], environment


def train(script_dir: Path, *arguments, **layout) -> subprocess.CompletedProcess:
    command, environment = command_and_environment(script_dir, list(map(str, arguments)), **layout)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def log_lines(stage_dir: Path) -> list[dict]:
    """The training losses that a stage logged."""
    lines = map(json.loads, (stage_dir / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]
