"""The progress of a run: bars on a terminal, lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.progress import Progress
from coca_hf.evaluate.speed import speed_rows
from coca_hf.evaluate.tables import results_table
from coca_hf.evaluate.tasks import task_rows
from tests.evaluate.runs import run_of

LOG = r"(.*): (\d+ of \d+ .*?)(?:, about \d+ s left)?\n"


class Clock:
    """A clock that only tests move."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def log():
    """A console that is not a terminal."""
    return Console(file=io.StringIO(), width=20)


def settings(length, **others):
    return {"task": "passkey", "rope": "dynamic:4", "length": length, "trained_length": 64} | others


def test_without_a_terminal_each_row_is_a_line_with_the_time_left_by_length(log):
    clock, rows = Clock(), [settings(length) for length in (100, 300, 2000, 200_000)]
    with Progress(log, clock) as progress:
        progress.begin(rows, len(rows), "rows")
        for seconds, row in zip((2, 6, 32, 9000), rows, strict=True):
            assert list(progress([7, 8], "batches of a row")) == [7, 8]
            clock.seconds += seconds
            progress.finish(row)
    assert log.file.getvalue().splitlines() == [
        "passkey  dynamic:4  100: 1 of 4 rows, about 67 min left",  # 2 s for 100, 202,300 left
        "passkey  dynamic:4  300: 2 of 4 rows, about 67 min left",  # 8 s for 400, 202,000 left
        "passkey  dynamic:4  2000: 3 of 4 rows, about 56 min left",  # 40 s for 2,400; 200,000
        "passkey  dynamic:4  200000: 4 of 4 rows",
    ]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(3, "3 s"), (99, "99 s"), (100, "2 min"), (5400, "90 min"), (7200, "2 h"), (360_000, "100 h")],
)
def test_the_time_left_has_a_natural_unit_and_counts_no_rows_of_an_earlier_run(log, seconds, left):
    clock = Clock()
    with Progress(log, clock) as progress:
        # Without a length, that of the model's training counts
        progress.begin([settings(64), settings(None)], 9, "rows")
        clock.seconds += seconds
        progress.finish(settings(64))
    assert log.file.getvalue() == f"passkey  dynamic:4  64: 8 of 9 rows, about {left} left\n"


def test_without_a_terminal_a_long_row_says_every_few_minutes_how_far_it_is(log):
    clock = Clock()
    with Progress(log, clock) as progress:
        for _ in progress([1] * 7, "passkey  [x]  64"):
            clock.seconds += 50
    assert log.file.getvalue().splitlines() == [
        "passkey  [x]  64: 3 of 7 batches",
        "passkey  [x]  64: 6 of 7 batches",
    ]


def test_a_terminal_has_a_bar_for_all_rows_and_one_for_each():
    terminal = {"force_terminal": True, "force_interactive": True, "width": 120}
    clock, console = Clock(), Console(file=io.StringIO(), **terminal)
    with Progress(console, clock) as progress:
        progress.begin([settings(100), settings(300)], 5, "rows")
        assert list(progress([5, 6, 7], "passkey  [x]")) == [5, 6, 7]
        clock.seconds += 50
        progress.finish(settings(100))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert re.search(r"rows +\S+ 4/5 +0:00:50 +left +about 2 min *\n", drawn)
    assert re.search(r"passkey  \[x\] +\S+ 3/3 +0:00:00 +left +0:00:00", drawn)


def test_a_command_logs_every_row_that_it_makes(tiny_llama_dir, books, tmp_path, coca_eval):
    arguments = f"perplexity {tiny_llama_dir} --data {books} --rope default,linear:4"
    arguments += f" --out {tmp_path}"
    _, _, stderr = coca_eval(arguments, "--lengths 60")
    assert re.findall(LOG, stderr) == [
        ("perplexity  default  60", "1 of 2 rows"),
        ("perplexity  linear:4  60", "2 of 2 rows"),
    ]
    _, _, stderr = coca_eval(arguments, "--lengths 60,50")
    assert re.findall(LOG, stderr) == [
        ("perplexity  default  50", "3 of 4 rows"),
        ("perplexity  linear:4  50", "4 of 4 rows"),
    ]
    assert coca_eval(arguments, "--lengths 60,50")[2] == ""


def test_models_in_turns_and_benchmarks_are_counted_as_such(
    llama, coca, own_tasks, task_dir, tmp_path, log
):
    with Progress(log) as progress:
        for lengths in ([16], [16, 24]):
            run = run_of(coca, tmp_path, *lengths)
            run.progress = progress
            list(speed_rows(run, llama, ["prefill", "decode"], repeats=1, warmup=0))
        run.lengths = []
        for names in (["coca_answer"], ["coca_answer", "coca_likelihood"]):
            list(task_rows(run, names, include_path=str(task_dir)))
    assert re.findall(LOG, log.file.getvalue()) == [
        ("speed  prefill  default  16", "1 of 2 pairs of rows"),
        ("speed  decode  default  16", "2 of 2 pairs of rows"),
        ("speed  prefill  default  24", "3 of 4 pairs of rows"),
        ("speed  decode  default  24", "4 of 4 pairs of rows"),
        ("tasks  coca_answer  default", "1 of 1 benchmarks"),
        ("tasks  coca_likelihood  default", "2 of 2 benchmarks"),
    ]


def table_of(rows, log):
    log.width = 200
    log.print(results_table(MEASUREMENTS[rows[0]["task"]], rows))
    return log.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def test_the_table_tells_filters_and_models_of_one_name_apart_and_has_no_minus_zero(log):
    row = {"task": "tasks", "rope": "default", "length": None, "model": "m", "benchmark": "sums"}
    row |= {"metric": "match", "error": None, "stderr": None}
    lines = [("a/m", "strict", 0.25), ("a/m", "flexible", 0.5), ("b/m", "strict", -1e-9)]
    rows = [
        row | {"model_path": path, "filter": name, "value": value} for path, name, value in lines
    ]
    lines = [line for line in table_of(rows, log).splitlines() if "│" in line]
    assert [line.replace("│", " ").split() for line in lines] == [
        ["a/m", "default", "sums", "match", "strict", "0.250"],
        ["a/m", "default", "sums", "match", "flexible", "0.500"],
        ["b/m", "default", "sums", "match", "strict", "0.000"],
    ]


def test_the_table_shows_the_nats_of_scored_answers_and_the_reasons_of_errors(log):
    row = {"task": "passkey", "rope": "default", "model": "m", "model_path": "m", "error": None}
    rows = [
        row | {"length": 512, "value": 0.85, "nats_per_digit": 0.314},
        row | {"length": 1024, "value": None, "error": "the model's logits are NaN"},
    ]
    text = table_of(rows, log)
    assert "passkey by context length" in text
    assert "│ 0.85 (0.31) │ the model's logits are NaN │" in text
