"""The three commands. What each takes is in `coca_hf/commands`."""

import gc
import sys
import warnings

import typer

from coca_hf.commands.console import console
from coca_hf.commands.convert import app as convert_app
from coca_hf.commands.evaluate import app as evaluate_app
from coca_hf.commands.train import app as train_app
from coca_hf.errors import CocaError


def convert() -> None:
    _run(convert_app)


def train() -> None:
    _run(train_app)


def evaluate() -> None:
    _run(evaluate_app)


def _run(app: typer.Typer) -> None:
    """Run a command; bad input becomes one line on stderr and exit code 2."""
    from transformers.utils.logging import set_verbosity_error

    gc.freeze()  # what is imported stays; the collector's going over it would be most of the time that exiting takes
    set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names it will drop: not ours
    try:
        app()
    except CocaError as error:
        console.print(f"error: {error}", style="red")
        sys.exit(2)
