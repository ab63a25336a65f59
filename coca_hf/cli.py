"""The three commands: `coca-convert`, `coca-train`, `coca-eval`. Nothing heavy is imported before it is needed."""

import os
import sys

import typer
from rich.console import Console

from coca_hf.errors import CocaError

console = Console(stderr=True, soft_wrap=True)

convert_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
train_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
evaluate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def convert() -> None:
    _run(convert_app)


def train() -> None:
    _run(train_app)


def evaluate() -> None:
    _run(evaluate_app)


def _run(app: typer.Typer) -> None:
    """Run a command; bad input becomes one line on stderr and exit code 2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except CocaError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        sys.exit(130)
