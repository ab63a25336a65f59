"""Running recipes in several processes on a CPU: DDP or FSDP2 over gloo, under torch's elastic
launcher.

Importing torch and transformers takes longer than these runs, so launchers and ranks are forked
from one server that has imported them; they are processes of their own, which can be killed.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from coca_cli import main
from coca_hf.train import preflight, stages
from coca_hf.train.trainer import StageTrainer

FSDP2 = {  # what `accelerate launch` sets for an FSDP2 layout
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
DDP: dict[str, str] = {}
CLONE_NEWNS = 0x20000  # Linux: mounts of one's own; os.unshare comes with Python 3.12
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([__name__])


class Interrupted(BaseException):
    """Raised by a hook in all ranks to end a run; the launch continues with the next run."""


def before_each_step(action: Callable[[StageTrainer], object]):
    plain = StageTrainer.training_step

    def step(self, *arguments):
        action(self)
        return plain(self, *arguments)

    StageTrainer.training_step = step


def interrupt_in_step(number: int):
    def interrupt(trainer):
        if trainer.state.global_step == number - 1:
            raise Interrupted

    before_each_step(interrupt)


@contextmanager
def interrupted_in_step(number: int):
    """Interrupt a run of this process in this step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTrainer, "training_step", StageTrainer.training_step)
        interrupt_in_step(number)
        with pytest.raises(Interrupted):
            yield


@dataclass
class Run:
    """A call of coca-train; `hook`, a function of a test module, patches coca_hf for it."""

    arguments: list
    environment: dict[str, str] = field(default_factory=dict)
    hook: Callable | None = None


@dataclass
class Host:
    """A machine of several: a network namespace, and how launchers in it find the others.

    disk: a directory that only this host sees, and the path where it sees it.
    """

    namespace: str
    address: str
    keeps_rendezvous: bool
    rendezvous: str
    number_of_hosts: int = 2
    restarts: int = 3
    disk: tuple[Path, Path] | None = None

    def enter(self) -> None:
        """Move this process, and all that it starts, to the network and the disk of the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        if self.disk:
            if libc.unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "unshare")
            subprocess.run(["mount", "--make-rslave", "/"], check=True)
            subprocess.run(["mount", "--bind", *self.disk], check=True)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as scripts/cluster/torchrun.sh


@dataclass
class Launch:
    """A running launcher; `output` is what it and all ranks write."""

    process: multiprocessing.Process
    output: Path

    def wait(self, seconds: float = 240) -> int | None:
        self.process.join(seconds)
        assert self.process.exitcode is not None, (
            f"still runs after {seconds} s: {self.output.read_text()}"
        )
        return self.process.exitcode

    def printed(self) -> str:
        """What they wrote, as one line."""
        return " ".join(self.output.read_text().split())

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in order; [] before they exist."""
        try:
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            return []
        return sorted(map(int, children))


def warm_server() -> None:
    """Let the server do its imports, which take longer than a run."""
    process = server.Process(target=gc.collect)
    process.start()
    process.join()


def launch(
    directory: Path, runs: list[Run], processes: int = 2, host: Host | None = None
) -> Launch:
    """Start this many processes that make `runs` one after the other; a single one has no launcher.

    host: the machine of one of the processes, which has a launcher of its own.
    """
    output = directory / f"output-{time.monotonic_ns()}.txt"
    arguments: tuple = (str(output), runs, processes)
    target = _rank if processes == 1 else _launcher
    process = server.Process(target=target, args=(*arguments, host) if host else arguments)
    process.start()
    return Launch(process, output)


def succeed(directory: Path, runs: list[Run], processes: int = 2) -> str:
    """Make the runs; returns what was printed."""
    launched = launch(directory, runs, processes)
    code = launched.wait()
    assert code == 0, launched.output.read_text()
    return launched.output.read_text()


def _launcher(output: str, runs: list[Run], processes: int, host: Host | None = None) -> None:
    _write_to(output)
    rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    how = {"start_method": "fork", "monitor_interval": 0.05, "max_restarts": 0}
    config = LaunchConfig(1, 1, processes, **rendezvous, **how)
    if host:
        host.enter()
        config.min_nodes = config.max_nodes = host.number_of_hosts
        config.nproc_per_node = processes // host.number_of_hosts
        config.max_restarts = host.restarts
        config.run_id, config.rdzv_endpoint = "hosts", host.rendezvous
        config.rdzv_configs["is_host"] = host.keeps_rendezvous
        config.rdzv_configs["keep_alive_interval"] = 2  # a lost host is missed after three
        config.local_addr = host.address
    elastic_launch(config, _rank)(output, runs, processes)


def _rank(output: str, runs: list[Run], processes: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a launcher's would be forked along
    _write_to(output)
    os.environ["OMP_NUM_THREADS"] = "1"
    for run in runs:
        sys.argv = ["coca-train", *map(str, run.arguments)]
        for name in FSDP2:
            os.environ.pop(name, None)
        os.environ.update(run.environment if processes > 1 else {})
        sharded = run.environment and processes > 1
        preflight.resolve_stages = _resolve_on_pretended_gpus if sharded else _resolve
        if run.hook:
            run.hook()
        # the next run needs it
        PartialState.destroy_process_group = _destroy if run is runs[-1] else _keep
        try:
            main.train()
        except SystemExit as ended:
            if ended.code or run is runs[-1]:
                raise
        except Interrupted:
            pass
        finally:
            _undo_hooks()


_resolve, _complete = preflight.resolve_stages, stages._complete
_training_step, _compute_loss = StageTrainer.training_step, StageTrainer.compute_loss
_destroy = PartialState.destroy_process_group


def _keep(state) -> None:
    pass


def _resolve_on_pretended_gpus(*arguments):
    """Accelerate shards only if it believes to be on GPUs."""
    runs = _resolve(*arguments)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return runs


def _undo_hooks() -> None:
    preflight.resolve_stages, stages._complete = _resolve, _complete
    StageTrainer.training_step, StageTrainer.compute_loss = _training_step, _compute_loss


def _write_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


# compiles hundreds of patterns here, once for all processes
get_checkpoint_conversion_mapping("llama")
gc.freeze()  # no garbage collection in a forked process needs to look at this
