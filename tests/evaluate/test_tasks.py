"""lm-eval's numbers as rows, on tasks over local files."""

import sys

import pyarrow.parquet as pq
import pytest

from coca_hf.errors import CocaError
from coca_hf.evaluate import tasks
from coca_hf.evaluate.rope import Rope
from coca_hf.evaluate.rows import RowStore
from coca_hf.evaluate.tasks import DIMENSIONS, parse_tasks, task_rows
from tests.test_lm_eval import PAIRS, expected, subject, task_dir  # noqa: F401

DEFAULT = [Rope("default")]
NAMES = ["coca_likelihood", "coca_answer"]


def test_rows_have_the_numbers_of_the_model_itself(coca, task_dir, expected, tmp_path, monkeypatch):  # noqa: F811
    assert parse_tasks(",".join(NAMES), str(task_dir)) == NAMES
    options = {"batch_size": 3, "include_path": str(task_dir)}
    rows = list(task_rows(coca, NAMES, DEFAULT, RowStore(tmp_path), **options))
    likelihood, answer = rows
    assert likelihood["value"] == pytest.approx(expected["perplexity"], rel=1e-4)
    assert (answer["value"], answer["metric"], answer["scored"]) == (1 - 1 / len(PAIRS), "exact_match", len(PAIRS))
    scores = [line["score"] for line in pq.read_table(tmp_path / answer["raw"]["samples"]).to_pylist()]
    assert sum(scores) / len(scores) == answer["value"]
    assert (answer["length"], answer["dimension"], answer["filter"]) == (None, None, "none")
    assert "lm-eval" in answer["versions"]
    monkeypatch.setattr(tasks, "_evaluate", None)
    assert list(task_rows(coca, NAMES, DEFAULT, RowStore(tmp_path), **options)) == rows


def test_a_benchmark_that_does_not_fit_is_tried_smaller_then_says_oom(coca, tmp_path, monkeypatch):
    tried = []

    def full(subject, settings, batch_size, include_path):  # noqa: F811
        tried.append(batch_size)
        raise MemoryError("CUDA out of memory.")

    monkeypatch.setattr(tasks, "_evaluate", full)
    (row,) = task_rows(coca, ["piqa"], DEFAULT, RowStore(tmp_path), batch_size=5)
    assert tried == [5, 2, 1]
    assert (row["value"], row["metric"], row["error"], row["dimension"]) == (
        *(None, None, "OOM: CUDA out of memory."),
        "reasoning",
    )


def test_the_group_of_the_paper_has_four_dimensions_of_tasks_that_lm_eval_knows():
    assert set(DIMENSIONS) == {"reasoning", "understanding", "language", "examination"}
    names = parse_tasks("opencompass,piqa")
    assert names == [name for some in DIMENSIONS.values() for name in some]


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(CocaError, match=r"--tasks: got 'helaswag', expected opencompass or .* nearest: hellaswag"):
        parse_tasks("helaswag")


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch, tiny_coca_dir, tmp_path, coca_eval):
    tasks._task_manager.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    code, stdout, stderr = coca_eval("tasks", tiny_coca_dir, "--tasks", "piqa", "--out", tmp_path)
    assert (code, stdout) == (2, "")
    assert stderr == "error: coca-eval tasks needs lm-eval: pip install 'coca-hf[lm-eval]'\n"


def test_data_that_are_not_there_are_one_line(coca, tmp_path):
    """No network here, so lm-eval cannot load them."""
    with pytest.raises(CocaError, match="--tasks piqa: lm-eval cannot run it: "):
        list(task_rows(coca, ["piqa"], DEFAULT, RowStore(tmp_path), limit=1))


def test_ruler_at_a_length_is_the_mean_of_its_tasks_there(coca, tmp_path, monkeypatch):
    """Results as lm-eval's RULER files make them: -1 at lengths that were not run, and no group mean but 4096's."""
    lengths = []

    def ran(subject, settings, batch_size, include_path):  # noqa: F811
        lengths.append(settings["length"])
        key = f"{settings['length']},none"
        results = {"niah_single_1": {key: 0.75, "4096,none": -1}, "ruler_vt": {key: 0.25}, "ruler": {"4096,none": -1}}
        return {"results": results, "n-samples": {"niah_single_1": {"effective": 8}, "ruler_vt": {"effective": 5}}}

    monkeypatch.setattr(tasks, "_evaluate", ran)
    rows = list(task_rows(coca, [], DEFAULT, RowStore(tmp_path), ruler_lengths=[8192, 16384]))
    assert [(row["length"], row["value"], row["dimension"], row["scored"]) for row in rows] == [
        *((8192, 0.5, "ruler", 13), (16384, 0.5, "ruler", 13))
    ]
    scores = pq.read_table(tmp_path / rows[0]["raw"]["samples"]).to_pylist()
    assert {line["benchmark"]: line["score"] for line in scores} == {"niah_single_1": 0.75, "ruler_vt": 0.25}
    list(task_rows(coca, [], DEFAULT, RowStore(tmp_path), ruler_lengths=[8192, 16384]))
    assert lengths == [8192, 16384]
