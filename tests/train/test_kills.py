"""Processes that are told to stop, or killed at any moment: the rerun ends with the losses of an
unbroken run.

COCA_KILLS sets how many random kills: COCA_KILLS=20 pytest tests/train/test_kills.py -k
random_moment
"""

import contextlib
import json
import os
import random
import signal
import time
from functools import partial
from importlib import import_module

import pytest

from coca_cli.main import console
from coca_hf.train import stages
from coca_hf.train.processes import EXIT_STOPPED
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.layouts import FSDP2, Run, before_each_step, launch, succeed, warm_server
from tests.train.results import STAGES, log_lines, record

pytestmark = pytest.mark.real
KILLS = int(os.environ.get("COCA_KILLS", "4"))
VICTIMS = ["launcher", "rank 1", "all ranks", "rank 0"]


def final_losses(out):
    records = [record(out / stage) for stage in STAGES]
    return [(kept["final_loss"], kept["held_out"]["after"]) for kept in records]


def assert_held_out_losses_of(unbroken, out):
    for (_, ours), (_, theirs) in zip(final_losses(out), final_losses(unbroken), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def signal_rank_1(number):
    if os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), number)


def signal_in_step_2(number):
    """The signal reaches one process only, in its second step of stage k."""

    def signal_then(trainer):
        if trainer.state.global_step == 1 and "1-k" in trainer.args.output_dir:
            signal_rank_1(number)

    before_each_step(signal_then)


def slow_steps(seconds=0.2):
    before_each_step(lambda trainer: time.sleep(seconds))


def test_a_signal_to_one_process_stops_all_after_a_checkpoint_and_nothing_is_lost(
    real_recipe, real_unbroken, tmp_path
):
    out = tmp_path / "out"
    arguments = [real_recipe, "--out", out, "training.save_strategy=no"]
    hook = partial(signal_in_step_2, signal.SIGUSR1)
    launched = launch(tmp_path, [Run(arguments, FSDP2, hook)])
    launched.wait()
    printed = launched.printed()
    assert "1-k: stopped by" in printed, printed
    assert f"exitcode : {EXIT_STOPPED}" in printed  # of the ranks; the launcher has its own
    stopped = json.loads((out / "stopped.json").read_text())
    assert (stopped["stage"], stopped["step"]) == ("k", 2)
    assert [path.name for path in (out / "1-k/trainer").glob("checkpoint-*")] == ["checkpoint-2"]
    recipe = load_recipe(real_recipe, ["training.save_strategy=no"])
    run_recipe(recipe, out, resume=True)
    assert not (out / "stopped.json").exists()
    for stage in STAGES:
        ours, theirs = log_lines(out / stage), log_lines(real_unbroken / stage)
        # means over other intervals
        assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], abs=0.5)
        assert ours[-1]["tokens_seen"] == theirs[-1]["tokens_seen"]
    assert_held_out_losses_of(real_unbroken, out)


def test_sigterm_ends_the_command_with_75_and_a_checkpoint(real_recipe, real_unbroken, tmp_path):
    out = tmp_path / "out"
    hook = partial(signal_in_step_2, signal.SIGTERM)
    launched = launch(tmp_path, [Run([real_recipe, "--out", out], hook=hook)], processes=1)
    assert launched.wait() == EXIT_STOPPED == 75
    printed = launched.printed()
    assert "1-k: stopped by SIGTERM after step 2, with a checkpoint; continue with" in printed
    run_recipe(load_recipe(real_recipe), out, resume=True)
    assert final_losses(out) == final_losses(real_unbroken)


def signal_while_the_result_of_stage_k_is_written():
    """To one process only; a step would take longer than the test allows."""
    complete = stages._complete

    def signal_and_complete(stage, *rest):
        if os.environ["RANK"] == "1" and stage.name == "k":
            signal_rank_1(signal.SIGTERM)
            slow_steps(60)
        complete(stage, *rest)

    stages._complete = signal_and_complete


def test_a_signal_between_stages_stops_all_processes_there(real_recipe, real_unbroken, tmp_path):
    out = tmp_path / "out"
    hook = signal_while_the_result_of_stage_k_is_written
    launched = launch(tmp_path, [Run([real_recipe, "--out", out], FSDP2, hook)])
    launched.wait()
    assert time.time() - (out / "1-k/training.json").stat().st_mtime < 30
    printed = launched.printed()
    assert "2-qkv: stopped by SIGTERM before it began; the blocks that" in printed, printed
    assert f"exitcode : {EXIT_STOPPED}" in printed
    assert json.loads((out / "stopped.json").read_text()) == {"signal": "SIGTERM", "stage": "qkv"}
    assert not (out / "2-qkv").exists()
    run_recipe(load_recipe(real_recipe), out, resume=True)
    assert_held_out_losses_of(real_unbroken, out)


def die_before(module, name):
    module = import_module(f"coca_hf.train.{module}")
    plain = getattr(module, name)

    def die_or_go_on(*arguments):
        signal_rank_1(signal.SIGKILL)
        return plain(*arguments)

    setattr(module, name, die_or_go_on)


DYING = {
    "in step 2": partial(signal_in_step_2, signal.SIGKILL),
    "in a checkpoint": partial(die_before, "trainer", "save_state"),
    "while the result is written": partial(die_before, "stages", "_complete"),
}


def die_and_print_slowly(die):
    """The launcher's SIGTERM reaches the survivor before it has printed."""
    die()
    plain = console.print

    def print_slowly(*words, **how):
        time.sleep(1)
        plain(*words, **how)

    console.print = print_slowly


@pytest.mark.parametrize("moment", DYING)
def test_a_survivor_of_another_process_says_so_in_one_line_and_does_not_blame_the_disk(
    real_recipe, tmp_path, moment
):
    arguments = [real_recipe, "--stage", "k", "--out", tmp_path / "out"]
    hook = partial(die_and_print_slowly, DYING[moment])
    launched = launch(tmp_path, [Run(arguments, FSDP2, hook)])
    assert launched.wait(120) != 0
    printed = launched.printed()
    said = "error: another process of this run has ended, see its own message; co"
    assert said in printed, printed
    assert "cannot be written" not in printed


def kill(victim, launched, out):
    """`kill -9` of one rank, all of them, or their launcher, if they exist yet; returns when all
    have ended.

    A run whose last stage is done is killed as a whole: torch's launcher of forks may wait forever
    for a rank that was killed while it waited for the launcher's `multiprocessing.Event`.
    """
    ranks = launched.ranks()
    all_ranks = ranks or [launched.process.pid]
    victims = {"rank 0": all_ranks[:1], "rank 1": all_ranks[-1:], "all ranks": all_ranks}
    _kill(victims.get(victim, [launched.process.pid]))
    deadline = time.monotonic() + 240
    while launched.process.is_alive() and time.monotonic() < deadline:
        launched.process.join(0.1)
        if (out / STAGES[-1] / "training.json").exists():
            _kill([*ranks, launched.process.pid])
    launched.wait(1)
    for pid in ranks:
        deadline = time.monotonic() + 120
        while os.path.exists(f"/proc/{pid}") and "Z" not in _status(pid):
            assert time.monotonic() < deadline, f"rank {pid} lives on without its launcher"
            time.sleep(0.05)


def _kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _status(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.fixture(scope="module")
def unbroken_in_two(real_recipe, tmp_path_factory):
    """OUT of two FSDP2 processes, in one go, and the seconds it took."""
    directory = tmp_path_factory.mktemp("unbroken-in-two")
    warm_server()
    started = time.monotonic()
    launched = launch(directory, [Run([real_recipe, "--out", directory / "out"], FSDP2)])
    assert launched.wait() == 0, launched.output.read_text()
    return directory / "out", time.monotonic() - started


def test_a_run_killed_in_every_stage_launcher_one_rank_and_all_ranks_ends_with_the_same_losses(
    real_recipe, unbroken_in_two, tmp_path
):
    draw = random.Random(os.environ.get("COCA_KILLS_SEED", 0))
    out = tmp_path / "out"
    arguments = [real_recipe, "--out", out, "--resume"]
    # each kill comes later than the one before
    for stage, victim in zip(STAGES, VICTIMS, strict=False):
        launched = launch(tmp_path, [Run(arguments, FSDP2, slow_steps)])
        while not (out / stage / "log.jsonl").exists():
            assert launched.process.is_alive(), launched.output.read_text()
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        kill(victim, launched, out)
        assert not (out / "3-full/training.json").exists()
    succeed(tmp_path, [Run(arguments, FSDP2)])
    assert final_losses(out) == final_losses(unbroken_in_two[0])
    assert not list(out.glob("**/checkpoint-*")) + list(out.glob("**/*partial*"))


@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_killed_at_a_random_moment_ends_with_the_same_losses(
    real_recipe, unbroken_in_two, tmp_path, number
):
    expected, seconds = unbroken_in_two
    draw = random.Random(f"{number} {os.environ.get('COCA_KILLS_SEED', 0)}")
    out = killed_at_random(VICTIMS[number % len(VICTIMS)], real_recipe, seconds, draw, tmp_path)
    succeed(tmp_path, [Run([real_recipe, "--out", out, "--resume"], FSDP2)])
    assert final_losses(out) == final_losses(expected)
    assert not list(out.glob("**/checkpoint-*")) + list(out.glob("**/*partial*"))


def killed_at_random(victim, recipe, seconds, draw, directory):
    """OUT of a run killed before its end; if the victim did not exist, another moment is drawn."""
    for number in range(10):
        out = directory / f"out-{number}"
        launched = launch(directory, [Run([recipe, "--out", out], FSDP2)])
        launched.process.join(moment := draw.uniform(0.1, 0.95) * seconds)
        is_there = launched.process.is_alive() and (
            victim == "launcher" or len(launched.ranks()) == 2
        )
        files = [str(path.relative_to(out)) for path in [*out.glob("*"), *out.glob("*/trainer/*")]]
        kill(victim, launched, out)
        complete = (out / STAGES[-1] / "training.json").exists()
        if is_there and launched.process.exitcode and not complete:
            moment = f"after {moment:.1f} s of {seconds:.1f}, at try {number + 1}"
            print(f"{victim} {moment}, with {sorted(files)}")
            return out
    raise AssertionError(f"no moment when {victim} was there: {launched.output.read_text()}")
