"""Conversion replaces only the checkpoint that it was told to replace, if that has not changed."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest

from coca_hf import convert_checkpoint
from tests.conftest import refused
from tests.convert.checkpoints import exit_code_of, files_of, interrupt, record_of, refuses, write


def once(action):
    """A progress callback that acts at its first call, while weights are written."""
    calls = []

    def progress(done, total):
        if not calls:
            calls.append(done)
            action()

    return progress


@pytest.fixture
def old(tmp_path):
    """A checkpoint to be replaced."""
    write(tmp_path / "dst" / "config.json", "old")
    write(tmp_path / "dst" / "additional_chat_templates" / "a.jinja", "mine")
    return tmp_path / "dst"


def link_elsewhere(dst):
    write(dst.parent / "other" / "config.json", "theirs")
    dst.symlink_to("other")


APPEARS = {
    "a checkpoint": lambda dst: write(dst / "config.json", "theirs"),
    "a directory": lambda dst: write(dst / "letters" / "a.txt", "theirs"),
    "a file": lambda dst: write(dst, "theirs"),
    "a link": link_elsewhere,
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("appear", APPEARS.values(), ids=APPEARS.keys())
def test_what_appears_at_the_destination_meanwhile_is_kept_and_the_rerun_continues(
    tiny_llama_dir, tmp_path, appear, overwrite
):
    dst = tmp_path / "dst"
    message = r"dst: not written: something appeared there .* the same command continues"
    options = {"overwrite": overwrite, "progress": once(lambda: appear(dst))}
    refused(message, convert_checkpoint, tiny_llama_dir, dst, **options)
    assert "theirs" in {file.read_text() for file in (dst, *dst.rglob("*")) if file.is_file()}
    dst.rename(tmp_path / "theirs")
    weights = (tmp_path / ".dst.incomplete" / "checkpoint" / "model.safetensors").stat()
    convert_checkpoint(tiny_llama_dir, dst)
    assert (dst / "model.safetensors").stat().st_ino == weights.st_ino
    assert not (tmp_path / ".dst.incomplete").exists()


CHANGES = {
    "a file more": lambda dst: write(dst / "additional_chat_templates" / "b.jinja", "theirs"),
    "a file changed": lambda dst: write(dst / "additional_chat_templates" / "a.jinja", "theirs"),
    "another checkpoint": lambda dst: [shutil.rmtree(dst), write(dst / "config.json", "theirs")],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_overwrite_keeps_a_checkpoint_that_changed_meanwhile(tiny_llama_dir, old, change):
    changed = {}

    def act():
        change(old)
        changed.update(files_of(old))

    message = "the checkpoint there changed meanwhile, and is left as it is; what is fini"
    options = {"overwrite": True, "progress": once(act)}
    refused(message, convert_checkpoint, tiny_llama_dir, old, **options)
    assert files_of(old) == changed
    assert b"theirs" in changed.values()
    convert_checkpoint(tiny_llama_dir, old, overwrite=True)
    assert record_of(old, "config.json")["model_type"] == "coca_llama"
    assert [file.name for file in old.parent.iterdir()] == ["dst"]


def test_what_takes_the_place_of_a_checkpoint_that_is_being_replaced_is_kept_beside_it(
    tiny_llama_dir, tmp_path, old
):
    """The state after a kill between the two renames, if a third party has written there since."""
    staging = tmp_path / ".dst.incomplete"
    (staging / "checkpoint").mkdir(parents=True)
    old.rename(staging / "replaced")
    write(old / "config.json", "theirs")
    for overwrite in (False, True):
        message = r"dst: appeared while .* is kept in .*replaced; move one of them"
        refuses(message, tiny_llama_dir, old, overwrite=overwrite)
        assert (staging / "replaced" / "config.json").read_text() == "old"
    old.rename(tmp_path / "theirs")
    refused("exists and is left as it is", convert_checkpoint, tiny_llama_dir, old)
    assert (old / "config.json").read_text() == "old"


def test_the_rest_of_a_replaced_checkpoint_goes_with_the_next_run(tiny_llama_dir, tmp_path, old):
    """The state after a kill that follows the second rename."""
    shutil.copytree(old, tmp_path / ".dst.incomplete" / "replaced")
    convert_checkpoint(tiny_llama_dir, old, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["dst"]


PLACES = {  # with --overwrite, except for the first
    "exists and is left as it is": lambda dst: dst.mkdir(),
    "--overwrite only replaces checkpoints": lambda dst: dst.touch(),
    "--overwrite only replaces checkpoints, directories with a config.json": (
        lambda dst: write(dst / "letters.txt", "mine")
    ),
    "is the source itself": lambda dst: dst.symlink_to("source"),
    "dst: is a link to other; name the directory itse": link_elsewhere,
    "dst: is a link to none": lambda dst: dst.symlink_to("none"),
}


@pytest.mark.parametrize("message", PLACES)
def test_a_destination_that_cannot_be_replaced_is_refused_before_the_source_is_opened(
    tiny_llama_dir, tmp_path, monkeypatch, message
):
    (tmp_path / "source").symlink_to(tiny_llama_dir)
    PLACES[message](tmp_path / "dst")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("coca_hf.convert.conversion.open_source", None)
    overwrite = "is left as it is" not in message
    refuses(message, tmp_path / "source", tmp_path / "dst", overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["dst", "a b\\c"])
def test_a_mount_point_is_refused_before_the_work(tmp_path, tiny_llama_dir, monkeypatch, name):
    dst = tmp_path / name
    write(dst / "config.json", "old")
    mounted = subprocess.run(["mount", "--bind", dst, dst], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    monkeypatch.setattr("coca_hf.convert.conversion.open_source", None)
    try:
        refuses("a file system is mounted there", tiny_llama_dir, dst, overwrite=True)
    finally:
        subprocess.run(["umount", "--lazy", dst], check=True)


def test_an_empty_directory_is_replaced_with_overwrite(tiny_llama_dir, tmp_path):
    (tmp_path / "dst").mkdir()
    convert_checkpoint(tiny_llama_dir, tmp_path / "dst", overwrite=True)
    assert (tmp_path / "dst" / "config.json").is_file()


@pytest.fixture
def interrupted(tiny_llama_dir, tmp_path):
    """The staging directory of an interrupted conversion with finished shards."""
    interrupt(tiny_llama_dir, tmp_path / "dst", 0.8, max_shard_size="20KB")
    assert len((tmp_path / ".dst.incomplete" / "manifest.jsonl").read_text().splitlines()) > 2
    return tmp_path / ".dst.incomplete"


def link_directory(path, victim):
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(victim)


def link_shard(kind, path, victim):
    link_file(kind, sorted(path.glob("model*.safetensors"))[0], victim)
    # damaged, so it is written again in the same place
    with (victim / "a.txt").open("ab") as file:
        file.write(b"mine")


def link_file(kind, path, victim):
    (victim / "a.txt").write_bytes(path.read_bytes() if path.exists() else b"mine")
    path.unlink(missing_ok=True)
    kind(victim / "a.txt", path)


LINKS = [
    *((name, link_directory) for name in ("checkpoint", "calibrated")),
    *(("checkpoint", partial(link_shard, kind)) for kind in (os.symlink, os.link)),
    *(("manifest.jsonl", partial(link_file, kind)) for kind in (os.symlink, os.link)),
    *(("lock", partial(link_file, kind)) for kind in (os.symlink, os.link)),
    ("manifest.jsonl", lambda path, victim: [path.unlink(), os.mkfifo(path)]),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("name", "prepare"), LINKS)
def test_a_staging_directory_with_a_link_in_it_is_refused_and_what_it_leads_to_kept(
    tiny_llama_dir, tmp_path, interrupted, name, prepare
):
    victim = tmp_path / "victim"
    write(victim / "letters" / "a.txt", "mine")
    write(victim / "b.safetensors", "mine")
    prepare(interrupted / name, victim)
    before = files_of(victim)
    message = r"is in the way, expected what coca-convert makes there; remove it"
    refuses(message, tiny_llama_dir, tmp_path / "dst", max_shard_size="20KB")
    assert files_of(victim) == before


def test_the_staging_directory_is_private_and_the_destination_follows_the_umask(
    tiny_llama_dir, tmp_path, interrupted
):
    assert interrupted.stat().st_mode & 0o777 == 0o700
    before = os.umask(0o027)
    try:
        convert_checkpoint(tiny_llama_dir, tmp_path / "dst")
    finally:
        os.umask(before)
    assert (tmp_path / "dst").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "dst").iterdir()} == {0o640}


@pytest.mark.parametrize("dst", ["", ".", "..", "x/.."])
def test_a_destination_without_a_name_is_refused(tiny_llama_dir, tmp_path, monkeypatch, dst):
    write(tmp_path / "config.json", "old")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    refuses("expected the name of a directory to write", tiny_llama_dir, dst, overwrite=True)
    assert (tmp_path / "config.json").read_text() == "old"


def test_a_refused_conversion_leaves_no_directory_above_its_destination(tiny_llama_dir, tmp_path):
    refuses("no such directory", "no/such/source", tmp_path / "a" / "b" / "dst")
    assert not list(tmp_path.iterdir())
    convert_checkpoint(tiny_llama_dir, tmp_path / "a" / "b" / "dst")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["dst"]


def test_a_source_in_its_own_staging_directory_is_refused(tiny_llama_dir, tmp_path, interrupted):
    before = files_of(interrupted)
    message = r"\.dst\.incomplete: is the source itself or holds it"
    refuses(message, interrupted / "checkpoint", tmp_path / "dst")
    assert files_of(interrupted) == before


@pytest.mark.parametrize("name", [".git", "runs", "additional_chat_templates/notes.txt"])
def test_overwrite_deletes_nothing_that_is_no_part_of_a_checkpoint(name, tiny_llama_dir, old):
    write(old / name, "mine") if name.endswith(".txt") else (old / name).mkdir()
    message = f"--overwrite would delete {name}, which is no part of a checkpoint"
    refuses(message, tiny_llama_dir, old, overwrite=True)
    (old / name).unlink() if name.endswith(".txt") else (old / name).rmdir()
    convert_checkpoint(tiny_llama_dir, old, overwrite=True)


def test_overwrite_deletes_no_text_that_it_is_calibrated_on(tiny_llama_dir, old, text):
    inside = text.rename(old / "text.txt")
    message = "is the source itself or holds it, or the text of --calibrate"
    refuses(message, tiny_llama_dir, old, overwrite=True, calibrate_on=str(inside))


def test_a_replaced_checkpoint_that_cannot_be_removed_does_not_undo_the_new_one(
    tiny_llama_dir, old, monkeypatch
):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    remove = shutil.rmtree
    by_name = {"replaced": refuse}
    monkeypatch.setattr(shutil, "rmtree", lambda path: by_name.get(path.name, remove)(path))
    message = r"dst: is written; but what is left .* cannot be removed: .*replaced"
    refused(message, convert_checkpoint, tiny_llama_dir, old, overwrite=True)
    assert record_of(old, "config.json")["model_type"] == "coca_llama"


def convert_killed(src, dst, number):
    """Convert, with a SIGKILL before the `number`th time that a file at or beside `dst` is touched."""
    events, places = itertools.count(1), (str(dst), f".{dst.name}.incomplete")

    def hook(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            paths = [os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
            touched = any(path == places[0] or places[1] in path for path in paths)
            if touched and next(events) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    convert_checkpoint(src, dst, overwrite=True, max_shard_size="60KB")


@pytest.mark.real
def test_killed_at_any_touch_of_a_file_it_leaves_the_old_or_the_new_checkpoint_and_the_rerun_completes(
    tiny_llama_dir, tmp_path, old
):
    def weights(directory):
        return {name: data for name, data in files_of(directory).items() if "safetensors" in name}

    convert_checkpoint(tiny_llama_dir, tmp_path / "expected", max_shard_size="60KB")
    before = files_of(old)
    for number in itertools.count(1, 2):
        code = exit_code_of(convert_killed, tiny_llama_dir, old, number)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        moved = tmp_path / ".dst.incomplete" / "replaced"
        found = old if old.exists() else moved
        assert files_of(found) == before or weights(found) == weights(tmp_path / "expected"), number
        convert_checkpoint(tiny_llama_dir, old, overwrite=True, max_shard_size="60KB")
        assert weights(old) == weights(tmp_path / "expected")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["dst", "expected"]
        shutil.rmtree(old)
        for name, data in before.items():
            if data:
                write(old / name, data.decode())
    assert number > 60
