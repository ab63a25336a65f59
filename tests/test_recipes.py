"""Every shipped recipe loads, its models exist, its stages have parameters, its rates are right."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import LlamaConfig

from coca_hf import CocaLlamaConfig
from coca_hf.train.gpu_plan import GIB, RESERVE, plan_recipe
from coca_hf.train.model import start_config, start_model
from coca_hf.train.preflight import check_model
from coca_hf.train.recipe import Recipe, load_recipe
from tests.conftest import TINY
from tests.train.test_schedule import rates_of, trainer_of

RECIPES = Path(__file__).parents[1] / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*.yaml") if "accelerate" not in path.parts)
PATHS = {str(path.relative_to(RECIPES)): path for path in FILES}
LAYOUTS = {path.stem: path for path in sorted((RECIPES / "accelerate").glob("*.yaml"))}
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CONFIGS = {  # of the checkpoints that recipes start from
    "checkpoints/llama-7b-coca": CocaLlamaConfig(),
    "runs/three-stage/3-full": CocaLlamaConfig(),
    "LLAMA-7B": LlamaConfig(),
    "checkpoints/smollm2-135m-coca": CocaLlamaConfig(**SMOLLM2),
    "quickstart/start": CocaLlamaConfig(**SMOLLM2),
}
ON_CPU = {"bf16": False, "gradient_checkpointing": False}
ADAPTERS = [  # as the header of the recipe says
    "training.per_device_train_batch_size=4",
    *(f"stages.{stage}.lora={{r: 32, alpha: 32}}" for stage in ("qkv", "full")),
    "stages.full.learning_rate=1e-3",
]
SCRATCH = "from-scratch-350m.yaml"
MODELS = {  # of that recipe, by override
    "coca": (),
    "strict": ("config.coca_constraint=strict",),
    "rope": ("config.model_type=llama",),
    "alibi": ("config.model_type=alibi_llama",),
}


@pytest.fixture
def load(tiny_tokenizer, tmp_path):
    """The recipe of a name, its checkpoint or tokenizer replaced by what is at hand."""

    def load(name: str, *settings: str) -> Recipe:
        recipe = load_recipe(PATHS[name], settings)
        if recipe.model is None:
            tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
            return load_recipe(PATHS[name], [*settings, f"tokenizer={tmp_path / 'tokenizer'}"])
        CONFIGS[recipe.model].save_pretrained(tmp_path / "model")
        recipe = load_recipe(PATHS[name], [*settings, f"model={tmp_path / 'model'}"])
        if recipe.teacher:
            of_original = start_config(recipe).to_dict() | {"model_type": "llama"}
            LlamaConfig(**of_original).save_pretrained(tmp_path / "teacher")
            recipe = recipe.model_copy(update={"teacher": str(tmp_path / "teacher")})
        return recipe

    return load


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_every_recipe_says_what_to_expect(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for label in ("Reproduces", "Command", "Cost", "Expect"):
        assert any(line.startswith(f"# {label}") for line in header), label


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, ()) for name in PATHS), *((SCRATCH, MODELS[model]) for model in [*MODELS][1:])],
)
def test_a_recipe_runs_dry(name, settings, load, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asks the hub"))
    recipe = load(name, *settings)
    check_model(recipe)  # on the meta device; every stage finds its parameters
    assert recipe.data.seq_len <= start_config(recipe).max_position_embeddings
    for stage in recipe.stages:
        # TrainingArguments and the trainer take all of them
        options = recipe.trainer_options(stage) | ON_CPU
        rates = rates_of(options | {"max_steps": 40}, tmp_path)
        assert 0 <= min(rates) <= max(rates) <= options.get("learning_rate", 5e-5)


def papers_rates(num_steps: int, warmup_steps: int) -> np.ndarray:
    """From 1e-7 to 1e-4, then linearly down to 1e-5."""
    steps = np.arange(num_steps)
    warm_up = 1e-7 + (1e-4 - 1e-7) * steps / warmup_steps
    decay = 1e-4 - (1e-4 - 1e-5) * (steps - warmup_steps) / (num_steps - warmup_steps)
    return np.where(steps < warmup_steps, warm_up, decay)


PAPERS_RATES = {
    "llama-7b/three-stage.yaml": papers_rates(15_000, 150),  # a warm-up of 1% of the steps
    "llama-7b/pi-32k.yaml": np.full(6000, 2e-5),
    SCRATCH: papers_rates(381_470, 3815),
}


@pytest.mark.parametrize("name", PAPERS_RATES)
def test_the_papers_optimizer_and_its_schedule(name, tmp_path):
    """At every step, as the schedule says it will be: to take 381,470 would take a minute."""
    recipe = load_recipe(PATHS[name])
    for stage in recipe.stages:
        trainer = trainer_of(recipe.trainer_options(stage) | ON_CPU, tmp_path)
        assert type(trainer.optimizer) is torch.optim.AdamW
        assert all(group["betas"] == (0.9, 0.95) for group in trainer.optimizer.param_groups)
        schedule = trainer.lr_scheduler
        for peak, share in set(zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)):
            rates = [peak * share(step) for step in range(len(PAPERS_RATES[name]))]
            assert len(rates) == trainer.args.max_steps
            np.testing.assert_allclose(rates, PAPERS_RATES[name], rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, ()) for name in PATHS), ("smollm2-135m/three-stage.yaml", ADAPTERS)],
)
def test_a_recipe_is_planned(name, settings, load):
    recipe = load(name, "config.num_hidden_layers=1", *settings)
    plan = plan_recipe(recipe, 32 if name.startswith("llama-7b") else 1)
    assert [stage.name for stage in plan.stages] == [stage.name for stage in recipe.stages]
    for stage, planned in zip(recipe.stages, plan.stages, strict=True):
        assert planned.memory.at_peak["optimizer"] > 0
        assert (planned.trained == planned.total) == (stage.train == "all" and stage.lora is None)


def test_adapters_fit_a_gpu_of_24_gb_as_their_recipe_says(load):
    name, peaks = "smollm2-135m/three-stage.yaml", []
    for num_layers in (1, 2):
        recipe = load(name, f"config.num_hidden_layers={num_layers}", *ADAPTERS)
        full = recipe.model_copy(update={"stages": recipe.stages[2:]})
        peaks.append(plan_recipe(full).stages[0].memory.peak / GIB)
    peak = peaks[0] + 29 * (peaks[1] - peaks[0])  # every layer of the 30 adds as much
    # as `coca-train --plan` says of all 30, in a minute
    assert peak == pytest.approx(12.5, abs=0.1)
    assert peak < 24 * (1 - RESERVE)


def test_batches_and_lengths_are_the_papers():
    paper = {  # blocks of all stages on the paper's number of GPUs
        "llama-7b/three-stage.yaml": (32, 3 * 15_000 * 32 * 8, 2048),
        "llama-7b/pi-32k.yaml": (32, 6000 * 32, 32768),
        SCRATCH: (8, 381470 * 256 * 2, 512),
    }
    for name, (world_size, num_blocks, seq_len) in paper.items():
        recipe = load_recipe(PATHS[name])
        assert (recipe.num_blocks(world_size), recipe.data.seq_len) == (num_blocks, seq_len), name
        assert [source.weight for source in recipe.data.sources] == [0.75, 0.25]
    tokens = load_recipe(PATHS[SCRATCH]).num_blocks(8) * 512
    assert tokens == pytest.approx(2 * 50e9, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in PATHS if name != "recover.yaml"])
def test_a_header_states_the_tokens_and_the_disk_that_its_recipe_takes(name):
    header = re.sub(r"\n#\s+", " ", PATHS[name].read_text()).replace("\u00d7", "x")
    stated = re.search(
        r"(?:(\d) stages x )?([\d,]+) steps x (\d+) blocks x ([\d,]+) tokens = (?:\d x )?([\d.]+)([MB]) tokens",
        header,
    )
    stages = int(stated[1] or 1)
    steps, blocks, seq_len = (int(number.replace(",", "")) for number in stated.group(2, 3, 4))
    recipe = load_recipe(PATHS[name])
    assert {recipe.blocks_per_step(stage, 8) for stage in recipe.stages} == {blocks}
    assert (
        sum(recipe.trainer_options(stage)["max_steps"] for stage in recipe.stages) == stages * steps
    )
    assert recipe.data.seq_len == seq_len
    tokens = recipe.num_blocks(8) * recipe.data.seq_len
    unit = {"M": 1e6, "B": 1e9}[stated[6]]
    assert float(stated[5]) == float(f"{tokens / stages / unit:.3g}")
    disk = re.search(r"([\d.]+) GB of disk", header)
    # 2 bytes a token: no vocabulary of theirs is above 65,536
    assert float(disk[1]) == float(f"{2 * tokens / 1e9:.2g}")


@pytest.mark.parametrize("model", ["LLAMA-7B", "runs/three-stage/3-full"])
def test_position_interpolation_is_for_llama_and_for_coca(load, model):
    config = start_config(load("llama-7b/pi-32k.yaml", f"model={model}"))
    assert type(config) is type(CONFIGS[model])
    assert config.max_position_embeddings == 32768
    rope = {key: config.rope_parameters[key] for key in ("rope_type", "factor", "rope_theta")}
    assert rope == {"rope_type": "linear", "factor": 32768 / 2048, "rope_theta": 10000.0}


def test_the_models_from_scratch_start_with_the_same_weights_where_they_share_them(load):
    settings = [f"config.{name}={size}" for name, size in TINY.items() if name != "rms_norm_eps"]
    started = {name: start_model(load(SCRATCH, *settings, *own)) for name, own in MODELS.items()}
    kinds = {
        (type(model).__name__, getattr(model.config, "coca_constraint", None))
        for model in started.values()
    }
    coca = {("CocaLlamaForCausalLM", constraint) for constraint in ("slack", "strict")}
    assert kinds == {("AlibiLlamaForCausalLM", None), ("LlamaForCausalLM", None), *coca}
    models = {name: model.state_dict() for name, model in started.items()}
    rope = models["rope"]
    for name, weights in models.items():
        ours, theirs = set(weights) - set(rope), set(rope) - set(weights)
        is_coca = name in ("coca", "strict")
        assert {key.split(".")[-2] for key in ours} == ({"t_proj"} if is_coca else set())
        assert {key.split(".")[-2] for key in theirs} == ({"k_proj"} if is_coca else set())
        assert all(weights[key].equal(rope[key]) for key in set(weights) & set(rope))
    assert all(weights.equal(models["strict"][key]) for key, weights in models["coca"].items())
    one, other = (rope[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not one.equal(other)
    assert one.std().item() == pytest.approx(0.02, rel=0.1)
    again = start_model(load(SCRATCH, *settings, *MODELS["rope"], "data.seed=1"))
    assert not again.state_dict()["model.layers.0.self_attn.q_proj.weight"].equal(one)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_one_that_accelerate_reads(name):
    layout = load_config_from_file(str(LAYOUTS[name]))
    assert (layout.num_machines, layout.num_processes) == (1, {"8gpu": 8, "2cpu": 2}[name])
    assert layout.mixed_precision == "no"  # the recipe's to say
    if name == "8gpu":
        assert layout.fsdp_config["fsdp_version"] == 2
        assert layout.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        assert not layout.fsdp_config["fsdp_activation_checkpointing"]  # the recipe's to say


def test_the_settings_of_the_commands_in_headers_are_taken():
    taken = []
    for path in PATHS.values():
        for line in path.read_text().splitlines():
            if line.startswith("#") and re.search(r"(coca-train|slurm\.sh) recipes/", line):
                words = shlex.split(line)
                recipe = next(word for word in words if word.endswith(".yaml"))
                settings = [word for word in words if re.match(r"[a-z_.]+=", word)]
                load_recipe(RECIPES.parent / recipe, settings)
                taken += settings
    assert {*ADAPTERS} < {*taken}
    others = {setting.partition("=")[0] for setting in taken if setting not in ADAPTERS}
    assert others == {"model", "teacher", "stages"}


def test_recipes_name_only_layouts_scripts_and_recipes_that_are_there():
    root = RECIPES.parent
    for path in [*PATHS.values(), *LAYOUTS.values(), *(root / "scripts/cluster").iterdir()]:
        for word in path.read_text().replace("`", " ").split():
            word = word.strip(";:,.()")
            if word.startswith(("recipes/", "scripts/")) and word.endswith((".yaml", ".sh")):
                assert (root / word).exists(), f"{path} names {word}"


def test_the_script_of_smollm2_calls_every_command_with_a_recipe_that_loads(tmp_path):
    """Stand-ins note what they are called with."""
    for name in ("coca-convert", "coca-train", "coca-eval", "python"):
        note = f'(printf "%s\\0" {name} "$@"; echo) >> {tmp_path}/calls'
        (tmp_path / name).write_text(f"#!/bin/sh\n{note}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "BOOKS": "books/*.parquet"}
    script = [RECIPES.parent / "scripts/smollm2.sh", tmp_path / "out", "stages.k.max_steps=7"]
    subprocess.run(script, env=environment, check=True)
    calls = [line.split("\0")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    convert, code, prepare, train, report = calls
    assert convert == ["coca-convert", "HuggingFaceTB/SmolLM2-135M", f"{tmp_path}/out/start"]
    assert (RECIPES.parent / code[1]).exists()
    assert prepare[-1] == "--prepare"
    assert train[-3:] == ["--out", f"{tmp_path}/out/train", "--resume"]
    assert prepare[1:-1] == train[1:-3]
    recipe = load_recipe(RECIPES.parent / train[1], train[2:-3])
    assert recipe.model == convert[2]
    sources = [(source.path, source.weight) for source in recipe.data.sources]
    assert sources == [("books/*.parquet", 0.75), (code[2], 0.25)]
    assert recipe.data.prepared == f"{tmp_path}/out/blocks"
    assert recipe.trainer_options(recipe.stages[0])["max_steps"] == 7
    out = f"{tmp_path}/out"
    assert report == ["coca-eval", "report", f"{out}/train", "--out", f"{out}/page"]
