"""`muon: true`: matrices of blocks learn by Muon, everything else by AdamW, as one optimizer."""

import copy

import pytest
import torch
from torch.optim import AdamW, Muon
from transformers import AutoModelForCausalLM

from coca_hf.train.muon import MuonWithAdamW, block_matrices
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer
from tests.train.layouts import Interrupted, interrupt_in_step
from tests.train.results import assert_same_weights, timeless, weights

MUON = ["training.muon=true"]


@pytest.fixture
def model(tiny_coca_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_coca_dir)


def test_muon_takes_the_matrices_of_blocks_and_adamw_all_other_parameters(model):
    model.model.layers[0].requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {names[id(matrix)] for matrix in block_matrices(model)}
    assert taken == {
        name
        for name, parameter in model.named_parameters()
        if ".layers." in name and ".layers.0." not in name and "norm" not in name
    }


def test_a_step_is_that_of_the_two_optimizers_with_the_rates_of_their_groups(model):
    theirs = copy.deepcopy(model)

    def learn(model, *optimizers):
        for _ in range(3):
            ids = torch.arange(3, 40)[None]
            model(input_ids=ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def groups(parameters):
        decayed, plain = ([p for p in parameters if p.ndim == d] for d in (2, 1))
        return [
            {"params": decayed, "lr": 1e-3, "weight_decay": 0.1},
            {"params": plain, "lr": 2e-3, "weight_decay": 0.0},
        ]

    adamw = AdamW(groups([*model.parameters()]), betas=(0.8, 0.95), fused=True)
    learn(model, MuonWithAdamW(adamw, block_matrices(model)))

    matrices = block_matrices(theirs)
    chosen = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in theirs.parameters() if id(parameter) not in chosen]
    muon = Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    learn(theirs, muon, AdamW(groups(others), betas=(0.8, 0.95), fused=True))
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_a_run_that_is_interrupted_resumes_to_the_same_bits(
    recipe_path, tmp_path, monkeypatch, capsys
):
    recipe, out = load_recipe(recipe_path, MUON), tmp_path / "out"
    unbroken = run_recipe(recipe, tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "training_step", StageTrainer.training_step)
        interrupt_in_step(4)
        with pytest.raises(Interrupted):
            run_recipe(recipe, out)
    resumed = run_recipe(recipe, out, resume=True)
    assert "continues after step 2" in capsys.readouterr().out
    assert timeless(resumed) == timeless(unbroken)
    assert_same_weights(resumed, unbroken)
    by_adamw = run_recipe(load_recipe(recipe_path), tmp_path / "by-adamw")
    learnt, before = weights(unbroken), weights(by_adamw)
    assert all(not torch.equal(learnt[name], before[name]) for name in learnt)
