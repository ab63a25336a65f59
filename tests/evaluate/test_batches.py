"""Running out of memory, batches dealt to processes, and killed runs."""

import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coca_hf.evaluate import batches
from coca_hf.evaluate.batches import Batches, NoValue, auto_batch_size
from coca_hf.evaluate.passkey import passkey_rows
from coca_hf.evaluate.perplexity import VARIANTS, perplexity_rows, value_of
from coca_hf.evaluate.sample import draw_sample
from coca_hf.report.read import read_tables
from tests.evaluate.runs import OPTIONS, raw_of, run_of
from tests.evaluate.test_cli import rows_in

MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 9 bytes",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
    "API call",
]


def holds(limit, tried, message=MESSAGES[0]):
    """A computation whose memory holds `limit` items; it notes the sizes it was asked for."""

    def compute(batch):
        tried.append(len(batch))
        if len(batch) > limit:
            kind = torch.OutOfMemoryError if message == MESSAGES[0] else RuntimeError
            raise kind(message)
        return [item * item for item in batch]

    return compute


@pytest.mark.parametrize("message", MESSAGES)
def test_after_running_out_of_memory_batches_are_halved_and_stay_small(message):
    tried = []
    eight = Batches(8)
    results = eight.compute([([*range(20)], 1)], holds(3, tried, message))
    assert (results, eight.used) == ([item * item for item in range(20)], 2)
    assert tried == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]


def test_an_item_that_does_not_fit_into_memory_is_an_error_of_the_row():
    tried, said = [], r"^OOM: one sequence alone does not fit \(CUDA out of memory"
    with pytest.raises(NoValue, match=said):
        Batches(8).compute([([*range(20)], 1)], holds(0, tried))
    assert tried == [8, 4, 2, 1]


def test_other_exceptions_are_passed_on():
    def broken(batch):
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        Batches(1).compute([([1], 1)], broken)


@pytest.mark.parametrize(("num_processes", "sizes"), [(8, [100]), (3, [7, 1, 1, 4]), (5, [3])])
def test_processes_get_equal_shares_and_all_results_in_order(monkeypatch, num_processes, sizes):
    """Processes are threads here."""
    numbers = iter(range(sum(sizes)))
    groups = [([next(numbers) for _ in range(size)], 1) for size in sizes]
    gathered, everyone, here = {}, threading.Barrier(num_processes), threading.local()

    def gather(mine):
        gathered[here.process_index] = mine
        everyone.wait(60)
        return [result for index in range(num_processes) for result in gathered[index]]

    def process(index):
        here.process_index, here.num_processes, batched = index, num_processes, [0]

        def compute(batch):
            batched.append(len(batch))
            assert any(set(batch) <= set(items) for items, _ in groups)
            return [item * item for item in batch]

        of_64 = Batches(64)
        return of_64.compute(groups, compute), of_64.used, batched

    monkeypatch.setattr(batches, "processes", lambda: here)
    monkeypatch.setattr(batches, "gather_object", gather)
    with ThreadPoolExecutor(num_processes) as threads:
        results, used, batched = zip(*threads.map(process, range(num_processes)), strict=True)
    assert max(map(sum, batched)) - min(map(sum, batched)) <= 1
    assert [*results] == [[item * item for item in range(sum(sizes))]] * num_processes
    assert {*used} == {max(map(max, batched))}


def test_auto_begins_with_64_sequences_on_a_gpu_and_1024_tokens_on_a_cpu(monkeypatch):
    sizes = {8: 64, 16: 64, 300: 3, 512: 2, 513: 1, 32768: 1}
    assert {tokens: auto_batch_size(tokens) for tokens in sizes} == sizes
    monkeypatch.setattr(batches, "processes", lambda: SimpleNamespace(device=torch.device("cuda")))
    assert {auto_batch_size(tokens) for tokens in sizes} == {64}


@pytest.fixture
def short_of_memory(llama):
    """A model whose memory ends at 2 sequences of 40 tokens, or one of 80."""
    forward = llama.model.forward

    def limited(*args, input_ids, **kwargs):
        if input_ids.numel() > 80:
            raise torch.OutOfMemoryError(MESSAGES[0])
        return forward(*args, input_ids=input_ids, **kwargs)

    limited.__signature__ = inspect.signature(forward)
    llama.model.forward = limited
    return llama


def test_a_row_that_does_not_fit_says_oom_and_is_measured_again(short_of_memory, books, tmp_path):
    sample = draw_sample(short_of_memory, str(books), 100)

    def measured(out=tmp_path):
        run = run_of(short_of_memory, out, 40, 100, 20, batch_size=16)
        return [*perplexity_rows(run, sample, 20)]

    rows = measured()
    assert [row["value"] is None for row in rows] == [False, True, False]
    assert rows[1]["error"].startswith("OOM: one sequence alone does not fit")
    assert [row.get("batch_size") for row in rows] == [2, None, 4]
    del short_of_memory.model.forward
    again = measured()
    assert [again[0], again[2]] == [rows[0], rows[2]]
    assert again[1]["value"] > 1
    assert rows_in(tmp_path) == [*rows, again[1]]
    assert measured() == again
    (table,) = read_tables([tmp_path])
    assert {row["value"] for row in table.rows} == {row["value"] for row in again}
    assert rows[0]["value"] == pytest.approx(measured(tmp_path / "b")[0]["value"], rel=1e-6)


def measure(loaded, books, out):
    sample = draw_sample(loaded, str(books), 60)
    run = run_of(loaded, out, 30, 60, ropes="default,dynamic:4,yarn:2", batch_size=4)
    passkeys = passkey_rows(run_of(loaded, out, 320), num_cases=6, new_tokens=5, depths=3)
    return [*perplexity_rows(run, sample, 25), *passkeys]


# the commit changes with every edit of the tree that tests run from
CHANGING = {"date", "seconds", "command", "commit", "processes"}


def lasting(rows):
    return [{key: value for key, value in row.items() if key not in CHANGING} for row in rows]


def test_a_row_records_the_batch_size_of_auto_and_does_not_depend_on_it(coca, books, tmp_path):
    sample = draw_sample(coca, str(books), 60)
    (row,) = perplexity_rows(run_of(coca, tmp_path, 30), sample, 15)
    windows = raw_of(row, tmp_path, "windows")
    same_shape = Counter((window["input_len"], window["tokens"]) for window in windows)
    assert row["batch_size"] == 1024 // 30 < max(same_shape.values())
    assert list(perplexity_rows(run_of(coca, tmp_path, 30, batch_size=2), sample, 15)) == [row]


def test_a_repeated_run_is_equal_to_the_last_bit_and_its_raw_tables_give_its_values(
    coca, books, tmp_path
):
    first, second = (measure(coca, books, tmp_path / name) for name in "ab")
    assert lasting(first) == lasting(second)
    for row in first:
        ((name, path),) = row["raw"].items()
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
        lines = raw_of(row, tmp_path / "a", name)
        if row["task"] == "perplexity":
            again = value_of(VARIANTS["sliding"], lines)
            assert again == {name: row[name] for name in ("value", "nll", "tokens", "error")}
        else:
            assert sum(line["correct"] for line in lines) / len(lines) == row["value"]
            assert all(str(line["key"]).isdecimal() for line in lines)


README = Path(__file__).parents[2] / "README.md"
COCA_EVAL = Path(sys.executable).with_name("coca-eval")


def start(arguments, *launcher, program=COCA_EVAL):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(program), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def run(*command, **options):
    process = start(*command, **options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


TOGETHER = [task for task in OPTIONS if task != "speed"]  # a timing is of one process
# All of them in the processes of one launch; each would end with the processes' connection. Every
# process would take long to read lm-eval's thousands of tasks, and reads ours only.
ALL = """
import shlex, sys
from accelerate import PartialState
from lm_eval.tasks import TaskManager
from coca_cli.main import run
from coca_hf.evaluate import tasks
tasks._task_manager = lambda path: TaskManager(include_path=path, include_defaults=False)
end, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda self: None
for command in sys.argv[1:]:
    sys.argv = ["coca-eval", *shlex.split(command)]
    try:
        run("coca_cli.evaluate", "eval")
    except SystemExit as code:
        if code.code:
            raise
end(PartialState())
"""


def assert_close(one, two):
    """Equal but for the rounding of numbers, whose batches differ."""
    if isinstance(one, float):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-7)
    elif isinstance(one, dict):
        assert_close(list(one.items()), list(two.items()))
    elif isinstance(one, list | tuple):
        for a, b in zip(one, two, strict=True):
            assert_close(a, b)
    else:
        assert one == two


@pytest.mark.real
@pytest.mark.parametrize("tasks", [["perplexity"], TOGETHER], ids=["README", "all"])
@pytest.mark.usefixtures("own_tasks", "one_thread")
def test_two_processes_make_the_rows_of_one(
    tiny_coca_dir, tiny_llama_dir, books, task_dir, tmp_path, coca_eval, tasks
):
    """Launched as the README says, on a port of its own."""
    commands = {"one": [], "two": []}
    for task, (name, words) in itertools.product(tasks, commands.items()):
        options = OPTIONS[task].replace("BOOKS", str(books))
        options = options.replace("LLAMA", str(tiny_llama_dir)).replace("TASKS", str(task_dir))
        words.append(f"{task} {tiny_coca_dir} {options} --out {tmp_path / name}")
    for command in commands["one"]:
        assert coca_eval(command)[0] == 0
    (flags,) = re.findall(r"`accelerate launch (.*) \$\(which coca-eval\) …`", README.read_text())
    flags = flags.replace("8", "2").split()
    port = f"--main_process_port={29560 + len(tasks)}"
    launcher = ["-m", "accelerate.commands.launch", *flags, port]
    if len(tasks) == 1:
        out = run(commands["two"][0].split(), *launcher)
    else:
        (tmp_path / "all.py").write_text(ALL)
        out = run(commands["two"], *launcher, program=tmp_path / "all.py")
    titles = [f"{task} by context length" if task != "tasks" else "coca_answer" for task in tasks]
    assert [out.count(title) for title in titles] == [1] * len(tasks)
    one, two = rows_in(tmp_path / "one"), rows_in(tmp_path / "two")
    assert len(one) == (4 if len(tasks) == 1 else 14)
    assert all(row["value"] is not None for row in one)
    assert_close(lasting(one), lasting(two))
    assert {row["processes"] for row in two} == {2}
    for row in one:
        for name in row["raw"]:
            assert_close(*(raw_of(row, tmp_path / each, name) for each in ("one", "two")))


@pytest.mark.real
def test_a_killed_run_continues_after_its_last_complete_row(
    tiny_coca_dir, books, tmp_path, coca_eval, one_thread
):
    lengths = ",".join(str(20 + more) for more in range(8))
    command = f"perplexity {tiny_coca_dir} --data {books} --stride 5 --lengths {lengths}"
    process = start([*command.split(), "--out", tmp_path / "killed"])
    rows = tmp_path / "killed" / "rows.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = rows.read_bytes()
    assert 2 <= before.count(b"\n") < 8
    for name in ("killed", "whole"):
        assert coca_eval(command, f"--out {tmp_path / name}")[0] == 0
    assert rows.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert lasting(rows_in(tmp_path / "killed")) == lasting(rows_in(tmp_path / "whole"))
