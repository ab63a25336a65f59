"""The commands as they are installed, before they have anything to do."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from coca_cli import main
from coca_hf.evaluate import passkey, perplexity, sample

SLOW = ("torch", "transformers", "datasets", "matplotlib", "coca_hf")
PERPLEXITY = "coca-eval perplexity a --lengths 8 --out b"
COPYING = "coca-eval copying a --lengths 8 --out b"
CALIBRATION = "calibrate-tokens=9 calibrate-block=9 calibrate-passes=9 column=text split=test "
CALIBRATION += "subset=en device=cpu seed=1"
LAYERS_AND_PAIRS = {  # values that they do not take, and what is expected
    "keep-layers": ("x 1;2 -1,0 auto,1 6:out", ""),
    "content-pairs": ("x -1 1.5 3,4", "how many of a head's pairs"),
    "content-layers": ("3 6:out x 1,y", "layers by number"),
}
HELP = [
    "coca-convert --help",
    "coca-train --help",
    "coca-eval --help",
    "coca-eval perplexity --help",
]
RUN = """
import contextlib, io, json, sys
from coca_cli import main
functions = {"coca-convert": main.convert, "coca-train": main.train, "coca-eval": main.evaluate}
outcomes = []
for command in sys.argv[1:]:
    sys.argv, out, err = command.split(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            functions[sys.argv[0]]()
        except SystemExit as end:
            outcomes.append((end.code, out.getvalue(), err.getvalue()))
print(json.dumps([outcomes, [*sys.modules]]))
"""


@pytest.fixture(scope="module")
def run():
    """Exit code, stdout and stderr of commands, all in one process that imports nothing slow."""
    commands = [*HELP, *WRONG, "coca-convert", "coca-train", "coca-eval"]
    wide = os.environ | {"COLUMNS": "200"}
    words = [sys.executable, "-c", RUN, *commands]
    done = subprocess.run(words, capture_output=True, text=True, env=wide, timeout=60, check=True)
    outcomes, imported = json.loads(done.stdout)
    assert not {*SLOW} & {*imported}
    return dict(zip(commands, outcomes, strict=True))


def names(choices):
    """As an error lists them."""
    return ", ".join(map(repr, choices))


WRONG = {
    "coca-convert a b --constraint loose": "'loose' is not one of 'slack', 'strict'",
    "coca-convert a b --calibrate-tokens 0": "--calibrate-tokens: got 0, expected greater than or "
    "equal to 1",
    "coca-convert a": "Missing argument 'dst'",
    "coca-convert a b --public": "--public: got it without --push-to-hub, expected both",
    **{
        f"coca-convert a b --{option}": f"--{option.partition('=')[0]}: got it without --calibrate, "
        "expected both\n"
        for option in CALIBRATION.split()
    },
    **{
        f"coca-convert a b --{option}={given}": f"--{option}: got {given!r}, expected {expected}"
        for option, (values, expected) in LAYERS_AND_PAIRS.items()
        for given in values.split()
    },
    "coca-convert a b --adapter c --adapter=d": "--adapter: got 'c' and 'd', expected one of them",
    "coca-eval recall a --lengths 256 --lengths 512": "--lengths: got '256' and '512', expected one of",
    "coca-convert a b --keep-layers 3, --keep-layers 5,": "--keep-layers: got '3,' and '5,', expected",
    "coca-train a.yaml --stages k": "No such option: --stages",
    "coca-train a --plan --stage k": "--stage: --plan does not take it, only a run does; leave it",
    "coca-train a --plan --out x": "--out: --plan does not take it, only a run does",
    "coca-train a --prepare --resume": "--resume: --prepare does not take it, only a run does",
    "coca-train a --gpu H100": "--gpu: a run does not take it, only --plan does; leave it out",
    "coca-train a --world-size 1": "--world-size: a run does not take it, only --plan or --prepare",
    "coca-train a --plan --mfu x": "--mfu: got x, expected a valid number",
    "coca-train a --plan --prepare": "--plan, --prepare: got both, expected one of them",
    "coca-eval perplexi": "No such command 'perplexi'. Did you mean 'perplexity'?",
    f"{PERPLEXITY} --stride 0": "--stride: got 0, expected greater than or equal to 1",
    f"{PERPLEXITY} --stride 1.5": "--stride: got 1.5, expected a valid integer",
    f"{PERPLEXITY} --seed -1": "--seed: got -1, expected greater than or equal to 0",
    f"{PERPLEXITY} --stride": "Option '--stride' requires an argument",
    f"{PERPLEXITY} --batch-size 0": "--batch-size: got '0', expected auto or a whole number from 1 to",
    PERPLEXITY: "--data, --preset: got neither, expected one of them",
    f"{PERPLEXITY} --data c --preset pg19": "--data, --preset: got both, expected one of",
    f"{PERPLEXITY} --preset pg19 --split train": "--split: got it with --preset, which has its own; "
    "leave it out",
    f"{PERPLEXITY} --preset pile": f"'pile' is not one of {names(sample.PRESETS)}",
    f"{PERPLEXITY} --variant paper": f"'paper' is not one of {names(perplexity.VARIANTS)}",
    f"{PERPLEXITY} --dtype int8": "'int8' is not one of 'auto', 'float32', 'bfloat16', 'float16'",
    "coca-eval passkey a --variant sliding": f"'sliding' is not one of {names(passkey.VARIANTS)}",
    f"{COPYING} --data c --preset pg19": "--data, --preset: got both, expected one of",
    f"{COPYING} --max-tokens 99": "--max-tokens: got it without --data or --preset, expected one of",
    "coca-eval passkey a --depths 1001": "--depths: got 1001, expected less than or equal to 1000",
    **{
        f"coca-eval passkey a --lengths={lengths} --out b": f"error: --lengths: got {lengths!r}, "
        "expected whole numbers from 2 to 999999999, as in 512,1024,2048\n"
        for lengths in ("512,x", "1", "-4", "64,,128", "9" * 5000)
    },
    "coca-eval speed a --lengths 8 --out b --baseline-name=c": "--baseline-name: got 'c' without "
    "--baseline, expected both",
    "coca-eval report a --out=": "--out: got an empty word, expected a value; is a variable unset?",
    "coca-eval tasks a --out b": "--tasks, --ruler: got neither, expected at least one of them",
    "coca-eval tasks a --out b --ruler 1": "--ruler: got '1', expected whole numbers",
    "coca-eval tasks a --out b --ruler 512 --include-path c": "--include-path: got it without "
    "--tasks, expected the names of your tasks",
}


@pytest.mark.parametrize("command", HELP)
def test_help_imports_nothing_that_takes_seconds(run, command):
    code, printed, _ = run[command]
    assert code == 0
    assert f"Usage: {command.removesuffix(' --help')}" in printed


@pytest.mark.parametrize("command", WRONG, ids=lambda command: command[:80])
def test_a_wrong_option_is_refused_in_one_line_before_anything_is_imported(run, command):
    code, stdout, printed = run[command]
    assert (code, stdout) == (2, "")
    assert printed.startswith("error: ")
    assert WRONG[command] in printed
    assert printed.count("\n") == 1


def test_other_options_may_be_given_again(monkeypatch):
    got = {}
    monkeypatch.setattr(
        "coca_hf.convert.conversion.convert_checkpoint", lambda **given: got.update(given)
    )
    monkeypatch.setattr("coca_cli.convert._print_conversion", lambda *_: None)
    words = "a b --adapter c --adapter c --ignore-field d --ignore-field e --seed 1 --seed 2"
    words += " --calibrate f"
    monkeypatch.setattr(sys, "argv", ["coca-convert", *words.split()])
    with pytest.raises(SystemExit, match="0"):
        main.convert()
    assert (got["adapter"], [*got["ignore_fields"]], got["seed"]) == ("c", ["d", "e"], 2)


@pytest.mark.parametrize("command", ["coca-convert", "coca-train"])
def test_a_command_without_arguments_says_what_is_missing(run, command):
    code, _, printed = run[command]
    assert (code, printed.startswith("error: Missing argument '")) == (2, True)


def test_coca_eval_without_arguments_prints_its_help_alone(run):
    code, printed, errors = run["coca-eval"]
    assert (code, errors) == (2, "")
    assert "Usage: coca-eval" in printed


def test_ctrl_c_is_answered_with_what_to_do(monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_hf.convert.conversion.convert_checkpoint", interrupt)
    monkeypatch.setattr(sys, "argv", ["coca-convert", "a", "b"])
    with pytest.raises(SystemExit, match="130"):
        main.convert()
    assert capsys.readouterr().err == "interrupted; the same command continues\n"


def test_what_is_installed_exists():
    points = entry_points(group="console_scripts")
    scripts = [point for point in points if point.name.startswith("coca-")]
    assert {point.name for point in scripts} == {"coca-convert", "coca-train", "coca-eval"}
    for point in scripts:
        assert callable(point.load())
