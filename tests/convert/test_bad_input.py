"""Bad input gives one clear line and exit code 2; the destination is absent, complete or unchanged."""

import os

import pytest
import torch

from coca_hf import convert_checkpoint
from tests.convert.checkpoints import edit_config, edit_weights, index, record_of, refuses

CONFIG, WEIGHTS = "config.json", "model.safetensors"
K0, Q1 = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.weight"
UP1 = "model.layers.1.mlp.up_proj.weight"


def config(**fields):
    return lambda directory: edit_config(directory, **fields)


def tensors(change):
    return lambda directory: edit_weights(directory, change)


def file(name, change):
    """A damage: `change` edits the bytes of a file."""
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def renamed(name):
    return lambda directory: (directory / WEIGHTS).rename(directory / name)


def without_weights(**files):
    """A damage: other files, by name and content, instead of weights; _ stands for a dot."""

    def change(directory):
        (directory / WEIGHTS).unlink()
        for name, content in files.items():
            (directory / name.replace("_gguf", ".gguf")).write_bytes(content)

    return change


def adapter(directory):
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (directory / "adapter_model.safetensors").touch()


def layout_of_meta(directory):
    renamed("consolidated.00.pth")(directory)
    (directory / "params.json").touch()


UNKNOWN_ROPE = {"rope_type": "proportional", "rope_theta": 1e4}
DAMAGE = {
    "no config": (lambda d: (d / CONFIG).unlink(), "config.json: no such file"),
    "config is not JSON": (file(CONFIG, lambda data: b"{oops"), "config.json: not JSON"),
    "config is a list": (file(CONFIG, lambda data: b"[1]"), "got a list, expected a JSON object"),
    "no model_type": (config(model_type=...), "got model_type None, supported: 'llama'"),
    "unknown field": (
        config(rope_thetas=5),
        "not understood for 'llama' (nearest known field: rope",
    ),
    "rope type": (config(rope_parameters=UNKNOWN_ROPE), "proportional"),
    "ungrouped heads": (config(num_key_value_heads=4), "num_attention_heads is 6, expected a"),
    "no key heads": (config(num_key_value_heads=0), "num_key_value_heads is 0, expected at least"),
    "nothing hidden": (config(hidden_size=0), "hidden_size is 0, expected at least 1"),
    "wrong type": (config(hidden_size="big"), "hidden_size"),
    "no weights": (without_weights(), "got no weights, expected model.safetensors"),
    "pickle only": (
        renamed("model.pt"),
        "got only pickled weights (model.pt), which can run code when read; expected safetensors; "
        "pass --allow-pickle",
    ),
    "adapter": (
        lambda d: [without_weights()(d), adapter(d)],
        "got an adapter of owner/base, expected a whole model; pass its base as SRC and its "
        "directory as --adapter",
    ),
    "adapter beside weights": (adapter, "or remove adapter_config.json if the weights beside it"),
    "Meta's layout": (
        layout_of_meta,
        "got the layout of Meta's or Mistral's own code (params.json), expected that of "
        "transformers; take the rep",
    ),
    "another framework": (renamed("tf_model.h5"), "got weights of another framework"),
    "no index": (
        renamed("model-00001-of-00002.safetensors"),
        "got safetensors without model.safetensors.index.json (model-00001-of-00002.safetensors)",
    ),
    "missing tensor": (tensors(lambda w: w.pop(K0)), f"tensor {K0} is missing"),
    "extra tensor": (
        tensors(lambda w: w.update(extra=torch.ones(2))),
        "tensor extra is not understood",
    ),
    "wrong shape": (
        tensors(lambda w: w.update({Q1: torch.ones(3, 5)})),
        f"{Q1} has shape (3, 5), expec",
    ),
    "zero weights": (tensors(lambda w: w[K0].zero_()), "layer 0: queries or keys are zero,"),
    "NaN": (
        tensors(lambda w: w[UP1][3, 4].fill_(torch.nan)),
        f"source/{WEIGHTS}: tensor {UP1}: got NaN or infinity, expected finite numbers; download",
    ),
    "infinity": (tensors(lambda w: w[UP1][3, 4].fill_(-torch.inf)), "got NaN or infinity"),
    "integers": (
        tensors(lambda w: w.update({Q1: w[Q1].to(torch.int8)})),
        "has dtype I8, expected one of",
    ),
    "absent shard": (
        lambda d: index(d, {K0: "b.safetensors"}),
        "b.safetensors: no such file, expected a complete checkpoint",
    ),
    "wrong shard": (
        lambda d: index(d, {"nowhere": "a.safetensors"}),
        "tensor nowhere is not in a.safetensors",
    ),
    "empty index": (lambda d: index(d, {}), "got no weight_map"),
    "two ggufs": (without_weights(a_gguf=b"", b_gguf=b""), "got GGUF files (a.gguf, b.gguf);"),
    "bad gguf": (without_weights(a_gguf=b"GG"), "cannot be read as GGUF"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_source_is_one_line_and_exit_code_2(source, tmp_path, refusal, damage, message):
    damage(source)
    assert message in refusal(source, tmp_path / "dst")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


ARGUMENTS = {
    "no-such-directory dst": "no such directory",
    "owner/name dst": "no such directory, and not on the hub within reach",
    "{source} {source}": "is the source itself or holds it",
    "{source} {source.parent} --overwrite": "is the source itself or holds it",
    "{source}/config.json dst": "got a file, expected a checkpoint directory",
    "{source} dst --revision main": "--revision: got 'main' for",
    "{coca} dst": "got a CoCA checkpoint already",
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.items())
def test_wrong_argument_is_one_line_and_exit_code_2(
    source, tiny_coca_dir, tmp_path, monkeypatch, refusal, arguments, message
):
    monkeypatch.chdir(tmp_path)
    words = (word.format(source=source, coca=tiny_coca_dir) for word in arguments.split())
    assert message in refusal(*words)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"constraint": "loose"}, "--constraint: got 'loose', expected slack or strict"),
        ({"dtype": "int4"}, "--dtype: got 'int4', expected auto, float32, bfloat16, float16"),
    ],
)
def test_wrong_option_from_python_is_refused(source, tmp_path, option, message):
    refuses(message, source, tmp_path / "dst", **option)
    assert not (tmp_path / "dst").exists()


NAMES = {
    "not UTF-8": (os.fsdecode(b"bad\xff"), "cannot be used ('utf-8' codec can't encode"),
    "too long": ("y" * 300, "cannot be used (File name too long)"),
    "circle": ("circle", "cannot be used (Too many levels of symbolic links)"),
}


@pytest.mark.parametrize("place", ["source", "destination", "adapter"])
@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES.keys())
def test_path_that_cannot_be_used_is_refused_before_anything_is_read(
    source, tmp_path, refusal, place, name, message
):
    (tmp_path / "circle").symlink_to("circle")
    if name.startswith("bad") and place == "source":
        source.rename(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    path, dst = tmp_path / name, tmp_path / "dst"
    words = {"source": [path, dst], "destination": [source, path]}
    assert message in refusal(*words.get(place, [source, dst, "--adapter", path]))
    assert sorted(tmp_path.iterdir()) == before


def test_destination_whose_staging_directory_has_too_long_a_name_is_refused(
    source, tmp_path, refusal
):
    printed = refusal(source, tmp_path / ("y" * 250))
    assert "y.incomplete: cannot be used (File name too long)" in printed


def test_names_that_rich_would_take_for_markup_are_printed_as_they_are(source, tmp_path, converts):
    named = source.rename(tmp_path / "o[b]c:smile:")
    printed = converts(named, tmp_path / "o[" / "b]c[/red]:smile:")
    assert f"{tmp_path}/o[/b]c[/red]:smile:: slack, float32" in printed


def test_a_tokenizer_that_cannot_be_edited_is_named_before_weights_are_written(
    source, tmp_path, refusal, monkeypatch
):
    (source / "tokenizer_config.json").write_text("{oops")
    monkeypatch.setattr("coca_hf.convert.conversion.WeightsWriter", None)
    printed = refusal(source, tmp_path / "dst", "--ntk-length", "128")
    assert f"error: {source}/tokenizer_config.json: not JSON" in printed


INERT = {
    **{"unsloth_fixed": True, "unsloth_version": "2026.1", "pad_token": "</s>"},
    **{"model_name": "mine", "gradient_checkpointing": True, "bos_token": "<s>"},
    **{"model_max_length": 4096, "anything": None, "quantization_config": None},
    **{"sliding_window": None, "auto_map": None, "rope_interleaved": None},
}


def test_fields_that_common_tools_leave_in_a_config_change_nothing(source, tmp_path, tiny_coca_dir):
    edit_config(source, **INERT)
    convert_checkpoint(source, tmp_path / "dst")
    assert record_of(tmp_path / "dst", CONFIG) == record_of(tiny_coca_dir, CONFIG)


def test_a_field_that_is_not_understood_can_be_left_out_and_is_recorded(
    source, tmp_path, converts, refusal, tiny_coca_dir
):
    dst = tmp_path / "dst"
    edit_config(source, neuron_cores=2, seq_len=5)
    printed = refusal(source, dst, "--ignore-field", "seq_len")
    assert "neuron_cores=2 is not understood" in printed
    remedy = (
        "(ignore_fields in Python) leaves it out, if it says nothing about weights or attention"
    )
    assert f"--ignore-field neuron_cores {remedy}" in printed
    converts(source, dst, "--ignore-field", "seq_len", "--ignore-field", "neuron_cores")
    assert record_of(dst)["ignored_fields"] == ["seq_len", "neuron_cores"]
    assert record_of(dst, CONFIG) == record_of(tiny_coca_dir, CONFIG)
    edit_config(dst, seq_len=5)
    longer = tmp_path / "longer"
    refuses("seq_len=5 is not .*; --ignore-field seq_len ", dst, longer, ntk_length=128)
    convert_checkpoint(dst, longer, ntk_length=128, ignore_fields=["seq_len"])


INERT_ONE = "got a field that changes the model, expected an inert one"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        *(
            ("hidden_size", INERT_ONE),
            ("quantization_config", INERT_ONE),
            ("model_type", INERT_ONE),
        ),
        ("hiden_size", "got no such field"),
    ],
)
def test_a_field_that_changes_the_model_or_is_not_there_cannot_be_left_out(
    source, tmp_path, refusal, field, message
):
    edit_config(source, quantization_config={"bits": 4})
    printed = refusal(source, tmp_path / "dst", "--ignore-field", field)
    assert f"config.json: --ignore-field {field}: {message}" in printed
