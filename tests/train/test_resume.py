"""Runs that are killed, meet a full disk or learn nonsense go on as if unbroken."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, Trainer

from coca_cli import main
from coca_hf import CocaError
from coca_hf.train import trainer
from coca_hf.train.data import Corpus
from coca_hf.train.recipe import Recipe, load_recipe
from coca_hf.train.run_directory import last_checkpoint
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer
from tests.train.conftest import make_recipe_tree
from tests.train.corpora import tokens_of
from tests.train.layouts import Interrupted, Run, interrupt_in_step, launch
from tests.train.results import assert_same_weights, log_lines, logged, record, timeless
from tests.train.test_training_state import Payload

STAGES = ["1-k", "2-qkv", "3-full"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step_4():
    plain = StageTrainer.training_step

    def step(self, *args):
        if "2-qkv" in self.args.output_dir and self.state.global_step == 3:
            die()
        return plain(self, *args)

    StageTrainer.training_step = step


def die_with_a_checkpoint_half_written():
    plain = trainer.save_state

    def save(model, optimizer, checkpoint):
        plain(model, optimizer, checkpoint)
        if str(checkpoint).endswith("2-qkv/trainer/partial/checkpoint-4"):
            for path in Path(checkpoint).glob("state/*.distcp"):
                path.write_bytes(path.read_bytes()[:500])
                die()

    trainer.save_state = save


def die_after_moving(name):
    plain = os.replace

    def replace(source, target):
        plain(source, target)
        if str(target).endswith(name):
            die()

    os.replace = replace


# Each kills its own process, as `kill -9` would, at a moment of stage qkv, which takes 5 steps.
KILLED = {
    "in step 4": die_in_step_4,
    "with checkpoint-4 half written": die_with_a_checkpoint_half_written,
    "with the result half moved": partial(die_after_moving, "2-qkv/model.safetensors"),
    "with the record written": partial(die_after_moving, "2-qkv/training.json"),
}


def assert_same_run(out: Path, unbroken: Path, stages: list[str] = STAGES) -> None:
    for stage in stages:
        ours, theirs = out / stage, unbroken / stage
        assert timeless(ours) == timeless(theirs)
        assert_same_weights(ours, theirs)
        for key in ("final_loss", "start_block", "end_block", "tokens_seen"):
            assert record(ours)[key] == record(theirs)[key]
        seconds = [*logged(ours, "seconds"), record(ours)["stages"][-1]["seconds"]]
        assert seconds == sorted(seconds)
    assert not list(out.glob("**/checkpoint-*")) + list(out.glob("**/*partial*"))


@pytest.mark.real
@pytest.mark.parametrize("moment", KILLED)
def test_a_killed_run_resumes_to_the_same_bits(recipe_path, unbroken, tmp_path, capsys, moment):
    out = tmp_path / "out"
    killed = launch(tmp_path, [Run([recipe_path, "--out", out], hook=KILLED[moment])], processes=1)
    assert killed.wait() == -signal.SIGKILL, killed.output.read_text()
    assert (out / "1-k/training.json").exists()
    assert (out / "2-qkv/training.json").exists() == (moment.startswith("with the record"))
    if "half written" in moment:
        assert (out / "2-qkv/trainer/partial/checkpoint-4/state").exists()
        assert last_checkpoint(out / "2-qkv/trainer") == out / "2-qkv/trainer/checkpoint-2"
    run_recipe(load_recipe(recipe_path), out, resume=True)
    assert ("continues after step 2" in capsys.readouterr().out) == (moment in list(KILLED)[:2])
    assert_same_run(out, unbroken)


def test_log_lines_of_steps_that_are_done_again_are_dropped(
    recipe_path, unbroken, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr("coca_hf.train.stages._complete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(load_recipe(recipe_path), out, "k")
    monkeypatch.undo()
    with (out / "1-k/log.jsonl").open("a") as log:
        log.write('{"step": 99, "loss": 1.0}\n{"step": 100, "lo')
    run_recipe(load_recipe(recipe_path), out, "k", resume=True)
    assert_same_run(out, unbroken, STAGES[:1])


def test_the_last_held_out_loss_is_that_of_the_last_step_when_only_the_result_is_missing(
    real_recipe, tmp_path, monkeypatch
):
    settings = ["stages.k.max_steps=10", "stages.k.held_out_steps=2", "training.save_steps=5"]
    recipe, out = load_recipe(real_recipe, settings), tmp_path / "out"
    monkeypatch.setattr("coca_hf.train.stages._complete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, out, "k")
    monkeypatch.undo()
    run_recipe(recipe, out, "k", resume=True)
    held_out = [line for line in timeless(out / "1-k") if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [0, 2, 4, 6, 8, 10]
    kept = record(out / "1-k")["held_out"]
    losses = [line["held_out_loss"] for line in held_out]
    assert (kept["before"], kept["after"]) == (losses[0], losses[-1])


def interrupt(*args):
    raise KeyboardInterrupt


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    recipe_path, unbroken, tmp_path
):
    out = tmp_path / "out"
    message = (
        r"1-k/trainer: cannot be written \(0.01 MB needed, \S+ GB free\): .*; what was saved before"
    )
    with no_file_above(5_000), pytest.raises(CocaError, match=message) as caught:
        run_recipe(load_recipe(recipe_path), out, "k")
    assert not any(word in str(caught.value) for word in ("\n", "Traceback"))
    assert last_checkpoint(out / "1-k/trainer") is None
    run_recipe(load_recipe(recipe_path), out, "k", resume=True)
    assert_same_run(out, unbroken, STAGES[:1])


def test_a_disk_that_is_full_at_the_end_of_a_stage_keeps_its_last_checkpoint(
    recipe_path, unbroken, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr("coca_hf.train.stages.StageTrainer.save_model", save_result_on_a_full_disk)
    message = r"1-k: cannot be written \(0.31 MB needed, \S+ GB free\): .*File too large"
    with pytest.raises(CocaError, match=message):
        run_recipe(load_recipe(recipe_path), out, "k")
    monkeypatch.undo()
    own_copy = shutil.copytree(
        out / "1-k/trainer/checkpoint-3", out / "1-k/trainer/checkpoint-9-mine"
    )
    assert last_checkpoint(out / "1-k/trainer").name == "checkpoint-3"
    assert not (out / "1-k/training.json").exists()
    run_recipe(load_recipe(recipe_path), out, "k", resume=True)
    assert (own_copy / "state").exists()
    shutil.rmtree(out / "1-k/trainer")
    assert_same_run(out, unbroken, STAGES[:1])


def test_a_logger_that_finds_the_disk_full_is_one_line_and_the_run_goes_on(
    recipe_path, unbroken, tmp_path, monkeypatch
):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.TensorBoardCallback.on_log", full)
        message = r"1-k: \[Errno 28\] No space left on device; what was saved before is"
        recipe = load_recipe(recipe_path, ["training.report_to=tensorboard"])
        with pytest.raises(CocaError, match=message):
            run_recipe(recipe, tmp_path / "out", "k")
    run_recipe(load_recipe(recipe_path), tmp_path / "out", "k", resume=True)
    assert_same_run(tmp_path / "out", unbroken, STAGES[:1])


def save_result_on_a_full_disk(self, output_dir=None, _internal_call=False):
    with no_file_above(200_000 if output_dir.endswith("1-k/partial") else 10**9):
        Trainer.save_model(self, output_dir, _internal_call)


@contextmanager
def no_file_above(size: int):
    """Let no file grow beyond so many bytes: to those who write, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_checkpoint(
    recipe_path, tmp_path
):
    out = tmp_path / "out"
    settings = ["stages.qkv.learning_rate=1e30", "training.save_steps=1"]
    with pytest.raises(
        CocaError,
        match=r"2-qkv/trainer: the loss of step 2 is nan, bad step 1 in a row .* lower learning_rate",
    ):
        run_recipe(load_recipe(recipe_path, settings), out)
    assert (out / "1-k/training.json").exists()
    assert last_checkpoint(out / "2-qkv/trainer").name == "checkpoint-1"
    assert not (out / "2-qkv/training.json").exists()


def test_an_empty_directory_resumes_to_a_fresh_run(recipe_path, tmp_path):
    (tmp_path / "out").mkdir()
    # killed while it wrote its first file
    (tmp_path / "out/.recipe.yaml.1.partial").write_text("model: half writ")
    result = run_recipe(load_recipe(recipe_path), tmp_path / "out", stage="k", resume=True)
    assert (result / "training.json").exists()
    assert load_recipe(tmp_path / "out/recipe.yaml") == load_recipe(recipe_path)
    assert not (tmp_path / "out/.recipe.yaml.1.partial").exists()


def test_an_out_below_a_file_is_refused_in_one_line(recipe_path, tmp_path):
    (tmp_path / "file").write_text("")
    message = "file/out: cannot be written: File exists; choose another --out"
    with pytest.raises(CocaError, match=message):
        run_recipe(load_recipe(recipe_path), tmp_path / "file/out")


def test_a_disk_without_room_for_a_checkpoint_is_found_before_writing(
    recipe_path, unbroken, tmp_path, monkeypatch
):
    out, real = tmp_path / "out", shutil.disk_usage
    calls = []

    def usage(path):
        calls.append(path)
        return real(path)._replace(free=10**9 if len(calls) < 2 else 20)

    monkeypatch.setattr("coca_hf.train.run_directory.shutil.disk_usage", usage)
    message = r"1-k/trainer: got 0.00 MB free, expected 0.01 MB for checkpoint-3; what was saved before is untouched"
    with pytest.raises(CocaError, match=message):
        run_recipe(load_recipe(recipe_path), out, "k")
    monkeypatch.undo()
    assert last_checkpoint(out / "1-k/trainer").name == "checkpoint-2"
    run_recipe(load_recipe(recipe_path), out, "k", resume=True)
    assert_same_run(out, unbroken, STAGES[:1])


def test_a_disk_that_is_really_full_keeps_the_checkpoint_before_and_the_need_is_that_of_the_state(
    recipe_path, tiny_coca_dir, small_disk, tmp_path, monkeypatch
):
    recipe = load_recipe(recipe_path, ["stages.k.train=all", "stages.k.max_steps=4"])
    run_recipe(recipe, tmp_path / "unbroken", stage="k")
    out = small_disk / "out"
    weights = load_file(tiny_coca_dir / "model.safetensors")
    # two moments, and a step for each
    state_bytes = sum(3 * 4 * tensor.numel() + 4 for tensor in weights.values())

    plain = Trainer.training_step

    def fill_in_step_4(self, *args):
        if self.state.global_step == 3:
            # enough for the tensors of checkpoint-4, and not for its other files
            filled = shutil.disk_usage(small_disk).free - state_bytes - 20_000
            (small_disk / "filler").write_bytes(bytes(filled))
        return plain(self, *args)

    needed = f"{state_bytes / 1e6:.2f} MB needed"
    message = rf"1-k/trainer: cannot be written \({needed}, 0.0\d MB free\): .*; what was saved bef"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", fill_in_step_4)
        with pytest.raises(CocaError, match=message):
            run_recipe(recipe, out, stage="k")
    assert last_checkpoint(out / "1-k/trainer").name == "checkpoint-2"
    (small_disk / "filler").unlink()
    run_recipe(recipe, out, stage="k", resume=True)
    assert_same_weights(out / "1-k", tmp_path / "unbroken/1-k")


def change_epsilon(config: Path) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_not_what_the_stage_before_wrote_is_refused(recipe_path, unbroken, tmp_path, name):
    out = tmp_path / "out"
    shutil.copytree(unbroken / "1-k", out / "1-k")
    shutil.copy(unbroken / "recipe.yaml", out)
    (change_epsilon if name == "config.json" else change_byte)(out / "1-k" / name)
    message = rf"1-k/{name}: got xxh3_128 \w{{32}}, expected \w{{32}} as training.json"
    with pytest.raises(CocaError, match=message):
        run_recipe(load_recipe(recipe_path), out, resume=True)
    assert not (out / "2-qkv/training.json").exists()


def bad_losses(monkeypatch, bad: dict[int, float]):
    """In these steps (counted from 1) the loss is multiplied."""
    plain = Trainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        return plain(self, *args, **kwargs) * bad.get(self.state.global_step + 1, 1.0)

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)


def test_fewer_bad_steps_than_allowed_are_skipped_and_leave_no_trace_in_the_weights(
    recipe_path, tmp_path, monkeypatch
):
    bad_losses(monkeypatch, {2: float("nan"), 3: 50.0})
    settings = ["max_bad_steps=3", "spike_factor=3", "lr_scheduler_type=constant", "save_steps=1"]
    settings += ["per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
    settings = [f"training.{setting}" for setting in settings]
    result = run_recipe(load_recipe(recipe_path, settings), tmp_path / "out", stage="k")
    assert record(result)["skipped_steps"] == 2
    assert [line["skipped_steps"] for line in log_lines(result)] == [0, 1, 2]
    first, second, _ = logged(result)
    assert second == pytest.approx(first)  # the running mean, in the place of a loss that is none
    once = [*settings, "stages.k.max_steps=1"]
    assert_same_weights(
        result, run_recipe(load_recipe(recipe_path, once), tmp_path / "once", stage="k")
    )


def test_after_a_bad_step_the_run_goes_on_as_the_message_says_from_the_last_checkpoint_or_the_one_before(
    recipe_path, tmp_path, monkeypatch, capsys
):
    bad_losses(monkeypatch, {3: float("nan")})
    out, saved = tmp_path / "out", ["training.save_steps=1"]
    with pytest.raises(CocaError, match="the loss of step 3 is nan") as caught:
        run_recipe(load_recipe(recipe_path, saved), out, stage="k")
    left = sorted(path.name for path in (out / "1-k/trainer").glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-2"]
    shutil.copytree(out, tmp_path / "before")
    shutil.rmtree(tmp_path / "before/1-k/trainer/checkpoint-2")
    (remedy,) = re.findall(r"--resume (\S+)", str(caught.value))
    recipe = load_recipe(recipe_path, [*saved, remedy])
    outs = (out, tmp_path / "before")
    results = [run_recipe(recipe, each, stage="k", resume=True) for each in outs]
    assert re.findall(r"continues after step (\d)", capsys.readouterr().out) == ["2", "1"]
    assert [record(result)["skipped_steps"] for result in results] == [1, 1]
    assert_same_weights(*results)


def test_a_spike_stops_the_run_and_its_blocks_and_sources_are_named(
    recipe_path, tiny_coca_dir, tmp_path, monkeypatch
):
    bad_losses(monkeypatch, {3: 50.0})
    recipe = load_recipe(recipe_path, ["training.spike_factor=3", "training.save_steps=1"])
    with pytest.raises(CocaError) as caught:
        run_recipe(recipe, tmp_path / "out", stage="k")
    message = str(caught.value)
    assert "the loss of step 3 is" in message
    assert "more than 3 times the running mean" in message
    tokenizer = AutoTokenizer.from_pretrained(tiny_coca_dir)
    blocks = tokens_of(Corpus(recipe.data, tokenizer).blocks(), 8, 12)
    digits = sum("0" <= tokenizer.decode(block[1:2]) <= "9" for block in blocks)
    assert "on blocks 8 to 11 (" in message
    for count, name in ((4 - digits, "words/"), (digits, "digits.jsonl")):
        assert (f"{count} of " in message and name in message) == (count > 0)
    assert last_checkpoint(tmp_path / "out/1-k/trainer").name == "checkpoint-2"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def append(path, content):
    path.write_bytes(path.read_bytes() + content + b"\n")


def change_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def interrupted(tiny_coca_dir, texts, tmp_path_factory) -> Path:
    """A directory with the recipe, and OUT of its first stage, stopped after `checkpoint-4`."""
    directory = tmp_path_factory.mktemp("interrupted")
    tree = make_recipe_tree(tiny_coca_dir, texts)
    tree["stages"][0]["max_steps"] = 5
    (directory / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTrainer, "training_step", StageTrainer.training_step)
        interrupt_in_step(5)
        with pytest.raises(Interrupted):
            run_recipe(load_recipe(directory / "recipe.yaml"), directory / "out", stage="k")
    return directory


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (truncate, "trainer_state.json"),
        (truncate, "scheduler.pt"),
        (truncate, "rng_state.pth"),
        (Path.unlink, "rng_state.pth"),
        (truncate, "state/.metadata"),
        (truncate, "state/__0_0.distcp"),
    ],
)
def test_a_damaged_checkpoint_is_named(interrupted, tmp_path, damage, file):
    out = shutil.copytree(interrupted / "out", tmp_path / "out")
    damage(out / "1-k/trainer/checkpoint-4" / file)
    for name in ("checkpoint-mine", "checkpoint-9-mine"):
        (out / "1-k/trainer" / name).mkdir()
    recipe = load_recipe(interrupted / "recipe.yaml")
    message = r"checkpoint-4: cannot be read \(.*delete it: --resume then goes on"
    with pytest.raises(CocaError, match=message):
        run_recipe(recipe, out, stage="k", resume=True)


@pytest.mark.parametrize("file", ["state/.metadata", "scheduler.pt", "rng_state.pth"])
def test_the_command_does_not_run_what_was_planted_in_a_checkpoint_that_it_resumes(
    file, interrupted, tmp_path, monkeypatch, capsys
):
    out = shutil.copytree(interrupted / "out", tmp_path / "out")
    planted = out / "1-k/trainer/checkpoint-4" / file
    assert planted.exists()
    if file == "state/.metadata":
        planted.write_bytes(pickle.dumps(Payload(tmp_path)))
    else:
        torch.save(Payload(tmp_path), planted)
    recipe = str(interrupted / "recipe.yaml")
    arguments = ["coca-train", recipe, "--out", str(out), "--stage", "k", "--resume"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main.train()
    assert ended.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-4: cannot be read" in printed
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _, model, texts: (texts / "words/new.txt").write_text("abc"),
            "sources.0.new.txt was absent, now 3",
        ),
        (
            lambda _, model, texts: append(texts / "digits.jsonl", b'{"code": "1"}'),
            "sources.1.digits.jsonl was .* bytes, xxh3_128 .*, now ",
        ),
        (
            lambda _, model, texts: change_byte(texts / "words/1.txt"),
            "sources.0.1.txt was .* bytes, xxh3_128 .*, now ",
        ),
        (
            lambda _, model, texts: change_byte(model / "model.safetensors"),
            "model.model.safetensors was",
        ),
        (
            lambda _, model, texts: change_byte(model.parent / "teacher/model.safetensors"),
            "teacher.model.safetensors was",
        ),
        (
            lambda _, model, texts: change_epsilon(model.parent / "teacher/config.json"),
            "teacher.config.json was",
        ),
        (
            lambda recipe, *_: recipe.training.update(per_device_train_batch_size=8),
            "blocks_per_step.k was 4",
        ),
    ],
    ids=[
        *("new file", "longer file", "file of the same size"),
        *("weights", "teacher's weights", "teacher's config", "batch"),
    ],
)
def test_other_inputs_are_refused(
    recipe_tree, tiny_coca_dir, tiny_llama_dir, texts, tmp_path, change, message
):
    model = shutil.copytree(tiny_coca_dir, tmp_path / "model")
    texts = shutil.copytree(texts, tmp_path / "texts")
    recipe_tree["model"] = str(model)
    recipe_tree["teacher"] = str(shutil.copytree(tiny_llama_dir, tmp_path / "teacher"))
    words, digits = recipe_tree["data"]["sources"]
    words["path"], digits["path"] = f"{texts}/words/*.txt", f"{texts}/digits.jsonl"
    recipe = Recipe.model_validate(recipe_tree)
    run_recipe(recipe, tmp_path / "out", stage="k")
    change(recipe, model, texts)
    with pytest.raises(CocaError, match=rf"out: cannot --resume on other inputs: .*{message}"):
        run_recipe(recipe, tmp_path / "out", resume=True)


DAMAGED = {
    "1-k/training.json": ["{", "[]", "{}", '{"end_block": "5"}', '{"end_block": 1, "stages": 1}'],
    "inputs.json": ["{", "[]", '{"commits": 5}', '{"commits": [null]}', '{"hub": 1}'],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_named(recipe_path, unbroken, tmp_path, name):
    out = tmp_path / "out"
    shutil.copytree(unbroken / "1-k", out / "1-k")
    shutil.copy(unbroken / "recipe.yaml", out)
    for content in DAMAGED[name]:
        (out / name).write_text(content)
        with pytest.raises(CocaError, match=f"{name}: "):
            run_recipe(load_recipe(recipe_path), out, resume=True)


def test_a_run_that_failed_before_its_first_step_leaves_room_for_the_corrected_recipe(
    recipe_path, tmp_path
):
    wrong = load_recipe(recipe_path, ["stages.k.lr_scheduler_type=cosine_with_min_lr"])
    with pytest.raises(CocaError, match=r"lr_scheduler_type .*min_lr"):
        run_recipe(wrong, tmp_path / "out", stage="k")
    run_recipe(load_recipe(recipe_path), tmp_path / "out", stage="k")


def test_a_run_makes_blocks_again_whose_state_is_damaged(recipe_path, unbroken, tmp_path):
    recipe = load_recipe(recipe_path, [f"data.prepared={tmp_path / 'blocks'}"])
    run_recipe(recipe, tmp_path / "out", stage="k")
    for state in Path(tmp_path / "blocks").glob("*/state.json"):
        state.write_text("{")
    out = run_recipe(recipe, tmp_path / "out", resume=True)
    assert_same_weights(out, unbroken / "3-full")
