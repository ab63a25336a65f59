"""lm-eval's own tasks, and its own command on a self-contained directory without coca_hf."""

import json
import os
import subprocess
import sys

import pytest

from coca_hf.evaluate.tasks import parse_tasks
from tests.evaluate.conftest import PAIRS


@pytest.mark.real
def test_coca_eval_knows_the_tasks_of_lm_eval_and_those_of_a_directory(task_dir):
    assert parse_tasks("piqa,coca_answer", str(task_dir)) == ["piqa", "coca_answer"]


@pytest.mark.real
def test_its_command_runs_a_self_contained_directory_without_coca_hf(
    tiny_coca_dir, task_dir, expected, tmp_path
):
    without_coca_hf = "import sys\nsys.modules['coca_hf'] = None  # importing it fails\n"
    (tmp_path / "sitecustomize.py").write_text(without_coca_hf)
    options = f"run --model hf --device cpu --batch_size 3 --include_path {task_dir}"
    options += f" --model_args pretrained={tiny_coca_dir},trust_remote_code=True,dtype=float32"
    options += f" --tasks coca_likelihood,coca_answer --output_path {tmp_path / 'results'}"
    places = {"PYTHONPATH": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    finished = subprocess.run(
        [sys.executable, "-m", "lm_eval", *options.split()],
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    written = next((tmp_path / "results").rglob("results_*.json"))
    results = json.loads(written.read_text())["results"]
    found = results["coca_likelihood"]["perplexity,none"]
    assert found == pytest.approx(expected["perplexity"], rel=1e-4)
    assert results["coca_answer"]["exact_match,none"] == 1 - 1 / len(PAIRS)
