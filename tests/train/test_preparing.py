"""Two processes before their first stage: one prepares the blocks, and the other waits."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from coca_hf import tokens
from coca_hf.train import data, processes, stages
from coca_hf.train.data import Corpus
from coca_hf.train.processes import EXIT_STOPPED
from tests.train.layouts import DDP, Run, launch, succeed
from tests.train.results import logged

pytestmark = pytest.mark.real
STAGE = ["--stage", "k"]


@pytest.fixture
def arguments(real_recipe, tmp_path):
    setting = f"data.prepared={tmp_path / 'prepared'}"
    return [real_recipe, setting, *STAGE, "--out", tmp_path / "out"]


def slowed(owner, name, seconds):
    plain = getattr(owner, name)

    def slow(*arguments):
        time.sleep(seconds)
        return plain(*arguments)

    setattr(owner, name, slow)


def slowly():
    """Tokenise one document at a time, once the held-out text is known."""
    tokens.PIECE_CHARACTERS = 700
    processes.FAREWELL_SECONDS = 2.0  # for one that was killed and cannot be told
    plain = data.batches

    def slow(pieces):
        for batch in plain(pieces):
            time.sleep(0.1)
            yield batch

    data.batches = slow


def start_slowly():
    slowed(Corpus, "_first_state", 10)


def read_slowly():
    slowed(data, "file_hash", 5)  # there are two files


def with_disks_of_their_own():
    shared = Corpus.directory.fget
    own = f"on-{os.environ['RANK']}"
    Corpus.directory = property(lambda self: shared(self).parent / own / shared(self).name)


def with_other_text():
    if os.environ["RANK"] == "1":
        Corpus._described = lambda self, file, known: f"hash of another {file.name}"


def with_another_teacher():
    os.environ["LOCAL_RANK"] = "0"  # as on another machine
    if os.environ["RANK"] == "1":
        stages.model_hashes = lambda directory, check_stop: {"config.json": "another"}


def wait_until_it_prepares(launched, directory: Path) -> None:
    while not list(directory.glob("prepared/*/source-0.bin")):
        assert launched.process.is_alive(), launched.output.read_text()
        time.sleep(0.05)
    time.sleep(1)


@pytest.mark.parametrize("hook", [start_slowly, read_slowly])
def test_a_preparation_may_outlast_the_collectives_limit(arguments, real_unbroken, tmp_path, hook):
    printed = succeed(tmp_path, [Run([*arguments, "training.ddp_timeout=8"], DDP, hook)])
    assert printed.count("data: preparing 12 blocks") == 1
    assert logged(tmp_path / "out/1-k") == pytest.approx(logged(real_unbroken / "1-k"), abs=1e-4)


def test_every_host_that_does_not_see_the_blocks_prepares_them(arguments, real_unbroken, tmp_path):
    succeed(tmp_path, [Run(arguments, DDP, with_disks_of_their_own)])
    assert logged(tmp_path / "out/1-k") == pytest.approx(logged(real_unbroken / "1-k"), abs=1e-4)
    one, other = (next((tmp_path / "prepared" / f"on-{rank}").iterdir()) for rank in (0, 1))
    for name in ("order.bin", "source-0.bin", "source-1.bin", "held-out.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


OTHERS = {
    with_other_text: r"sources\.0\.topics\.jsonl is [\d,]+ bytes, xxh3_128 \w+, here hash of another t",
    with_another_teacher: r"teacher\.config\.json is \w{32}, here another; teacher\.model",
}


@pytest.mark.parametrize("hook", OTHERS)
def test_a_host_with_other_inputs_is_named_and_ends_all(arguments, tiny_llama_dir, tmp_path, hook):
    settings = [f"teacher={tiny_llama_dir}", "stages.k.objective=distill"]
    launched = launch(tmp_path, [Run([*arguments, *settings], DDP, hook)])
    assert launched.wait(60) not in (0, None)
    error = rf"process 1: got other inputs than the main process: {OTHERS[hook]}"
    assert len(re.findall(error, launched.printed())) == 2, launched.printed()


def test_an_error_of_the_process_that_prepares_ends_all_with_it(arguments, real_text, tmp_path):
    rows = (real_text / "topics.jsonl").read_text() + '{"text": 5}\n'
    (tmp_path / "topics.jsonl").write_text(rows)
    changed = [*arguments, f"data.sources.0.path={tmp_path / 'topics.jsonl'}"]
    started = time.monotonic()
    launched = launch(tmp_path, [Run(changed, DDP)])
    assert launched.wait() not in (0, None)
    assert time.monotonic() - started < 60
    printed = launched.printed()
    error = f"error: {tmp_path / 'topics.jsonl'}:60: got int in column 'text', expected text"
    assert printed.count(error) == 2
    assert "CocaError" not in printed, "a traceback"
    assert not (tmp_path / "out/1-k").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_and_the_blocks_are_kept(
    arguments, real_unbroken, tmp_path, rank
):
    launched = launch(tmp_path, [Run(arguments, DDP, slowly)])
    wait_until_it_prepares(launched, tmp_path)
    os.kill(launched.ranks()[rank], signal.SIGUSR1)
    launched.wait(60)
    printed = launched.printed()
    assert "1-k: stopped by SIGUSR1 before it began; the blocks that are pr" in printed, printed
    assert f"exitcode : {EXIT_STOPPED}" in printed
    stopped = json.loads((tmp_path / "out/stopped.json").read_text())
    assert stopped == {"signal": "SIGUSR1", "stage": "k"}
    state = next(tmp_path.glob("prepared/*/state.json")).read_text()
    assert json.loads(state)["state"]["parts"]["source-0"], "what was tokenised is kept"
    succeed(tmp_path, [Run([*arguments, "--resume"], DDP)])
    assert logged(tmp_path / "out/1-k") == pytest.approx(logged(real_unbroken / "1-k"), abs=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_is_killed_the_other_does_not_hang(arguments, real_unbroken, tmp_path, rank):
    launched = launch(tmp_path, [Run(arguments, DDP, slowly)])
    wait_until_it_prepares(launched, tmp_path)
    ranks = launched.ranks()
    os.kill(ranks[rank], signal.SIGKILL)
    launched.wait(60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    succeed(tmp_path, [Run([*arguments, "--resume"], DDP)])
    assert logged(tmp_path / "out/1-k") == pytest.approx(logged(real_unbroken / "1-k"), abs=1e-4)
