"""Bad input gives one clear line and exit code 2; the destination is absent, complete or unchanged."""

import math
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


def rope(**parameters):
    return config(rope_parameters={"rope_type": "default"} | parameters)


def tensors(change):
    return lambda directory: edit_weights(directory, change)


def without_prefix(weights):
    """The names of a LlamaModel, which has no head."""
    for name in [*weights]:
        weights[name.removeprefix("model.")] = weights.pop(name)


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


DAMAGE = {
    "config.json: no such file": lambda d: (d / CONFIG).unlink(),
    "config.json: not JSON": file(CONFIG, lambda data: b"{oops"),
    "got a list, expected a JSON object": file(CONFIG, lambda data: b"[1]"),
    "got model_type None, supported: 'llama'": config(model_type=...),
    "not understood for 'llama' (nearest known field: rope": config(rope_thetas=5),
    "proportional": config(rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
    "num_attention_heads is 6, expected a": config(num_key_value_heads=4),
    "num_key_value_heads is 0, expected at least": config(num_key_value_heads=0),
    "hidden_size is 0, expected at least 1": config(hidden_size=0),
    "max_position_embeddings is 0, expected at least": config(max_position_embeddings=0),
    "max_position_embeddings is -1, expected at least": config(max_position_embeddings=-1),
    "000, expected at least 1 and below 2^31": config(max_position_embeddings=10**30),
    "rms_norm_eps is -1.0, expected a finite": config(rms_norm_eps=-1.0),
    "rms_norm_eps is nan, expected a finite": config(rms_norm_eps=math.nan),
    "rope_theta is 0, expected a finite": rope(rope_theta=0),
    "rope_theta is -5.0, expected a finite": rope(rope_theta=-5.0),
    "rope_theta is nan, expected a finite": rope(rope_theta=math.nan),
    "factor is 0, expected a finite": rope(rope_theta=1e4, rope_type="linear", factor=0),
    "hidden_size": config(hidden_size="big"),
    "got no weights, expected model.safetensors": without_weights(),
    "got only pickled weights (model.pt), which can run code when read; expected safetensors; "
    "pass --allow-pickle": renamed("model.pt"),
    "got an adapter of owner/base, expected a whole model; pass its base as SRC and its "
    "directory as --adapter": lambda d: [without_weights()(d), adapter(d)],
    "or remove adapter_config.json if the weights beside it": adapter,
    "got the layout of Meta's or Mistral's own code (params.json), expected that of "
    "transformers; take the rep": layout_of_meta,
    "got weights of another framework": renamed("tf_model.h5"),
    "got safetensors without model.safetensors.index.json (model-00001-of-00002.safetensors)": (
        renamed("model-00001-of-00002.safetensors")
    ),
    f"tensor {K0} is missing; is the checkpoint complete?": tensors(lambda w: w.pop(K0)),
    "is missing; got score.weight, expected a plain LlamaForCausalLM": (
        tensors(lambda w: w.update({"score.weight": w.pop("lm_head.weight")}))
    ),
    "got embed_tokens.weight, expected a plain LlamaForCausalLM": tensors(without_prefix),
    "tensor extra is not understood": tensors(lambda w: w.update(extra=torch.ones(2))),
    f"{Q1} has shape (3, 5), expec": tensors(lambda w: w.update({Q1: torch.ones(3, 5)})),
    "layer 0: queries or keys are zero,": tensors(lambda w: w[K0].zero_()),
    f"source/{WEIGHTS}: tensor {UP1}: got NaN or infinity, expected finite numbers; download": (
        tensors(lambda w: w[UP1][3, 4].fill_(torch.nan))
    ),
    "got NaN or infinity": tensors(lambda w: w[UP1][3, 4].fill_(-torch.inf)),
    "has dtype I8, expected one of": tensors(lambda w: w.update({Q1: w[Q1].to(torch.int8)})),
    "b.safetensors: no such file, expected a complete checkpoint": (
        lambda d: index(d, {K0: "b.safetensors"})
    ),
    "tensor nowhere is not in a.safetensors": lambda d: index(d, {"nowhere": "a.safetensors"}),
    "got no weight_map": lambda d: index(d, {}),
    "got GGUF files (a.gguf, b.gguf);": without_weights(a_gguf=b"", b_gguf=b""),
    "cannot be read as GGUF": without_weights(a_gguf=b"GG"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_source_is_one_line_and_exit_code_2(source, tmp_path, refusal, message):
    DAMAGE[message](source)
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
    f"{{source}} {'y' * 250}": "y.incomplete: cannot be used (File name too long)",
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.items())
def test_wrong_argument_is_one_line_and_exit_code_2(
    source, tiny_coca_dir, tmp_path, monkeypatch, refusal, arguments, message
):
    monkeypatch.chdir(tmp_path)
    words = (word.format(source=source, coca=tiny_coca_dir) for word in arguments.split())
    assert message in refusal(*words)


def test_wrong_option_from_python_is_refused(source, tmp_path):
    message = "--constraint: got 'loose', expected slack or strict"
    refuses(message, source, tmp_path / "dst", constraint="loose")
    message = "--dtype: got 'int4', expected auto, float32, bfloat16, float16"
    refuses(message, source, tmp_path / "dst", dtype="int4")


NAMES = {
    "cannot be used ('utf-8' codec can't encode": os.fsdecode(b"bad\xff"),
    "cannot be used (File name too long)": "y" * 300,
    "cannot be used (Too many levels of symbolic links)": "circle",
}


@pytest.mark.parametrize("place", ["source", "destination", "adapter"])
@pytest.mark.parametrize("message", NAMES)
def test_path_that_cannot_be_used_is_refused_at_once(source, tmp_path, refusal, place, message):
    name = NAMES[message]
    (tmp_path / "circle").symlink_to("circle")
    if name.startswith("bad") and place == "source":
        source.rename(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    path, dst = tmp_path / name, tmp_path / "dst"
    words = {"source": [path, dst], "destination": [source, path]}
    assert message in refusal(*words.get(place, [source, dst, "--adapter", path]))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("argument", ["src", "adapter", "calibrate_on"])
def test_an_empty_name_is_refused(source, tmp_path, monkeypatch, argument):
    monkeypatch.chdir(source)  # which an empty path would mean
    message = "got an empty name of a checkpoint, expected a directory, a file or a hub id"
    if argument == "calibrate_on":
        message = "got an empty name of a source, expected a file, a directory, a glob of them"
    refuses(message, **({"src": source, "dst": tmp_path / "dst"} | {argument: ""}))


def test_an_empty_word_of_a_command_is_refused(source, tmp_path, refusal):
    said = "got an empty word, expected a value; is a variable unset?"
    assert f"argument 1: {said}" in refusal("", tmp_path / "dst")
    assert f"--calibrate: {said}" in refusal(source, tmp_path / "dst", "--calibrate", "")


def test_names_that_rich_would_take_for_markup_are_printed_as_they_are(source, tmp_path, converts):
    named = source.rename(tmp_path / "o[b]c:smile:")
    printed = converts(named, tmp_path / "o[" / "b]c[/red]:smile:")
    assert f"{tmp_path}/o[/b]c[/red]:smile:: slack, float32" in printed


def test_a_bad_tokenizer_is_named_before_the_work(source, tmp_path, refusal, monkeypatch):
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
    remedy = "leaves it out, if it says nothing about weights or attention"
    assert f"--ignore-field neuron_cores (ignore_fields in Python) {remedy}" in printed
    converts(source, dst, "--ignore-field", "seq_len", "--ignore-field", "neuron_cores")
    assert record_of(dst)["ignored_fields"] == ["seq_len", "neuron_cores"]
    assert record_of(dst, CONFIG) == record_of(tiny_coca_dir, CONFIG)
    edit_config(dst, seq_len=5)
    longer = tmp_path / "longer"
    refuses("seq_len=5 is not .*; --ignore-field seq_len ", dst, longer, ntk_length=128)
    convert_checkpoint(dst, longer, ntk_length=128, ignore_fields=["seq_len"])


@pytest.mark.parametrize(
    "field", ["hidden_size", "quantization_config", "model_type", "hiden_size"]
)
def test_a_field_of_the_model_or_of_nothing_cannot_be_left_out(source, tmp_path, refusal, field):
    edit_config(source, quantization_config={"bits": 4})
    printed = refusal(source, tmp_path / "dst", "--ignore-field", field)
    inert_one = "got a field that changes the model, expected an inert one"
    message = "got no such field" if field == "hiden_size" else inert_one
    assert f"config.json: --ignore-field {field}: {message}" in printed
