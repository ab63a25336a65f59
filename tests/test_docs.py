"""The pages for people: what they link to is in the repository."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = subprocess.run(  # none outside of a checkout
    ["git", "-c", f"safe.directory={ROOT}", "ls-files"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()
HERE = {ROOT, *(parent for name in FILES for parent in (ROOT / name, *(ROOT / name).parents))}


@pytest.mark.parametrize("page", [name for name in FILES if name.endswith(".md")])
def test_links_lead_to_files_of_the_repository_and_sections_that_are_there(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, section = link.partition("#")
        target = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
        assert target in HERE, link
        if section:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.M)
            assert section in {_anchor(heading) for heading in headings}, link


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
