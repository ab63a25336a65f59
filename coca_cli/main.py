"""The three commands."""

import gc
import os
import re
import sys
import warnings
from importlib import import_module, metadata
from typing import Any

import typer

from coca_cli import BadOption, console

# of a value, or an option, argument or command that is not there
WrongOption: Any = typer.BadParameter.__base__


def convert() -> None:
    run("coca_cli.convert", "text")


def train() -> None:
    run("coca_cli.train", "train")


def evaluate() -> None:
    run("coca_cli.evaluate", "eval")


def run(module: str, extra: str) -> None:
    """Run the `app` of a module, whose packages are in an extra of coca-hf.

    Bad input, wrong options and a package of an extra that is not installed become one line on
    stderr and exit code 2.
    """
    # objects; the usual 700 make looking for garbage a tenth of the time that imports take
    gc.set_threshold(10_000)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # of names it will drop: not ours
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        sys.exit(import_module(module).app(standalone_mode=False) or 0)
    except WrongOption as error:
        # typer has printed the help where there is no argument at all
        if message := _of_option(error):
            console.print(f"error: {message}", style="red")
        sys.exit(2)
    except ValueError as error:
        if not isinstance(error, BadOption):
            from coca_hf.errors import CocaError

            if not isinstance(error, CocaError):
                raise
        console.print(f"error: {error}", style="red")
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extras = _extras_with(package)
        if not extras:
            raise
        console.print(
            f"error: this needs {package}, which is not installed: "
            f"pip install 'coca-hf[{extra if extra in extras else extras[0]}]'",
            style="red",
        )
        sys.exit(2)
    finally:
        # or the collector would go over all that was imported once more, and exiting take a second
        gc.freeze()


def _of_option(error: Any) -> str:
    """What typer says; which number is none, or out of bounds, says pydantic alone, the cause of
    the error.
    """
    _, number, expected = error.message.partition("Input should be ")
    if not number:
        return error.format_message()
    got = error.__cause__.errors()[0]["input"]
    return f"{error.param.opts[0]}: got {got}, expected {expected.partition(',')[0]}"


def _extras_with(module: str) -> list[str]:
    """The extras of coca-hf that bring a top-level module, without `all` and `dev`."""
    package = {"PIL": "pillow", "yaml": "pyyaml"}.get(module, module)
    brings = re.compile(rf"{re.escape(package)}\W.*extra == ['\"](\S+)['\"]", re.IGNORECASE)
    matches = map(brings.match, metadata.requires("coca-hf") or [])
    return sorted({match[1] for match in matches if match} - {"all", "dev"})
