"""The three commands, and how they speak: results to stdout, everything else to stderr."""

import gc
import logging
import os
import re
import shlex
import sys
import warnings
from functools import partial
from importlib import import_module, metadata
from itertools import pairwise
from typing import Any

import typer
from rich.console import Console

# Prints paths and names as they are, whatever rich would read into them.
PlainConsole = partial(Console, markup=False, emoji=False, highlight=False)
console = PlainConsole(stderr=True, soft_wrap=True)

# Typer's error for options, arguments and commands that are wrong or do not exist; one line. To
# import CocaError would import all of coca_hf.
BadOption: Any = typer.BadParameter.__base__
# Options of several things, so that a second one looks like one more
TAKEN_ONCE = (
    *("--adapter", "--calibrate", "--content-layers", "--keep-layers"),
    *("--data", "--lengths", "--modes", "--paper", "--preset", "--rope", "--ruler", "--tasks"),
)
INTERRUPTED = 130  # typer's exit code after Ctrl-C


def say(text: str) -> None:
    """To stdout, for whoever reads on: where the results are, and what comes next."""
    PlainConsole().print(text, soft_wrap=True)


def convert() -> None:
    run("coca_cli.convert", "text")


def train() -> None:
    run("coca_cli.train", "train")


def evaluate() -> None:
    run("coca_cli.evaluate", "eval")


def run(module: str, extra: str) -> None:
    """Run the `app` of a module whose packages are in an extra of coca-hf.

    Bad input, wrong options and missing packages of an extra become one line on stderr and exit
    code 2.
    """
    # With the default of 700 objects, looking for garbage takes a tenth of the time of imports
    gc.set_threshold(10_000)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # On processors with AVX-512 BF16 it asks everybody who imports it to install kernels
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # transformers warns of its own names that it will drop
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        _refuse_empty_words()
        _refuse_second_values()
        status = import_module(module).app(standalone_mode=False) or 0
        if status == INTERRUPTED and extra != "train":  # which says more
            console.print("interrupted; the same command continues")
        sys.exit(status)
    except BadOption as error:
        message = _of_option(error)
    except ValueError as error:
        from coca_hf.errors import CocaError

        if not isinstance(error, CocaError):
            raise
        message = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extras = _extras_with(package)
        if not extras:
            raise
        which = extra if extra in extras else extras[0]
        message = f"this needs {package}, which is not installed: pip install 'coca-hf[{which}]'"
    finally:
        # Otherwise the collector goes through all imports once more, and exiting takes a second
        gc.freeze()
    if message:  # without any argument, typer has already printed the help
        console.print(f"error: {message}", style="red")
    sys.exit(2)


def _refuse_empty_words() -> None:
    """Raises BadOption for `--out ""` and `--out=`, which would write into the current directory."""
    for number, (before, word) in enumerate(pairwise(sys.argv), 1):
        if not word or re.fullmatch("--[a-z-]+=", word):
            option = word.removesuffix("=") or before
            where = option if option.startswith("-") else f"argument {number}"
            raise BadOption(f"{where}: got an empty word, expected a value; is a variable unset?")


def _refuse_second_values() -> None:
    """Raises BadOption for `--adapter A --adapter B`, of which typer would drop A without a word."""
    found: dict[str, str] = {}
    for word, following in pairwise([*sys.argv, ""]):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if option in TAKEN_ONCE and found.setdefault(option, value) != value:
            raise BadOption(f"{option}: got {found[option]!r} and {value!r}, expected one of them")


def refuse_other_encodings() -> None:
    """Raises BadOption for arguments that are not UTF-8, which no result can hold."""
    # Their bytes are surrogates here
    if any("\ud800" <= character <= "\udfff" for word in sys.argv for character in word):
        problem = "got a name that is not UTF-8, which no result can hold; rename it"
        raise BadOption(f"{shlex.join(sys.argv)!a}: {problem}")


def _of_option(error: Any) -> str:
    """Typer's message. A number that is invalid or out of bounds is only in the error's cause, of
    pydantic.
    """
    _, number, expected = error.message.partition("Input should be ")
    if not number:
        return error.format_message()
    got = error.__cause__.errors()[0]["input"]
    return f"{error.param.opts[0]}: got {got}, expected {expected.partition(',')[0]}"


def _extras_with(module: str) -> list[str]:
    """The extras of coca-hf that install a top-level module, except `all` and `dev`."""
    names = {"PIL": "pillow", "ruamel": "ruamel-yaml", "lm_eval": "lm-eval"}
    package = names.get(module, module)
    brings = re.compile(rf"{re.escape(package)}\W.*extra == ['\"](\S+)['\"]", re.IGNORECASE)
    matches = map(brings.match, metadata.requires("coca-hf") or [])
    return sorted({match[1] for match in matches if match} - {"all", "dev"})
