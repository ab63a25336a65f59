"""Which code runs: the commit of coca_hf's own checkout."""

import functools
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str | None:
    """The commit that coca_hf runs from, with `+changes` where files differ from it; None outside a checkout."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()) != source.parent:
            return None  # installed into somebody else's repository
        return git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None
