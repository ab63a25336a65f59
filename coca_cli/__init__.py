"""What `coca-convert`, `coca-train` and `coca-eval` take and print; `main.py` runs them.

A package of its own, because `import coca_hf` registers models, for which it imports torch and
transformers. That takes seconds, and neither `--help` nor a wrong option needs them: what does is
imported inside the commands.
"""

from functools import partial
from typing import Any

import typer
from rich.console import Console

# Prints paths and names as they are, whatever rich would read into them.
PlainConsole = partial(Console, markup=False, emoji=False, highlight=False)
console = PlainConsole(stderr=True, soft_wrap=True)


# Typer's error for options, arguments and commands that are wrong or do not exist; one line. CocaError
# is not to be had before all of coca_hf is imported.
BadOption: Any = typer.BadParameter.__base__


def say(text: str) -> None:
    """To stdout, for whoever reads on: where the results are, and what comes next."""
    PlainConsole().print(text, soft_wrap=True)
