"""`fp16: true`: overflows of the loss's scale are routine, and no other bad step is.

Accelerate scales losses on GPUs alone; here it does on a CPU, too, with torch's own scaler.
"""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from coca_hf import CocaError
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.results import assert_same_weights, changed, log_lines, record, weights
from tests.train.test_resume import bad_losses

ON_CPU = not torch.cuda.is_available()
OPTIONS = ["training.fp16=true", "stages.k.max_steps=12", f"training.use_cpu={ON_CPU}"]


@pytest.fixture(autouse=True)
def scaler(monkeypatch):
    """A scale that is too high for the first steps."""
    plain = Accelerator.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.native_amp = True
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**20)

    monkeypatch.setattr(Accelerator, "__init__", init)


def test_overflows_of_the_scale_are_skipped_until_it_fits_and_are_not_bad(
    recipe_path, tiny_coca_dir, tmp_path
):
    result = run_recipe(load_recipe(recipe_path, OPTIONS), tmp_path / "out", stage="k")
    skipped = record(result)["skipped_steps"]
    assert 2 < skipped < 10
    lines = log_lines(result)
    assert [line["skipped_steps"] for line in lines][:3] == [1, 2, 3]
    assert lines[-1]["skipped_steps"] == skipped
    before, after = weights(tiny_coca_dir), weights(result)
    assert all(weight.isfinite().all() for weight in after.values())
    assert changed(before, after)


def test_a_loss_that_is_no_number_is_bad(recipe_path, tmp_path, monkeypatch):
    bad_losses(monkeypatch, {9: float("nan")})
    with pytest.raises(CocaError, match="the loss of step 9 is nan, bad step 1 in a row"):
        run_recipe(load_recipe(recipe_path, OPTIONS), tmp_path / "out", stage="k")


def test_a_gradient_that_overflows_at_every_scale_is_bad(recipe_path, tmp_path, monkeypatch):
    plain = Trainer.training_step

    def training_step(self, model, *rest):
        loss = plain(self, model, *rest)
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        return loss

    monkeypatch.setattr(Trainer, "training_step", training_step)
    recipe = load_recipe(recipe_path, [*OPTIONS, "stages.k.max_steps=40"])
    message = r"the loss of step 21 is \S+, but its gradient's norm is inf"
    with pytest.raises(CocaError, match=message):
        run_recipe(recipe, tmp_path / "out", stage="k")


def test_a_spike_is_skipped_without_a_trace(recipe_path, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: 1.0)
    settings = ["max_bad_steps=3", "spike_factor=3", "lr_scheduler_type=constant"]
    settings = [*OPTIONS, *(f"training.{setting}" for setting in settings)]
    bad_losses(monkeypatch, {2: 50.0})
    for steps in (1, 2):
        recipe = load_recipe(recipe_path, [*settings, f"stages.k.max_steps={steps}"])
        run_recipe(recipe, tmp_path / str(steps), "k")
    assert_same_weights(tmp_path / "2/1-k", tmp_path / "1/1-k")
