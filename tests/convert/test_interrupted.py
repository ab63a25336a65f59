"""After a kill, a full disk or a race, the destination is absent or complete, and a rerun continues."""

import json
import os
import random
import resource
import shutil
import signal
from functools import partial
from threading import Lock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import CocaError, convert_checkpoint
from coca_hf.convert import writer
from tests.conftest import flip
from tests.convert.checkpoints import (
    PROCESSES,
    Stop,
    edit_weights,
    exit_code_of,
    record_of,
    refuses,
    weights_of,
)

SHARDS = {"max_shard_size": "300KB"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sharded checkpoint of 4.5 MB."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **{"vocab_size": 1000, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 8},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 32},
    )
    directory = tmp_path_factory.mktemp("interrupted") / "source"
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="500KB")
    assert len(list(directory.glob("*.safetensors"))) > 4
    return directory


@pytest.fixture(scope="module")
def expected(source):
    """The files of weights of an uninterrupted run: bytes by name."""
    directory = source.parent / "expected"
    convert_checkpoint(source, directory, **SHARDS)
    assert len(list(directory.glob("*.safetensors"))) > 8
    return bytes_of(directory)


def bytes_of(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.glob("model*"))}


def staged(dst):
    """The finished shards in the staging directory of `dst`, and what tells a file from its copy."""
    manifest = dst.parent / f".{dst.name}.incomplete" / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines() if line.endswith("}")]
    return places(manifest.parent / "checkpoint", [line["shard"] for line in lines[1:]])


def places(directory, names):
    files = {name: (directory / name).stat() for name in names}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in files.items()}


def continues(source, dst, expected, before=None, **options):
    """Convert again, which keeps the finished shards in `before`, at least two; returns the record."""
    before = staged(dst) if before is None else before
    assert len(before) >= 2
    record = convert_checkpoint(source, dst, **SHARDS, **options)
    assert places(dst, before) == before
    assert bytes_of(dst) == expected
    assert not (dst.parent / ".dst.incomplete").exists()
    return record


def convert_reporting(src, dst, result):
    try:
        convert_checkpoint(src, dst, **SHARDS)
        result.put("converted")
    except CocaError as error:
        result.put(str(error))


def stop_after(num_bytes, action=None):
    def progress(done, total):
        if done >= num_bytes:
            if action:
                action()
            else:
                raise Stop

    return progress


def interrupted(source, dst, num_bytes=2_000_000, **options):
    with pytest.raises(Stop):
        convert_checkpoint(source, dst, **SHARDS, **options, progress=stop_after(num_bytes))
    assert not dst.exists()
    finished = staged(dst)
    assert len(finished) >= 3
    return finished


def convert_killed(src, dst, num_bytes):
    kill = stop_after(num_bytes, lambda: os.kill(os.getpid(), signal.SIGKILL))
    convert_checkpoint(src, dst, **SHARDS, progress=kill)


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_killed_conversion_continues_from_its_finished_shards(source, expected, tmp_path):
    """Three shards of at most 0.4 MB are written at once, so after 2 MB at least two are finished."""
    dst, moment = tmp_path / "dst", random.Random(8)
    for _ in range(5):
        arguments = source, dst, moment.uniform(2e6, 3.3e6)
        assert exit_code_of(convert_killed, *arguments) == -signal.SIGKILL
        assert not dst.exists()
        continues(source, dst, expected)
        shutil.rmtree(dst)
        assert not list(tmp_path.iterdir())


def test_what_a_run_left_that_was_killed_after_its_last_rename_is_removed(
    source, expected, tmp_path, monkeypatch
):
    """Also by a run that is refused because the destination is complete."""
    dst, left, remove = tmp_path / "dst", tmp_path / ".dst.incomplete/calibrated", writer._remove

    def killed_at_calibrated(path):
        if path == left:
            raise Stop
        remove(path)

    monkeypatch.setattr(writer, "_remove", killed_at_calibrated)
    with pytest.raises(Stop):
        convert_checkpoint(source, dst, **SHARDS)
    monkeypatch.undo()
    left.mkdir(parents=True)
    refuses("dst: exists and is left as it is", source, dst, **SHARDS)
    assert [file.name for file in tmp_path.iterdir()] == ["dst"]
    assert bytes_of(dst) == expected


@pytest.mark.real
@pytest.mark.timeout(60)
def test_one_of_two_concurrent_conversions_wins_and_the_other_says_so(source, expected, tmp_path):
    dst = tmp_path / "dst"
    for _ in range(4):
        target, result = convert_reporting, PROCESSES.Queue()
        processes = [PROCESSES.Process(target=target, args=(source, dst, result)) for _ in "12"]
        for process in processes:
            process.start()
        answers = sorted(result.get(timeout=30) for _ in processes)
        for process in processes:
            process.join()
        refusals = ("another conversion is writing it", "exists and is left as it is")
        assert answers.pop(answers.index("converted")) == "converted"
        assert any(reason in answers[0] for reason in refusals), answers
        assert bytes_of(dst) == expected
        shutil.rmtree(dst)
        assert not list(tmp_path.iterdir())


def test_rerun_keeps_the_finished_shards_also_of_another_dtype_and_gives_the_same_files_and_record(
    source, tmp_path
):
    record = convert_checkpoint(source, tmp_path / "fresh", **SHARDS, dtype="bfloat16")
    interrupted(source, tmp_path / "dst", num_bytes=1_600_000, dtype="bfloat16")
    fresh = bytes_of(tmp_path / "fresh")
    again = continues(source, tmp_path / "dst", fresh, dtype="bfloat16")
    assert again["start"] == record["start"]


DAMAGES = {
    "number": partial(flip, place=-5),
    "header's length": partial(flip, place=0),
    "header": partial(flip, place=30),
    "cut": lambda file: os.truncate(file, 5000),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_rerun_rewrites_a_damaged_shard_and_keeps_the_others(source, expected, tmp_path, damage):
    dst = tmp_path / "dst"
    before = interrupted(source, dst)
    file = tmp_path / ".dst.incomplete" / "checkpoint" / next(iter(before))
    damage(file)
    before.pop(file.name)
    continues(source, dst, expected, before)


def test_progress_counts_every_byte_once_from_one_thread_at_a_time(source, expected, tmp_path):
    steps, inside = [(0, 0)], Lock()

    def progress(done, total):
        assert inside.acquire(blocking=False)
        steps.append((done, total))
        inside.release()

    convert_checkpoint(source, tmp_path / "dst", **SHARDS, progress=progress)
    done, totals = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    written = weights_of(tmp_path / "dst").values()
    assert done[-1] == sum(tensor.nbytes for tensor in written)
    assert set(totals[1:]) == {done[-1]}


@pytest.mark.parametrize("stopped", [False, True])
def test_the_number_of_torch_threads_does_not_change(source, tmp_path, stopped):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        if stopped:
            interrupted(source, tmp_path / "dst")
        else:
            convert_checkpoint(source, tmp_path / "dst")
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


def values(**changed):
    """A change of the first shard's line."""

    def change(text):
        first, second, *others = text.splitlines()
        return "\n".join([first, json.dumps(json.loads(second) | changed), *others, ""])

    return change


MANIFESTS = {
    **{text: lambda _, text=text: text for text in ("", "{", '{"made_from": "x"}\n', "[]\n[]\n")},
    **{"not UTF-8": lambda text: "\xff\n", "cut": lambda text: text[:-7]},
    **{"no such shard": values(shard="no-such-shard"), "nothing written": values(written={})},
    **{"another hash": values(read={"model.norm.weight": "1"})},
    **{"no such tensor": values(read={"no.such.tensor": "1"})},
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_rerun_with_a_damaged_manifest_gives_the_same_files(source, expected, tmp_path, change):
    interrupted(source, tmp_path / "dst")
    file = tmp_path / ".dst.incomplete" / "manifest.jsonl"
    file.write_text(change(file.read_text()), encoding="latin-1")
    convert_checkpoint(source, tmp_path / "dst", **SHARDS)
    assert bytes_of(tmp_path / "dst") == expected


def test_a_rerun_keeps_the_shards_that_were_recorded_after_a_cut_line(source, expected, tmp_path):
    dst = tmp_path / "dst"
    before = interrupted(source, dst)
    file = tmp_path / ".dst.incomplete" / "manifest.jsonl"
    file.write_text(MANIFESTS["cut"](file.read_text()))
    assert len(interrupted(source, dst, 3_000_000)) > len(before)
    continues(source, dst, expected)


@pytest.mark.parametrize("options", [{}, {"constraint": "strict"}], ids=["number", "option"])
def test_rerun_starts_over_with_another_number_in_the_source_or_option(source, tmp_path, options):
    changed, dst = shutil.copytree(source, tmp_path / "changed"), tmp_path / "dst"
    interrupted(changed, dst)
    if not options:
        file = sorted(changed.glob("*.safetensors"))[0]
        stat = file.stat()
        edit_weights(changed, lambda w: next(iter(w.values())).view(-1)[3].add_(1), file.name)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    convert_checkpoint(changed, dst, **SHARDS, **options)
    convert_checkpoint(changed, tmp_path / "fresh", **SHARDS, **options)
    assert bytes_of(dst) == bytes_of(tmp_path / "fresh")


def test_a_rerun_with_other_code_keeps_no_shard(source, tmp_path, monkeypatch):
    before = interrupted(source, tmp_path / "dst")
    monkeypatch.setattr("coca_hf.convert.layout.CODE", [])
    convert_checkpoint(source, tmp_path / "dst", **SHARDS)
    assert not places(tmp_path / "dst", before).items() & before.items()


def test_a_missing_source_shard_is_named_and_a_rerun_continues_with_it(source, expected, tmp_path):
    copy, dst = shutil.copytree(source, tmp_path / "copy"), tmp_path / "dst"
    interrupted(copy, dst)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    shard.rename(tmp_path / "away")
    refuses(f"{shard.name}: no such file, expected a complete checkpoint", copy, dst, **SHARDS)
    shutil.copyfile(tmp_path / "away", shard)
    continues(copy, dst, expected)


def test_source_that_shrinks_while_it_is_read_is_named_and_the_rest_kept(source, tmp_path):
    copy, dst = shutil.copytree(source, tmp_path / "copy"), tmp_path / "dst"
    shard = sorted(copy.glob("*.safetensors"))[-1]
    message = f"{shard.name} became shorter while it was read; what is finished is kept"
    shrink = stop_after(1_000_000, lambda: os.truncate(shard, 100))
    refuses(message, copy, dst, **SHARDS, progress=shrink)
    assert staged(dst)


def test_a_file_size_limit_is_one_line_and_the_rerun_continues(source, expected, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        message = r"not written: .*File too large.*the same command continues"
        limit = (resource.RLIMIT_FSIZE, (200_000, limits[1]))
        progress = stop_after(2_000_000, lambda: resource.setrlimit(*limit))
        refuses(message, source, tmp_path / "dst", **SHARDS, progress=progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    continues(source, tmp_path / "dst", expected)


def test_a_full_disk_is_one_line_and_keeps_the_old_checkpoint_and_the_rerun_continues(
    source, expected, small_disk
):
    dst = small_disk / "dst"
    dst.mkdir()
    (dst / "config.json").write_text("{}")
    filler = small_disk / "filler"

    def fill():
        if not filler.exists():
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))

    message = "disk full while writing; free some space; what is finished is kept"
    progress = stop_after(2_000_000, fill)
    refuses(message, source, dst, **SHARDS, overwrite=True, progress=progress)
    filler.unlink()
    assert len(staged(dst)) >= 3
    continues(source, dst, expected, overwrite=True)


def test_bad_weights_found_late_leave_nothing(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    name = "model.layers.7.self_attn.k_proj.weight"
    file = record_of(copy, "model.safetensors.index.json")["weight_map"][name]
    edit_weights(copy, lambda weights: weights[name][5, 5].fill_(torch.nan), file)
    message = "layer 7: queries or keys are zero, infinite or NaN"
    refuses(message, copy, tmp_path / "dst", **SHARDS)
    assert [file.name for file in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize(
    "make", [lambda p, t: p.symlink_to(t), lambda p, t: p.write_text("")], ids=["link", "file"]
)
def test_what_is_in_the_place_of_the_staging_directory_is_left_alone(source, tmp_path, make):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    make(tmp_path / ".dst.incomplete", elsewhere)
    refuses(r"\.dst\.incomplete: is in the way", source, tmp_path / "dst")
    assert [file.name for file in elsewhere.iterdir()] == ["mine"]
