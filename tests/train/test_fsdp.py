"""Three stages on real text in two FSDP2 processes over gloo, against one process."""

import functools
import json
import os
import shutil

import pytest
import torch
from accelerate import PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from coca_hf import convert_checkpoint
from coca_hf.train import stages
from coca_hf.train.recipe import load_recipe
from coca_hf.train.stages import run_recipe
from coca_hf.train.trainer import StageTrainer
from tests.train.layouts import FSDP2, Run, interrupt_in_step, interrupted_in_step, launch, succeed
from tests.train.results import (
    assert_same_losses,
    assert_same_weights,
    changed,
    logged,
    record,
    timeless,
    weights,
)
from tests.train.test_memory import assert_as_trained, bytes_of

pytestmark = pytest.mark.real
STAGES = {"1-k": ["t_proj"], "2-qkv": ["q_proj", "t_proj", "v_proj"], "3-full": [""]}

# the ranks are even and split into equal halves
LORA = ["stages.qkv.lora={r: 4, alpha: 6}", "stages.full.lora={r: 2, alpha: 6}"]
FRUGAL = ["training.gradient_checkpointing=true", "training.fused_cross_entropy=true"]
# two batches a step and process
BF16 = ["training.bf16=true", "training.per_device_train_batch_size=1"]
# steps 2, 4 and 5 are saved
ONE_STAGE = ["--stage", "k", "stages.k.train=all", "stages.k.max_steps=5"]
FULL = FSDP2 | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}


def watch():
    """Write, before a stage's result is saved, what its model computes and how it is sharded."""
    complete, plain_step, taken = stages._complete, StageTrainer.training_step, {}

    def watch_step(self, *arguments):
        loss = plain_step(self, *arguments)
        taken.update(bytes_of(self))
        return loss

    def watch_and_complete(run, trainer, *rest):
        modules = [m for m in trainer.model.modules() if isinstance(m, FSDPModule)]
        for module in modules:
            module.reshard()  # frees what the last forward gathered
        facts = {"sharded": sorted({type(module).__name__ for module in modules}), "bytes": taken}
        facts["all_dtensors"] = all(isinstance(p, DTensor) for p in trainer.model.parameters())
        with torch.no_grad():
            logits = trainer.model_wrapped.eval()(input_ids=torch.arange(3, 40)[None]).logits
        facts["logits"] = logits.double().sum().item()
        if os.environ["RANK"] == "0":
            path = run.directory.parent.parent / f"{run.directory.name}.json"
            path.write_text(json.dumps(facts))
        complete(run, trainer, *rest)

    stages._complete, StageTrainer.training_step = watch_and_complete, watch_step


@pytest.fixture(scope="module")
def runs(real_recipe, tmp_path_factory):
    """On two FSDP2 processes: `stages/out` of the whole recipe, `lora/out` with adapters; `bf16` of
    one stage that trains everything in bfloat16, two batches a step; `one` of the same in float32;
    `accumulated` of that, in two batches a step; `interrupted` of `one`, with sharded state dicts,
    and `resumed` from there; `from-one`: what one process left, resumed with less memory.
    """
    directory = tmp_path_factory.mktemp("fsdp")
    with interrupted_in_step(4):
        run_recipe(load_recipe(real_recipe, ONE_STAGE[2:]), directory / "from-one", stage="k")
    one, sharded = [real_recipe, *ONE_STAGE, "--out"], directory / "interrupted"
    copy = functools.partial(copy_to_resume, sharded)
    runs = [
        Run([real_recipe, "--out", directory / "stages/out"], FSDP2, watch),
        Run([real_recipe, *LORA, "--out", directory / "lora/out"], FSDP2, watch),
        Run([real_recipe, *ONE_STAGE, *BF16, "--out", directory / "bf16"], FSDP2),
        Run([*one, directory / "one"], FULL),
        Run([*one, directory / "accumulated", "training.per_device_train_batch_size=1"], FSDP2),
        Run([*one, sharded], FSDP2, functools.partial(interrupt_in_step, 4)),
        Run([*one, directory / "from-one", "--resume", *FRUGAL], FULL),
        Run([*one, directory / "resumed", "--resume"], FSDP2, copy),
    ]
    printed = succeed(directory, runs)
    assert printed.count("continues after step 2") == 2, printed
    return directory


def copy_to_resume(source):
    """Copy the interrupted run for two processes to resume; one process resumes the original."""
    if os.environ["RANK"] == "0":
        shutil.copytree(source, source.parent / "resumed")
    PartialState().wait_for_everyone()


@pytest.fixture
def sharded(runs):
    return runs / "stages/out"


def test_losses_and_held_out_losses_are_those_of_one_process(sharded, real_unbroken):
    for stage in STAGES:
        ours, theirs = sharded / stage, real_unbroken / stage
        for key in ("step", "tokens_seen", "learning_rate"):
            assert logged(ours, key) == logged(theirs, key)
        assert_same_losses(ours, theirs)
        assert record(ours)["hardware"]["processes"] == 2
        ours, theirs = (record(directory)["held_out"] for directory in (ours, theirs))
        assert (ours["blocks"], ours["tokens"]) == (7, 7 * 43)
        error = 1e-6 if stage == "1-k" else 1e-5
        assert ours["before"] == pytest.approx(theirs["before"], abs=error)
        assert ours["after"] == pytest.approx(theirs["after"], abs=1e-5)


def assert_sharded(out):
    """By decoder layer; each process has half of the gradients and of the optimizer state."""
    for stage in STAGES:
        facts = json.loads((out.parent / f"{stage}.json").read_text())
        assert facts["all_dtensors"]
        assert "FSDPCocaLlamaDecoderLayer" in facts["sharded"]
        trained = record(out / stage)["parameters"]["trained"]
        assert_as_trained(facts["bytes"], trained, processes=2)


def test_every_stage_is_sharded_with_its_gradients_and_optimizer_state(sharded):
    assert_sharded(sharded)


def test_a_stage_changes_the_parameters_it_names_and_no_other_bit(sharded, tiny_coca_dir):
    before = weights(tiny_coca_dir)
    for stage, parts in STAGES.items():
        after = weights(sharded / stage)
        named = {name for name in before if any(part in name for part in parts)}
        assert changed(before, after) == named
        before = after


def test_the_result_loads_and_is_the_live_model(sharded):
    for stage in STAGES:
        facts = json.loads((sharded.parent / f"{stage}.json").read_text())
        result = sharded / stage
        model, report = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
        assert not any(report.values())
        with torch.no_grad():
            logits = model(torch.arange(3, 40)[None]).logits
        assert logits.double().sum().item() == pytest.approx(facts["logits"], rel=1e-5)


def test_adapters_are_sharded_trained_and_merged_as_in_one_process(real_recipe, runs, tmp_path):
    ours, one = runs / "lora/out", tmp_path / "one"
    run_recipe(load_recipe(real_recipe, LORA), one)
    assert_sharded(ours)
    for stage in STAGES:
        assert logged(ours / stage) == pytest.approx(logged(one / stage), abs=1e-4)
        assert_same_weights(ours / stage, one / stage, atol=1e-3)


def assert_trains_as_in_one_process(recipe, model, tmp_path):
    """One stage in two processes of FSDP2; returns its directory."""
    settings = [*ONE_STAGE[2:], f"model={model}"]
    ours = tmp_path / "two/1-k"
    succeed(tmp_path, [Run([recipe, *ONE_STAGE[:2], *settings, "--out", ours.parent], FSDP2)])
    one = run_recipe(load_recipe(recipe, settings), tmp_path / "one", "k")
    assert_same_losses(ours, one)
    assert_same_weights(ours, one, atol=1e-4)
    return ours


def test_kept_layers_with_a_window_train_as_in_one_process(real_recipe, tiny_llama_dir, tmp_path):
    convert_checkpoint(tiny_llama_dir, tmp_path / "kept", keep_layers=[1], keep_window=9)
    ours = assert_trains_as_in_one_process(real_recipe, tmp_path / "kept", tmp_path)
    assert json.loads((ours / "config.json").read_text())["coca_kept_window"] == 9


def test_tied_embeddings_train_and_are_saved_once_as_by_one_process(
    real_recipe, tiny_coca_dir, tmp_path
):
    config = AutoConfig.from_pretrained(tiny_coca_dir, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(tiny_coca_dir).save_pretrained(tmp_path / "tied")
    assert_trains_as_in_one_process(real_recipe, tmp_path / "tied", tmp_path)


def test_bfloat16_computes_but_rounds_no_loss_and_sums_no_gradients(real_recipe, runs, tmp_path):
    run_recipe(load_recipe(real_recipe, [*ONE_STAGE[2:], *BF16]), tmp_path / "one", stage="k")
    ours, theirs = runs / "bf16/1-k", tmp_path / "one/1-k"
    # Half of a bfloat16 rounding: processors sum products differently, and a rounded loss differs
    # by more
    for key, error in {"loss": 2**-9, "grad_norm": 1e-2}.items():
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=error)
    losses = torch.tensor([*logged(ours), record(ours)["held_out"]["after"]])
    assert (losses != losses.bfloat16()).sum() > 3


def assert_close(ours, theirs):
    assert logged(ours, "step") == [1, 2, 3, 4, 5]
    for key in ("loss", "tokens_seen"):
        assert logged(ours, key) == pytest.approx(logged(theirs, key), abs=1e-4)


def test_two_processes_resume_to_the_same_bits_whatever_the_type_of_state_dict(runs):
    assert timeless(runs / "resumed/1-k") == timeless(runs / "one/1-k")
    assert_same_weights(runs / "resumed/1-k", runs / "one/1-k")


def test_two_processes_resume_what_one_saved_and_may_recompute_where_it_did_not(runs):
    assert_close(runs / "from-one/1-k", runs / "one/1-k")


def test_accumulated_batches_have_losses_and_weights_of_one_process(real_recipe, runs, tmp_path):
    ours = runs / "accumulated/1-k"
    one = run_recipe(load_recipe(real_recipe, ONE_STAGE[2:]), tmp_path / "one", "k")
    inputs = json.loads((ours.parent / "inputs.json").read_text())
    assert inputs["blocks_per_step"]["k"] == 4  # of 1 in each of 2 processes
    assert_same_losses(ours, one)
    assert_same_weights(ours, one, atol=1e-4)


def test_one_process_resumes_what_two_saved(real_recipe, runs, tmp_path, capsys):
    out = shutil.copytree(runs / "interrupted", tmp_path / "out")
    assert [path.name for path in (out / "1-k/trainer").glob("checkpoint-*")] == ["checkpoint-2"]
    run_recipe(load_recipe(real_recipe, ONE_STAGE[2:]), out, stage="k", resume=True)
    assert "continues after step 2" in capsys.readouterr().out
    assert_close(out / "1-k", runs / "one/1-k")


def test_a_changed_recipe_is_refused_in_every_process(real_recipe, runs, tmp_path):
    """Otherwise the others would wait for the main one until the launcher kills them."""
    faster = ["--resume", "training.learning_rate=2e-3"]
    arguments = [real_recipe, *ONE_STAGE, "--out", runs / "one", *faster]
    launched = launch(tmp_path, [Run(arguments, FSDP2)])
    assert launched.wait() != 0
    printed = launched.printed()
    assert printed.count("training.learning_rate was 0.001, now 0.002") == 2
