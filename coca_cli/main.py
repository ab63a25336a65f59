"""The three commands."""

import gc
import os
import sys
import warnings
from typing import Any

import typer

from coca_cli.console import BadOption, console
from coca_cli.convert import app as convert_app
from coca_cli.evaluate import app as evaluate_app
from coca_cli.train import app as train_app

WrongOption: Any = typer.BadParameter.__base__  # of a value, or an option, argument or command that is not there


def convert() -> None:
    run(convert_app)


def train() -> None:
    run(train_app)


def evaluate() -> None:
    run(evaluate_app)


def run(app: typer.Typer) -> None:
    """Run a command; bad input and wrong options become one line on stderr and exit code 2."""
    gc.set_threshold(10_000)  # objects; the usual 700 make looking for garbage a tenth of the time that imports take
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names it will drop: not ours
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except WrongOption as error:
        if message := _of_option(error):  # typer has printed the help where there is no argument at all
            console.print(f"error: {message}", style="red")
        sys.exit(2)
    except ValueError as error:
        if not isinstance(error, BadOption):
            from coca_hf.errors import CocaError

            if not isinstance(error, CocaError):
                raise
        console.print(f"error: {error}", style="red")
        sys.exit(2)
    finally:
        gc.freeze()  # or the collector would go over all that was imported once more, and exiting take a second


def _of_option(error: Any) -> str:
    """What typer says; which number is none, or out of bounds, says pydantic alone, the cause of the error."""
    _, number, expected = error.message.partition("Input should be ")
    if not number:
        return error.format_message()
    got = error.__cause__.errors()[0]["input"]
    return f"{error.param.opts[0]}: got {got}, expected {expected.partition(',')[0]}"
