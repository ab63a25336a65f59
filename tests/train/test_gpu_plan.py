"""A plan's memory against closed forms, and against a real run as torch's profiler sees it."""

import functools
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
from coca_hf.train.model import freeze_, model_from_config, start_config, teacher_from_config
from coca_hf.train.objectives import Objective, chunk_cross_entropy_
from coca_hf.train.recipe import load_recipe
from tests.conftest import TINY as THREE_LAYERS

TINY = {**THREE_LAYERS, "num_hidden_layers": 2}
BATCH, SEQ_LEN, VOCAB = 4, 60, 70
STAGES = [{"name": "k", "train": ["t_proj"]}, {"name": "full", "train": "all"}]
ONE_LAYER = "config.num_hidden_layers=1"  # halves the time of tests that need no second layer
WIDE = (ONE_LAYER, f"config.vocab_size={40 * VOCAB}")
LOGITS = BATCH * SEQ_LEN * 40 * VOCAB * 4  # bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    # no weights
    coca_hf.CocaLlamaConfig(vocab_size=VOCAB, **TINY).save_pretrained(folder / "model")
    data = {"seq_len": SEQ_LEN, "sources": [{"path": "absent.txt", "weight": 1}]}
    training = {"max_steps": 5, "per_device_train_batch_size": BATCH, "optim": "adamw_torch_fused"}
    tree = {"model": str(folder / "model"), "data": data, "training": training, "stages": STAGES}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder / "recipe.yaml"


@pytest.fixture(autouse=True)
def _closed_forms_do_not_round_up_to_an_allocators_blocks(monkeypatch):
    monkeypatch.setattr(gpu_plan, "_BLOCK_BYTES", 1)


@pytest.fixture(scope="module")
def measured(path):
    """What is measured of a stage of the recipe with overrides, once in all tests."""

    @functools.cache
    def measured(number, setting, *words):
        recipe = load_recipe(path, words)
        return measure(recipe, recipe.stages[number], setting)

    return measured


def alone(path, number: int, *words):
    """The recipe with overrides and one of its stages."""
    recipe = load_recipe(path, words)
    return recipe.model_copy(update={"stages": recipe.stages[number : number + 1]})


def shard_bytes(parameter, world_size: int) -> int:
    """Bytes of float32 numbers in the shard of the first process, which has the most rows."""
    rows, *others = parameter.shape
    return 4 * math.ceil(rows / world_size) * math.prod(others)


@pytest.mark.parametrize("world_size", [1, 32])
@pytest.mark.parametrize("number", [0, 1], ids=["k", "full"])
def test_weights_and_optimizer_are_exactly_the_shards(path, measured, number, world_size):
    recipe = load_recipe(path)
    with torch.device("meta"):
        model = model_from_config(recipe)
    freeze_(model, recipe.stages[number])
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = measured(number, Setting(world_size, BATCH, 1, False)).at_peak
    trained = sum(shard_bytes(parameter, world_size) for parameter in learning)
    every = sum(shard_bytes(parameter, world_size) for parameter in model.parameters())
    assert held["weights"] == every
    # two moments, and a step counter for each
    assert held["optimizer"] == 2 * trained + 4 * len(learning)


def real_run(recipe, checkpointing: bool) -> tuple[int, int]:
    """The allocator's peak in two real steps of the only stage, and the bytes saved for backward,
    without weights.
    """
    gc.collect()
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model, [stage] = model_from_config(recipe).train(), recipe.stages
        freeze_(model, stage)
        if stage.needs_teacher:
            chunk_cross_entropy_(model)
            objective = Objective(stage.objective, teacher_from_config(recipe))
        if checkpointing:
            model.gradient_checkpointing_enable()
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learning, fused=True)
        ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
        for _ in range(2):
            saved.clear()
            given = {"use_cache": False, "num_items_in_batch": torch.tensor(ids.numel())}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = model(input_ids=ids, labels=ids, **given)
                loss = outputs.loss
                if stage.needs_teacher:
                    loss = objective(loss, outputs.logits, {"input_ids": ids}, 1)
                del outputs
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
def test_the_peak_is_that_of_a_real_run_on_a_cpu(path, measured, number, checkpointing):
    """It differs by up to 1.1%, because no tensor shows the memory inside a kernel. On GPUs the goal
    is 10%; scripts/bench/plan.py compares.
    """
    memory = measured(number, Setting(1, BATCH, 1, checkpointing))
    peak, saved = real_run(alone(path, number), checkpointing)
    assert memory.peak == pytest.approx(peak, rel=0.015)
    # at the peak, early in the backward, the last saved tensors are already freed
    if not checkpointing:
        error = (0.07, 0.01)[number]
        assert memory.at_peak["activations"] == pytest.approx(saved, rel=error)


@pytest.mark.parametrize("words", [(), WIDE], ids=["narrow", "wide"])
def test_a_stage_with_a_teacher_is_planned_with_it(path, measured, tmp_path, monkeypatch, words):
    monkeypatch.setattr("coca_hf.train.objectives._CHUNK_TOKENS_OF_CPU", 1024)
    recipe = load_recipe(path, words)
    config = LlamaConfig(**start_config(recipe).to_dict() | {"model_type": "llama"})
    config.save_pretrained(tmp_path / "teacher")
    distilled = (f"teacher={tmp_path / 'teacher'}", "stages.full.objective={lm: 0.5, distill: 0.5}")
    memory = measured(1, Setting(1, BATCH, 1, False), *words, *distilled)
    peak, _ = real_run(alone(path, 1, *words, *distilled), False)
    assert memory.peak == pytest.approx(peak, rel=0.015)
    without = measured(1, Setting(1, BATCH, 1, False), *words)
    weights = 4 * teacher_from_config(load_recipe(path, distilled + words)).num_parameters()
    assert memory.at_peak["weights"] == without.at_peak["weights"] + weights


def test_float32_logits_are_in_the_measure_unless_cross_entropy_is_fused(measured, monkeypatch):
    monkeypatch.setattr("coca_hf.train.objectives._CHUNK_TOKENS", 30)
    setting = Setting(32, BATCH, 1, True)
    plain = measured(0, setting, *WIDE).peak
    # the probabilities' logarithms, their gradient, and that of the logits
    assert plain > 3 * LOGITS
    fused = measured(0, setting, *WIDE, "training.fused_cross_entropy=true").peak
    assert fused < plain - 2 * LOGITS


def test_gpus_that_share_a_block_have_the_activations_of_their_part(path, measured):
    settings = (Setting(4, BATCH, 1, False, sharing) for sharing in (1, 2))
    whole, half = (measured(1, setting).at_peak["activations"] for setting in settings)
    assert 0.4 * whole < half < 0.5 * whole  # the scores of a part are fewer than half
    plan = plan_recipe(alone(path, 0, ONE_LAYER, "training.context_parallel_size=2"), 4)
    assert plan.stages[0].tokens == 5 * 2 * BATCH * SEQ_LEN  # two groups
    assert "stages.k: planned without the keys and values that GPUs exchange" in plan.notes


def test_gpus_that_share_a_block_read_held_out_blocks_whole(measured):
    setting = Setting(4, BATCH, 1, True, sharing=4)
    # those of a quarter of a block, and the backward's
    assert measured(0, setting, *WIDE, "data.held_out_blocks=0").peak < 1.35 * LOGITS
    assert measured(0, setting, *WIDE).peak > 2 * LOGITS  # and the probabilities' logarithms


def test_accumulation_keeps_the_gradients_of_all_shards_on_every_process(path, measured):
    settings = (Setting(32, BATCH, accumulation, False) for accumulation in (1, 2))
    plain, accumulated = (measured(1, setting).at_peak["gradients"] for setting in settings)
    with torch.device("meta"):
        model = model_from_config(load_recipe(path))
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    assert plain < 0.1 * whole  # the shards and the layer at hand: 0.096
    assert accumulated > 0.9 * whole  # every layer's are whole there: 0.92


def test_bf16_halves_what_is_saved(measured):
    setting = Setting(2, BATCH, 1, False)
    plain, half = (
        measured(1, setting, ONE_LAYER, *own).at_peak["activations"]
        for own in ((), ("training.bf16=true",))
    )
    assert 0.5 * plain < half < 0.8 * plain  # norms and the loss stay in float32


def test_eager_attention_is_planned_with_its_maps(measured):
    setting = Setting(1, BATCH, 1, False)
    plain, maps = (
        measured(1, setting, ONE_LAYER, *own).at_peak["activations"]
        for own in ((), ("training.attn_implementation=eager",))
    )
    assert maps > plain + 4 * BATCH * TINY["num_attention_heads"] * SEQ_LEN**2


def test_kept_layers_with_a_window_are_planned_as_they_run(path, measured):
    layers = ("config.coca_kept_layers=[1]", "config.coca_kept_window=9")
    memory = measured(1, Setting(1, BATCH, 1, False), *layers)
    peak, _ = real_run(alone(path, 1, *layers), False)
    assert memory.peak == pytest.approx(peak, rel=0.02)


def test_a_model_that_looks_into_its_positions_is_planned(path, tmp_path):
    LlamaConfig(vocab_size=VOCAB, **TINY).save_pretrained(tmp_path / "llama")
    settings = [ONE_LAYER, "stages.k.train=all", f"model={tmp_path / 'llama'}"]
    rope = "config.rope_parameters={rope_type: %s, factor: 4.0}"
    plain, dynamic = (
        plan_recipe(alone(path, 1, *settings, rope % kind)).stages[0]
        for kind in ("linear", "dynamic")
    )
    assert dynamic.memory.at_peak == plain.memory.at_peak


def test_time_is_operations_over_what_the_gpus_do(path, monkeypatch):
    monkeypatch.setattr(gpu_plan, "measure", lambda *_: Memory({}))
    recipe = alone(path, 0, ONE_LAYER)
    one, many = (plan_recipe(recipe, size, gpu="A100", mfu=0.5).stages[0] for size in (1, 32))
    assert one.tokens == 5 * BATCH * SEQ_LEN
    assert many.tokens == 32 * one.tokens
    assert one.seconds == pytest.approx(one.flops / (0.5 * 312e12))
    assert many.seconds == pytest.approx(one.seconds)


def test_what_is_advised_fits(measured, path):
    share = 0.5  # of the peak: checkpointing alone is not enough
    peak = measured(1, Setting(1, BATCH, 1, False), ONE_LAYER).peak
    memory = peak * share / GIB / (1 - RESERVE)
    (stage,) = plan_recipe(alone(path, 1, ONE_LAYER), 1, memory).stages
    assert stage.change.startswith("does not fit")
    words = stage.change.split(" with ")[1].split(" (")[0].split()
    assert words[0] == "stages.full.gradient_checkpointing=true"
    assert words[1].startswith("stages.full.per_device_train_batch_size=")
    (changed,) = plan_recipe(alone(path, 1, ONE_LAYER, *words), 1, memory).stages
    assert changed.change is None
    assert changed.setting.global_batch == stage.setting.global_batch


@pytest.mark.parametrize(("accumulation", "advice"), [(4, "--world-size 4"), (1, "nothing helps")])
def test_more_gpus_are_advised_last_and_nothing_where_nothing_helps(
    path, monkeypatch, accumulation, advice
):
    def measure_shards(recipe, stage, setting):
        return Memory({"weights": 100 * GIB // setting.world_size})

    monkeypatch.setattr(gpu_plan, "measure", measure_shards)
    steps = ["per_device_train_batch_size=1", f"gradient_accumulation_steps={accumulation}"]
    recipe = alone(path, 1, ONE_LAYER, *(f"training.{setting}" for setting in steps))
    plan = plan_recipe(recipe, 1, gpu_memory=40)
    assert advice in plan.stages[0].change


def test_a_long_block_is_helped_by_a_fused_cross_entropy_and_then_by_sharing_it(path, monkeypatch):
    """That each of them takes less memory is tested above."""

    def measure_block(recipe, stage, setting):
        logits = 8 if recipe.own_options(stage).fused_cross_entropy else 24
        return Memory({"activations": (8 + logits) * GIB // setting.sharing})

    monkeypatch.setattr(gpu_plan, "measure", measure_block)
    recipe = alone(path, 1, ONE_LAYER, "training.per_device_train_batch_size=1")
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
    assert "2 x H100, 80 GiB each, at MFU 0.4 of 989 TFLOPS" in result.stdout
    assert "stages.k: planned without torch_compile" in result.stdout
    assert "training would refuse this: config.num_hidden_layers: got 1, exp" in result.stdout
    (tokens,) = [line for line in result.stdout.splitlines() if line.startswith("│ tokens ")]
    assert re.findall(r"[\d,.]+B?", tokens) == ["2,400", "4.8B"]
