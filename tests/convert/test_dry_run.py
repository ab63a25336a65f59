"""`--dry-run`: every check, what would be read and written, and not a byte on the disk."""

import errno
import os
import shutil
import tempfile

import pytest
from safetensors.torch import load_file, save_file

from coca_hf import CocaError, convert_checkpoint
from coca_hf.convert.staging import locked_staging


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    """A directory of their own, which the tests find empty again."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))


def everything_in(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def test_nothing_is_written_and_the_plan_is_what_the_conversion_then_does(
    tiny_llama_dir, tmp_path, convert
):
    dst, options = tmp_path / "deep" / "dst", {"dtype": "bfloat16", "keep_layers": [0, 2]}
    options["max_shard_size"] = "100KB"
    before = everything_in(tmp_path)
    plan = convert_checkpoint(tiny_llama_dir, dst, dry_run=True, **options)
    code, printed = convert(
        *(tiny_llama_dir, dst, "--dry-run", "--dtype", "bfloat16", "--keep-layers", "0,2"),
        *("--max-shard-size", "100KB"),
    )
    assert code == 0
    assert everything_in(tmp_path) == before

    record = convert_checkpoint(tiny_llama_dir, dst, **options)
    shared = plan.keys() & record.keys() - {"source"}
    assert {"constraint", "dtype", "kept_layers", "parameters"} <= shared
    assert {name: plan[name] for name in shared} == {name: record[name] for name in shared}
    size = (tiny_llama_dir / "model.safetensors").stat().st_size
    assert plan["read"] == {"files": 1, "bytes": size}
    shards = [load_file(file) for file in dst.glob("*.safetensors")]
    num_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    assert plan["written"] == {"files": len(shards), "bytes": num_bytes}
    assert len(shards) > 1
    assert f"{dst}: not written (--dry-run)" in printed
    assert f"{tiny_llama_dir}: safetensors, {size / 1e6:.2f} MB of weights, files: 1" in printed
    assert f"slack, bfloat16, {num_bytes / 1e6:.2f} MB of weights, files: {len(shards)}" in printed
    assert "original attention    kept in layers 0, 2" in printed


def full_disk(source, dst, monkeypatch):
    full = shutil._ntuple_diskusage(10**6, 10**6, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)


def zero_keys(source, dst, monkeypatch):
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"].zero_()
    save_file(weights, source / "model.safetensors")


def foreign_file(source, dst, monkeypatch):
    staging = dst.parent / ".dst.incomplete"
    staging.mkdir(parents=True)
    (staging / "manifest.jsonl").symlink_to(source)


def unreadable_tokenizer(source, dst, monkeypatch):
    (source / "tokenizer_config.json").write_text("{oops")


def read_only(source, dst, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)


REFUSED = {
    "exists": (lambda source, dst, _: dst.mkdir(parents=True), "exists and is left as it is", {}),
    "full disk": (full_disk, "disk full: 0.00 MB free", {}),
    "numbers": (zero_keys, "layer 1: queries or keys are zero, infinite or NaN", {}),
    "foreign file": (foreign_file, "is in the way, expected what coca-convert makes there", {}),
    "tokenizer": (unreadable_tokenizer, "not JSON", {"ntk_length": 128}),
    "parent is a file": (
        lambda source, dst, _: dst.parent.touch(),
        f"not written: [Errno {errno.ENOTDIR}] Not a directory",
        {},
    ),
}


@pytest.mark.parametrize(("prepare", "message", "options"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_conversion_refuses_is_refused_in_the_same_words(
    tiny_llama_dir, tmp_path, monkeypatch, prepare, message, options
):
    source = shutil.copytree(tiny_llama_dir, tmp_path / "source")
    dst = tmp_path / "parent" / "dst"
    prepare(source, dst, monkeypatch)
    before = everything_in(tmp_path)
    said = []
    for dry_run in (True, False):
        with pytest.raises(CocaError, match=message.replace("[", r"\[")) as refused:
            convert_checkpoint(source, dst, dry_run=dry_run, **options)
        said.append(str(refused.value))
        assert everything_in(tmp_path) == before
    if "Errno" not in message:  # of another call, on the same path
        assert said[0] == said[1]


def test_a_directory_that_may_not_be_written_is_refused(
    tiny_llama_dir, tmp_path, convert, monkeypatch
):
    """For root every directory may, but on a disk that is read-only."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, printed = convert(tiny_llama_dir, tmp_path / "dst", "--dry-run")
    assert (code, printed.count("\n")) == (2, 1)
    assert "dst: not written: [Errno 13] Permission denied" in printed


def test_a_destination_that_another_process_writes_is_refused(tiny_llama_dir, tmp_path):
    dst = tmp_path / "dst"
    with locked_staging(dst):
        before = everything_in(tmp_path)
        with pytest.raises(CocaError, match="another conversion is writing it"):
            convert_checkpoint(tiny_llama_dir, dst, dry_run=True)
        assert everything_in(tmp_path) == before


def test_an_interrupted_conversion_is_left_to_continue_and_its_shards_count_as_room(
    tiny_llama_dir, tmp_path, monkeypatch
):
    dst = tmp_path / "dst"

    def interrupt(done, total):
        _made_from, *finished = (
            (tmp_path / ".dst.incomplete/manifest.jsonl").read_text().split("\n")
        )
        if any(finished):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tiny_llama_dir, dst, progress=interrupt, max_shard_size="20KB")
    before = everything_in(tmp_path)
    full_disk(None, dst, monkeypatch)
    with pytest.raises(CocaError, match="disk full") as refused:
        convert_checkpoint(tiny_llama_dir, dst, dry_run=True, max_shard_size="20KB")
    assert "disk full: 0.00 MB free" not in str(refused.value)
    assert everything_in(tmp_path) == before


def test_a_calibration_is_planned_with_its_text_and_not_begun(
    tiny_llama_dir, tmp_path, convert, monkeypatch
):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {number}\n" for number in range(1000)))
    monkeypatch.setattr("coca_hf.convert.conversion.calibrate", None)
    options = ("--calibrate", text, "--calibrate-tokens", "256", "--calibrate-block", "32")
    before = everything_in(tmp_path)
    code, printed = convert(
        *(tiny_llama_dir, tmp_path / "dst", "--dry-run", "--device", "cpu"),
        *(*options, "--calibrate-passes", "3", "--keep-layers", "2"),
    )
    assert code == 0
    assert "would calibrate       512 tokens, 3 passes, on cpu, with " in printed
    assert " of memory and " in printed
    assert "kept in the layers that calibration finds (2)" in printed
    assert everything_in(tmp_path) == before
    text.write_text("short")
    code, printed = convert(tiny_llama_dir, tmp_path / "dst", "--dry-run", *options)
    assert (code, printed.count("\n")) == (2, 1)
    assert everything_in(tmp_path).keys() == before.keys()


def test_a_plan_without_calibration_keeps_no_layer_and_calibrates_nothing(
    tiny_llama_dir, tmp_path, convert
):
    code, printed = convert(tiny_llama_dir, tmp_path / "dst", "--dry-run")
    assert code == 0
    assert "original attention    kept in no layer" in printed
    assert "calibrate" not in printed
