"""Subjects and documents small enough for a slow reference, and `coca-eval` run as a person runs
it.
"""

import shlex
import sys

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


@pytest.fixture
def own_tasks(monkeypatch):
    """lm-eval's own tasks, which take their while, are not read where a directory is given."""
    from lm_eval.tasks import TaskManager

    class OwnTasks(TaskManager):
        __module__ = TaskManager.__module__

        def __init__(self, include_path=None, **options):
            options.setdefault("include_defaults", include_path is None)
            super().__init__(include_path=include_path, **options)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OwnTasks)


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
