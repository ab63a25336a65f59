"""`--keep-layers`: the tensors of kept layers are the source's own, and whatever tells of the model
tells of them.
"""

import copy
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coca_cli.console import BadOption
from coca_cli.convert import _layers
from coca_hf import CocaError, convert_checkpoint, patch_, unpatch_
from coca_hf.convert.harm import layer_harms, most_harmful
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from coca_hf.models.attention import KeptAttention
from tests.convert.test_families import LOAD_WITHOUT_COCA_HF, write_golden
from tests.models.families import CASES, WINDOW, stock_model, tokens

EVERY_CASE = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """`converted(case)`: directories of the source and of what it became with layers 0 and 2 kept,
    and the record.
    """
    made = {}

    def convert(case):
        if case not in made:
            directory = tmp_path_factory.mktemp("kept")
            stock_model(case).save_pretrained(directory / "src")
            record = convert_checkpoint(directory / "src", directory / "dst", keep_layers=[2, 0])
            made[case] = directory / "src", directory / "dst", record
        return made[case]

    return convert


@EVERY_CASE
def test_kept_layers_have_the_sources_tensors_and_the_checkpoint_loads_clean(converted, case):
    src, dst, record = converted(case)
    model, info = AutoModelForCausalLM.from_pretrained(dst, output_loading_info=True)
    assert not any(
        info[problem]
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    assert model.config.coca_kept_layers == record["kept_layers"] == [0, 2]
    assert [isinstance(layer.self_attn, KeptAttention) for layer in model.model.layers] == [
        True,
        False,
        True,
    ]
    assert [scales is None for scales in record["start"]["scales"]] == [True, False, True]
    assert sum(p.numel() for p in model.parameters()) == record["parameters"]["after"]
    patched = patch_(AutoModelForCausalLM.from_pretrained(src), keep_layers=[0, 2])
    assert torch.equal(patched(tokens()).logits, model(tokens()).logits)
    if CASES[case][0] not in ("gpt_neox", "phi3"):
        before, after = load_file(src / "model.safetensors"), load_file(dst / "model.safetensors")
        assert {name for name in after if "k_proj" in name or "k_norm" in name} == {
            name for name in before if ("k_proj" in name or "k_norm" in name) and ".1." not in name
        }
        assert all(
            torch.equal(after[name], tensor)
            for name, tensor in before.items()
            if ".1.self_attn.k_" not in name
        )


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "neox-partial"])
def test_the_bytes_that_inspect_and_the_record_tell_are_those_of_the_cache(converted, case):
    _, dst, record = converted(case)
    facts, model, ids = (
        inspect_checkpoint(dst),
        AutoModelForCausalLM.from_pretrained(dst),
        tokens(1, 5),
    )
    cache = model(ids, use_cache=True).past_key_values
    assert facts["kv_bytes_per_token"] + facts["kv_bytes_fixed"] // 7 == (
        sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values)) // 5
    )
    if not facts["kv_bytes_fixed"]:
        assert record["kv_cache_bytes_per_token"]["after"] == facts["kv_bytes_per_token"]
        assert record["kv_cache_bytes_per_token"]["before"] == facts["kv_bytes_per_token_standard"]
    assert facts["kept_layers"] == [0, 2]
    assert "CoCA, slack; the original's in layers 0, 2" in describe(facts)


def test_the_card_names_the_kept_layers(converted):
    card = (converted("llama")[1] / "README.md").read_text()
    assert "in place of its own in all layers but 0, 2, made with" in card
    assert "- original attention: layers 0, 2" in card


def test_loads_and_saves_without_coca_hf_by_its_own_code(converted, tmp_path):
    directories = [
        tmp_path / case
        for case in ("mistral-window", "qwen2-window", "qwen3-window", "smollm3", "neox-partial")
    ]
    for directory in directories:
        shutil.copytree(converted(directory.name)[1], directory)
    command = [sys.executable, "-c", LOAD_WITHOUT_COCA_HF, *map(str, directories)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    ids = torch.arange(60).view(2, 30) * 5 % 89
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory)
        logits, generated = torch.load(f"{directory}-copy/outputs.pt")
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, max_new_tokens=9), generated)


@pytest.mark.parametrize("case", ["llama", "qwen3", "neox-partial"])
def test_a_longer_ntk_base_keeps_the_kept_layers_and_turns_them_too(converted, case, tmp_path):
    src, dst, _ = converted(case)
    record = convert_checkpoint(dst, tmp_path / "from-coca", ntk_length=160)
    convert_checkpoint(src, tmp_path / "from-src", ntk_length=160, keep_layers=[0, 2])
    once, twice = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("from-src", "from-coca")
    )
    assert twice.config.coca_kept_layers == record["kept_layers"] == [0, 2]
    assert torch.equal(once(tokens()).logits, twice(tokens()).logits)
    unbaked = AutoModelForCausalLM.from_pretrained(dst)
    for attention in (unbaked.model.layers[1].self_attn, twice.model.layers[1].self_attn):
        # what is left of positions is that of the kept layers
        torch.nn.init.zeros_(attention.o_proj.weight)
    assert (unbaked(tokens()).logits - twice(tokens()).logits).abs().max() > 1e-2
    with pytest.raises(
        CocaError, match=r"--keep-layers: got \[1\], expected \[0, 2\], the source's"
    ):
        convert_checkpoint(dst, tmp_path / "other", ntk_length=160, keep_layers=[1])


@pytest.mark.parametrize("layers", [[3], [-1], [1, 1]])
def test_layers_that_are_not_there_are_refused(layers, tiny_llama_dir, tmp_path):
    with pytest.raises(CocaError, match="expected different numbers of layers, from 0 to 2"):
        convert_checkpoint(tiny_llama_dir, tmp_path / "dst", keep_layers=layers)
    with pytest.raises(CocaError, match="expected different numbers of layers, from 0 to 2"):
        patch_(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), keep_layers=layers)
    assert not list(tmp_path.iterdir())


def test_the_released_layout_has_no_keys_to_keep(tmp_path):
    write_golden(tmp_path / "src", "neox")
    with pytest.raises(
        CocaError, match="--keep-layers: got the released CoCA layout, which has no keys"
    ):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", released=True, keep_layers=[0])


@EVERY_CASE
def test_unpatch_restores_the_original_of_a_model_with_kept_layers(case):
    model, ids = stock_model(case), tokens()
    expected = model(ids).logits
    patch_(model, keep_original=True, keep_layers=[1])
    assert not torch.equal(model(ids).logits, expected)
    assert torch.equal(unpatch_(model)(ids).logits, expected)


@EVERY_CASE
def test_the_harm_of_a_layer_is_what_its_conversion_alone_changes_in_the_predictions(
    case, pairs_of, tmp_path
):
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
        expected = (reference.exp() * (reference - other)).sum(-1).mean().item()
        assert harms[number] == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_auto_keeps_the_fewest_layers_that_do_half_of_the_harm():
    assert most_harmful([0.1, 0.5, 0.2, 0.3], 2) == [1, 3]
    assert most_harmful([0.1, 0.5, 0.2, 0.3], None) == [1, 3]
    assert most_harmful([0.1, 0.6, 0.2, 0.3], None) == [1]
    assert most_harmful([0.2, 0.2, 0.2, 0.2], None) == [0, 1]


@pytest.mark.parametrize("given", ["1", "auto"])
def test_the_command_keeps_the_layers_whose_calibrated_conversion_harms_most(
    given, tiny_llama_dir, tmp_path, convert
):
    (tmp_path / "text.txt").write_text(
        "".join(f"{n} times {n % 7} is {n * (n % 7)}; " for n in range(400))
    )
    options = [
        "--calibrate",
        tmp_path / "text.txt",
        "--calibrate-tokens",
        256,
        "--calibrate-passes",
        3,
    ]
    code, _ = convert(tiny_llama_dir, tmp_path / "dst", *options, "--keep-layers", given)
    assert code == 0
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())
    harms = record["calibration"]["layer_harm"]
    assert len(harms) == 3
    kept = most_harmful(harms, 1 if given == "1" else None)
    assert record["kept_layers"] == kept
    named = ",".join(map(str, kept)) + ","
    convert(tiny_llama_dir, tmp_path / "named", *options, "--keep-layers", named)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "named" / name).read_bytes()


@pytest.mark.parametrize(
    ("given", "calibrate", "message"),
    [
        (
            "1",
            False,
            "--keep-layers: got 1 without --calibrate, which measures the harm of layers; pass --calibrate",
        ),
        ("auto", False, "--keep-layers: got auto without --calibrate"),
        ("0", True, "--keep-layers: got 0, expected auto, a number from 1, or a list of layers"),
        ("4", True, "--keep-layers: got 4, expected at most the model's 3 layers"),
    ],
)
def test_how_many_layers_need_calibration_and_are_no_more_than_there_are(
    given, calibrate, message, tiny_llama_dir, tmp_path, convert
):
    options = ["--calibrate", tmp_path / "text.txt"] if calibrate else []
    code, printed = convert(tiny_llama_dir, tmp_path / "dst", *options, "--keep-layers", given)
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["x", "1;2", "", "-1,0", "auto,1"])
def test_the_command_refuses_what_is_no_list_of_layers_in_one_line(given, tiny_llama_dir, tmp_path):
    command = ["coca-convert", tiny_llama_dir, tmp_path / "dst", f"--keep-layers={given}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
    assert f"--keep-layers: got {given!r}, expected" in finished.stderr


def test_so_many_layers_are_those_that_coca_eval_layers_ranks_first(tmp_path):
    rows = [
        {"task": "layers", "order": [0, 1, 2]},
        {"task": "passkey"},
        {"task": "layers", "order": [2, 0, 1]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _layers(f"2:{tmp_path}") == [2, 0]
    for given, message in (
        (f"4:{tmp_path}", "got 4 of the 3 layers that .* ranks, expected fewer"),
        (
            f"2:{tmp_path / 'nothing'}",
            "got no ranking in .*nothing, expected the --out of coca-eval layers",
        ),
    ):
        with pytest.raises(BadOption, match=message):
            _layers(given)
    (tmp_path / "rows.jsonl").write_text('{"task": "passkey"}\n')
    with pytest.raises(BadOption, match="got no ranking"):
        _layers(f"2:{tmp_path}")


def test_the_command_keeps_layers_and_says_so(tiny_llama_dir, tmp_path):
    command = ["coca-convert", tiny_llama_dir, tmp_path / "dst", "--keep-layers", "2,0"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "original attention    kept in layers 0, 2" in finished.stderr
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["coca_kept_layers"] == [0, 2]
    subprocess.run(
        [*command[:2], tmp_path / "one", "--keep-layers", "2,"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads((tmp_path / "one" / "config.json").read_text())["coca_kept_layers"] == [2]
