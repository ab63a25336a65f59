"""The paper's tables as files: every model has a recipe that takes the settings of every scale."""

import contextlib
import functools
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig

from coca_cli import convert, evaluate, train
from coca_hf import CocaLlamaConfig
from coca_hf.evaluate.loaded_model import parse_ropes
from coca_hf.train.gpu_plan import GIB, RESERVE, plan_recipe
from coca_hf.train.model import start_config
from coca_hf.train.recipe import load_recipe

PAPER = Path(__file__).parents[2] / "scripts" / "paper"
tables = sorted(path.stem for path in PAPER.glob("*.yaml") if path.stem not in ("models", "scales"))
models, scales = (
    yaml.safe_load((PAPER / f"{name}.yaml").read_text()) for name in ("models", "scales")
)


@functools.cache
def commands(name, scale):
    printed = io.StringIO()
    words = ["make.py", name, "--scale", scale, "--out", "/nowhere", "--dry-run"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", words)
        runpy.run_path(str(PAPER / "make.py"), run_name="__main__")
    lines = printed.getvalue().splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines]


APPS = {"coca-convert": convert, "coca-train": train, "coca-eval": evaluate}
COMMANDS = {name: typer.main.get_command(module.app) for name, module in APPS.items()}
REPOSITORY = PAPER.parents[1]


def parsed(words):
    """The parameters of a command line by name, as the command itself reads them."""
    name, *arguments = words
    command = COMMANDS[name]
    if name == "coca-eval":
        subcommand, *arguments = arguments
        command = command.commands[subcommand]
    return command.make_context(name, arguments).params


def launched(words):
    """A command as it runs on one process: without `accelerate launch`, whose own options are read
    on the way.
    """
    if words[0] != "accelerate":
        return words
    options = launch_command_parser().parse_args(words[2:])
    assert (REPOSITORY / options.config_file).is_file()
    assert (options.module, options.training_script) == (True, "coca_hf.train")
    return ["coca-train", *options.training_script_args]


def test_there_is_a_file_for_every_table_and_every_measured_figure():
    figures = [f"figure-{number}" for number in (1, 4, 5, 6)]
    assert tables == [*figures, "rotary-base", *(f"table-{number}" for number in range(1, 7))]


@pytest.mark.parametrize("scale", scales)
@pytest.mark.parametrize("name", tables)
def test_a_table_is_made_of_the_three_commands_and_ends_in_its_page(name, scale):
    run = [words for words in commands(name, scale) if words[0] != "bash"]
    assert {words[0] for words in run} <= {"coca-convert", "coca-train", "coca-eval", "accelerate"}
    assert all(words[0] != "accelerate" or "coca_hf.train" in words for words in run)
    assert run[-1][:2] == ["coca-eval", "report"]
    trained = [words[words.index("--out") + 1] for words in run if "--resume" in words]
    assert len(trained) == len(set(trained))  # each model once
    measured = [words for words in run[:-1] if words[0] == "coca-eval"]
    steps = yaml.safe_load((PAPER / f"{name}.yaml").read_text())["measure"]
    assert len(measured) == sum(len(step["models"]) for step in steps)
    assert not Path("/nowhere").exists()


@pytest.mark.parametrize("scale", scales)
def test_every_command_line_is_understood_and_its_files_are_in_the_repository(scale):
    lines = {tuple(words): None for name in tables for words in commands(name, scale)}
    files = []
    for words in lines:
        if words[0] == "bash":
            files += re.findall(r"scripts/\S+\.(?:sh|py)", words[2])
            continue
        given = parsed(launched(words))
        if words[0] == "coca-convert":
            continue
        if "recipe" in given:
            files.append(given["recipe"])
            load_recipe(REPOSITORY / given["recipe"], given["settings"])
        if given.get("rope"):
            parse_ropes(given["rope"])
        if given.get("include_path"):
            files.append(f"{given['include_path']}/{given['tasks']}.yaml")
    assert files
    assert not [file for file in files if not (REPOSITORY / file).exists()]


from_scratch = [name for name, plan in models.items() if plan.get("kind") == "from-scratch"]


@pytest.mark.parametrize("model", from_scratch)
def test_a_model_from_scratch_has_the_heads_of_its_own_width(model, tiny_llama_dir):
    """64 dimensions of 16 heads make 1024, and not the 128 of a LLaMA-7B, which is the default."""
    settings = [f"{key}={value}" for key, value in models[model]["settings"].items()]
    settings.append(f"tokenizer={tiny_llama_dir}")
    config = start_config(load_recipe(REPOSITORY / models[model]["recipe"], settings))
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (1024, 16, 64)


def test_a_scale_of_its_own_says_what_a_step_takes():
    """Otherwise one GPU would accumulate what the recipe says for 32 GPUs."""
    own = {name: scale["train"] for name, scale in scales.items() if name != "paper"}
    assert own
    kinds = [train for kinds in own.values() for train in kinds.values()]
    assert all("training.global_batch_size" in train for train in kinds)


def too_large(recipe, settings, processes, tokenizer) -> list[str]:
    """The last stages, which train most, whose steps do not fit GPUs of 80 GB, by the plans of
    models of 1 and of 2 layers: every further layer adds as much.
    """
    path, model = REPOSITORY / recipe, load_recipe(REPOSITORY / recipe, settings).model
    if model is None:
        start = [f"tokenizer={tokenizer}", "config.vocab_size=50277"]  # gpt-neox-20b's
    else:  # LLaMA-7B's sizes are the defaults
        config = LlamaConfig() if model == "huggyllama/llama-7b" else CocaLlamaConfig()
        config.save_pretrained(tokenizer.parent / config.model_type)
        start = [f"model={tokenizer.parent / config.model_type}"]
    num_layers = start_config(load_recipe(path, [*settings, *start])).num_hidden_layers
    peaks = []
    for number in (1, 2):
        whole = load_recipe(path, [*settings, *start, f"config.num_hidden_layers={number}"])
        assert whole.stages[-1].train == "all"
        assert all(stage.training.keys() <= {"max_steps"} for stage in whole.stages)
        last = whole.model_copy(update={"stages": whole.stages[-1:]})
        plan = plan_recipe(last, processes, gpu_memory=10_000)  # all of them fit
        peaks.append(plan.stages[0].memory.peak)
    peak = peaks[0] + (num_layers - 1) * (peaks[1] - peaks[0])
    if peak <= (1 - RESERVE) * 80 * GIB:
        return []
    return [f"{recipe}: stages.{last.stages[0].name} takes {peak / GIB:.0f} GiB"]


class World:
    """Runs the commands of make.py on names: each asks for what it reads, and makes what it would
    make. steps: what `too_large` takes of every training.
    """

    def __init__(self):
        self.batches, self.dtypes, self.steps = [], set(), set()

    def run(self, words, check):
        if words[0] == "bash":
            return
        given = parsed(launched(words))
        if words[0] == "coca-convert":
            self.exists(given["src"])
            Path(given["dst"]).mkdir(parents=True)
        elif "recipe" in given:
            self.train(words, given)
        elif "runs" in given:
            assert all((run / "rows.jsonl").is_file() for run in given["runs"])
            (given["out"] / "report.html").touch()
        else:
            self.exists(given["model"])
            self.exists(given.get("baseline") or given["model"])
            self.dtypes.add(given["dtype"])
            given["out"].mkdir(parents=True, exist_ok=True)
            (given["out"] / "rows.jsonl").touch()

    def train(self, words, given):
        recipe = load_recipe(REPOSITORY / given["recipe"], given["settings"])
        if recipe.model:
            self.exists(recipe.model)
        stages = recipe.stages
        if given["prepare"]:
            Path(f"{recipe.data.seq_len} tokens for {given['world_size']}").mkdir(exist_ok=True)
            return
        layout = yaml.safe_load((REPOSITORY / words[words.index("--config_file") + 1]).read_text())
        processes = layout["num_processes"]
        assert layout["num_machines"] == 1, "waits for machines that are not there"
        assert Path(f"{recipe.data.seq_len} tokens for {processes}").is_dir(), "no blocks"
        # the base of RoPE takes no memory
        settings = tuple(one for one in given["settings"] if "rope_theta" not in one)
        self.steps.add((str(given["recipe"]), settings, processes))
        batch = recipe.trainer_options(stages[0])["per_device_train_batch_size"]
        blocks = processes * batch * recipe.accumulation(stages[0], processes)
        self.batches.append((recipe.data.seq_len, blocks))
        for number, stage in enumerate(stages, 1):
            directory = given["out"] / f"{number}-{stage.name}"
            directory.mkdir(parents=True)
            (directory / "training.json").touch()

    def exists(self, path):
        assert Path(path).is_dir() or str(path) == "huggyllama/llama-7b", f"{path}: not there yet"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a table at the scale of the paper in a `World` of its own."""

    def make_(name):
        world = World()
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setattr(subprocess, "run", world.run)
        monkeypatch.setattr(sys, "argv", ["make.py", name, "--scale", "paper"])
        runpy.run_path(str(PAPER / "make.py"), run_name="__main__")
        return world

    return make_


@pytest.mark.parametrize("name", tables)
def test_a_table_at_the_scale_of_the_paper_completes_on_one_machine(name, make):
    """Each command finds what it reads, and each step has the paper's tokens, whatever the number
    of GPUs.
    """
    world = make(name)
    assert Path("runs", "paper", "paper", name, "report.html").is_file()
    assert set(world.batches) <= {(512, 512), (2048, 256), (32768, 32)}
    assert world.dtypes == {"bfloat16"}


@pytest.mark.real
def test_every_step_at_the_scale_of_the_paper_fits_its_gpus(make, tiny_llama_dir):
    steps = set().union(*(make(name).steps for name in tables))
    assert len(steps) > 5
    assert [large for step in steps for large in too_large(*step, tiny_llama_dir)] == []
    recipe = "recipes/llama-7b/pi-32k.yaml"
    (found,) = too_large(recipe, ("model=huggyllama/llama-7b",), 1, tiny_llama_dir)
    assert re.fullmatch(rf"{recipe}: stages.\S+ takes 1\d\d GiB", found)


def test_a_directory_without_plays_makes_no_cases_that_a_later_run_would_keep(
    tmp_path, monkeypatch
):
    out = tmp_path / "next-line.jsonl"
    monkeypatch.setattr(sys, "argv", ["next_line.py", str(tmp_path), str(out)])
    with pytest.raises(SystemExit, match="got no plays, expected a directory"):
        runpy.run_path(str(PAPER / "next_line.py"))
    assert not out.exists()
