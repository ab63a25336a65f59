"""Bad input gets one clear line and exit code 2; the destination is absent, complete, or as it was."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from coca_hf import CocaError, convert_checkpoint


@pytest.fixture
def source(tmp_path, tiny_llama_dir):
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "source"))


def edit_config(directory, **fields):
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garble(directory):
    file = directory / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def index(directory, weight_map):
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickle_only(directory):
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")


def adapter(directory):
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (directory / "adapter_model.safetensors").touch()


K0, Q1 = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "config is not JSON": (
        lambda d: (d / "config.json").write_text("{oops"),
        "config.json: not JSON",
    ),
    "config is a list": (
        lambda d: (d / "config.json").write_text("[1]"),
        "got a list, expected a JSON object",
    ),
    "another family": (
        lambda d: edit_config(d, model_type="gpt2"),
        "got model_type 'gpt2', supported: 'llama'",
    ),
    "no model_type": (
        lambda d: edit_config(d, model_type=...),
        "got model_type None, supported: 'llama'",
    ),
    "its own code": (
        lambda d: edit_config(d, auto_map={"AutoModel": "evil.Model"}),
        "auto_map names the checkpoint's own",
    ),
    "unknown field": (
        lambda d: edit_config(d, rope_thetas=5),
        "rope_thetas=5 is not understood for 'llama' (nearest known field: rope_",
    ),
    "quantized": (
        lambda d: edit_config(d, quantization_config={"bits": 4}),
        "quantization_config={'bits': 4} is not supp",
    ),
    "rope type": (
        lambda d: edit_config(d, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
        "proportional",
    ),
    "odd head_dim": (
        lambda d: edit_config(d, head_dim=9),
        "head_dim is 9, expected an even number",
    ),
    "ungrouped heads": (
        lambda d: edit_config(d, num_key_value_heads=4),
        "num_attention_heads is 6, expected a multiple of num_key_value_heads, which is 4",
    ),
    "no key heads": (
        lambda d: edit_config(d, num_key_value_heads=0),
        "num_key_value_heads is 0, expected at least 1",
    ),
    "nothing hidden": (
        lambda d: edit_config(d, hidden_size=0),
        "hidden_size is 0, expected at least 1",
    ),
    "wrong type": (lambda d: edit_config(d, hidden_size="big"), "hidden_size"),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "got no weights, expected model.safetensors",
    ),
    "pickle only": (
        pickle_only,
        "got only pickled weights (pytorch_model.bin), which can run code when read; expected "
        "safetensors; pass --allow-pickle",
    ),
    "pickle of another name": (
        lambda d: (d / "model.safetensors").rename(d / "model.pt"),
        "got only pickled weights (model.pt), which can run code when read; expected safetensors; "
        "load the model with transformers",
    ),
    "adapter": (
        lambda d: [(d / "model.safetensors").unlink(), adapter(d)],
        "got an adapter of owner/base, expected a whole model; pass its base as SRC and its directory "
        "as --adapter",
    ),
    "adapter beside weights": (
        lambda d: adapter(d),
        "or remove adapter_config.json where the weights beside it are m",
    ),
    "Meta's layout": (
        lambda d: [
            (d / "model.safetensors").rename(d / "consolidated.00.pth"),
            (d / "params.json").touch(),
        ],
        "got the layout of Meta's or Mistral's own code (params.json), expected that of transformers; take the rep",
    ),
    "another framework": (
        lambda d: (d / "model.safetensors").rename(d / "tf_model.h5"),
        "got weights of another framework (tf_model.h5), expected safetensors",
    ),
    "no index": (
        lambda d: (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors"),
        "got safetensors without model.safetensors.index.json (model-00001-of-00002.safetensors)",
    ),
    "truncated": (truncate, "model.safetensors: truncated or corrupted"),
    "garbled": (garble, "model.safetensors: truncated or corrupted"),
    "missing tensor": (lambda d: edit_weights(d, lambda w: w.pop(K0)), f"tensor {K0} is missing"),
    "extra tensor": (
        lambda d: edit_weights(d, lambda w: w.update(extra=torch.ones(2))),
        "tensor extra is not understood",
    ),
    "wrong shape": (
        lambda d: edit_weights(d, lambda w: w.update({Q1: torch.ones(3, 5)})),
        f"{Q1} has shape (3, 5), expec",
    ),
    "zero weights": (
        lambda d: edit_weights(d, lambda w: w[K0].zero_()),
        "layer 0: queries or keys are zero, infinite or NaN",
    ),
    "integers": (
        lambda d: edit_weights(d, lambda w: w.update({Q1: w[Q1].to(torch.int8)})),
        "has dtype I8, expected one of",
    ),
    "absent shard": (
        lambda d: index(d, {K0: "b.safetensors"}),
        "names b.safetensors, which is not in",
    ),
    "shard outside": (
        lambda d: index(d, {K0: "../a.safetensors"}),
        "got the file name '../a.safetensors'",
    ),
    "shard absolute": (lambda d: index(d, {K0: "/etc/passwd"}), "got the file name '/etc/passwd'"),
    "wrong shard": (
        lambda d: index(d, {"nowhere": "a.safetensors"}),
        "tensor nowhere is not in a.safetensors",
    ),
    "empty index": (lambda d: index(d, {}), "got no weight_map"),
    "two ggufs": (
        lambda d: [
            (d / "model.safetensors").unlink(),
            (d / "a.gguf").touch(),
            (d / "b.gguf").touch(),
        ],
        "got 2 GGUF files (a.gguf, b.gguf), expected one",
    ),
    "bad gguf": (
        lambda d: [(d / "model.safetensors").unlink(), (d / "a.gguf").write_bytes(b"GG")],
        "cannot be read as GGUF",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_source_is_one_line_and_exit_code_2(source, tmp_path, convert, damage, message):
    damage(source)
    code, printed = convert(source, tmp_path / "dst")
    assert code == 2
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-directory", "dst"], "no such directory"),
        (["owner/name", "dst"], "no such directory, and not on the hub within reach"),
        (["{source}", "{source}"], "is the source itself or holds it"),
        (["{source}", "{source.parent}", "--overwrite"], "is the source itself or holds it"),
        (["{source}", "{source}/..", "--overwrite"], "expected the name of a directory to write"),
        (["{source}/config.json", "dst"], "got a file, expected a checkpoint directory"),
    ],
)
def test_wrong_argument_is_one_line_and_exit_code_2(
    source, tmp_path, monkeypatch, convert, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, printed = convert(*(argument.format(source=source) for argument in arguments))
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"constraint": "loose"}, "--constraint: got 'loose', expected slack or strict"),
        ({"dtype": "int4"}, "--dtype: got 'int4', expected auto, float32, bfloat16, float16"),
    ],
)
def test_wrong_option_from_python_is_refused(source, tmp_path, option, message):
    with pytest.raises(CocaError, match=message):
        convert_checkpoint(source, tmp_path / "dst", **option)
    assert not (tmp_path / "dst").exists()


NAMES = {
    "not UTF-8": (os.fsdecode(b"bad\xff"), "got a name that is not UTF-8"),
    "too long": ("y" * 300, "cannot be used (File name too long)"),
    "circle": ("circle", "cannot be used (Too many levels of symbolic links)"),
}


@pytest.mark.parametrize("place", ["source", "destination", "adapter"])
@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES.keys())
def test_path_that_cannot_be_used_is_refused_before_anything_is_read(
    source, tmp_path, convert, place, name, message
):
    (tmp_path / "circle").symlink_to("circle")
    if name.startswith("bad") and place == "source":
        source.rename(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    path = tmp_path / name
    words = {
        "source": [path, tmp_path / "dst"],
        "destination": [source, path],
        "adapter": [source, tmp_path / "dst", "--adapter", path],
    }
    code, printed = convert(*words[place])
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert sorted(tmp_path.iterdir()) == before


def test_destination_whose_staging_directory_has_too_long_a_name_is_refused(
    source, tmp_path, convert
):
    code, printed = convert(source, tmp_path / ("y" * 250))
    assert (code, printed.count("\n")) == (2, 1)
    assert "y.incomplete: cannot be used (File name too long)" in printed


def test_names_that_rich_would_take_for_markup_are_printed_as_they_are(source, tmp_path, convert):
    named = source.rename(tmp_path / "o[b]c:smile:")
    code, printed = convert(named, tmp_path / "o[" / "b]c[/red]:smile:")
    assert code == 0
    assert f"{tmp_path}/o[/b]c[/red]:smile:: slack, float32" in printed


def test_a_tokenizer_that_cannot_be_edited_is_named_before_weights_are_written(
    source, tmp_path, convert, monkeypatch
):
    (source / "tokenizer_config.json").write_text("{oops")
    monkeypatch.setattr("coca_hf.convert.conversion.WeightsWriter", None)
    code, printed = convert(source, tmp_path / "dst", "--ntk-length", "128")
    assert (code, printed.count("\n")) == (2, 1)
    assert f"error: {source}/tokenizer_config.json: not JSON" in printed


def test_coca_source_is_refused_by_name(tmp_path, convert, tiny_coca_dir):
    code, printed = convert(tiny_coca_dir, tmp_path / "dst")
    assert code == 2
    assert "got a CoCA checkpoint already" in printed


def test_gpt2_is_refused_with_what_is_supported(tmp_path, convert):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)).save_pretrained(
        tmp_path / "source"
    )
    code, printed = convert(tmp_path / "source", tmp_path / "dst")
    assert code == 2
    assert "got model_type 'gpt2', supported: 'llama'" in printed


def test_released_layout_is_refused_as_strict(source, tmp_path, convert):
    def rename(weights):
        for name in [name for name in weights if "k_proj" in name]:
            weights[name.replace("k_proj", "t_proj")] = weights.pop(name)

    edit_weights(source, rename)
    code, printed = convert(source, tmp_path / "dst", "--constraint", "strict")
    assert code == 2
    assert "got the released CoCA layout, which is slack" in printed


def test_existing_destination_is_kept_without_overwrite_and_replaced_with_it(
    source, tmp_path, convert
):
    convert_checkpoint(source, tmp_path / "dst")
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    code, printed = convert(source, tmp_path / "dst")
    assert code == 2
    assert "exists and is left as it is; pass --overwrite" in printed
    assert (tmp_path / "dst" / "notes.txt").exists()
    code, _ = convert(source, tmp_path / "dst", "--overwrite", "--constraint", "strict")
    assert code == 0
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["coca_constraint"] == "strict"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dst", "source"]


def test_overwrite_does_not_replace_what_is_no_checkpoint(source, tmp_path, convert):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("mine")
    code, printed = convert(source, tmp_path / "home", "--overwrite")
    assert code == 2
    assert "--overwrite replaces a checkpoint directory only" in printed
    assert (tmp_path / "home" / "letters.txt").read_text() == "mine"


def test_too_small_a_disk_is_refused_before_writing(source, tmp_path, convert, monkeypatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000)
    )
    code, printed = convert(source, tmp_path / "dst")
    assert code == 2
    assert "disk full: 0.00 MB free" in printed


@pytest.mark.parametrize(
    "fields",
    [
        {
            "unsloth_fixed": True,
            "unsloth_version": "2026.1",
            "pad_token": "</s>",
            "model_name": "mine",
        },
        {
            "gradient_checkpointing": True,
            "bos_token": "<s>",
            "model_max_length": 4096,
            "anything": None,
        },
        {
            "quantization_config": None,
            "sliding_window": None,
            "auto_map": None,
            "rope_interleaved": None,
        },
    ],
)
def test_fields_that_common_tools_leave_in_a_config_change_nothing(
    source, tmp_path, tiny_coca_dir, fields
):
    edit_config(source, **fields)
    convert_checkpoint(source, tmp_path / "dst")
    got, expected = (
        json.loads((directory / "config.json").read_text())
        for directory in (tmp_path / "dst", tiny_coca_dir)
    )
    assert got == expected


def test_a_field_that_is_not_understood_can_be_left_out_and_is_recorded(
    source, tmp_path, convert, tiny_coca_dir
):
    edit_config(source, neuron_cores=2, seq_len=5)
    code, printed = convert(source, tmp_path / "dst", "--ignore-field", "seq_len")
    assert (code, printed.count("\n")) == (2, 1)
    assert "neuron_cores=2 is not understood" in printed
    assert (
        "--ignore-field neuron_cores leaves it out, if it says nothing about weights or attention"
        in printed
    )
    code, _ = convert(
        source, tmp_path / "dst", "--ignore-field", "seq_len", "--ignore-field", "neuron_cores"
    )
    assert code == 0
    assert json.loads((tmp_path / "dst" / "conversion.json").read_text())["ignored_fields"] == [
        "seq_len",
        "neuron_cores",
    ]
    got, expected = (
        json.loads((directory / "config.json").read_text())
        for directory in (tmp_path / "dst", tiny_coca_dir)
    )
    assert got == expected
    edit_config(tmp_path / "dst", seq_len=5)
    with pytest.raises(
        CocaError, match=r"seq_len=5 is not understood .*; --ignore-field seq_len leaves it out"
    ):
        convert_checkpoint(tmp_path / "dst", tmp_path / "longer", ntk_length=128)
    convert_checkpoint(
        tmp_path / "dst", tmp_path / "longer", ntk_length=128, ignore_fields=["seq_len"]
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "hidden_size",
            "--ignore-field hidden_size: got a field that changes the model, expected an inert one",
        ),
        (
            "quantization_config",
            "--ignore-field quantization_config: got a field that changes the model",
        ),
        ("model_type", "--ignore-field model_type: got a field that changes the model"),
        ("hiden_size", "--ignore-field hiden_size: got no such field"),
    ],
)
def test_a_field_that_changes_the_model_cannot_be_left_out(
    source, tmp_path, convert, field, message
):
    edit_config(source, quantization_config={"bits": 4})
    code, printed = convert(source, tmp_path / "dst", "--ignore-field", field)
    assert (code, printed.count("\n")) == (2, 1)
    assert f"config.json: {message}" in printed


def test_a_revision_of_a_directory_is_refused(source, tmp_path, convert):
    code, printed = convert(source, tmp_path / "dst", "--revision", "main")
    assert (code, printed.count("\n")) == (2, 1)
    assert "--revision: got 'main' for" in printed
