"""Which code made a record, and when: coca_hf's commit, versions of packages, the date."""

import functools
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@functools.cache
def commit() -> str | None:
    """The commit of coca_hf's checkout, with `+changes` if files differ; None outside one."""
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
        except PackageNotFoundError:  # run from a directory without installation
            continue
    return found | {"python": platform.python_version()}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
