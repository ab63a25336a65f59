"""Files are whole or absent, and one process writes at a time."""

import subprocess
import sys

import pytest

from coca_hf.errors import CocaError
from coca_hf.files import append_line, locked, remove_unfinished, replacing


def test_a_file_is_replaced_when_it_is_whole_and_not_before(tmp_path):
    file = tmp_path / "state.json"
    file.write_text("old")
    with replacing(file) as unfinished:
        unfinished.write_text("new")
        assert file.read_text() == "old"
        assert unfinished.name.startswith(".state.json.")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "state.json"
    file.write_text("old")

    def stop_half_way():
        with replacing(file) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_what_a_killed_process_left_is_removed_and_no_other_hidden_file(tmp_path):
    with replacing(tmp_path / "state.json") as unfinished:
        unfinished.touch()
        others = {".download.partial", ".a.1.partial.txt", "b.1.partial"}
        for name in others:
            (tmp_path / name).touch()
        remove_unfinished(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == others
        unfinished.touch()


def test_lines_are_appended_in_utf_8(tmp_path):
    for line in ("one", "zwölf"):
        append_line(tmp_path / "lines", line)
    assert (tmp_path / "lines").read_bytes() == "one\nzwölf\n".encode()


HOLD = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]);"
HOLD += "lock.acquire(); print('held', flush=True); sys.stdin.read()"


def test_another_process_that_holds_the_lock_is_one_line_and_its_death_frees_it(tmp_path):
    file = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        message = "a: is being written; wait"
        with pytest.raises(CocaError, match=f"^{message}$"), locked(file, message):
            pass
        other.kill()
    with locked(file, "still held"):
        assert file.exists()
    assert not file.exists()
