"""Two hosts with a link that can be cut, as network namespaces that the tests make and remove."""

import os
import subprocess
import time
from contextlib import ExitStack

import pytest

from tests.train.layouts import FSDP2, Host, Run, launch, succeed
from tests.train.results import log_lines
from tests.train.test_kills import STAGES, final_losses, slow_steps

pytestmark = pytest.mark.real
SILENCE = 8  # seconds: training.ddp_timeout


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts():
    names = [f"coca-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    try:
        one, other = (["eth0", "netns", name] for name in names)
        ip("link", "add", *one, "type", "veth", "peer", "name", *other)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [
            Host(name, f"10.77.0.{number}", number == 1, "10.77.0.1:29400")
            for number, name in enumerate(names, 1)
        ]
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def logged(stage_dir, launches) -> None:
    """Wait until the stage has logged a step."""
    while not (stage_dir / "log.jsonl").exists() or not log_lines(stage_dir):
        for launched in launches:
            assert launched.process.is_alive(), launched.output.read_text()
        time.sleep(0.02)


def lose(launched) -> None:
    """`kill -9` of all processes of a host."""
    ranks = launched.ranks()
    launched.process.kill()
    for pid in ranks:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)
    launched.wait()


def test_a_lost_host_and_then_a_cut_link_end_with_the_losses_of_an_unbroken_run(
    real_recipe, hosts, tmp_path
):
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
        ip("-n", second.namespace, "link", "set", "eth0", "down")
        cut = time.monotonic()
        message = "no answer from another process for training.ddp_timeout seconds"
        while message not in here.printed():
            assert here.process.is_alive(), here.output.read_text()
            assert time.monotonic() < cut + 2 * SILENCE, here.output.read_text()
            time.sleep(0.1)
        lose(there)
        ip("-n", second.namespace, "link", "set", "eth0", "up")
        there = start(second)
        assert there.wait() == 0, there.output.read_text()
        assert here.wait() == 0, here.output.read_text()
    assert final_losses(out) == final_losses(tmp_path / "unbroken")
    assert not list(out.glob("**/checkpoint-*"))
