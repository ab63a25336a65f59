"""Which process has which weights, student and teacher, under FSDP2 as recipes/accelerate launches
it.

CI runs it on the oldest supported versions, too: which process gets contents depends on the version
of transformers.
"""

import json
import math
import os

import pytest
import torch
from torch.distributed.tensor import DTensor

from coca_hf import CocaError
from coca_hf.train import model, stages
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.layouts import FSDP2, Run, launch, succeed
from tests.train.results import logged, weights

pytestmark = pytest.mark.real
STAGES = {"1-k": ("lm", "distill"), "2-qkv": ("distill",)}
TAUGHT = [
    "stages.k.objective={lm: 0.5, distill: 0.5}",
    "stages.qkv.objective={distill: 0.5}",
    *(f"stages.{stage}.max_steps=2" for stage in ("k", "qkv")),
]


def contents(tensors) -> float:
    return sum(tensor.double().abs().sum().item() for tensor in tensors)


def watch():
    """Write what a process loads for a stage, and what the teacher is when the stage is saved."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # what is not loaded is NaN
    complete, plain_load, plain_model = stages._complete, stages._load, model.load_model
    facts, loaded = {}, []

    def load_model(name, *rest):
        loaded.append(name)
        return plain_model(name, *rest)

    def load(recipe, run):
        base, tokenizer, objective = plain_load(recipe, run)
        facts["loaded"] = loaded.count(recipe.teacher)
        facts["student"] = contents(base.parameters())
        facts["teacher"] = objective and contents(objective._teacher.parameters())
        return base, tokenizer, objective

    def watch_and_complete(run, trainer, *rest):
        teacher = list(trainer.objective._teacher.parameters()) if trainer.objective else []
        facts["learns"] = any(p.requires_grad or p.grad is not None for p in teacher)
        facts["sharded"] = any(isinstance(p, DTensor) for p in teacher)
        optimized = trainer.optimizer.param_groups[0]["params"]
        facts["optimized"] = any(p is q for p in teacher for q in optimized)
        path = run.directory.parent.parent / f"{run.directory.name} {os.environ['RANK']}.json"
        path.write_text(json.dumps(facts))
        complete(run, trainer, *rest)

    model.load_model = load_model
    stages._load, stages._complete = load, watch_and_complete


@pytest.fixture(scope="module")
def taught(real_recipe, tiny_llama_dir, tmp_path_factory):
    """OUT of stages with a teacher on two processes; beside it what each of them loaded."""
    directory = tmp_path_factory.mktemp("taught")
    arguments = [real_recipe, f"teacher={tiny_llama_dir}", *TAUGHT, "--out", directory / "out"]
    succeed(directory, [Run(arguments, FSDP2, watch)])
    return directory / "out"


def facts_of(taught, stage):
    return [json.loads((taught.parent / f"{stage} {rank}.json").read_text()) for rank in (0, 1)]


def test_every_process_has_the_teacher_s_weights_once(taught, tiny_llama_dir):
    expected = contents(weights(tiny_llama_dir).values())
    for stage in STAGES:
        for facts in facts_of(taught, stage):
            assert facts["teacher"] == pytest.approx(expected)
            assert facts["loaded"] == 1
            assert not any(facts[key] for key in ("learns", "sharded", "optimized"))


def test_only_the_main_process_loads_the_student(taught):
    for stage in (*STAGES, "3-full"):
        loaded = [math.isfinite(facts["student"]) for facts in facts_of(taught, stage)]
        assert loaded == [True, False]


def test_stages_with_a_teacher_have_the_losses_of_one_process(
    taught, real_recipe, tiny_llama_dir, tmp_path
):
    run_recipe(load_recipe(real_recipe, [f"teacher={tiny_llama_dir}", *TAUGHT]), tmp_path / "one")
    for stage, parts in STAGES.items():
        for key in ("loss", "grad_norm", *(f"loss_{part}" for part in parts)):
            expected = pytest.approx(logged(tmp_path / "one" / stage, key), abs=1e-4)
            assert logged(taught / stage, key) == expected, key


def test_a_model_that_only_the_main_process_cannot_load_ends_all_in_one_line(real_recipe, tmp_path):
    """Otherwise the others would wait for its weights until the launcher kills them."""
    arguments = [real_recipe, "--out", tmp_path / "out"]
    launched = launch(tmp_path, [Run(arguments, FSDP2, fail_in_main_process)])
    assert launched.wait() != 0
    assert launched.output.read_text().count("error: the checkpoint of a test") == 2


def fail_in_main_process():
    def load_model(*_):
        raise CocaError("the checkpoint of a test")

    model.load_model = load_model
