"""`--dry-run`: every check and a plan, without a byte written."""

import errno
import re
import tempfile

import pytest
import torch

from coca_hf import convert_checkpoint
from coca_hf.convert.preflight import free_bytes
from coca_hf.convert.writer import locked_staging
from tests.conftest import refused
from tests.convert.checkpoints import edit_weights, files_of, full_disk, interrupt, weights_of


@pytest.fixture(autouse=True)
def temporary_files(tmp_path, monkeypatch):
    """A directory for temporary files, which must be empty again afterwards."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))


def test_nothing_is_written_and_the_conversion_follows_the_plan(tiny_llama_dir, tmp_path, converts):
    dst, options = tmp_path / "deep" / "dst", {"dtype": "bfloat16", "keep_layers": [0, 2]}
    options["max_shard_size"] = "100KB"
    before = files_of(tmp_path)
    plan = convert_checkpoint(tiny_llama_dir, dst, dry_run=True, **options)
    words = ["--dtype", "bfloat16", "--keep-layers", "0,2", "--max-shard-size", "100KB"]
    printed = converts(tiny_llama_dir, dst, "--dry-run", *words)
    assert files_of(tmp_path) == before

    plain = converts(tiny_llama_dir, dst, "--dry-run")
    assert "original attention    kept in no layer" in plain
    assert "calibrate" not in plain

    record = convert_checkpoint(tiny_llama_dir, dst, **options)
    shared = plan.keys() & record.keys() - {"source"}
    assert {"constraint", "dtype", "kept_layers", "parameters"} <= shared
    assert {name: plan[name] for name in shared} == {name: record[name] for name in shared}
    size = (tiny_llama_dir / "model.safetensors").stat().st_size
    assert plan["read"] == {"files": 1, "bytes": size}
    shards = list(dst.glob("*.safetensors"))
    num_bytes = sum(tensor.nbytes for tensor in weights_of(dst).values())
    assert plan["written"] == {"files": len(shards), "bytes": num_bytes}
    assert len(shards) > 1
    assert f"{dst}: not written (--dry-run)" in printed
    assert f"{tiny_llama_dir}: safetensors, {size / 1e6:.2f} MB of weights, files: 1" in printed
    assert f"slack, bfloat16, {num_bytes / 1e6:.2f} MB of weights, files: {len(shards)}" in printed
    assert "original attention    kept in layers 0, 2" in printed
    took = r"about 7\d\d\.\d\d MB of memory \(from the shapes\) and \d+ s \(from the time to read"
    assert re.search(f"would take            {took}", printed)


def foreign_file(source, dst):
    staging = dst.parent / ".dst.incomplete"
    staging.mkdir(parents=True)
    (staging / "manifest.jsonl").symlink_to(source)


def weights(change):
    return lambda source, dst: edit_weights(source, change)


REFUSED = {
    "exists and is left as it is": lambda source, dst: dst.mkdir(parents=True),
    "disk full: 0.00 MB free": lambda source, dst: None,
    "norm.weight: got NaN or infinity, expected finite numbers": (
        weights(lambda w: w["model.norm.weight"][3].fill_(torch.nan))
    ),
    "layer 1: queries or keys are zero, infinite or NaN": (
        weights(lambda w: w["model.layers.1.self_attn.k_proj.weight"].zero_())
    ),
    "is in the way, expected what coca-convert makes there": foreign_file,
    "not JSON": lambda source, dst: (source / "tokenizer_config.json").write_text("{oops"),
    rf"not written: \[Errno {errno.ENOTDIR}] Not a directory": lambda _, dst: dst.parent.touch(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_it_refuses_what_a_conversion_does_in_its_words(source, tmp_path, monkeypatch, message):
    dst = tmp_path / "parent" / "dst"
    REFUSED[message](source, dst)
    if message.startswith("disk full"):
        full_disk(monkeypatch)
    options = {"ntk_length": 128} if message == "not JSON" else {}  # edits the tokenizer
    before = files_of(tmp_path)
    said = set()
    for dry_run in (True, False):
        said.add(refused(message, convert_checkpoint, source, dst, dry_run=dry_run, **options))
        assert files_of(tmp_path) == before
    assert len(said) == 1


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_destination_that_another_process_writes_is_refused(
    tiny_llama_dir, tmp_path, refusal, options
):
    dst = tmp_path / "dst"
    with locked_staging(dst):
        before = files_of(tmp_path)
        assert refusal(tiny_llama_dir, dst, *options) == (
            f"error: {dst}: another conversion is writing it; wait for it or choose another name\n"
        )
        assert files_of(tmp_path) == before


def test_an_interrupted_conversion_is_left_to_continue_and_its_shards_count_as_room(
    tiny_llama_dir, tmp_path, monkeypatch
):
    dst = tmp_path / "dst"
    interrupt(tiny_llama_dir, dst, 0.5, max_shard_size="20KB")
    before = files_of(tmp_path)
    full_disk(monkeypatch)
    options = {"dry_run": True, "max_shard_size": "20KB"}
    said = refused("disk full", convert_checkpoint, tiny_llama_dir, dst, **options)
    assert "disk full: 0.00 MB free" not in said
    assert files_of(tmp_path) == before


def test_what_an_interrupted_calibration_wrote_counts_as_room(tmp_path, monkeypatch):
    calibrated = tmp_path / ".dst.incomplete/calibrated"
    calibrated.mkdir(parents=True)
    for name in ("layer-00000.safetensors", "refit-00000.safetensors", "states-0"):
        (calibrated / name).write_bytes(bytes(500))
    full_disk(monkeypatch)
    assert free_bytes(tmp_path / "dst") == 1000 + 3 * 500


def test_a_calibration_is_planned_with_its_text_and_not_begun(
    tiny_llama_dir, text, tmp_path, converts, refusal, monkeypatch
):
    monkeypatch.setattr("coca_hf.convert.calibration.CalibrationRun", None)
    paths = tiny_llama_dir, tmp_path / "dst"
    command = (*paths, "--dry-run", "--calibrate", text, "--calibrate-tokens", "256")
    command += ("--calibrate-block", "32")
    before = files_of(tmp_path)
    options = ("--device", "cpu", "--calibrate-passes", "3", "--keep-layers", "2")
    printed = converts(*command, *options)
    needs = r"about 7\d\d\.\d\d MB of memory \(from the shapes\), 0\.\d\d MB of disk and \d+ s"
    planned = rf"512 tokens, 3 passes, on cpu, with {needs} \(from a timed step\)"
    assert re.search(rf"would calibrate       {planned}", printed)
    assert "kept in the layers that calibration finds (2)" in printed
    fitted = {"calibrate_on": str(text), "calibrate_tokens": 256, "calibrate_block": 32}
    named, number, auto = (
        convert_checkpoint(*paths, keep_layers=layers, dry_run=True, **fitted)
        for layers in ([0, 2], 2, "auto")
    )
    for size in ("parameters", "kv_cache_bytes_per_token", "written", "trainable_fraction"):
        assert number[size] == named[size] != auto[size]
    printed = converts(*command, "--keep-layers", "auto")
    assert "finds (auto); the sizes above count none of them" in printed
    assert files_of(tmp_path) == before
    text.write_text("short")
    refusal(*command)
    assert files_of(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("layers", [3, [0, 1, 2]])
def test_a_calibration_that_has_no_layer_to_fit_is_planned(
    tiny_llama_dir, calibrating, tmp_path, layers
):
    options = {**calibrating, "keep_layers": layers, "dry_run": True}
    plan = convert_checkpoint(tiny_llama_dir, tmp_path / "dst", **options)
    assert plan["kept_layers"] == layers
    # layers are ranked by fits of all of them
    assert (plan["calibration"]["seconds"] is None) == (layers != 3)
