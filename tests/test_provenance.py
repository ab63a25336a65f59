import importlib.util
import platform
import shutil
import subprocess
from datetime import datetime, timedelta
from importlib.metadata import version

import pytest

from coca_hf import provenance
from coca_hf.models.hub import without_paths


@pytest.fixture
def git(tmp_path):
    """A directory with provenance.py in a package, and git in it; nothing is a repository yet."""
    (tmp_path / "site" / "coca_hf").mkdir(parents=True)
    shutil.copy(provenance.__file__, tmp_path / "site" / "coca_hf")

    def run(*arguments, where=tmp_path / "site"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True
        ).stdout

    return run


def commit_in(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "copied", tmp_path / "site" / "coca_hf" / "provenance.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.commit()


def test_outside_a_checkout_there_is_no_commit(git, tmp_path):
    assert commit_in(tmp_path) is None
    git("init", where=tmp_path)  # somebody else's repository
    git("add", ".", where=tmp_path)
    git("commit", "-m", "theirs", where=tmp_path)
    assert commit_in(tmp_path) is None


def test_a_checkout_has_its_commit_and_says_whether_files_differ(git, tmp_path):
    git("init")
    git("add", ".")
    git("commit", "-m", "ours")
    head = git("rev-parse", "HEAD").strip()
    assert commit_in(tmp_path) == head
    with (tmp_path / "site" / "coca_hf" / "provenance.py").open("a") as file:
        file.write("# changed\n")
    assert commit_in(tmp_path) == f"{head}+changes"


def test_versions_leave_out_what_is_not_installed():
    found = provenance.versions("torch", "no-such-package")
    assert found == {"torch": version("torch"), "python": platform.python_version()}


def test_the_date_is_in_utc_to_the_second():
    assert datetime.fromisoformat(provenance.now()).utcoffset() == timedelta(0)
    assert "." not in provenance.now()


def test_a_record_names_local_files_without_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").touch()
    expected = {
        "data/a.txt": "a.txt",
        "data/*.txt": "*.txt",
        "**/*.txt": "*.txt",
        "../elsewhere/*.txt": "*.txt",
        "/absent/b.txt": "b.txt",
        "~/c": "c",
        ".": tmp_path.name,
        "owner/name": "owner/name",
        "owner/name@main": "owner/name@main",
        "https://owner.org/licence": "https://owner.org/licence",
        "mean of the rows / 2": "mean of the rows / 2",
        "data/" + "y" * 300: "data/" + "y" * 300,
        "a/null\0byte": "a/null\0byte",
    }
    record = {"number": 1, "names": list(expected), "none": None}
    assert without_paths(record) == record | {"names": list(expected.values())}
