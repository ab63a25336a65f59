"""The commands as they are installed, before they have anything to do."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

SLOW = ("torch", "transformers", "datasets", "matplotlib", "coca_hf")
RUN = """
import atexit, sys
atexit.register(lambda: print("imported:", *[name for name in {slow} if name in sys.modules]))
sys.argv[0] = "{command}"
from coca_cli.main import {function}
{function}()
"""


def run(command, *arguments):
    function = {"coca-convert": "convert", "coca-train": "train", "coca-eval": "evaluate"}[command]
    code = RUN.format(slow=SLOW, command=command, function=function)
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=wide, timeout=60
    )
    *printed, imported = done.stdout.splitlines()
    assert imported.strip() == "imported:"
    return done.returncode, "\n".join(printed), done.stderr


@pytest.mark.parametrize(
    "arguments", [("coca-convert",), ("coca-train",), ("coca-eval",), ("coca-eval", "perplexity")], ids=" ".join
)
def test_help_imports_nothing_that_takes_seconds(arguments):
    code, printed, _ = run(*arguments, "--help")
    assert code == 0
    assert f"Usage: {' '.join(arguments)}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("coca-convert", "a", "b", "--constraint", "loose"), "'loose' is not one of 'slack', 'strict'"),
        (("coca-convert", "a"), "Missing argument 'dst'"),
        (("coca-train", "a.yaml", "--stages", "k"), "No such option: --stages"),
        (("coca-eval", "perplexity", "a", "--lengths", "8", "--out", "b"), "--data, --preset: got both or neither"),
        (("coca-eval", "passkey", "a", "--lengths", "x", "--out", "b"), "--lengths: got 'x', expected whole numbers"),
        (("coca-eval", "tasks", "a", "--out", "b"), "--tasks, --ruler: got neither, expected at least one of them"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused_before_anything_is_imported(arguments, message):
    code, _, printed = run(*arguments)
    assert code == 2
    assert message in printed


def test_what_is_installed_exists():
    scripts = [point for point in entry_points(group="console_scripts") if point.name.startswith("coca-")]
    assert {point.name for point in scripts} == {"coca-convert", "coca-train", "coca-eval"}
    for point in scripts:
        assert callable(point.load())
