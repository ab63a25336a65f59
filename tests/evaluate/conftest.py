"""Subjects and documents small enough for a slow reference, and `coca-eval` run as a person runs
it.
"""

import shlex
import sys
from pathlib import Path

import pytest
import torch

from coca_cli import main
from coca_hf.evaluate.loaded_model import load_model


@pytest.fixture
def llama(tiny_llama_dir):
    return load_model(str(tiny_llama_dir))


@pytest.fixture
def coca(tiny_coca_dir):
    return load_model(str(tiny_coca_dir))


@pytest.fixture
def books(tmp_path):
    """Three documents of 210, 230 and 250 bytes, which are tokens of the tiny tokenizer."""
    directory = tmp_path / "books"
    directory.mkdir()
    for number, name in enumerate(("austen", "bronte", "conrad")):
        text = f"{name} wrote of {number} sea voyages, one ball and no trains. " * 9
        (directory / f"{name}.txt").write_text(text[: 210 + 20 * number])
    return directory


# Where lm-eval has the tasks of `DIMENSIONS`; all of its directories take seconds to read
DIRECTORIES = (
    *("arc", "glue", "hellaswag", "lambada", "mmlu/default", "openbookqa", "piqa", "race", "siqa"),
    *("super_glue", "winogrande"),
)


@pytest.fixture
def own_tasks(monkeypatch):
    """lm-eval with the tasks of a directory that is given, or of `DIRECTORIES`, and without asking
    pip and the machine what a benchmark ran on.
    """
    import lm_eval.tasks

    class OwnTasks(lm_eval.tasks.TaskManager):
        __module__ = lm_eval.tasks.TaskManager.__module__

        def __init__(self, include_path=None, include_defaults=False, **options):
            tasks = Path(lm_eval.tasks.__file__).parent
            paths = include_path or [tasks / name for name in DIRECTORIES]
            super().__init__(include_path=paths, include_defaults=False, **options)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OwnTasks)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture
def one_thread():
    """As many threads as the processes have that tests start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def coca_eval(monkeypatch, capsys):
    """Run `coca-eval` with arguments, each several words; returns exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        words = [word for argument in arguments for word in shlex.split(str(argument))]
        monkeypatch.setattr(sys, "argv", ["coca-eval", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_info:
            main.evaluate()
        out, err = capsys.readouterr()
        return exit_info.value.code or 0, out, err

    return run
