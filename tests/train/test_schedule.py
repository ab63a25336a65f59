"""The learning rate of every step against the closed form."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from coca_hf.train.log import StageLog, start_place
from coca_hf.train.processes import StopRequest
from coca_hf.train.recipe import StageOptions, load_recipe
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer
from tests.train.results import logged


def trainer_of(options: dict, tmp_path) -> StageTrainer:
    """A trainer of a small model, with its optimizer and schedule."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_hidden_layers=1, **sizes))
    trainer = StageTrainer(
        model,
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options),
        log=StageLog(tmp_path / "log.jsonl", 8, 1, 1, 0, start_place(0)),
        own_options=StageOptions(),
        held_out=torch.empty(0, 8),
        stop=StopRequest(),
    )
    trainer.create_optimizer_and_scheduler(options["max_steps"])
    return trainer


def rates_of(options: dict, tmp_path) -> list[float]:
    """The rates of the trainer's schedule for each of `max_steps` steps, and for the next."""
    trainer, rates = trainer_of(options, tmp_path), []
    for _ in range(options["max_steps"] + 1):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return rates


@pytest.mark.parametrize("bounds", [{"start_lr": 3e-4}, {"end_lr": 2e-4}], ids=["start", "end"])
def test_a_bound_that_is_not_given_is_zero(bounds, tmp_path):
    options = {"learning_rate": 1e-3, "warmup_steps": 4, "max_steps": 11}
    options["lr_scheduler_kwargs"] = bounds
    points = [bounds.get("start_lr", 0.0), 1e-3, bounds.get("end_lr", 0.0)]
    np.testing.assert_allclose(
        rates_of(options, tmp_path), np.interp(np.arange(12), [0, 4, 11], points), atol=1e-12
    )


def test_a_run_logs_the_rates_of_the_schedule(recipe_path, tmp_path):
    bounds = "training.lr_scheduler_kwargs={start_lr: 1e-5, end_lr: 1e-4}"
    settings = [bounds, "training.warmup_steps=2"]
    recipe = load_recipe(recipe_path, [*settings, "stages.k.max_steps=7"])
    rates = logged(run_recipe(recipe, tmp_path / "out", stage="k"), "learning_rate")
    np.testing.assert_allclose(rates, np.interp(range(7), [0, 2, 7], [1e-5, 1e-3, 1e-4]), rtol=1e-9)
