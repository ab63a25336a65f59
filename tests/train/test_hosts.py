"""Two hosts with a link that can be cut, as network namespaces that the tests make and remove."""

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import convert_checkpoint
from tests.train.layouts import FSDP2, Host, Run, before_each_step, launch, succeed
from tests.train.results import STAGES, log_lines
from tests.train.test_kills import final_losses, slow_steps

pytestmark = pytest.mark.real
SILENCE = 8  # seconds: training.ddp_timeout
BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    with ExitStack() as at_the_end:
        try:
            made = at_the_end.enter_context(import_module("host_reads").two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        yield [
            Host(name, address, number == 0, "10.77.0.1:29400")
            for number, (name, address) in enumerate(made.items())
        ]


def logged(stage_dir, launches) -> None:
    """Wait until the stage has logged a step."""
    while not (stage_dir / "log.jsonl").exists() or not log_lines(stage_dir):
        for launched in launches:
            assert launched.process.is_alive(), launched.output.read_text()
        time.sleep(0.02)


def set_link(host, state) -> None:
    subprocess.run(["ip", "-n", host.namespace, "link", "set", "eth0", state], check=True)


def lose(launched) -> None:
    """`kill -9` of all processes of a host."""
    ranks = launched.ranks()
    launched.process.kill()
    for pid in ranks:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)
    launched.wait()


def test_a_lost_host_and_a_cut_link_end_with_the_unbroken_losses(real_recipe, hosts, tmp_path):
    arguments = [real_recipe, f"training.ddp_timeout={SILENCE}", "training.save_steps=1"]
    succeed(tmp_path, [Run([*arguments, "--out", tmp_path / "unbroken"], FSDP2)])
    out = tmp_path / "out"
    runs = [Run([*arguments, "--out", out, "--resume"], FSDP2, slow_steps)]
    second = hosts[1]

    with ExitStack() as at_the_end:

        def start(host):
            launched = launch(tmp_path, runs, host=host)
            at_the_end.callback(lose, launched)
            return launched

        here, there = map(start, hosts)
        logged(out / STAGES[0], [here, there])
        lose(there)
        there = start(second)
        logged(out / STAGES[1], [here, there])
        set_link(second, "down")
        cut = time.monotonic()
        message = "no answer from another process for training.ddp_timeout seconds"
        while message not in here.printed():
            assert here.process.is_alive(), here.output.read_text()
            assert time.monotonic() < cut + 2 * SILENCE, here.output.read_text()
            time.sleep(0.1)
        lose(there)
        set_link(second, "up")
        there = start(second)
        assert there.wait() == 0, there.output.read_text()
        assert here.wait() == 0, here.output.read_text()
    assert final_losses(out) == final_losses(tmp_path / "unbroken")
    assert not list(out.glob("**/checkpoint-*"))


@pytest.fixture
def disks(tiny_tokenizer, tmp_path):
    """Two directories with the same teacher and model, neither in the page cache."""
    teacher, model = tmp_path / "a/teacher", tmp_path / "a/model"
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), num_attention_heads=8, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(teacher)
    tiny_tokenizer.save_pretrained(teacher)
    convert_checkpoint(teacher, model)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.sync()
    for file in tmp_path.glob("[ab]/*/*"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return tmp_path / "a", tmp_path / "b"


def note_reads(directory):
    """Bytes that each process has had read from a disk until its first step."""

    def note(trainer):
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        (directory / f"rank-{os.environ['RANK']}").write_text(counts["read_bytes"])

    before_each_step(note)


def test_each_host_reads_weights_from_its_disk_once_at_most(disks, real_recipe, hosts, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    tree = yaml.safe_load(real_recipe.read_text())
    tree |= {"model": str(seen / "model"), "teacher": str(seen / "teacher")}
    tree["stages"] = [{"name": "k", "train": ["t_proj"], "max_steps": 1}]
    tree["stages"][0] |= {"objective": {"distill": 1}, "save_strategy": "no"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    run = Run([tmp_path / "recipe.yaml", "--out", tmp_path / "out"], FSDP2)
    run.arguments.append("training.global_batch_size=8")
    run.hook = partial(note_reads, tmp_path)
    launches = [
        launch(tmp_path, [run], processes=4, host=replace(host, disk=(disk, seen), restarts=0))
        for host, disk in zip(hosts, disks, strict=True)
    ]
    for launched in launches:
        assert launched.wait() == 0, launched.output.read_text()
    read = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(4)]
    files = (disks[0] / name / "model.safetensors" for name in ("model", "teacher"))
    model, teacher = (file.stat().st_size for file in files)
    # Python's own files may come from the disk, too
    assert 0.95 < (read[0] + read[1]) / (model + teacher) < 1.4, read
    assert 0.95 < (read[2] + read[3]) / teacher < 1.4, read  # it is sent its part of the model
