"""scripts/recovery: its plan names what there is, and its table is of the rows; the runs themselves
take hours.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from typer.main import get_command

import coca_hf
from coca_cli.evaluate import app
from coca_hf.evaluate.loaded_model import fingerprint
from coca_hf.train.recipe import load_recipe
from tests.conftest import output_of
from tests.report.made import BOOKS, row, with_raw, write_rows

SCRIPTS = Path(__file__).parents[1] / "scripts" / "recovery"
RUN = runpy.run_path(str(SCRIPTS / "run.py"))
PLANS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(SCRIPTS.glob("*s.yaml"))}
RUNS = [(plan, name) for plan in PLANS for name in PLANS[plan]["runs"]]
TASKS = [(plan, *task) for plan in PLANS for task in PLANS[plan]["evaluate"]]


@pytest.mark.parametrize(("plan", "name"), RUNS, ids=str)
def test_every_run_starts_somewhere_and_its_recipe_is_one(plan, name, monkeypatch, tmp_path):
    run, commands = PLANS[plan]["runs"][name], []
    assert run["start"] in PLANS[plan]["starts"]
    if not run.keys() & {"stages", "settings"}:
        return
    (tmp_path / "1-stage").mkdir()
    (tmp_path / "1-stage/training.json").touch()
    monkeypatch.setitem(RUN["train"].__globals__, "run", lambda *words: commands.append(words))
    assert RUN["train"](PLANS[plan], run, Path("start"), 3, tmp_path) == tmp_path / "1-stage"
    _, recipe, *changes = commands[0][: commands[0].index("--out")]
    recipe = load_recipe(SCRIPTS.parents[1] / recipe, changes)
    assert (recipe.model, recipe.data.seed) == ("start", 3)
    steps = run.get("settings", {}).get("stages.recover.max_steps", 21)
    assert sum(recipe.trainer_options(stage)["max_steps"] for stage in recipe.stages) == steps
    learns_from_original = plan == "lookups" or "distilled" in name
    assert any(stage.needs_teacher for stage in recipe.stages) == learns_from_original


@pytest.mark.parametrize(("plan", "task", "options"), TASKS, ids=str)
def test_every_measurement_is_one_of_coca_eval(plan, task, options):
    parameters = get_command(app).commands[task].params
    known = {word for parameter in parameters for word in parameter.opts}
    assert {RUN["option"](*pair)[0] for pair in options.items()} <= known


def test_a_copy_is_the_fold_of_the_keys_without_its_scale(tiny_llama_dir, tiny_coca_dir, tmp_path):
    coca_hf.convert_checkpoint(tiny_llama_dir, tmp_path / "copy")
    RUN["unscale"](tmp_path / "copy")
    keys = load_file(tiny_llama_dir / "model.safetensors")
    found = load_file(tmp_path / "copy" / "model.safetensors")
    scaled = load_file(tiny_coca_dir / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        # 2 heads: firsts and seconds of the pairs
        heads = keys[f"{prefix}.k_proj.weight"].unflatten(0, (2, 2, -1))
        expected = heads.mean(1).flatten(0, 1)
        assert found[f"{prefix}.t_proj.weight"].allclose(expected, rtol=1e-5)
        assert not scaled[f"{prefix}.t_proj.weight"].allclose(expected, rtol=1e-2)


def test_a_start_made_with_other_options_is_refused(tmp_path, monkeypatch):
    make = lambda *words: Path(words[2]).mkdir()  # noqa: E731
    monkeypatch.setitem(RUN["convert"].__globals__, "run", make)
    plan = {"original": "original", "starts": {"six kept": {"keep-layers": "1"}}}
    assert [RUN["convert"](plan, "six kept", tmp_path) for _ in range(2)][1].is_dir()
    plan["starts"]["six kept"] = {"keep-layers": "2"}
    with pytest.raises(SystemExit, match=r"six-kept: made with .*\"1\".*, expected .*\"2\""):
        RUN["convert"](plan, "six kept", tmp_path)


def test_the_table_has_the_mean_over_seeds_and_the_ratio_to_original(tmp_path, monkeypatch, capsys):
    novels = {**BOOKS, "data": "x/books-test.parquet", "document_names": ["emma"]}
    novels |= {"variant": "sliding", "stride": 256, "asked_stride": 256, "max_tokens": 1025}
    values = {"original": 40.0, "calibrated": 100.0, "trained, seed 0": 50.0}
    values["trained, seed 1"] = 70.0
    rows = [row(name, length=256, value=value, **novels) for name, value in values.items()]
    rows.append(row("calibrated", length=512, value=9.0, **novels))  # not of the original
    for length, value in ((256, 3.5), (1024, 4.0), (4096, None)):  # of lengths, not of seeds
        rows.append(row("original", length=length, value=value, task="copying"))
    for name, value in (("original", 0.0), ("calibrated", 0.5)):
        shared = {"layer": 0, "baseline_previous": 0.1}
        heads = [{**shared, "divergence": value * n, "baseline_sink": 0.3 * n} for n in range(4)]
        maps = row(name, length=256, value=value, task="attention-maps", **novels)
        maps |= {"baseline": "original", "sink": 0.5}
        rows.append(with_raw(tmp_path / "rows", "heads", maps, heads))
    write_rows(tmp_path / "rows", *rows)
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path)])
    runpy.run_path(str(SCRIPTS / "table.py"))
    assert capsys.readouterr().out.splitlines() == [
        "| run | perplexity, novels, 256 | perplexity, novels, 512 | second copy, 256, nats | "
        "second copy, 1024, nats | attention, 256, nats | mass on first token, 256 |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| original | 40.0 |  | 3.50 | 4.00 | 0.00 | 0.50 |",
        "| calibrated | 100.0, 2.50 x | 9.00 |  |  | 0.50 | 0.50 |",
        "| trained | 60.0 (50.0 to 70.0), 1.50 x |  |  |  |  |  |",
        "",
        "| run | others (2 heads) | first token (2 heads) |",
        "|---|---:|---:|",
        "| original | 0.00 | 0.00 |",
        "| calibrated | 0.25 | 1.25 |",
    ]


def test_rows_of_other_settings_are_not_taken_for_seeds(tmp_path, monkeypatch):
    rows = [row("original", value=value, task="recall") for value in (0.9, 0.5)]
    write_rows(tmp_path / "rows", rows[0], rows[1] | {"cases": 100})
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"original: got rows of different settings for"):
        runpy.run_path(str(SCRIPTS / "table.py"))


@pytest.mark.parametrize(
    "line",
    [
        "recovery/run.py --plan failing.yaml",
        "recovery/run.py --plan nowhere.yaml",
        "paper/make.py table-1 --scale cpu-hour",  # not from the root of the repository
    ],
)
def test_a_command_that_fails_has_the_last_word_of_a_script(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = line.split()
    plan = {"name": "x", "runs": {}, "prepare": ["exit 2"]}
    (tmp_path / "failing.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS.parent / words[0]), run_name="__main__")
    assert ended.value.code == 2


def test_a_window_that_was_measured_is_not_measured_again(tiny_coca_dir, tmp_path):
    """coca-eval knows a model by its files, of which the script makes a copy each time."""
    (tmp_path / "coca-eval").write_text("#!/bin/sh\n")
    (tmp_path / "coca-eval").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    copy, found, link = tmp_path / "out/windows/link-16", set(), tmp_path / "link"
    link.symlink_to(tiny_coca_dir)
    for _ in range(2):
        output_of(SCRIPTS / "beyond.sh", tmp_path / "out", link, "tiny", 16, PATH=path)
        found.add(fingerprint(str(copy), None, False))
    assert len(found) == 1
    assert found != {fingerprint(str(tiny_coca_dir), None, False)}
    assert json.loads((copy / "config.json").read_text())["coca_kept_window"] == 16
    assert json.loads((tiny_coca_dir / "config.json").read_text())["coca_kept_window"] is None


def test_text_to_measure_with_has_no_package_and_a_checkout_may_be_below_tests(
    tmp_path, monkeypatch
):
    files = runpy.run_path(str(SCRIPTS / "other_text.py"))["files"]
    library, packages = tmp_path / "test" / "python3", tmp_path / "test" / "python3" / "packages"
    monkeypatch.setitem(files.__globals__, "PACKAGES", packages)
    for name in ("io.py", "packages/numpy.py", "packages/tests/numpy.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    assert [*files([(library, "*.py")], 100, 1)] == ["io.py"]
    assert [*files([(packages, "*.py")], 100, 1)] == ["packages/numpy.py"]
