"""The facts of inspect are those of the loaded model: its parameters and the bytes of its cache."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MistralConfig

from coca_hf import CocaError, convert_checkpoint
from coca_hf.evaluate.inspect import describe, inspect_checkpoint
from coca_hf.models.attention import CACHE
from tests.conftest import TINY, refused
from tests.convert.checkpoints import edit_config, edit_weights

IDS = torch.arange(17)[None]


def cache_bytes(model, ids=IDS):
    cache = model(ids, use_cache=True)[CACHE]
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def assert_facts_are_of(model, facts):
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["weight_bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    assert facts["kv_bytes_per_token"] * IDS.numel() == cache_bytes(model)


def saved(config, directory):
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        *(("slack", {}), ("slack", {"tie_word_embeddings": True})),
        ("strict", {"num_key_value_heads": 6, "head_dim": 14}),
    ],
    ids=["slack", "tied", "strict"],
)
def test_coca_facts_equal_the_loaded_models(tmp_path, constraint, fields):
    saved(LlamaConfig(**(TINY | {"vocab_size": 101} | fields)), tmp_path / "src")
    form = {"dtype": "bfloat16", "max_shard_size": "50KB"}
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", constraint, **form)
    facts = inspect_checkpoint(tmp_path / "dst")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert_facts_are_of(model, facts)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.bfloat16)
    assert facts["kv_bytes_per_token_standard"] * IDS.numel() == cache_bytes(plain)
    said = {"family": "llama", "constraint": constraint, "dtype": "bfloat16"}
    said |= {"trained_length": 64, "max_length": 64, "rope": "default, base 10,000"}
    assert facts.items() >= said.items()
    record = json.loads((tmp_path / "dst" / "conversion.json").read_text())
    assert record["kv_cache_bytes_per_token"]["after"] == facts["kv_bytes_per_token"]


NEOX = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 40}
NEOX |= {"intermediate_size": 60, "vocab_size": 53}
PLAIN = [
    LlamaConfig(**TINY, vocab_size=53),
    MistralConfig(**TINY, vocab_size=53, sliding_window=None),
    GPTNeoXConfig(**NEOX),  # whose projections are fused
]


@pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.model_type)
def test_plain_facts_equal_the_loaded_models(tmp_path, config):
    facts = inspect_checkpoint(saved(config, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_facts_are_of(model, facts)
    assert facts["constraint"] is None
    assert facts["family"] == config.model_type


def test_weights_count_in_the_dtype_in_which_they_are_loaded(tmp_path):
    directory = saved(LlamaConfig(**TINY, vocab_size=53), tmp_path / "src")
    edit_weights(directory, lambda w: w.update({name: w[name].bfloat16() for name in w}))
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert_facts_are_of(model, inspect_checkpoint(directory))


def test_cache_of_sliding_windows_stops_growing(tmp_path):
    config = MistralConfig(**TINY, vocab_size=53, sliding_window=8)
    facts = inspect_checkpoint(saved(config, tmp_path), memory_bytes=10**7)
    assert facts["kv_bytes_per_token"] == 0
    width = 3 * 2 * 2 * 8 * 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert cache_bytes(model) <= facts["kv_bytes_fixed"] == 8 * width
    assert facts["longest_context"] is None
    assert "any in 10.00 MB: the cache stops growing" in describe(facts)
    convert_checkpoint(tmp_path, tmp_path / "coca")
    cache = "32 bytes per token, and 2,304 bytes for sliding windows"
    assert cache in describe(inspect_checkpoint(tmp_path / "coca"))


def test_longest_context_is_the_last_that_fits(tiny_coca_dir):
    facts = inspect_checkpoint(tiny_coca_dir, 10**6)
    model = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    longest = facts["longest_context"]
    assert longest > 100
    assert weights + cache_bytes(model, torch.zeros(1, longest, dtype=torch.long)) <= 10**6
    assert weights + cache_bytes(model, torch.zeros(1, longest + 1, dtype=torch.long)) > 10**6
    assert inspect_checkpoint(tiny_coca_dir, weights)["longest_context"] == 0
    assert inspect_checkpoint(tiny_coca_dir, 1)["longest_context"] == 0
    assert "none: 0.00 MB do not hold" in describe(inspect_checkpoint(tiny_coca_dir, 1))


def test_an_ntk_export_shows_its_trained_length(tmp_path, tiny_coca_dir):
    convert_checkpoint(tiny_coca_dir, tmp_path / "dst", ntk_length=256)
    facts = inspect_checkpoint(tmp_path / "dst")
    assert (facts["trained_length"], facts["max_length"]) == (64, 256)
    assert "64 tokens (set up for 256)" in describe(facts)
    assert "NTK base for 256 tokens" in facts["rope"]


def test_command_prints_lines_json_or_one_line_of_error(tiny_coca_dir, tmp_path, coca_eval):
    lines = coca_eval(f"inspect {tiny_coca_dir} --memory 24GB")[1]
    said = ["llama, CoCA, slack", "default, base 10,000", "64 tokens", "float32"]
    assert all(words in lines for words in [*said, "tokens in 24.0 GB beside"])
    printed = coca_eval(f"inspect {tiny_coca_dir} --json")[1]
    assert json.loads(printed) == inspect_checkpoint(tiny_coca_dir)
    for arguments in (tmp_path / "nothing", tmp_path, f"{tiny_coca_dir} --memory lots"):
        code, printed, error = coca_eval("inspect", arguments)
        assert (code, printed, error.count("\n")) == (2, "", 1)
        assert error.startswith("error: ")


def drop_layer(weights):
    for name in [name for name in weights if ".2." in name]:
        del weights[name]


WORDS = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": "x"}
QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}
DAMAGE = {
    "damaged: no such directory": shutil.rmtree,
    "damaged: got a file, expected a checkpoint directory": (
        lambda d: (shutil.rmtree(d), d.write_bytes(b"GGUF"))
    ),
    "got model_type 'x'": lambda d: edit_config(d, model_type="x"),
    "config.json: .*hidden_size": lambda d: edit_config(d, hidden_size="big"),
    "config.json: got a length of 'x', expected a whole number": (
        lambda d: edit_config(d, rope_parameters=WORDS)
    ),
    "expected a family of coca-convert": lambda d: edit_config(d, model_type="clip"),
    "config.json: got weights quantized by fp8, expected plain ones": (
        lambda d: edit_config(d, **QUANTIZED)
    ),
    "config.json: no such file": lambda d: (d / "config.json").unlink(),
    "got no weights": lambda d: (d / "model.safetensors").unlink(),
    "truncated or corrupted": lambda d: (d / "model.safetensors").write_bytes(b"\1"),
    "got weights of 2 layers, expected 3 from config": lambda d: edit_weights(d, drop_layer),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_bad_input_is_one_line(tiny_coca_dir, tmp_path, message):
    directory = shutil.copytree(tiny_coca_dir, tmp_path / "damaged")
    DAMAGE[message](directory)
    refused(message, inspect_checkpoint, directory)


@pytest.mark.timeout(60)
def test_any_value_in_any_field_of_the_config_is_described_or_one_line(tiny_coca_dir, tmp_path):
    directory = shutil.copytree(tiny_coca_dir, tmp_path / "damaged")
    config, told = json.loads((directory / "config.json").read_text()), 0
    rope = {"rope_type": "default", "rope_theta": "x"}
    values = [None, True, -1, 0, 10**12, 2**70, 1e300, "", "x", [], {}, rope]
    for field in config:
        for value in values:
            (directory / "config.json").write_text(json.dumps(config | {field: value}))
            try:
                facts = inspect_checkpoint(directory, 10**9)
            except CocaError:
                continue
            assert describe(facts).startswith(str(directory)), (field, value)
            told += 1
    assert told > 20
