"""The commands as they are installed, before they have anything to do."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

SLOW = ("torch", "transformers", "datasets", "matplotlib", "coca_hf")
PERPLEXITY = "coca-eval perplexity a --lengths 8 --out b"
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
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=wide, timeout=60)
    *printed, imported = done.stdout.splitlines()
    assert imported.strip() == "imported:"
    return done.returncode, "\n".join(printed), done.stderr


@pytest.mark.parametrize(
    "command", ["coca-convert", "coca-train", "coca-eval", "coca-eval perplexity"]
)
def test_help_imports_nothing_that_takes_seconds(command):
    code, printed, _ = run(*command.split(), "--help")
    assert code == 0
    assert f"Usage: {command}" in printed


WRONG = {
    "coca-convert a b --constraint loose": "'loose' is not one of 'slack', 'strict'",
    "coca-convert a b --calibrate-tokens 0": "--calibrate-tokens: got 0, expected greater than or "
    "equal to 1",
    "coca-convert a b --ntk-factor x": "--ntk-factor: got x, expected a valid number",
    "coca-convert a": "Missing argument 'dst'",
    "coca-train a.yaml --stages k": "No such option: --stages",
    "coca-eval perplexi": "No such command 'perplexi'. Did you mean 'perplexity'?",
    f"{PERPLEXITY} --stride 0": "--stride: got 0, expected greater than or equal to 1",
    f"{PERPLEXITY} --stride 1.5": "--stride: got 1.5, expected a valid integer",
    f"{PERPLEXITY} --seed -1": "--seed: got -1, expected greater than or equal to 0",
    f"{PERPLEXITY} --stride": "Option '--stride' requires an argument",
    PERPLEXITY: "--data, --preset: got both or neither",
    "coca-eval passkey a --depths 1001": "--depths: got 1001, expected less than or equal to 1000",
    "coca-eval passkey a --lengths x --out b": "--lengths: got 'x', expected whole numbers",
    "coca-eval tasks a --out b": "--tasks, --ruler: got neither, expected at least one of them",
    "coca-eval tasks a --out b --ruler 1": "--ruler: got '1', expected whole numbers",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_option_is_refused_in_one_line_before_anything_is_imported(command):
    code, _, printed = run(*command.split())
    assert code == 2
    assert printed.startswith("error: ")
    assert WRONG[command] in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("command", ["coca-convert", "coca-train"])
def test_a_command_without_arguments_says_what_is_missing(command):
    code, _, printed = run(command)
    assert (code, printed.startswith("error: Missing argument '")) == (2, True)


def test_coca_eval_without_arguments_prints_its_help_alone():
    code, printed, errors = run("coca-eval")
    assert (code, errors) == (2, "")
    assert "Usage: coca-eval" in printed


def test_what_is_installed_exists():
    points = entry_points(group="console_scripts")
    scripts = [point for point in points if point.name.startswith("coca-")]
    assert {point.name for point in scripts} == {"coca-convert", "coca-train", "coca-eval"}
    for point in scripts:
        assert callable(point.load())
