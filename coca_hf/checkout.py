"""What records of conversion and training share: coca_hf's commit, versions of packages, the date,
and names in the place of paths.
"""

import functools
import glob
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@functools.cache
def commit() -> str | None:
    """The commit that coca_hf runs from, with `+changes` where files differ; None outside one."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(source), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()) != source.parent:
            return None  # installed into somebody else's repository
        changes = git("status", "--porcelain", "-uno").strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(*packages: str) -> dict[str, str]:
    """The versions of those `packages` that are installed, and Python's."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a directory: no reason to lose a record
            continue
    return found | {"python": platform.python_version()}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def without_paths(value: Any) -> Any:
    """A record that may leave this machine: paths and globs of local files become their last part.

    value: strings, numbers, lists and dicts. Ids on the hub stay, in dicts that are `on_hub` and
    under `base` whatever they are. A relative path is told from an id by the files that it finds,
    so that this has to run in the directory that it is relative to.
    """
    if isinstance(value, dict):
        if value.get("on_hub"):
            return value
        return {key: item if key == "base" else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    is_here = "/" in value and (os.path.exists(value) or glob.glob(value, recursive=True))
    if is_here or value.startswith(("/", "~", ".")):
        return os.path.basename(os.path.abspath(value))
    return value
