"""A plan's memory against closed forms, and against a real run as torch's profiler sees it."""

import gc
import itertools
import math
import re

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from typer.testing import CliRunner

import coca_hf
from coca_cli.train import app as train_app
from coca_hf.errors import CocaError
from coca_hf.train import gpu_plan
from coca_hf.train.gpu_plan import GIB, RESERVE, Memory, Setting, measure, plan_recipe
from coca_hf.train.model import freeze_, model_from_config
from coca_hf.train.recipe import load_recipe
from tests.conftest import TINY as THREE_LAYERS

TINY = {**THREE_LAYERS, "num_hidden_layers": 2}
BATCH, SEQ_LEN, VOCAB = 4, 60, 70
STAGES = [{"name": "k", "train": ["t_proj"]}, {"name": "full", "train": "all"}]
ONE_LAYER = "config.num_hidden_layers=1"  # halves the time of tests that need no second layer


@pytest.fixture
def path(tmp_path):
    # no weights
    coca_hf.CocaLlamaConfig(vocab_size=VOCAB, **TINY).save_pretrained(tmp_path / "model")
    data = {"seq_len": SEQ_LEN, "sources": [{"path": "absent.txt", "weight": 1}]}
    training = {"max_steps": 5, "per_device_train_batch_size": BATCH, "optim": "adamw_torch_fused"}
    tree = {"model": str(tmp_path / "model"), "data": data, "training": training, "stages": STAGES}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "recipe.yaml"


@pytest.fixture
def recipe(path, monkeypatch):
    # closed forms do not round up to an allocator's blocks
    monkeypatch.setattr(gpu_plan, "_BLOCK_BYTES", 1)
    return load_recipe(path)


@pytest.fixture
def small(path, recipe):
    return load_recipe(path, [ONE_LAYER])


def alone(recipe, number: int):
    """The recipe with one of its stages."""
    return recipe.model_copy(update={"stages": recipe.stages[number : number + 1]})


def shard_bytes(parameter, world_size: int) -> int:
    """Bytes of float32 numbers in the shard of the first process, which has the most rows."""
    rows, *others = parameter.shape
    return 4 * math.ceil(rows / world_size) * math.prod(others)


@pytest.mark.parametrize("world_size", [1, 32])
@pytest.mark.parametrize("number", [0, 1], ids=["k", "full"])
def test_weights_and_optimizer_are_exactly_the_shards(recipe, number, world_size):
    stage = recipe.stages[number]
    with torch.device("meta"):
        model = model_from_config(recipe)
    freeze_(model, stage)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = measure(recipe, stage, Setting(world_size, BATCH, 1, False)).at_peak
    trained = sum(shard_bytes(parameter, world_size) for parameter in learning)
    every = sum(shard_bytes(parameter, world_size) for parameter in model.parameters())
    assert held["weights"] == every
    # two moments, and a step counter for each
    assert held["optimizer"] == 2 * trained + 4 * len(learning)


def real_run(recipe, stage, checkpointing: bool) -> tuple[int, int]:
    """The allocator's peak in two real steps, and the bytes saved for backward, without weights."""
    gc.collect()
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = model_from_config(recipe).train()
        freeze_(model, stage)
        if checkpointing:
            model.gradient_checkpointing_enable()
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learning, fused=True)
        ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
        for _ in range(2):
            saved.clear()
            given = {"use_cache": False, "num_items_in_batch": torch.tensor(ids.numel())}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(input_ids=ids, labels=ids, **given).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        saved.pop(parameter.data_ptr(), None)
    events = profiled.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    in_order = sorted(events, key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in in_order))
    return peak, sum(saved.values())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("number", [0, 1], ids=["k", "full"])
def test_the_peak_is_that_of_a_real_run_on_a_cpu(recipe, number, checkpointing):
    """It differs by up to 1.1%, because no tensor shows the memory inside a kernel. On GPUs the goal
    is 10%; scripts/bench/plan.py compares.
    """
    memory = measure(recipe, recipe.stages[number], Setting(1, BATCH, 1, checkpointing))
    peak, saved = real_run(recipe, recipe.stages[number], checkpointing)
    assert memory.peak == pytest.approx(peak, rel=0.015)
    # at the peak, early in the backward, the last saved tensors are already freed
    if not checkpointing:
        error = {"k": 0.07, "full": 0.01}[recipe.stages[number].name]
        assert memory.at_peak["activations"] == pytest.approx(saved, rel=error)


def test_float32_logits_are_in_the_measure_unless_cross_entropy_is_fused(small, path, monkeypatch):
    monkeypatch.setattr("coca_hf.train.objectives._CHUNK_TOKENS", 30)
    recipe, wide = small, 40 * VOCAB
    coca_hf.CocaLlamaConfig(vocab_size=wide, **TINY).save_pretrained(recipe.model)
    logits = BATCH * SEQ_LEN * wide * 4
    memory = measure(recipe, recipe.stages[0], Setting(32, BATCH, 1, True))
    # the probabilities' logarithms, their gradient, and that of the logits
    assert memory.peak > 3 * logits
    fused = recipe.model_copy(update={"training": {**recipe.training, "fused_cross_entropy": True}})
    ours = measure(fused, recipe.stages[0], Setting(32, BATCH, 1, True))
    assert ours.peak < memory.peak - 2 * logits


def test_gpus_that_share_a_block_have_the_activations_of_their_part(recipe, path):
    settings = (Setting(4, BATCH, 1, False, sharing) for sharing in (1, 2))
    memories = (measure(recipe, recipe.stages[1], setting) for setting in settings)
    whole, half = (memory.at_peak["activations"] for memory in memories)
    assert 0.4 * whole < half < 0.5 * whole  # the scores of a part are fewer than half
    shared = load_recipe(path, [ONE_LAYER, "training.context_parallel_size=2"])
    plan = plan_recipe(alone(shared, 0), 4)
    assert plan.stages[0].tokens == 5 * 2 * BATCH * SEQ_LEN  # two groups
    assert "stages.k: planned without the keys and values that GPUs exchange" in plan.notes


def test_gpus_that_share_a_block_read_held_out_blocks_whole(small):
    wide = 40 * VOCAB
    coca_hf.CocaLlamaConfig(vocab_size=wide, **TINY).save_pretrained(small.model)
    none = small.model_copy(update={"data": small.data.model_copy(update={"held_out_blocks": 0})})
    counted, not_counted = (
        measure(recipe, recipe.stages[0], Setting(4, BATCH, 1, True, sharing=4)).peak
        for recipe in (small, none)
    )
    logits = BATCH * SEQ_LEN * wide * 4
    # those of a quarter of a block, and the backward's
    assert not_counted < 1.35 * logits
    assert counted > 2 * logits  # and the probabilities' logarithms


def test_accumulation_keeps_the_gradients_of_all_shards_on_every_process(recipe):
    settings = (Setting(32, BATCH, accumulation, False) for accumulation in (1, 2))
    memories = (measure(recipe, recipe.stages[1], setting) for setting in settings)
    plain, accumulated = (memory.at_peak["gradients"] for memory in memories)
    with torch.device("meta"):
        whole = sum(4 * parameter.numel() for parameter in model_from_config(recipe).parameters())
    assert plain < 0.1 * whole  # the shards and the layer at hand: 0.096
    assert accumulated > 0.9 * whole  # every layer's are whole there: 0.92


def test_bf16_halves_what_is_saved(path):
    kept = [
        measure(recipe, recipe.stages[1], Setting(2, BATCH, 1, False)).at_peak["activations"]
        for recipe in (load_recipe(path, [ONE_LAYER, *own]) for own in ([], ["training.bf16=true"]))
    ]
    assert 0.5 * kept[0] < kept[1] < 0.8 * kept[0]  # norms and the loss stay in float32


def test_eager_attention_is_planned_with_its_maps(small, path):
    eager = load_recipe(path, [ONE_LAYER, "training.attn_implementation=eager"])
    plain, maps = (
        measure(recipe, recipe.stages[1], Setting(1, BATCH, 1, False)).at_peak["activations"]
        for recipe in (small, eager)
    )
    assert maps > plain + 4 * BATCH * TINY["num_attention_heads"] * SEQ_LEN**2


def test_kept_layers_with_a_window_are_planned_as_they_run(path, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_plan, "_BLOCK_BYTES", 1)
    layers = {"coca_kept_layers": [1], "coca_kept_window": 9}
    config = coca_hf.CocaLlamaConfig(vocab_size=VOCAB, **TINY, **layers)
    config.save_pretrained(tmp_path / "model")
    recipe = load_recipe(path)
    memory = measure(recipe, recipe.stages[1], Setting(1, BATCH, 1, False))
    peak, _ = real_run(recipe, recipe.stages[1], False)
    assert memory.peak == pytest.approx(peak, rel=0.02)


def test_a_model_that_looks_into_its_positions_is_planned(path, tmp_path):
    LlamaConfig(vocab_size=VOCAB, **TINY).save_pretrained(tmp_path / "llama")
    settings = [ONE_LAYER, "stages.k.train=all", f"model={tmp_path / 'llama'}"]
    rope = "config.rope_parameters={rope_type: %s, factor: 4.0}"
    plain, dynamic = (
        plan_recipe(alone(load_recipe(path, [*settings, rope % kind]), 1)).stages[0]
        for kind in ("linear", "dynamic")
    )
    assert dynamic.memory.at_peak == plain.memory.at_peak


def test_time_is_operations_over_what_the_gpus_do(small):
    recipe = alone(small, 0)
    one, many = (plan_recipe(recipe, size, gpu="A100", mfu=0.5).stages[0] for size in (1, 32))
    assert one.tokens == 5 * BATCH * SEQ_LEN
    assert many.tokens == 32 * one.tokens
    assert one.seconds == pytest.approx(one.flops / (0.5 * 312e12))
    assert many.seconds == pytest.approx(one.seconds)


def test_what_is_advised_fits(small, path):
    share = 0.5  # of the peak: checkpointing alone is not enough
    full = small.stages[1]
    memory = measure(small, full, Setting(1, BATCH, 1, False)).peak * share / GIB / (1 - RESERVE)
    (stage,) = plan_recipe(alone(small, 1), 1, memory).stages
    assert not stage.fits
    words = stage.change.split(" with ")[1].split(" (")[0].split()
    assert words[0] == "stages.full.gradient_checkpointing=true"
    assert words[1].startswith("stages.full.per_device_train_batch_size=")
    changed = load_recipe(path, [ONE_LAYER, *words])
    (changed,) = plan_recipe(alone(changed, 1), 1, memory).stages
    assert changed.fits
    assert changed.setting.global_batch == stage.setting.global_batch


@pytest.mark.parametrize(("accumulation", "advice"), [(4, "--world-size 4"), (1, "nothing helps")])
def test_more_gpus_are_advised_last_and_nothing_where_nothing_helps(
    path, monkeypatch, accumulation, advice
):
    def measure_shards(recipe, stage, setting):
        return Memory({"weights": 100 * GIB // setting.world_size})

    monkeypatch.setattr(gpu_plan, "measure", measure_shards)
    steps = ["per_device_train_batch_size=1", f"gradient_accumulation_steps={accumulation}"]
    recipe = load_recipe(path, [ONE_LAYER, *(f"training.{setting}" for setting in steps)])
    plan = plan_recipe(alone(recipe, 1), 1, gpu_memory=40)
    assert advice in plan.stages[0].change


def test_a_long_block_is_helped_by_a_fused_cross_entropy_and_then_by_sharing_it(path, monkeypatch):
    """That each of them takes less memory is tested above."""

    def measure_block(recipe, stage, setting):
        logits = 8 if recipe.own_options(stage).fused_cross_entropy else 24
        return Memory({"activations": (8 + logits) * GIB // setting.sharing})

    monkeypatch.setattr(gpu_plan, "measure", measure_block)
    recipe = load_recipe(path, [ONE_LAYER, "training.per_device_train_batch_size=1"])
    recipe = alone(recipe, 1)
    fused, shared = (plan_recipe(recipe, 8, memory).stages[0].change for memory in (20, 10))
    frugal = "stages.full.gradient_checkpointing=true stages.full.fused_cross_entropy=true"
    assert f"it does with {frugal} (16.0 GiB)" in fused
    halves = "stages.full.context_parallel_size=2 stages.full.gradient_accumulation_steps=2"
    assert f"it does with {frugal} {halves} (8.0 GiB, without the keys and values that" in shared


NO_PLAN = {
    "--gpu ABACUS": "--gpu: got 'ABACUS', expected one of",
    "--mfu 0": "--mfu 0; expected",
    "--gpu-memory 0": "--gpu-memory 0",
    "config.attention_dropout=7": "attention_dropout is 7, expected from 0 to below 1",
    "config.hidden_act=loud": "no CocaLlamaConfig model can be made of it: ",
    "training.optim_args=quickly": "stages.k: optim adamw_torch_fused, optim_args 'quickly'",
    "training.lr_scheduler_type=lineal": "is not a valid",
    "training.use_cpu=true": "stages.k: got use_cpu, but a plan is for GPUs; add training",
    "data.skip_positions=65": "data.skip_positions: got 65, expected at most 64, the pos",
}


@pytest.mark.parametrize("words", NO_PLAN)
def test_what_cannot_be_planned_is_refused(path, words):
    result = CliRunner().invoke(train_app, [str(path), "--plan", *words.split()])
    assert isinstance(result.exception, CocaError)
    assert NO_PLAN[words] in str(result.exception)


def test_the_command_prints_a_table_and_notes(path):
    arguments = [str(path), ONE_LAYER, "training.torch_compile=true", "--plan", "--world-size", "2"]
    arguments.append("stages.full.max_steps=10_000_000")
    result = CliRunner().invoke(train_app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    assert "2 x H100, 80 GB each, at MFU 0.4 of 989 TFLOPS" in result.stdout
    assert "stages.k: planned without torch_compile" in result.stdout
    (tokens,) = [line for line in result.stdout.splitlines() if line.startswith("│ tokens ")]
    assert re.findall(r"[\d,.]+B?", tokens) == ["2,400", "4.8B"]
