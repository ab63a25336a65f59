"""What a stage changes, what it leaves behind, and what it refuses before it writes."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from coca_hf import CocaError, convert_checkpoint
from coca_hf.train import stages
from coca_hf.train.data import Corpus
from coca_hf.train.preflight import resolve_stages
from coca_hf.train.processes import Stopped
from coca_hf.train.recipe import Recipe, load_recipe
from coca_hf.train.stages import _noting_a_stop, run_recipe
from tests.conftest import flip, refused
from tests.train.layouts import interrupted_in_step
from tests.train.results import STAGES, assert_same_weights, changed, log_lines, record, weights


def files(directory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_stage_changes_the_parameters_it_names_and_no_other_bit(unbroken, tiny_coca_dir):
    before = weights(tiny_coca_dir)
    named = ["t_proj"], ["q_proj", "t_proj", "v_proj"], [""]
    for stage, parts in zip(STAGES, named, strict=True):
        after = weights(unbroken / stage)
        learnt = {name for name in before if any(part in name for part in parts)}
        assert changed(before, after) == learnt
        before = after


DEPENDS = "other numbers of processes have other steps"


def test_the_fraction_that_learns_is_printed_and_recorded(unbroken):
    # 3 layers, hidden 48, 6 heads and 2 key/value heads of 8; MLP 80; vocabulary 259, embeddings
    # not tied
    of_t, of_q, of_v = 3 * 48 * 2 * 4, 3 * 48 * 6 * 8, 3 * 48 * 2 * 8
    total = of_t + 2 * of_q + of_v + 3 * 3 * 48 * 80 + 7 * 48 + 2 * 259 * 48
    printed = (unbroken.parent / "printed.txt").read_text()
    trained = [of_t, of_t + of_q + of_v, total]
    for stage, count, steps in zip(STAGES, trained, (3, 5, 4), strict=True):
        parameters = record(unbroken / stage)["parameters"]
        assert parameters == {"trained": count, "total": total, "fraction": count / total}
        share = f"trains {count:,} of {total:,} parameters ({count / total:.1%})"
        takes = f"{steps} steps of 4 blocks, {steps * 4 * 20:,} tokens ({DEPENDS}"
        assert f"{stage}: {share} for {takes}" in printed


def test_a_stage_continues_the_stream_of_blocks_where_the_one_before_ended(unbroken):
    records = [record(unbroken / stage) for stage in STAGES]
    places = [(kept["start_block"], kept["end_block"], kept["tokens_seen"]) for kept in records]
    assert places == [(0, 12, 12 * 20), (12, 32, 32 * 20), (32, 48, 48 * 20)]


def test_the_log_has_a_line_per_interval_checkpoint_and_end_and_the_record_the_last_loss(unbroken):
    lines = log_lines(unbroken / "2-qkv")
    seen = [(step, (12 + 4 * step) * 20) for step in (2, 3, 4, 5)]
    assert [(line["step"], line["tokens_seen"]) for line in lines] == seen
    assert [line["learning_rate"] for line in lines] == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4])
    kept = record(unbroken / "2-qkv")
    assert kept["final_loss"] == lines[-1]["loss"]
    assert 0 < lines[0]["seconds"] < lines[-1]["seconds"] <= kept["seconds"]


def test_the_record_says_what_was_run_and_on_what(unbroken, tiny_coca_dir):
    kept = record(unbroken / "2-qkv")
    assert kept["base_model"] == "1-k"
    assert kept["stage"] == {"name": "qkv", "train": ["q_proj", "t_proj", "v_proj"]}
    recipe = yaml.safe_load((unbroken / "recipe.yaml").read_text())
    recipe["model"], recipe["data"]["prepared"] = tiny_coca_dir.name, "prepared"
    words, digits = recipe["data"]["sources"]
    words["path"], digits["path"] = "*.txt", "digits.jsonl"
    assert kept["recipe"] == recipe
    assert kept["versions"]["torch"] == torch.__version__
    assert kept["hardware"]["processes"] == 1
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout
    assert (kept["commit"] or "").removesuffix("+changes") == head.strip()
    conversion = (tiny_coca_dir / "conversion.json").read_bytes()
    for stage in STAGES:
        assert (unbroken / stage / "conversion.json").read_bytes() == conversion


def test_the_result_of_a_stage_loads_and_nothing_else_is_left(unbroken, tiny_coca_dir):
    for stage in STAGES:
        result = unbroken / stage
        model, report = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
        assert not any(report.values())
        assert model.config.use_cache
        assert AutoTokenizer.from_pretrained(unbroken / stage)("ab")["input_ids"]
        assert not list(unbroken.glob("**/checkpoint-*")) + list(unbroken.glob("**/*partial*"))
        expected = {path.name for path in tiny_coca_dir.iterdir()} | {"log.jsonl", "training.json"}
        assert {path.name for path in result.iterdir()} == expected
        assert len({path.stat().st_mode for path in result.iterdir()}) == 1  # as the umask has it
        # The code, with which a checkpoint loads without coca_hf (tests/convert/test_families.py)
        for code in tiny_coca_dir.glob("*.py"):
            assert (unbroken / stage / code.name).read_bytes() == code.read_bytes()
        assert model.config.auto_map == AutoConfig.from_pretrained(tiny_coca_dir).auto_map


def test_stages_hand_on_tokenizers_of_other_engines_but_no_directories_and_may_differ_in_precision(
    train, tiny_coca_dir, tmp_path
):
    model = shutil.copytree(tiny_coca_dir, tmp_path / "model")
    for name in ("tokenizer.model", "tekken.json"):
        (model / name).write_bytes(b"\x00mine")
    for name in ("tokenizer.model.bak", "LICENSE"):
        (model / name).mkdir()
    short = [f"stages.{name}.max_steps=1" for name in ("k", "qkv", "full")]
    last = train(f"model={model}", "stages.qkv.bf16=true", *short, stage=None)
    for name in ("tokenizer.model", "tekken.json"):
        assert (last / name).read_bytes() == b"\x00mine"
    assert not any(path.is_dir() for path in last.iterdir())
    assert {tensor.dtype for tensor in weights(last).values()} == {torch.float32}


def test_stages_one_by_one_are_the_run_in_one_go(train, unbroken, tmp_path, capsys):
    for stage in ("k", "qkv", "full"):
        train(stage=stage, resume=True)
    assert "complete, skipped" not in capsys.readouterr().out
    for stage in STAGES:
        assert_same_weights(tmp_path / "out" / stage, unbroken / stage)


def test_a_tied_weight_learns_by_either_of_its_names(tiny_coca_dir, recipe_tree, tmp_path):
    config = AutoConfig.from_pretrained(tiny_coca_dir, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(tiny_coca_dir).save_pretrained(tmp_path / "tied")
    recipe_tree["model"] = str(tmp_path / "tied")
    recipe_tree["stages"] = [{"name": "head", "train": ["lm_head"], "max_steps": 1}]
    result = run_recipe(Recipe.model_validate(recipe_tree), tmp_path / "out")
    assert record(result)["parameters"]["trained"] == 259 * 48
    assert changed(weights(tmp_path / "tied"), weights(result)) == {"model.embed_tokens.weight"}


def test_a_finished_run_is_skipped_and_stays_as_it_is(train, unbroken, capsys):
    before = files(unbroken)
    train(stage=None, out=unbroken, resume=True)
    assert capsys.readouterr().out.count("complete, skipped") == 3
    assert files(unbroken) == before


REFUSED = {
    "stages.full.train=[t_porj]": "CocaLlamaForCausalLM has no parameters in 't_porj'; nearest: t_proj",
    "stages.qkv.train=[rotary_emb]": "stages.qkv.train: CocaLlamaForCausalLM has no parameters in 'rotary_emb'",
    "model=checkpoints/none": "checkpoints/none: cannot be loaded, expected a model directory or hub id",
    "data.sources.0.path=none.txt": "none.txt: got no such file",
    "data.sources.1.column=text": "digits.jsonl: got columns code, expected a column 'text'",
    "data.seq_len=5000": "got fewer than 5000 tokens",
    "stages.full.logging_steps=0": "stages.full: got logging_steps 0.0, expected at least 1",
    f"stages.full.max_steps={10**23}": f"stages.full: got max_steps {10**23}, expected less than 2^31",
    "config.attention_dropout=-1": "attention_dropout is -1, expected from 0 to below 1",
    "stages.full.optim=adamm": "adamm is not a valid",
    "stages.full.optim=schedule_free_adamw": "stages.full: got optim schedule_free_adamw, expected an",
    "stages.full.optim=adalomo": "got optim adalomo, expected an optimizer that steps after the backward",
    "stages.full.optim=galore_adamw": "got optim galore_adamw, expected an "
    "optimizer that keeps in its state, as tensors and numbers, all that --resume needs",
    "stages.full.optim=apollo_adamw": "got optim apollo_adamw, expected",
    "stages.full.optim=grokadamw": "got optim grokadamw, expected an optimizer that keeps",
    "stages.full.adam_beta2=1": "do not work: Invalid beta parameter at index 1: 1.0",
    "stages.full.optim_args=quickly": "stages.full: optim adamw_torch_fused, optim_args 'quickly'",
    "stages.full.optim_args=speed=3": "optim_args 'speed=3', lr_scheduler_type linear, lr_scheduler_kwargs None do not "
    "work: adamw_torch_fused takes no optim_args",
    'stages.full.lr_scheduler_type=cosine stages.full.lr_scheduler_kwargs={"cycles":3}': "do not work: ",
    'stages.full.lr_scheduler_type=cosine stages.full.lr_scheduler_kwargs={"num_cycles":"half"} '
    "stages.full.warmup_steps=1": "do not work: could not convert string to float: 'half'",
    'stages.full.lr_scheduler_type=constant_with_warmup stages.full.lr_scheduler_kwargs={"end_lr":0}': "do not "
    "work: constant_with_warmup takes no lr_scheduler_kwargs",
    "stages.full.lr_scheduler_type=constant stages.full.warmup_steps=1": "constant has no warm-up, constant_with_warm",
    "training.attn_implementation=sdpaa": "stages.k: attn_implementation 'sdpaa' does not run here: ",
    "training.context_parallel_size=2": "stages.k: got context_parallel_size 2 on a cpu, for which torch has no ring "
    "attention; expected GPUs",
    "training.global_batch_size=6": "stages.k: got global_batch_size 6, expected a multiple of 4: per_device_tra",
    "training.global_batch_size=8 training.gradient_accumulation_steps=4": "got global_batch_size 8 and "
    "gradient_accumulation_steps 4, expected 2 on 1",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(train, tmp_path, setting):
    with pytest.raises(CocaError) as caught:
        train(*setting.split(), stage=None)
    assert REFUSED[setting] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_that_lacks_weights_is_refused(train, tiny_coca_dir, tmp_path):
    broken = tmp_path / "broken"
    AutoTokenizer.from_pretrained(tiny_coca_dir).save_pretrained(broken)
    AutoConfig.from_pretrained(tiny_coca_dir).save_pretrained(broken)
    kept = weights(tiny_coca_dir)
    del kept["model.layers.1.self_attn.t_proj.weight"]
    save_file(kept, broken / "model.safetensors", metadata={"format": "pt"})
    message = r"missing keys: model\.layers\.1\.self_attn\.t_proj\.weight"
    refused(message, train, f"model={broken}", stage=None)


def test_a_directory_in_use_is_left_alone_without_resume(train, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/novel.txt").write_text("chapter one")
    refused("not empty; continue what is there with --resume", train, stage=None)
    refused(r"without recipe\.yaml", train, stage=None, resume=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["novel.txt"]


def test_a_changed_recipe_is_refused_with_what_changed(train, unbroken):
    before = files(unbroken)
    settings = ["training.learning_rate=2e-3", "stages.full.max_steps=9", "stages.k.warmup_steps=1"]
    with pytest.raises(CocaError) as caught:
        train(*settings, stage=None, out=unbroken, resume=True)
    changes = ["training.learning_rate was 0.001, now 0.002", "stages.full.max_steps was 4, now 9"]
    for change in (*changes, "stages.k.warmup_steps was absent, now 1.0"):
        assert change in str(caught.value)
    assert files(unbroken) == before


@pytest.mark.parametrize(
    ("began", "now"),
    [
        ("training.lr_scheduler_kwargs={start_lr: 1e-5}", "stages.k.lr_scheduler_kwargs={}"),
        ("training.optim=sgd", "stages.k.optim_args=null"),
        ("data.seed=1", "config.coca_kept_window=null"),
    ],
)
def test_an_option_that_becomes_empty_is_a_change(train, tmp_path, began, now):
    train(began, "stages.k.max_steps=1")
    key = now.partition("=")[0]
    message = rf"another recipe: .*{key} was absent, now (\{{\}}|None)"
    refused(message, train, began, now, "stages.k.max_steps=1", resume=True)


OTHER_STAGES = {
    "[{name: full}, {name: qkv}, {name: k}]": r"\['full', 'qkv', 'k'\], now \['k', 'qkv', 'full'\]",
    "[{name: k}, qkv]": r"\[\{'name': 'k'\}, 'qkv'\], now \['k', ",
}


@pytest.mark.parametrize("stages", OTHER_STAGES)
def test_other_stages_and_a_recipe_that_is_none_are_refused(train, tmp_path, stages):
    (tmp_path / "out/1-k").mkdir(parents=True)
    (tmp_path / "out/1-k/log.jsonl").write_text("")
    (tmp_path / "out/recipe.yaml").write_text(f"stages: {stages}")
    message = (
        f"--resume with another recipe: stages was {OTHER_STAGES[stages]}.*; give the one that"
    )
    refused(message, train, resume=True)


def test_a_stage_without_its_predecessor_is_refused(train, tmp_path):
    message = r"--stage full: starts from .*2-qkv, which is not complete; run --stage qkv"
    refused(message, train, stage="full")
    message = "--stage: got 'qvk', expected one of k, qkv, full; nearest: qkv"
    refused(message, train, stage="qvk")
    assert not (tmp_path / "out").exists()


def test_the_command_trains_and_says_where_the_result_is(recipe_path, tmp_path, coca_train, capsys):
    out = tmp_path / "my out"
    assert coca_train(recipe_path, "--out", out, "--stage", "k", "stages.k.max_steps=1") == 0
    printed = capsys.readouterr().out
    assert f"checkpoint: {out}/1-k" in printed
    # without --rope, which some models refuse
    advice = (
        f"next: coca-eval perplexity '{out}/1-k' --data TEXT --lengths 20,40 --out '{out}/rows'"
    )
    assert advice in printed
    assert record(out / "1-k")["tokens"] == 4 * 20


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--resume", r"out: interrupted; continue with --resume \(SIGTERM would"),
        ("--prepare", "prepared: interrupted; the same command continues"),
    ],
)
def test_an_interrupted_command_says_how_to_continue(
    recipe_path, tmp_path, coca_train, monkeypatch, capsys, option, said
):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_hf.train.stages.preflight", interrupt)
    monkeypatch.setattr("coca_hf.train.stages.check_positions", interrupt)
    words = [] if option == "--prepare" else ["--out", tmp_path / "out"]
    assert coca_train(recipe_path, option, *words) == 130
    assert re.search(said, capsys.readouterr().err)


def test_a_stop_whose_note_cannot_be_written_is_a_stop(recipe_path, tmp_path, capsys):
    stage, *_ = resolve_stages(load_recipe(recipe_path), tmp_path / "gone")
    with (
        pytest.raises(Stopped, match="1-k: stopped by SIGTERM after step 3"),
        _noting_a_stop(stage),
    ):
        raise Stopped("SIGTERM", 3)
    assert f"{tmp_path}/gone/stopped.json: got [Errno 2]" in capsys.readouterr().out


def test_kept_layers_learn_nothing_in_stage_k_and_later_the_projections_that_are_named(
    tiny_llama_dir, recipe_tree, tmp_path
):
    convert_checkpoint(tiny_llama_dir, tmp_path / "coca", keep_layers=[1], keep_window=9)
    recipe_tree["model"] = str(tmp_path / "coca")
    recipe_tree["stages"][1]["train"] = ["q_proj", "k_proj", "t_proj", "v_proj"]
    run_recipe(Recipe.model_validate(recipe_tree), tmp_path / "out")
    directories = (tmp_path / "coca", *(tmp_path / "out" / stage for stage in STAGES[:2]))
    learnt = [
        {name.split("self_attn.")[-1] for name in changed(*states) if ".1." in name}
        for states in itertools.pairwise(map(weights, directories))
    ]
    assert learnt == [set(), {"q_proj.weight", "k_proj.weight", "v_proj.weight"}]
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / STAGES[2])
    assert (final.config.coca_kept_layers, final.config.coca_kept_window) == ([1], 9)


def test_a_process_uses_one_gpu_and_says_how_to_use_all(train, unbroken, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    plain = TrainingArguments.__post_init__

    def on_gpus(arguments):
        plain(arguments)
        arguments._n_gpu = 8  # as where CUDA is

    monkeypatch.setattr(TrainingArguments, "__post_init__", on_gpus)
    result = train()
    assert "one process uses one GPU" in (printed := capsys.readouterr().out)
    assert printed.count("--num_processes 8") == 1
    ours, theirs = record(result), record(unbroken / "1-k")
    assert ours["blocks_per_step"] == 4
    assert ours["final_loss"] == theirs["final_loss"]


OTHER_BATCHES = {  # blocks a step of the stages k and qkv
    "training.global_batch_size=8": (8, 8),
    "stages.qkv.global_batch_size=8": (4, 8),
    "training.global_batch_size=null": (2, 2),
    "training.global_batch_size=4": (4, 4),
    "training.learning_rate=1e-4": (4, 4),
}


@pytest.fixture
def global_batch_path(recipe_tree, tmp_path):
    """A recipe of two stages, a step each, whose file says 4 blocks a step."""
    recipe_tree["training"] |= {"per_device_train_batch_size": 2, "global_batch_size": 4}
    recipe_tree["stages"] = [stage | {"max_steps": 1} for stage in recipe_tree["stages"][:2]]
    recipe_tree["stages"][0]["logging_steps"] = 1
    del recipe_tree["stages"][1]["logging_steps"]
    (tmp_path / "global.yaml").write_text(yaml.safe_dump(recipe_tree))
    return tmp_path / "global.yaml"


@pytest.mark.parametrize("setting", OTHER_BATCHES)
def test_a_recipe_knows_which_overrides_change_the_blocks_of_a_step(setting, global_batch_path):
    recipe = load_recipe(global_batch_path, [setting])
    for stage, blocks in zip(recipe.stages, OTHER_BATCHES[setting], strict=True):
        assert recipe.blocks_per_step(stage, 1) == blocks
        assert recipe.batch_in_file(stage) == (None if blocks == 4 else 4)


ANNOUNCED = {
    "stages.k.global_batch_size=8": "stages.k: takes 8 blocks a step, not the 4 of the recipe's file",
    "teacher=ORIGINAL": "stages.k: learns nothing from the teacher: no objective is distill",
    "stages.k.warmup_steps=7": "stages.k: got warmup_steps 7 of 1 steps, expected fewer",
    "training.seed=3": "stages.k: got seed 3, which draws adapters, dropout and noise; data.seed draws the blocks",
    "training.logging_steps=2": "stages.k: keeps its own, not training.logging_steps=2; override it",
    "stages.k.lr_scheduler_kwargs={start_lr: 1e-4}": "stages.k: never has the rate start_lr: warm",
    "stages.k.held_out_steps=1": "stages.k: measures no held-out loss: data.held_out_blocks is 0",
    "stages.k.gradient_checkpointing_kwargs={use_reentrant: false}": "stages.k: recomputes nothing",
    "stages.k.optim=sgd; training.adam_beta2=0.9": "stages.k: optim sgd does not take adam_beta2",
    "data.held_out_blocks=99": "data.held_out_blocks: got text for 16 of 99, because a tenth of",
}


@pytest.mark.parametrize("setting", ANNOUNCED)
def test_what_a_run_does_otherwise_than_its_recipe_seems_to_say_is_announced(
    setting, global_batch_path, tiny_llama_dir, tmp_path, capsys
):
    settings = setting.replace("ORIGINAL", str(tiny_llama_dir)).split("; ")
    recipe = load_recipe(global_batch_path, settings)
    with interrupted_in_step(1):
        run_recipe(recipe, tmp_path / "out")
    printed = capsys.readouterr().out
    assert [printed.count(line) for line in ANNOUNCED.values()] == [
        int(other == setting) for other in ANNOUNCED
    ]
    assert " for 1 step of " in printed
    assert DEPENDS not in printed


TEACHERS = {
    "a copy": "has the weights that the model begins with, which have nothing to teach it; expected",
    "a result": "is a CoCA model (coca_llama); expected the original, from before the conversion",
    "the original": None,
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_teacher_that_is_not_the_original_is_announced(
    kind, recipe_path, tiny_coca_dir, tiny_llama_dir, unbroken, tmp_path, capsys
):
    teachers = {"the original": tiny_llama_dir, "a result": unbroken / "1-k"}
    teacher = teachers.get(kind) or shutil.copytree(tiny_coca_dir, tmp_path / "copy")
    settings = [f"teacher={teacher}", "stages.k.objective=distill"]
    with interrupted_in_step(1):
        run_recipe(load_recipe(recipe_path, settings), tmp_path / "out")
    printed = capsys.readouterr().out
    if TEACHERS[kind]:
        assert f"teacher: {teacher} {TEACHERS[kind]}" in printed
    assert printed.count("teacher: ") == (TEACHERS[kind] is not None)


@pytest.mark.parametrize("key", ["model", "teacher"])
def test_a_model_that_is_replaced_while_blocks_are_prepared_is_not_trained_on(
    key, recipe_path, tiny_coca_dir, tiny_llama_dir, tmp_path, monkeypatch
):
    """Its hashes are taken before, and it is loaded after that."""
    model = shutil.copytree(tiny_coca_dir, tmp_path / "model")
    teacher = shutil.copytree(tiny_llama_dir, tmp_path / "teacher")
    replaced, plain = tmp_path / key, Corpus.prepare

    def slow(corpus, num_blocks):
        flip(replaced / "model.safetensors")
        return plain(corpus, num_blocks)

    monkeypatch.setattr(Corpus, "prepare", slow)
    settings = [f"model={model}", f"teacher={teacher}", "stages.k.objective=distill"]
    settings.append(f"data.prepared={tmp_path / 'prepared'}")
    message = rf"{replaced}: changed since the run began: model.safetensors was \w{{32}}, now"
    refused(message, run_recipe, load_recipe(recipe_path, settings), tmp_path / "out", "k")
    assert not (tmp_path / "out/1-k").exists()


def test_a_teacher_that_is_replaced_before_its_stage_is_not_learned_from(
    recipe_path, tiny_llama_dir, tmp_path, monkeypatch
):
    teacher, plain = shutil.copytree(tiny_llama_dir, tmp_path / "teacher"), stages._complete

    def complete(*arguments):
        plain(*arguments)
        flip(teacher / "model.safetensors")

    monkeypatch.setattr(stages, "_complete", complete)
    settings = [f"teacher={teacher}", "stages.qkv.objective=distill"]
    message = rf"{teacher}: changed since the run began: model.safetensors was"
    refused(message, run_recipe, load_recipe(recipe_path, settings), tmp_path / "out")
    assert (tmp_path / "out/1-k/training.json").exists()
    assert not (tmp_path / "out/2-qkv").exists()


@pytest.mark.parametrize("setting", [None, "data.seed=1", "data.seq_len=21", "other text"])
def test_a_run_says_if_its_model_has_seen_its_blocks(
    recipe_path, texts, unbroken, tmp_path, capsys, setting
):
    """Files count by what is in them, wherever they are."""
    moved = shutil.copytree(texts, tmp_path / "moved")
    settings = [f"model={unbroken / '1-k'}", f"data.sources.0.path={moved}/words/*.txt"]
    if setting == "other text":
        (moved / "words/0.txt").write_text("dcba " * 300)
    elif setting:
        settings.append(setting)
    with interrupted_in_step(1):
        run_recipe(load_recipe(recipe_path, settings), tmp_path / "out")
    notice = (
        f"model: {unbroken / '1-k'} has seen blocks 0 to 11 of this data, which this run repeats"
    )
    assert (notice in capsys.readouterr().out) == (setting is None)
