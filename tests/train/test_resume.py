"""Runs that are killed or meet a full disk continue as if unbroken; what they resume from is
checked, and read as data.
"""

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import chain, cycle, repeat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.metadata
import yaml
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoTokenizer, Trainer

from coca_hf import CocaError
from coca_hf.train import trainer
from coca_hf.train.recipe import Recipe, load_recipe
from coca_hf.train.run_directory import last_checkpoint, saved_checkpoints
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer, _Unpickler, load_state, save_state
from tests.conftest import flip, refused
from tests.train.conftest import make_recipe_tree
from tests.train.layouts import Run, before_each_step, interrupted_in_step, launch
from tests.train.results import STAGES, assert_same_weights, logged, no_file_above, record, timeless


class Payload:
    """Pickled, it makes a directory `ran` if it is executed."""

    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory / "ran"),)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


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
    assert ("continues after step 2" in capsys.readouterr().out) == ("half written" in moment)
    assert_same_run(out, unbroken)


@contextmanager
def stopped_before_its_result(monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("coca_hf.train.stages._complete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_log_lines_of_repeated_steps_are_dropped(train, unbroken, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with stopped_before_its_result(monkeypatch):
        train()
    with (out / "1-k/log.jsonl").open("a") as log:
        log.write('{"step": 99, "loss": 1.0}\n{"step": 100, "lo')
    train(resume=True)
    assert_same_run(out, unbroken, STAGES[:1])


def test_the_last_held_out_loss_is_that_of_the_last_step_when_only_the_result_is_missing(
    real_recipe, tmp_path, monkeypatch
):
    settings = ["stages.k.max_steps=10", "stages.k.held_out_steps=2", "training.save_steps=5"]
    recipe, out = load_recipe(real_recipe, settings), tmp_path / "out"
    with stopped_before_its_result(monkeypatch):
        run_recipe(recipe, out, "k")
    run_recipe(recipe, out, "k", resume=True)
    held_out = [line for line in timeless(out / "1-k") if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [0, 2, 4, 6, 8, 10]
    kept = record(out / "1-k")["held_out"]
    losses = [line["held_out_loss"] for line in held_out]
    assert (kept["before"], kept["after"]) == (losses[0], losses[-1])


def test_old_checkpoints_are_removed_and_copies_of_ones_own_are_not(train, tmp_path, monkeypatch):
    saved = tmp_path / "out/1-k/trainer"
    monkeypatch.setattr(StageTrainer, "training_step", StageTrainer.training_step)

    def copy_checkpoint(trainer):
        if trainer.state.global_step == 2:
            for name in ("checkpoint-0-mine", "checkpoint-100-mine"):
                shutil.copytree(saved / "checkpoint-1", saved / name)

    before_each_step(copy_checkpoint)
    with stopped_before_its_result(monkeypatch):
        train("training.save_steps=1", "stages.k.max_steps=5")
    own = {"checkpoint-0-mine", "checkpoint-100-mine"}
    left = {path.parent.name for path in saved.glob("checkpoint-*/state")}
    assert left == {"checkpoint-4", "checkpoint-5", *own}
    assert last_checkpoint(saved).name == "checkpoint-5"
    train("training.save_steps=1", "stages.k.max_steps=5", resume=True)
    assert {path.parent.name for path in saved.glob("checkpoint-*/state")} == own


def test_a_resumed_run_takes_the_interval_and_the_timeout_that_it_is_given(
    train, tmp_path, monkeypatch
):
    with interrupted_in_step(2):
        train("training.save_steps=1", "stages.k.max_steps=5")
    with stopped_before_its_result(monkeypatch):
        given = ("training.save_steps=3", "training.ddp_timeout=60")
        train(*given, "stages.k.max_steps=5", resume=True)
    saved = saved_checkpoints(tmp_path / "out/1-k/trainer")
    assert [path.name for path in saved] == ["checkpoint-3", "checkpoint-5"]


def save_result_on_a_full_disk(self, output_dir=None, _internal_call=False):
    with no_file_above(200_000 if output_dir.endswith("1-k/partial") else 10**9):
        Trainer.save_model(self, output_dir, _internal_call)


def save_on_a_full_disk(self, save, directory):
    with no_file_above(1_000):
        save(self, directory)


def log_on_a_full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_any_place_is_one_line_and_the_run_continues_with_room(
    train, recipe_path, unbroken, tmp_path, monkeypatch
):
    out, trainer_dir = tmp_path / "out", tmp_path / "out/1-k/trainer"

    def refused(message, last, *settings):
        with pytest.raises(CocaError, match=f"{message}.*; what was saved before is") as caught:
            train(*settings, resume=True)
        assert not any(word in str(caught.value) for word in ("\n", "Traceback"))
        assert last_checkpoint(trainer_dir) == (last and trainer_dir / last)
        assert not (out / "1-k/training.json").exists()

    with no_file_above(5_000):
        refused(r"1-k/trainer: cannot be written \(0.01 MB needed, \S+ GB free\): ", None)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.TensorBoardCallback.on_log", log_on_a_full_disk)
        message = r"\[Errno 28\] No space left on device"
        refused(f"1-k: {message}", None, "training.report_to=tensorboard")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
        refused(rf"1-k or \S+/boards: {message}", None, "training.report_to=tensorboard")
    with monkeypatch.context() as patch:
        real, free = shutil.disk_usage, chain([10**9], repeat(20))
        usage = "coca_hf.train.run_directory.shutil.disk_usage"
        patch.setattr(usage, lambda path: real(path)._replace(free=next(free)))
        message = "1-k/trainer: got 0.00 MB free, expected 0.01 MB for checkpoint-3"
        refused(message, "checkpoint-2")
    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "save_model", save_result_on_a_full_disk)
        message = r"1-k: cannot be written \(0.31 MB needed, \S+ GB free\): .*File too large"
        refused(message, "checkpoint-3")
    with monkeypatch.context() as patch:
        kind = type(AutoTokenizer.from_pretrained(load_recipe(recipe_path).model))
        save = partialmethod(save_on_a_full_disk, kind.save_pretrained)
        patch.setattr(kind, "save_pretrained", save)
        refused(r"1-k: cannot be written .*: Exception: File too large \(os error", "checkpoint-3")
    train(resume=True)
    assert_same_run(out, unbroken, STAGES[:1])


def test_an_empty_directory_resumes_to_a_fresh_run(recipe_path, tmp_path):
    (tmp_path / "out").mkdir()
    # killed while it wrote its first file
    (tmp_path / "out/.recipe.yaml.1.partial").write_text("model: half writ")
    result = run_recipe(load_recipe(recipe_path), tmp_path / "out", stage="k", resume=True)
    assert (result / "training.json").exists()
    assert load_recipe(tmp_path / "out/recipe.yaml") == load_recipe(recipe_path)
    assert not (tmp_path / "out/.recipe.yaml.1.partial").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file/out", "file/out: cannot be written: File exists; choose another --out"),
        ("file", "file: got a file, expected a directory or nothing; choose another --out"),
    ],
)
def test_an_out_that_is_a_file_or_below_one_is_refused_in_one_line(train, tmp_path, out, message):
    (tmp_path / "file").write_text("")
    refused(message, train, stage=None, out=tmp_path / out)


def test_an_interrupted_stage_with_adapters_and_a_teacher_resumes_to_the_same_bits(
    train, tiny_llama_dir, tmp_path
):
    settings = ["stages.qkv.lora={r: 3, alpha: 6, dropout: 0.1}", f"teacher={tiny_llama_dir}"]
    settings.append("stages.qkv.objective={lm: 0.5, distill: 0.25}")
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(*settings, out=out)
    shutil.copytree(out, whole)
    train(*settings, stage="qkv", out=whole, resume=True)
    with interrupted_in_step(4):
        train(*settings, stage="qkv", resume=True)
    assert last_checkpoint(out / "2-qkv/trainer").name == "checkpoint-2"
    train(*settings, stage="qkv", resume=True)
    assert timeless(out / "2-qkv") == timeless(whole / "2-qkv")
    assert_same_weights(out / "2-qkv", whole / "2-qkv")


def change_epsilon(config: Path) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))


@pytest.fixture
def first_stage(unbroken, tmp_path) -> Path:
    """OUT with the first stage of the unbroken run."""
    shutil.copytree(unbroken / "1-k", tmp_path / "out/1-k")
    for name in ("recipe.yaml", "inputs.json"):
        shutil.copy(unbroken / name, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_changed_result_of_the_stage_before_is_refused(train, first_stage, name):
    (change_epsilon if name == "config.json" else flip)(first_stage / "1-k" / name)
    message = rf"1-k/{name}: got xxh3_128 \w{{32}}, expected \w{{32}} as training.json"
    refused(message, train, stage=None, resume=True)
    assert not (first_stage / "2-qkv/training.json").exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def interrupted(tiny_coca_dir, texts, tmp_path_factory) -> Path:
    """A directory with the recipe, and OUT of its first stage, stopped after `checkpoint-4`."""
    directory = tmp_path_factory.mktemp("interrupted")
    tree = make_recipe_tree(tiny_coca_dir, texts)
    tree["stages"][0]["max_steps"] = 5
    (directory / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with interrupted_in_step(5):
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
    message = r"checkpoint-4: cannot be read \(.*delete it: --resume then continues"
    refused(message, run_recipe, recipe, out, stage="k", resume=True)


LOST = "another process of this run has ended"
NOT_DAMAGE = [
    (OSError(errno.ESTALE, "Stale handle"), CocaError, r"4: cannot be read now \(.* with --resu"),
    (PermissionError(errno.EACCES, "No"), CocaError, r"4: cannot be read now \(PermissionError"),
    (RuntimeError("Connection reset by peer"), CocaError, "another process of this run has ended"),
    (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    (MemoryError("too large"), MemoryError, "too large"),
]
READERS = (trainer.DefaultLoadPlanner, "load_bytes"), (Trainer, "_load_rng_state")


@pytest.mark.parametrize(("failure", "reader"), [*zip(NOT_DAMAGE, cycle(READERS))])
def test_a_whole_checkpoint_that_cannot_be_read_now_is_not_to_be_deleted(
    interrupted, tmp_path, monkeypatch, failure, reader
):
    error, kind, message = failure

    def fail(*args):
        raise error

    monkeypatch.setattr(*reader, fail)
    out = shutil.copytree(interrupted / "out", tmp_path / "out")
    with pytest.raises(kind, match=message) as caught:
        run_recipe(load_recipe(interrupted / "recipe.yaml"), out, stage="k", resume=True)
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("method", ["read_data", "write_data"])
def test_an_interruption_in_a_checkpoint_is_none_of_its_disk(
    interrupted, tmp_path, monkeypatch, method
):
    def interrupt(*args):
        raise KeyboardInterrupt

    kind = {"read_data": trainer._Reader, "write_data": trainer.dcp.FileSystemWriter}[method]
    monkeypatch.setattr(kind, method, interrupt)
    out = shutil.copytree(interrupted / "out", tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(load_recipe(interrupted / "recipe.yaml"), out, stage="k", resume=True)


@pytest.mark.parametrize("file", ["state/.metadata", "scheduler.pt", "rng_state.pth"])
def test_the_command_does_not_execute_a_payload_in_a_checkpoint_that_it_resumes(
    file, interrupted, tmp_path, coca_train, capsys
):
    out = shutil.copytree(interrupted / "out", tmp_path / "out")
    planted = out / "1-k/trainer/checkpoint-4" / file
    assert planted.exists()
    if file == "state/.metadata":
        planted.write_bytes(pickle.dumps(Payload(tmp_path)))
    else:
        torch.save(Payload(tmp_path), planted)
    arguments = [interrupted / "recipe.yaml", "--out", out, "--stage", "k", "--resume"]
    assert coca_train(*arguments) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-4: cannot be read" in printed
    assert not (tmp_path / "ran").exists()


def append_row(path):
    path.write_bytes(path.read_bytes() + b'{"code": "1"}\n')


TEXTS = "was .* bytes, xxh3_128 .*, now "
OTHER_INPUTS = {  # in the directory of the model, the teacher and the texts
    "texts/words/new.txt": (lambda path: path.write_text("abc"), "was absent, now 3"),
    "texts/digits.jsonl": (append_row, TEXTS),
    "texts/words/1.txt": (flip, TEXTS),
    "model/model.safetensors": (flip, "model.model.safetensors was"),
    "teacher/model.safetensors": (flip, "teacher.model.safetens"),
    "teacher/pytorch_model.bin": (
        lambda path: path.write_bytes(b"other weights"),
        "teacher.pytorch_model.bin was absent, now ",
    ),
    "teacher/config.json": (change_epsilon, "teacher.config.json was"),
    "out/inputs.json": (
        lambda path: path.write_text(
            re.sub('"blocks": "\\w+"', '"blocks": "earlier"', path.read_text())
        ),
        r"blocks was earlier, now \w{8,}",
    ),
}


@pytest.fixture(scope="module")
def copied(tiny_coca_dir, tiny_llama_dir, texts, tmp_path_factory) -> Path:
    """A directory with copies of a model, a teacher and texts, and OUT, of which stage k is done."""
    directory = tmp_path_factory.mktemp("copied")
    sources = {"model": tiny_coca_dir, "teacher": tiny_llama_dir, "texts": texts}
    for name, path in sources.items():
        shutil.copytree(path, directory / name)
    tree = make_recipe_tree(directory / "model", directory / "texts")
    tree["teacher"] = str(directory / "teacher")
    run_recipe(Recipe.model_validate(tree), directory / "out", stage="k")
    return directory


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_other_inputs_are_refused(copied, name):
    change, message = OTHER_INPUTS[name]
    file, recipe = copied / name, load_recipe(copied / "out/recipe.yaml")
    before = file.read_bytes() if file.exists() else None
    given = rf"out: cannot --resume on other inputs: .*{message}"
    remedy = "restore them or"
    if name == "out/inputs.json":  # as of an earlier format of blocks
        remedy = "restore the data, continue with the version .* began with, or"
    change(file)
    try:
        with pytest.raises(CocaError, match=rf"{given}.*; {remedy} choose another --out"):
            run_recipe(recipe, copied / "out", resume=True)
    finally:
        file.unlink()
        if before is not None:
            file.write_bytes(before)


def test_a_run_whose_files_were_moved_continues_once_its_recipe_has_their_paths(copied, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(copied, moved)
    file = moved / "out/recipe.yaml"
    text = file.read_text().replace(str(copied), str(moved))
    (moved / "recipe.yaml").write_text(text)
    recipe = load_recipe(moved / "recipe.yaml")
    remedy = "out/recipe.yaml; put new paths there if its files were moved"
    with pytest.raises(CocaError, match=rf"with another recipe: model was .*{remedy}\), or"):
        run_recipe(recipe, moved / "out", stage="qkv", resume=True)
    file.write_text(text)
    assert run_recipe(recipe, moved / "out", stage="qkv", resume=True) == moved / "out/2-qkv"


def test_the_same_files_in_another_order_are_refused(train, tmp_path):
    names = ("a/1.txt", "b/2.txt"), ("a/2.txt", "b/1.txt")
    for name, text in zip(names[0], ("abcd" * 99, "efgh" * 99), strict=True):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    settings = f"data.sources=[{{path: '{tmp_path}/*/*.txt', weight: 1}}]", "stages.k.max_steps=1"
    train(*settings)
    for before, after in zip(names[0], reversed(names[1]), strict=True):
        (tmp_path / before).rename(tmp_path / after)
    with pytest.raises(CocaError, match=r"on other inputs: blocks was [\w-]+, now [\w-]+; restore"):
        train(*settings, stage=None, resume=True)


def test_another_number_of_blocks_a_step_is_refused(train, unbroken):
    message = "other inputs: blocks_per_step.k was 4, now 8; .* keep the product of processes, per_"
    refused(message, train, "training.per_device_train_batch_size=8", out=unbroken, resume=True)


DAMAGED = {
    "1-k/training.json": ["{", "[]", "{}", '{"end_block": "5"}', '{"end_block": 1, "stages": 1}'],
    "inputs.json": ["{", "[]", '{"commits": 5}', '{"commits": [null]}', '{"hub": 1}'],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_named(train, first_stage, name):
    for content in DAMAGED[name]:
        (first_stage / name).write_text(content)
        refused(f"{name}: ", train, stage=None, resume=True)


def test_a_run_without_the_record_of_its_inputs_is_refused_because_they_may_be_others(
    train, first_stage
):
    (first_stage / "inputs.json").unlink()
    message = r"inputs\.json: missing, expected .* that the run began with; restore the file, or"
    refused(message, train, stage=None, resume=True)
    assert sorted(path.name for path in first_stage.iterdir()) == ["1-k", "recipe.yaml"]


def trained():
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_flipped_bit_on_the_disk_is_not_trained_on(tmp_path):
    model, optimizer = trained()
    save_state(model, optimizer, tmp_path)
    [file] = (tmp_path / "state").glob("*.distcp")
    place = file.read_bytes().find(model.weight.detach().numpy().tobytes())
    assert place > 0
    flip(file, place)
    other = nn.Linear(3, 5)
    with pytest.raises(CheckpointException, match="got another CRC-32 than was written"):
        load_state(other, torch.optim.AdamW(other.parameters()), tmp_path)


class Attribute:
    """Pickled in the way of Python 3.11.0 to 3.11.3 for members of an enum."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_an_enum_that_an_older_python_wrote_is_read_and_no_other_attribute():
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    written = pickle.dumps(Attribute(encoding, "TORCH_PRESERVE_FORMAT"))
    assert _Unpickler(io.BytesIO(written)).load() is encoding.TORCH_PRESERVE_FORMAT
    for kind, name in ((encoding, "__init__"), (torch.Size, "numel")):
        with pytest.raises(pickle.UnpicklingError, match=f"got attribute {name} in .metadata"):
            _Unpickler(io.BytesIO(pickle.dumps(Attribute(kind, name)))).load()


def test_a_payload_in_an_option_of_the_optimizer_is_not_executed(tmp_path):
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = Payload(tmp_path)
    save_state(model, optimizer, tmp_path)
    with pytest.raises(CheckpointException, match=r"mkdir"):
        load_state(*trained(), tmp_path)
    assert not (tmp_path / "ran").exists()
