"""Two hosts of two processes: how often the weights of a model and its teacher are read from disk,
and what the network carries until every process has its part.

    python scripts/bench/host_reads.py --out docs/results/host-reads.json  # as root, on Linux

The hosts are network namespaces, and each sees its own copy of the checkpoints under the same path,
so no host finds in the page cache what another has read. The copies are dropped from the cache
before each run. `read_bytes` is what a process had fetched from the disk (/proc/self/io, which
counts the pages of mapped files, too); `sent_bytes` is what a host's network interface sent. The
processes compute on the CPU over gloo. Prints a table and writes JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from convert import byte_tokenizer, forget, make_source
from measure import show, write
from transformers import AutoModelForCausalLM, LlamaConfig

from coca_cli.main import train
from coca_hf import convert_checkpoint
from coca_hf.train import preflight, stages
from coca_hf.train.trainer import StageTrainer

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 258}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8}
LAYOUTS = {  # what `accelerate launch` tells its processes
    "FSDP2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    },
    "DDP": {},
}
RECIPE = """
model: {folder}/seen/model
teacher: {folder}/seen/teacher
data:
  seq_len: 32
  held_out_blocks: 0
  prepared: {folder}/prepared
  sources: [{{path: {folder}/text.txt, weight: 1}}]
training: {{use_cpu: true, report_to: none, disable_tqdm: true, save_strategy: "no"}}
stages: [{{name: k, train: [t_proj], max_steps: 1, objective: {{distill: 1}}}}]
"""
TABLE = {
    **{"layout": "layout", "host": "host", "process": "rank", "loads": "loads"},
    **{"read to check, MB": ("checked_bytes", 1e-6), "to load, MB": ("loaded_bytes", 1e-6)},
    **{"in all, MB": ("read_bytes", 1e-6), "seconds to load": "load_seconds"},
    **{"to send": "send_seconds", "host sent, MB": ("sent_bytes", 1e-6)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="26 MB of float16 weights each")
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to read from")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.dir.resolve(), prefix=".host-reads-") as folder,
        two_hosts() as hosts,
    ):
        result = measure(Path(folder), hosts, options)
    show("What two hosts of two processes read", TABLE, result["rows"])
    write(result, options.out)


def measure(folder: Path, hosts: dict[str, str], options: argparse.Namespace) -> dict:
    checkpoints = [folder / host / name for host in hosts for name in ("teacher", "model")]
    for teacher, model in zip(checkpoints[::2], checkpoints[1::2], strict=True):
        teacher.parent.mkdir()
        config = LlamaConfig(**SHAPE, num_hidden_layers=options.layers)
        make_source(teacher, config)
        byte_tokenizer().save_pretrained(teacher)
        convert_checkpoint(teacher, model, max_shard_size="1TB")
    (folder / "seen").mkdir()
    (folder / "text.txt").write_text(Path(__file__).read_text())
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    rows = []
    for layout in options.layouts:
        for checkpoint in checkpoints:
            forget(checkpoint)
        notes = folder / layout
        notes.mkdir()
        launch(hosts, folder, LAYOUTS[layout], notes)
        rows += [
            {"layout": layout, **json.loads(file.read_text())}
            for file in sorted(notes.glob("*.json"))
        ]
    sizes = {
        path.name: sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for path in checkpoints[:2]
    }
    return {"task": "host-reads", "weights_bytes": sizes, "rows": rows}


def launch(hosts: dict[str, str], folder: Path, layout: dict[str, str], notes: Path) -> None:
    """Run the recipe under a torchrun on each host; every process leaves a note."""
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | layout
    launchers = []
    for number, (host, address) in enumerate(hosts.items()):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=reads"]
        command += ["--rdzv-endpoint=10.77.0.1:29400", f"--rdzv-conf=is_host={number == 0}"]
        command += [f"--local-addr={address}", __file__, "--process", str(notes), host[-1]]
        mount = f'mount --bind {folder}/{host} {folder}/seen && exec "$@"'
        in_host = ["ip", "netns", "exec", host, "sh", "-c", mount, "sh"]
        launchers.append(subprocess.Popen([*in_host, *command], env=os.environ | variables))
    codes = [launcher.wait() for launcher in launchers]
    if any(codes):
        raise SystemExit(f"the launchers of the two hosts ended with {codes}")


@contextmanager
def two_hosts() -> Iterator[dict[str, str]]:
    """The addresses of two network namespaces with a link between them, by name."""
    names = [f"coca-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    try:
        for name in names:
            ip("netns", "add", name)
        one, other = (["eth0", "netns", name] for name in names)
        ip("link", "add", *one, "type", "veth", "peer", "name", *other)
        for name, address in hosts.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def process(notes: Path, host: str) -> None:
    """A process of the training: run the recipe of `notes`, and note what is read and sent."""
    load, resolve, prepare = stages._load, preflight.resolve_stages, Accelerator.prepare
    from_pretrained, step = AutoModelForCausalLM.from_pretrained, StageTrainer.training_step
    facts: dict = {"host": host, "rank": int(os.environ["RANK"]), "loads": []}
    facts |= {"load_seconds": 0.0, "send_seconds": 0.0, "sent_bytes": 0}

    def resolve_on_pretended_gpus(*arguments):
        """Accelerate shards only where it believes it is on GPUs."""
        runs = resolve(*arguments)
        if "FSDP_VERSION" in os.environ:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return runs

    def note_name(*arguments, **options):
        facts["loads"].append(Path(options["pretrained_model_name_or_path"]).name)
        return from_pretrained(*arguments, **options)

    def note_load(*arguments):
        facts["checked_bytes"] = bytes_read()
        with timed(facts, "load_seconds"):
            loaded = load(*arguments)
        facts["loaded_bytes"] = bytes_read() - facts["checked_bytes"]
        return loaded

    def note_prepare(*arguments, **options):
        PartialState().wait_for_everyone()
        before = bytes_sent()
        with timed(facts, "send_seconds"):
            prepared = prepare(*arguments, **options)
            PartialState().wait_for_everyone()
        facts["sent_bytes"] += bytes_sent() - before
        return prepared

    def note_step(*arguments):
        facts["read_bytes"], facts["loads"] = bytes_read(), ", ".join(facts["loads"])
        (notes / f"{facts['rank']}.json").write_text(json.dumps(facts))
        return step(*arguments)

    preflight.resolve_stages, stages._load = resolve_on_pretended_gpus, note_load
    AutoModelForCausalLM.from_pretrained = note_name
    Accelerator.prepare, StageTrainer.training_step = note_prepare, note_step
    sys.argv = ["coca-train", str(notes.parent / "recipe.yaml"), "--out", str(notes / "out")]
    train()


@contextmanager
def timed(facts: dict, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    facts[name] += time.perf_counter() - began


def bytes_read() -> int:
    """What this process has had fetched from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def bytes_sent() -> int:
    """What this host has sent to the other."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
