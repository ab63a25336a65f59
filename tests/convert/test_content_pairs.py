"""`--content-pairs`: which they are, and that every description of a checkpoint has their number."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from coca_hf import (
    CocaGPTNeoXConfig,
    CocaLlamaConfig,
    CocaLlamaForCausalLM,
    convert_checkpoint,
    patch_,
)
from coca_hf.convert import layer_fit
from coca_hf.convert.config import slow_pairs
from coca_hf.errors import CocaError
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from tests.conftest import refused
from tests.convert.checkpoints import Stop, assert_same_weights, edit_config, record_of, refuses
from tests.models.families import tiny_model, tokens


def test_the_checkpoint_is_the_patched_model_and_says_how_many(tiny_llama_dir, tmp_path, converts):
    options = ["--keep-layers", "1,", "--content-pairs", "2", "--content-layers", "2,0"]
    words = "the 2 slowest of each head, and every second of the others in layers 0, 2"
    for dst, more in (("dst", []), ("dry", ["--dry-run"])):
        printed = converts(tiny_llama_dir, tmp_path / dst, *options, *more)
        assert f"content pairs         {words}" in printed
    config = record_of(tmp_path / "dst", "config.json")
    assert (config["coca_content_pairs"], config["coca_content_layers"]) == (2, [0, 2])
    record = record_of(tmp_path / "dst", "conversion.json")
    assert (record["content_pairs"], record["content_layers"]) == (2, [0, 2])
    assert f"- content pairs: {words}" in (tmp_path / "dst" / "README.md").read_text()
    assert f"content pairs: {words}" in describe(inspect_checkpoint(tmp_path / "dst"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    patched = patch_(original, keep_layers=[1], content_pairs=2, content_layers=[0, 2])
    assert torch.equal(loaded(tokens()).logits, patched(tokens()).logits)


ROPES = {  # its theta, the length that it was trained on, and the part of a head that it rotates
    "default": ({}, 1024, 1.0),
    "dynamic": ({"factor": 4.0}, 1024, 1.0),
    "baked": ({"rope_type": "default", "original_max_position_embeddings": 300}, 300, 1.0),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.25}, 1024, 0.25),
}


@pytest.mark.parametrize("rope", ROPES)
def test_auto_are_the_pairs_that_do_not_complete_a_rotation_within_the_trained_length(rope):
    fields, length, part = ROPES[rope]
    config = (CocaGPTNeoXConfig if part < 1 else CocaLlamaConfig)(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": rope, "rope_theta": 5000.0} | fields,
    )
    rotated = int(32 * part)
    periods = [2 * math.pi * 5000 ** (pair / rotated) for pair in range(rotated)]
    slow = sum(period > length for period in periods)
    assert 0 < slow < rotated
    assert slow_pairs(config) == slow + 32 - rotated


def test_scaled_angles_count_as_they_are_at_the_longer_length():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    sizes = {"hidden_size": 256, "num_attention_heads": 4}
    plain, scaled = (
        CocaLlamaConfig(**sizes, max_position_embeddings=length, rope_parameters=rope)
        for length, rope in ((1024, {"rope_theta": 5000.0}), (4096, yarn | {"rope_theta": 5000.0}))
    )
    assert slow_pairs(scaled) == slow_pairs(plain)


def test_auto_is_a_number_in_the_config_whatever_the_baked_base(tiny_llama_dir, tmp_path):
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "coca", content_pairs="auto")
    number = record["content_pairs"]
    assert 0 < number < AutoConfig.from_pretrained(tiny_llama_dir).head_dim // 2
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    assert patch_(original, content_pairs="auto").config.coca_content_pairs == number
    baked = {"ntk_length": 16000}
    at_once = convert_checkpoint(tiny_llama_dir, tmp_path / "once", content_pairs="auto", **baked)
    assert at_once["content_pairs"] == number
    later = convert_checkpoint(tmp_path / "coca", tmp_path / "later", **baked)
    assert later["content_pairs"] == number


def test_auto_needs_a_calibration(tiny_llama_dir, tmp_path, refusal, calibrating, converts):
    printed = refusal(tiny_llama_dir, tmp_path / "dst", "--content-layers=auto")
    message = "--content-layers: got 'auto', expected numbers of layers, or auto with --calib"
    assert message in printed
    text = calibrating["calibrate_on"]
    options = ["--calibrate-block", 32, "--calibrate-tokens", 256, "--content-layers", "auto"]
    options += ["--calibrate", text, "--dry-run"]
    printed = converts(tiny_llama_dir, tmp_path / "dst", *options)
    assert "every second of the pairs in those that calibration finds" in printed


def test_content_layers_exist_once_and_are_not_kept(tiny_llama_dir, tmp_path):
    paths = tiny_llama_dir, tmp_path / "dst"
    message = r"--content-layers: .*coca_content_layers is \[1, 7\], expected .* from 0 to 2"
    refuses(message, *paths, content_layers=[7, 1])
    message = "--content-layers: got layer 1 more than once"
    refuses(message, *paths, content_layers=[1, 2, 1])
    message = r"--content-layers: got layers \[1\], which --keep-layers keeps"
    refuses(message, *paths, content_layers=[1, 2], keep_layers=[0, 1])
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    message = r"--content-layers: .*has layers \[1\], which keep the original's attention, expected"
    refused(message, patch_, original, keep_layers=[1], content_layers=[1])


def test_ranked_layers_that_are_kept_have_no_content_pairs(tiny_llama_dir, calibrating, tmp_path):
    paths, options = (tiny_llama_dir, tmp_path / "dst"), {**calibrating, "keep_layers": 1}
    plan = convert_checkpoint(*paths, **options, content_layers=[0], dry_run=True)
    assert plan["content_layers"] == [0]
    found = []
    options["calibrate_progress"] = lambda progress: found.append(progress.notice)
    record = convert_checkpoint(*paths, **options, content_layers=[0, 1, 2])
    assert sorted(record["kept_layers"] + record["content_layers"]) == [0, 1, 2]
    assert [notice for notice in found if notice][1:3] == [
        "measuring the harm of converting each of 3 layers alone",
        f"keeping layers {record['kept_layers'][0]}; measuring the fits of the others beside them",
    ]
    assert "harm" in record["calibration"]["seconds_by_part"]


def test_more_than_a_head_has_are_refused(tiny_llama_dir, tmp_path):
    message = "--content-pairs: .*coca_content_pairs is .*, expected 0 to the 4 pairs of a head"
    for number in (5, -1):
        refuses(message, tiny_llama_dir, tmp_path / "dst", content_pairs=number)
        with pytest.raises(CocaError, match=message):
            patch_(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), content_pairs=number)
    message = "--content-pairs: got 'all', expected how many of a head's pairs, or auto"
    refuses(message, tiny_llama_dir, tmp_path / "dst", content_pairs="all")


def test_a_checkpoint_with_fields_of_another_version_is_not_loaded(tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "dst")
    edit_config(tmp_path / "dst", coca_other_pairs=1)
    message = "coca_other_pairs is unknown to this version"
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "dst")
    refuses(message, tmp_path / "dst", tmp_path / "again")
    message = "--ignore-field coca_other_pairs: got a field that changes the model"
    refuses(message, tmp_path / "dst", tmp_path / "again", ignore_fields=["coca_other_pairs"])


def test_auto_chooses_the_layers_that_a_short_fit_brings_nearer(
    tiny_llama_dir, calibrating, tmp_path, monkeypatch
):
    """The written model is the one that was fitted: naming the chosen layers gives the same bytes,
    and so does a run that is interrupted. Content pairs are fitted, too.
    """
    margin = 0.96  # tells the layers of this model apart
    monkeypatch.setattr(layer_fit, "TRIAL_MARGIN", margin)
    monkeypatch.setattr(layer_fit, "TRIAL_STEPS", 32)  # two passes over 16 blocks
    options = {**calibrating, "content_pairs": 1, "keep_layers": 1}
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "auto", **options, content_layers="auto")
    kls = []
    for number, layers in enumerate(([], [0, 1, 2])):
        some = {**calibrating, "content_pairs": 1, "content_layers": layers}
        trial = convert_checkpoint(tiny_llama_dir, tmp_path / f"trial{number}", **some)
        kls.append([layer["kl_fitted"] for layer in trial["calibration"]["attention_kl"]])
    expected = [
        layer
        for layer, (few, more) in enumerate(zip(*kls, strict=True))
        if more < margin * few and layer not in record["kept_layers"]
    ]
    assert len(expected) == 1
    assert record["content_layers"] == expected
    for layer in trial["calibration"]["attention_kl"]:
        assert layer["kl_fitted"] < layer["kl_start"]

    def interrupt(progress):
        if progress.layers_done == 2:
            raise Stop

    again = tiny_llama_dir, tmp_path / "again"
    options["content_layers"] = "auto"
    with pytest.raises(Stop):
        convert_checkpoint(*again, **options, calibrate_progress=interrupt)
    convert_checkpoint(*again, **options)
    assert_same_weights(tmp_path / "again", tmp_path / "auto")
    assert record_of(tmp_path / "again", "config.json")["coca_content_layers"] == expected
    options |= {"keep_layers": record["kept_layers"], "content_layers": expected}
    convert_checkpoint(tiny_llama_dir, tmp_path / "named", **options)
    assert_same_weights(tmp_path / "named", tmp_path / "auto")


@pytest.mark.parametrize("number", [32, 512, 1200, 5000])
def test_a_trial_sees_text_and_all_four_kinds_of_repeated_blocks_and_not_too_many(number):
    seen = range(number)[:: layer_fit._trial_stride(number)]
    repeated = [block - number // 2 for block in seen if block >= number // 2]
    assert {block % 4 for block in repeated} == {0, 1, 2, 3}
    assert 0.4 < len(repeated) / len(seen) < 0.6
    assert min(number, 160) <= len(seen) <= 320


def test_a_field_of_another_version_that_is_not_set_is_dropped(tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "dst")
    edit_config(tmp_path / "dst", coca_other_layers=[], coca_log_scale=0.0)
    fields = AutoModelForCausalLM.from_pretrained(tmp_path / "dst").config.to_dict()
    assert not {"coca_other_layers", "coca_log_scale"} & fields.keys()
    convert_checkpoint(tmp_path / "dst", tmp_path / "again", ntk_length=128)
    assert "coca_other_layers" not in record_of(tmp_path / "again", "config.json")


def test_layers_that_peft_repeats_are_refused_until_the_config_has_their_numbers():
    model = tiny_model(coca_content_pairs=1, coca_content_layers=[1])
    lora = LoraConfig(target_modules=["q_proj"], r=2, layer_replication=[[0, 2], [1, 3]])
    adapted = get_peft_model(model, lora)
    with pytest.raises(
        ValueError, match=r"layer 2 .* set coca_content_layers to their new numbers"
    ):
        adapted(input_ids=tokens())
    model.config.coca_content_layers = [1, 2]
    logits = adapted(input_ids=tokens()).logits
    four = tiny_model(coca_content_pairs=1, coca_content_layers=[1, 2], num_hidden_layers=4)
    four.load_state_dict(adapted.unload().state_dict())
    assert torch.equal(four(tokens()).logits, logits)


def test_content_layers_that_are_set_on_a_model_are_refused():
    model = tiny_model()
    model.config.coca_content_layers = [1]
    with pytest.raises(ValueError, match=r"layer 1 was made with .*every_second=False"):
        model(tokens())


def test_what_is_passed_to_from_pretrained_is_checked(tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "dst")
    with pytest.raises(StrictDataclassClassValidationError, match="coca_content_pairs is 77"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dst", coca_content_pairs=77)
    with pytest.raises(TypeError, match="coca_content_pair"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dst", coca_content_pair=1)


@pytest.mark.parametrize(("field", "value"), [("content_pairs", 5), ("content_layers", [3])])
def test_bad_fields_that_are_set_on_a_config_are_refused_before_a_model_is_made(field, value):
    config = tiny_model().config
    setattr(config, f"coca_{field}", value)
    with pytest.raises(ValueError, match=f"coca_{field} is .*, expected"):
        CocaLlamaForCausalLM(config)


def test_iterables_are_read_once(tiny_llama_dir, tmp_path):
    layers = {"keep_layers": iter([0]), "content_layers": iter([1, 2])}
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "dst", **layers)
    assert (record["kept_layers"], record["content_layers"]) == ([0], [1, 2])
