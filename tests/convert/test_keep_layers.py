"""`--keep-layers`: kept layers have the source's tensors, and every description names them."""

import copy
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coca_hf import convert_checkpoint, patch_
from coca_hf.convert.calibration import layer_harms, most_harmful
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from coca_hf.models.attention import CACHE, KeptAttention
from tests.conftest import refused
from tests.convert.checkpoints import edit_config, edit_json, load_clean, record_of, refuses
from tests.models.families import CASES, ONE_CASE_EACH, WINDOW, stock_model, tokens

KEPT = {"kept": (2, 0)}


@pytest.mark.parametrize("case", ONE_CASE_EACH.values())
def test_kept_layers_have_the_sources_tensors_and_the_checkpoint_loads_clean(converted, case):
    src, dst, record = converted(case, **KEPT)
    model = load_clean(dst)
    assert model.config.coca_kept_layers == record["kept_layers"] == [0, 2]
    kept = [isinstance(layer.self_attn, KeptAttention) for layer in model.model.layers]
    assert kept == [True, False, True]
    assert [scales is None for scales in record["start"]["scales"]] == [True, False, True]
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]["after"]
    patched = patch_(AutoModelForCausalLM.from_pretrained(src), keep_layers=[0, 2])
    assert torch.equal(patched(tokens()).logits, model(tokens()).logits)
    if CASES[case][0] not in ("gpt_neox", "phi3"):
        before, after = load_file(src / "model.safetensors"), load_file(dst / "model.safetensors")
        kept = {name for name in before if ".1.self_attn.k_" not in name}
        assert {name for name in after if "self_attn.k_" in name} == {
            name for name in kept if "self_attn.k_" in name
        }
        assert all(torch.equal(after[name], before[name]) for name in kept)


@pytest.mark.parametrize(
    ("case", "kept", "content"),
    [
        *((case, [0, 2], []) for case in ("llama", "qwen2-window", "neox-partial")),
        *(("llama", [], content) for content in ([], [1], [0, 1, 2])),
    ],
)
def test_inspect_and_record_state_the_bytes_of_the_cache(converted, case, kept, content, tmp_path):
    options = {"keep_layers": kept, "content_layers": content}
    record = convert_checkpoint(converted(case)[0], tmp_path / "dst", **options)
    facts = inspect_checkpoint(tmp_path / "dst")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    cache = model(tokens(1, 5), use_cache=True)[CACHE]
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert facts["kv_bytes_per_token"] + facts["kv_bytes_fixed"] // 7 == held // 5
    before_and_after = facts["kv_bytes_per_token_standard"], facts["kv_bytes_per_token"]
    assert tuple(record["kv_cache_bytes_per_token"].values()) == before_and_after
    assert record["kv_cache_bytes_of_windows"] == facts["kv_bytes_fixed"]
    assert facts["kept_layers"] == kept
    assert ("CoCA, slack; the original's in layers 0, 2" in describe(facts)) == bool(kept)


@pytest.mark.parametrize("case", ["llama", "qwen3", "neox-partial"])
def test_a_longer_ntk_base_keeps_the_kept_layers_and_applies_to_them(converted, case, tmp_path):
    src, dst, _ = converted(case, **KEPT)
    record = convert_checkpoint(dst, tmp_path / "from-coca", ntk_length=160)
    assert record["earlier"] == [record_of(dst)]
    card = (tmp_path / "from-coca" / "README.md").read_text()
    assert f"# {src.name} with CoCA" in card
    assert f"- source: {dst.name}, safetensors, CoCA" in card
    convert_checkpoint(src, tmp_path / "from-src", ntk_length=160, keep_layers=[0, 2])
    places = tmp_path / "from-src", tmp_path / "from-coca"
    once, twice = map(AutoModelForCausalLM.from_pretrained, places)
    assert twice.config.coca_kept_layers == record["kept_layers"] == [0, 2]
    assert torch.equal(once(tokens()).logits, twice(tokens()).logits)
    unbaked = AutoModelForCausalLM.from_pretrained(dst)
    for attention in (unbaked.model.layers[1].self_attn, twice.model.layers[1].self_attn):
        # now only the kept layers depend on positions
        torch.nn.init.zeros_(attention.o_proj.weight)
    assert (unbaked(tokens()).logits - twice(tokens()).logits).abs().max() > 1e-2


def test_the_layers_of_a_coca_checkpoint_stay_as_they_are(converted, text, tmp_path):
    _, kept, _ = converted("llama", **KEPT)
    calibrate, baked = {"calibrate_on": str(text)}, {"ntk_length": 160}
    already = r"got a CoCA checkpoint already \(model_type 'coca_llama'\), expected an original"
    for options in ({}, {"keep_layers": [2]}, {"keep_layers": "auto", **calibrate}):
        refuses(already, kept, tmp_path / "dst", **options)
    for message, options in (
        ("--keep-layers: got it for a CoCA checkpoint, whose layers stay", {"keep_layers": [2, 0]}),
        ("--content-pairs: got it for a CoCA checkpoint", {"content_pairs": "auto"}),
        ("--content-layers: got it for a CoCA checkpoint", {"content_layers": [1]}),
        ("--constraint: got it for a CoCA checkpoint", {"constraint": "strict"}),
        ("got the released CoCA layout with coca_hf's own format", {"released": True}),
        ("--calibrate: got a CoCA checkpoint, expected an original, whose", calibrate),
    ):
        refuses(message, kept, tmp_path / "dst", **options, **baked)


@pytest.mark.parametrize(
    ("edited", "missing"),
    [
        ([0, 1, 2], "model.layers.1.self_attn.k_proj"),
        ([1], "model.layers.0.self_attn.t_proj"),
        ([0], "model.layers.2.self_attn.t_proj"),
    ],
)
def test_kept_layers_that_the_weights_do_not_have_are_refused(converted, edited, missing, tmp_path):
    kept = shutil.copytree(converted("llama", **KEPT)[1], tmp_path / "kept")
    edit_config(kept, coca_kept_layers=edited)
    refuses(f"tensor {missing}", kept, tmp_path / "dst", ntk_length=160)


NO_CARD = "kept: its records are not what coca-convert and "


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("conversion.json", {"base": 3}, r"kept/conversion\.json: got .* 3, expected"),
        ("training.json", {"stages": 3}, r"kept/training\.json: got .* 3, expected"),
        *(("conversion.json", {"earlier": value}, NO_CARD) for value in (5, "abc")),
        *(("training.json", {"stages": value}, NO_CARD) for value in ([1], [{}])),
        ("conversion.json", None, r"kept/conversion\.json: not JSON"),
        ("training.json", None, r"kept/training\.json: not JSON"),
    ],
)
def test_records_from_which_no_card_can_be_made_are_refused_before_anything_is_written(
    converted, name, fields, message, tmp_path
):
    kept = shutil.copytree(converted("llama", **KEPT)[1], tmp_path / "kept")
    edit_json(kept / name, **fields) if fields else (kept / name).write_text("{")
    refuses(message, kept, tmp_path / "dst", ntk_length=160)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


@pytest.mark.parametrize("layers", [[3], [-1], [1, 0, 1]])
def test_layers_that_are_not_there_or_named_twice_are_refused(layers, tiny_llama_dir, tmp_path):
    absent = "expected each layer once, numbered from 0 to 2"
    twice = r"^--keep-layers: got layer 1 more than once in \[1, 0, 1\], expected each"
    message = twice if len(layers) == 3 else f"--keep-layers: got .*{absent}"
    refuses(message, tiny_llama_dir, tmp_path / "dst", keep_layers=layers)
    original = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    refused(absent, patch_, original, keep_layers=layers)
    assert not list(tmp_path.iterdir())


def test_with_all_layers_kept_nothing_is_said_to_need_training(tiny_llama_dir, tmp_path, converts):
    printed = converts(tiny_llama_dir, tmp_path / "dst", "--keep-layers", "0,1,2")
    assert "--calibrate" not in printed
    assert "coca-train" not in printed
    rule = record_of(tmp_path / "dst")["start"]["rule"]
    assert rule == "none: all layers keep the original's attention"
    for said in (printed, (tmp_path / "dst" / "README.md").read_text()):
        assert "to be trained" not in said


@pytest.mark.parametrize("case", ["granite", "smollm3", "qwen2-window", "neox-partial"])
def test_the_harm_of_a_layer_is_that_of_its_conversion_alone(case, pairs_of, tmp_path):
    original = stock_model(case)
    coca = patch_(copy.copy(original)).eval()
    draw = torch.Generator().manual_seed(1)
    fitted = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=draw)
        for name, tensor in coca.state_dict().items()
        if ("q_proj" in name or "t_proj" in name)
        and int(name.split(".")[2]) not in coca.config.coca_kept_layers
    }
    ids = tokens(3, WINDOW)
    harms = layer_harms(pairs_of(original), fitted, ids, tmp_path)
    assert not (tmp_path / "states-harm").exists()
    reference = original(ids).logits.double().log_softmax(-1)
    for number in range(3):
        swapped = patch_(copy.copy(original), keep_layers={0, 1, 2} - {number}).eval()
        own = {name: tensor for name, tensor in fitted.items() if f"layers.{number}." in name}
        changed = copy.deepcopy(swapped)  # its other weights are the original's own
        changed.load_state_dict(own, strict=False)
        other = changed(ids).logits.double().log_softmax(-1)
        divergences = (reference.exp() * (reference - other)).sum(-1)
        half = ids.shape[1] // 2
        expected = divergences[:, half:].mean() - divergences[:, :half].mean()
        assert harms[number] == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)


def test_auto_keeps_the_fewest_layers_that_do_half_of_the_harm():
    assert most_harmful([0.1, 0.5, 0.2, 0.3], range(4), 2) == [1, 3]
    assert most_harmful([0.1, 0.5, 0.2, 0.3], range(4), None) == [1, 3]
    assert most_harmful([0.1, 0.6, 0.2, 0.3], range(4), None) == [1]
    assert most_harmful([0.2, 0.2, 0.2, 0.2], range(4), None) == [0, 1]
    assert most_harmful([-0.3, 0.2, 0.2, 0.2], range(4), None) == [1, 2]  # does none


def test_layers_that_are_kept_anyway_take_no_place_among_the_most_harmful():
    """SmolLM3's without rotary embedding have a harm of 0, and others may have less."""
    harms, converted = [-0.2, 0.3, 0.0, -0.1], [0, 1, 3]
    assert most_harmful(harms, converted, 2) == [1, 3]
    assert most_harmful(harms, converted, 4) == [0, 1, 3]
    assert most_harmful([-0.2, -0.3, 0.0, -0.1], converted, None) == [3]


def test_the_command_keeps_the_layers_whose_calibrated_conversion_harms_most(
    tiny_llama_dir, text, tmp_path, converts
):
    options = ["--calibrate", text, "--calibrate-tokens", 256, "--calibrate-passes", 2]
    printed = converts(tiny_llama_dir, tmp_path / "dst", *options, "--keep-layers", "auto")
    assert re.search(
        r"calibrating layers, divergence \S+ nats: 2 of 3, about \d+ s left\n", printed
    )
    assert re.search(r"calibrating layers, divergence \S+ nats: 3 of 3\n", printed)
    record = record_of(tmp_path / "dst")
    advice = printed.partition("Retrieval comes back with training")[2]
    assert "model=" in advice
    # recover.yaml has 8,192, which is refused for a model of fewer positions, and an epsilon for 135M
    # parameters
    reach = record["calibration"]["reach"]
    assert f"data.skip_positions={reach} training.adam_epsilon=1e-8\n" in advice
    harms = record["calibration"]["layer_harm"]
    assert len(harms) == 3
    kept = most_harmful(harms, range(3), None)
    assert record["kept_layers"] == kept
    divergences = [layer["kl_fitted"] for layer in record["calibration"]["attention_kl"]]
    assert [divergence == 0 for divergence in divergences] == [n in kept for n in range(3)]
    named = ",".join(map(str, kept)) + ","
    converts(tiny_llama_dir, tmp_path / "named", *options, "--keep-layers", named)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "named" / name).read_bytes()


OTHER_VALUES = {
    "1": "got 1 without --calibrate, which measures the harm of an original's layers; name the "
    "layers, as in 8,17",
    "auto": "got auto without --calibrate",
    "0 --calibrate": "got 0, expected auto, a number from 1, or a list of layers",
    "4 --calibrate": "got 4, expected at most the model's 3 layers",
}


@pytest.mark.parametrize("given", OTHER_VALUES)
def test_a_number_of_layers_needs_calibration_and_is_one_that_can_be(
    given, tiny_llama_dir, tmp_path, refusal
):
    value, *options = given.split(" ")
    options += [tmp_path / "text.txt"] if options else []
    printed = refusal(tiny_llama_dir, tmp_path / "dst", *options, f"--keep-layers={value}")
    assert f"--keep-layers: {OTHER_VALUES[given]}" in printed
    assert not list(tmp_path.iterdir())


def test_kept_layers_get_a_window_and_everything_tells_of_it(
    tiny_llama_dir, text, tmp_path, converts
):
    dst, options = tmp_path / "dst", ("--keep-layers", "1,", "--keep-window", "6")
    printed = converts(tiny_llama_dir, dst, *options)
    assert "original attention    kept in layers 1, over the last 6 tokens" in printed
    record = record_of(dst)
    assert record["kept_window"] == 6
    card = (dst / "README.md").read_text()
    assert "in place of its own in all layers but 1, made with" in card
    assert "- original attention: layers 1, over the last 6 tokens" in card
    facts = inspect_checkpoint(dst)
    assert "the original's in layers 1, over the last 6 tokens" in describe(facts)
    assert record["kv_cache_bytes_of_windows"] == facts["kv_bytes_fixed"] > 0
    of_two_layers = facts["kv_bytes_per_token_standard"]  # the third has the window
    assert record["kv_cache_bytes_per_token"]["before"] == of_two_layers // 2 * 3
    model = AutoModelForCausalLM.from_pretrained(dst)
    assert model.config.layer_types[:3] == ["full_attention", "sliding_attention", "full_attention"]

    planned = converts(
        *(tiny_llama_dir, tmp_path / "plan", "--dry-run", "--keep-layers", "1", "--keep-window"),
        *("64", "--calibrate", text, "--calibrate-tokens", "256"),  # positions of the model
    )
    assert "the layers that calibration finds (1), over the last 64 tokens" in planned

    assert convert_checkpoint(dst, tmp_path / "longer", ntk_length=2048)["kept_window"] == 6
    calibrating = {"calibrate_on": str(text), "calibrate_tokens": 256, "calibrate_block": 16}
    calibrating |= {"calibrate_passes": 1, "keep_layers": 2, "keep_window": 16}
    calibrated = convert_checkpoint(tiny_llama_dir, tmp_path / "calibrated", **calibrating)
    most = most_harmful(calibrated["calibration"]["layer_harm"], range(3), 2)
    assert (calibrated["kept_layers"], calibrated["kept_window"]) == (most, 16)
    assert calibrated["calibration"]["reach"] > 16


def test_layers_without_rotary_embedding_are_said_to_have_no_window(
    converted, tiny_tokenizer, text, tmp_path, converts
):
    source, *_ = converted("smollm3")
    tiny_tokenizer.save_pretrained(source)
    printed = converts(source, tmp_path / "dst", "--keep-layers", "1,", "--keep-window", "6")
    words = "layers 1, 2, of which 1 over the last 6 tokens"
    assert f"kept in {words}" in printed
    assert f"- original attention: {words}" in (tmp_path / "dst" / "README.md").read_text()
    assert f"the original's in {words}" in describe(inspect_checkpoint(tmp_path / "dst"))
    message = r"--keep-window: got 6 for layers \[2\], which have no rotary embedding"
    refuses(message, source, tmp_path / "other", keep_layers=[2], keep_window=6)
    text.write_text(",".join(map(str, range(2000))))  # ids within the small vocabulary
    options = {"calibrate_on": str(text), "calibrate_tokens": 64, "calibrate_block": 16}
    options |= {"keep_window": 16, "dry_run": True}
    for layers in (1, "auto"):
        plan = convert_checkpoint(source, tmp_path / "other", keep_layers=layers, **options)
        assert plan["kept_window"] == 16


def test_a_window_over_kept_layers_that_cannot_be_is_refused(
    tiny_llama_dir, converted, text, tmp_path
):
    dst = tmp_path / "dst"
    refuses("--keep-window: got 6 without kept layers", tiny_llama_dir, dst, keep_window=6)
    expected = "got 1, expected at least 2 tokens, and below 2^31"
    refuses(
        f"--keep-window: {re.escape(expected)}", tiny_llama_dir, dst, keep_layers=[1], keep_window=1
    )
    options = {"calibrate_on": str(text), "calibrate_block": 16, "keep_layers": [1]}
    expected = "got 6, expected at least 16 tokens, those of a block of --calibrate"
    refuses(f"--keep-window: {expected}", tiny_llama_dir, dst, **options, keep_window=6)
    windowed, *_ = converted("qwen3-window")
    message = "--keep-window: got 6, but the model has windows of its own"
    refuses(message, windowed, dst, keep_layers=[1], keep_window=6)
