"""Steps whose loss or gradient is not a number or spikes; `fp16: true`, whose scaler overflows.

Accelerate scales losses only on GPUs; here it does on a CPU, too, with torch's own scaler.
"""

import itertools
import json
import re
import shutil

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from coca_hf import CocaError
from coca_hf.train import objectives, preflight
from coca_hf.train.recipe import load_recipe
from coca_hf.train.run_directory import last_checkpoint
from tests.conftest import refused
from tests.train.corpora import corpus_of, tokens_of
from tests.train.results import assert_same_weights, changed, log_lines, logged, record, weights

NAN = float("nan")
THREE_BAD = ["training.max_bad_steps=3", "training.spike_factor=3"]
THREE_BAD.append("training.lr_scheduler_type=constant")


@pytest.fixture
def bad_losses(monkeypatch):
    """Multiplies the loss of these steps, counted from 1."""

    def set_them(bad: dict[int, float]):
        plain = Trainer.compute_loss

        def compute_loss(self, *args, **kwargs):
            return plain(self, *args, **kwargs) * bad.get(self.state.global_step + 1, 1.0)

        monkeypatch.setattr(Trainer, "compute_loss", compute_loss)

    return set_them


def test_a_diverging_run_stops_and_keeps_the_last_checkpoint(train, tmp_path):
    message = r"2-qkv/trainer: the loss of step 2 is nan, bad step 1 in a row .* lower learning_r"
    refused(message, train, "stages.qkv.learning_rate=1e30", "training.save_steps=1", stage=None)
    assert (tmp_path / "out/1-k/training.json").exists()
    assert last_checkpoint(tmp_path / "out/2-qkv/trainer").name == "checkpoint-1"
    assert not (tmp_path / "out/2-qkv/training.json").exists()


def test_bad_steps_that_are_allowed_are_skipped_without_a_trace(train, bad_losses, tmp_path):
    bad_losses({2: NAN, 3: 50.0})
    batches = ["per_device_train_batch_size=2", "gradient_accumulation_steps=2", "save_steps=1"]
    settings = [*THREE_BAD, *(f"training.{batch}" for batch in batches)]
    result = train(*settings)
    assert record(result)["skipped_steps"] == 2
    assert [line["skipped_steps"] for line in log_lines(result)] == [0, 1, 2]
    first, second, _ = logged(result)
    assert second == pytest.approx(first)  # the running mean replaces a loss that is not a number
    assert_same_weights(result, train(*settings, "stages.k.max_steps=1", out=tmp_path / "once"))


def test_a_checkpoint_after_bad_steps_alone_leaves_the_optimizer_as_it_is(
    train, bad_losses, tmp_path
):
    bad = {1: NAN, 2: NAN}
    bad_losses(bad)
    settings = ["training.max_bad_steps=2", "training.lr_scheduler_type=constant"]
    settings.append("training.save_steps=1")
    refused("the loss of step 2 is nan", train, *settings)
    del bad[2]
    resumed = train(*settings, resume=True)
    plain = train(*settings[:2], "training.save_strategy=no", out=tmp_path / "plain")
    assert_same_weights(resumed, plain)
    assert_same_weights(train(*settings, out=tmp_path / "saved"), plain)


def test_a_bad_step_hides_no_mean_of_an_objectives_parts(
    train, tiny_llama_dir, tmp_path, monkeypatch
):
    settings = [f"teacher={tiny_llama_dir}", "stages.k.objective={lm: 0.5, distill: 0.5}"]
    settings += ["training.max_bad_steps=3", "training.save_strategy=no"]
    plain, calls = objectives.distillation_loss, itertools.count(1)

    def bad_in_step_2(*arguments):
        return plain(*arguments) * (NAN if next(calls) == 2 else 1)

    monkeypatch.setattr(objectives, "distillation_loss", bad_in_step_2)
    first, second, third = log_lines(train(*settings))
    assert second["loss_distill"] is None
    calls = itertools.count(1)
    [line] = log_lines(train(*settings, "training.logging_steps=3", out=tmp_path / "together"))
    parts = (first["loss_distill"] + third["loss_distill"]) / 2
    assert line["loss_distill"] == pytest.approx(parts)
    lm = [each["loss_lm"] for each in (first, second, third)]
    assert line["loss_lm"] == pytest.approx(sum(lm) / 3)


@pytest.mark.parametrize(("interval", "unknown"), [(1, [1, 2]), (3, [3])])
def test_a_bad_first_step_has_no_loss_in_the_log_which_stays_json(
    train, bad_losses, interval, unknown
):
    def refuse(word):
        raise AssertionError(word)

    bad_losses({1: NAN, 2: float("inf")})
    settings = [f"training.logging_steps={interval}", "training.save_strategy=no"]
    result = train(*THREE_BAD, *settings)
    texts = (result / "log.jsonl").read_text().splitlines()
    lines = [json.loads(text, parse_constant=refuse) for text in texts]
    assert [line["step"] for line in lines if line["loss"] is None] == unknown
    assert record(result)["final_loss"] == lines[-1]["loss"]


def test_after_a_bad_step_the_run_continues_from_either_checkpoint_as_the_message_says(
    train, bad_losses, tmp_path, capsys
):
    bad_losses({3: NAN})
    out, saved = tmp_path / "out", "training.save_steps=1"
    with pytest.raises(CocaError, match="the loss of step 3 is nan") as caught:
        train(saved)
    left = sorted(path.name for path in (out / "1-k/trainer").glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-2"]
    shutil.copytree(out, tmp_path / "before")
    shutil.rmtree(tmp_path / "before/1-k/trainer/checkpoint-2")
    (remedy,) = re.findall(r"--resume (\S+)", str(caught.value))
    outs = (out, tmp_path / "before")
    results = [train(saved, remedy, out=each, resume=True) for each in outs]
    assert re.findall(r"continues after step (\d)", capsys.readouterr().out) == ["2", "1"]
    assert [record(result)["skipped_steps"] for result in results] == [1, 1]
    assert_same_weights(*results)


def test_a_spike_stops_the_run_and_its_blocks_and_sources_are_named(
    train, recipe_path, bad_losses, tiny_tokenizer, tmp_path
):
    bad_losses({3: 50.0})
    message = r"the loss of step 3 is \S+, more than 3 times the running mean .* blocks 8 to 11 \("
    with pytest.raises(CocaError, match=message) as caught:
        train("training.spike_factor=3", "training.save_steps=1")
    blocks = tokens_of(corpus_of(load_recipe(recipe_path)).blocks(), 8, 12)
    digits = sum("0" <= tiny_tokenizer.decode(block[1:2]) <= "9" for block in blocks)
    for count, name in ((4 - digits, "words/"), (digits, "digits.jsonl")):
        named = f"{count} of " in str(caught.value) and name in str(caught.value)
        assert named == (count > 0)
    assert last_checkpoint(tmp_path / "out/1-k/trainer").name == "checkpoint-2"


FLOAT16 = ["training.fp16=true", f"training.use_cpu={not torch.cuda.is_available()}"]


@pytest.fixture
def scaler(monkeypatch):
    """A scale that is too high for the first steps."""
    plain = Accelerator.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.native_amp = True
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**20)

    monkeypatch.setattr(Accelerator, "__init__", init)
    monkeypatch.setattr(preflight, "check_precision", lambda *_: None)  # refuses fp16 on a CPU


def test_overflows_are_skipped_until_the_scale_fits_and_are_not_bad(train, scaler, tiny_coca_dir):
    result = train(*FLOAT16, "stages.k.max_steps=12")
    skipped, lines = record(result)["skipped_steps"], log_lines(result)
    assert 2 < skipped < 10
    assert [line["skipped_steps"] for line in lines][:3] == [1, 2, 3]
    assert lines[-1]["skipped_steps"] == skipped
    after = weights(result)
    assert all(weight.isfinite().all() for weight in after.values())
    assert changed(weights(tiny_coca_dir), after)


def test_a_float16_loss_that_is_not_a_number_is_bad(train, scaler, bad_losses):
    bad_losses({9: NAN})
    with pytest.raises(CocaError, match="the loss of step 9 is nan, bad step 1 in a row"):
        train(*FLOAT16, "stages.k.max_steps=12")


def test_a_float16_gradient_that_overflows_at_every_scale_is_bad(train, scaler, monkeypatch):
    plain = Trainer.training_step

    def training_step(self, model, *rest):
        loss = plain(self, model, *rest)
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        return loss

    monkeypatch.setattr(Trainer, "training_step", training_step)
    message = r"the loss of step 21 is \S+, but its gradient's norm is inf"
    refused(message, train, *FLOAT16, "stages.k.max_steps=40")


def test_a_float16_spike_leaves_no_trace(train, scaler, bad_losses, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: 1.0)
    bad_losses({2: 50.0})
    one, two = (
        train(*FLOAT16, *THREE_BAD, f"stages.k.max_steps={steps}", out=tmp_path / str(steps))
        for steps in (1, 2)
    )
    assert_same_weights(two, one)
