"""The three commands."""

import gc
import os
import sys
import warnings

import typer

from coca_cli.console import BadOption, console
from coca_cli.convert import app as convert_app
from coca_cli.evaluate import app as evaluate_app
from coca_cli.train import app as train_app


def convert() -> None:
    run(convert_app)


def train() -> None:
    run(train_app)


def evaluate() -> None:
    run(evaluate_app)


def run(app: typer.Typer) -> None:
    """Run a command; bad input becomes one line on stderr and exit code 2."""
    gc.set_threshold(10_000)  # objects; the usual 700 make looking for garbage a tenth of the time that imports take
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names it will drop: not ours
    try:
        app()
    except ValueError as error:
        if not isinstance(error, BadOption):
            from coca_hf.errors import CocaError

            if not isinstance(error, CocaError):
                raise
        console.print(f"error: {error}", style="red")
        sys.exit(2)
    finally:
        gc.freeze()  # or the collector would go over all that was imported once more, and exiting take a second
