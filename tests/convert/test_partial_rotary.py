"""`--partial-rotary`: every description of a checkpoint names the layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_hf import convert_checkpoint, patch_
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from tests.convert.checkpoints import record_of, refuses
from tests.convert.test_families import write_golden
from tests.models.families import tokens


def test_the_checkpoint_is_the_patched_model_and_says_which_layers(
    tiny_llama_dir, tmp_path, converts
):
    options = ["--keep-layers", "1,", "--partial-rotary", "2,0"]
    printed = converts(tiny_llama_dir, tmp_path / "dst", *options)
    assert "partial rotation      every second pair, in layers 0, 2" in printed
    printed = converts(tiny_llama_dir, tmp_path / "dry", *options, "--dry-run")
    assert "partial rotation      every second pair, in layers 0, 2" in printed
    assert record_of(tmp_path / "dst", "config.json")["coca_partial_rotary_layers"] == [0, 2]
    assert record_of(tmp_path / "dst", "conversion.json")["partial_rotary_layers"] == [0, 2]
    card = (tmp_path / "dst" / "README.md").read_text()
    assert "- every second rotary pair stands still: layers 0, 2" in card
    described = describe(inspect_checkpoint(tmp_path / "dst"))
    assert "every second rotary pair stands still in layers 0, 2" in described
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    patched = patch_(original, keep_layers=[1], partial_rotary=[2, 0])
    assert torch.equal(loaded(tokens()).logits, patched(tokens()).logits)


def test_a_baked_ntk_base_keeps_the_layers_and_accepts_no_others(tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "coca", partial_rotary=[1])
    record = convert_checkpoint(tmp_path / "coca", tmp_path / "long", ntk_length=160)
    assert record["partial_rotary_layers"] == [1]
    message = r"--partial-rotary: got \[0\], expected \[1\], the source's"
    options = {"ntk_length": 160, "partial_rotary": [0]}
    refuses(message, tmp_path / "coca", tmp_path / "other", **options)


def test_a_layer_that_calibration_keeps_rotates_every_pair(tiny_llama_dir, calibrating, tmp_path):
    options = {"keep_layers": 1, "partial_rotary": [0, 1, 2]}
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "dst", **calibrating, **options)
    assert len(record["kept_layers"]) == 1
    assert sorted(record["kept_layers"] + record["partial_rotary_layers"]) == [0, 1, 2]


def test_kept_layers_and_models_that_are_coca_are_refused(tiny_llama_dir, tmp_path):
    layers = {"keep_layers": [0, 1], "partial_rotary": [1, 2]}
    message = r"coca_partial_rotary_layers has \[1\], which coca_kept_layers has, too"
    refuses(message, tiny_llama_dir, tmp_path / "dst", **layers)
    write_golden(tmp_path / "released", "neox")
    message = "released: got the released CoCA layout with --partial-rotary, expected"
    refuses(message, tmp_path / "released", tmp_path / "dst", released=True, partial_rotary=[0])


@pytest.mark.parametrize("given", ["3", "auto", "x", ""])
def test_other_values_of_partial_rotary_are_refused(given, tiny_llama_dir, tmp_path, refusal):
    printed = refusal(tiny_llama_dir, tmp_path / "dst", f"--partial-rotary={given}")
    assert f"--partial-rotary: got {given!r}, expected layers by number" in printed
