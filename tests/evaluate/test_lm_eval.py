"""lm-eval on a CoCA checkpoint: in this process, and by its command on a self-contained directory
without coca_hf.
"""

import json
import os
import subprocess
import sys

import pytest

from coca_hf.evaluate.tasks import parse_tasks
from tests.evaluate.conftest import PAIRS


def values(results):
    """Perplexity of the first task, and share of right answers of the second."""
    return [
        results["coca_likelihood"]["perplexity,none"],
        results["coca_answer"]["exact_match,none"],
    ]


def test_in_process_it_measures_what_the_model_says(coca, task_dir, expected):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    output = simple_evaluate(
        HFLM(pretrained=coca.model, tokenizer=coca.tokenizer, batch_size=3),
        tasks=["coca_likelihood", "coca_answer"],
        task_manager=TaskManager(include_path=str(task_dir), include_defaults=False),
        bootstrap_iters=0,
    )
    assert values(output["results"]) == pytest.approx(
        [expected["perplexity"], 1 - 1 / len(PAIRS)], rel=1e-4
    )


@pytest.mark.real
def test_coca_eval_knows_the_tasks_of_lm_eval_and_those_of_a_directory(task_dir):
    assert parse_tasks("piqa,coca_answer", str(task_dir)) == ["piqa", "coca_answer"]


@pytest.mark.real
def test_its_command_runs_a_self_contained_directory_without_coca_hf(
    tiny_coca_dir, task_dir, expected, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['coca_hf'] = None  # importing it fails\n"
    )
    finished = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "lm_eval",
                "run",
                "--model",
                "hf",
                "--device",
                "cpu",
                "--batch_size",
                "3",
            ),
            *("--model_args", f"pretrained={tiny_coca_dir},trust_remote_code=True,dtype=float32"),
            *("--tasks", "coca_likelihood,coca_answer", "--include_path", str(task_dir)),
            *("--output_path", str(tmp_path / "results")),
        ],
        env=os.environ
        | {"PYTHONPATH": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    written = next((tmp_path / "results").rglob("results_*.json"))
    assert values(json.loads(written.read_text())["results"]) == pytest.approx(
        [expected["perplexity"], 1 - 1 / len(PAIRS)], rel=1e-4
    )
