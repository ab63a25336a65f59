"""scripts/recovery: its plan names what there is, and its table is of the rows; the runs themselves
take hours.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.main import get_command

import coca_hf
from coca_cli.evaluate import app
from coca_hf.train.recipe import load_recipe
from tests.report.made import BOOKS, row, with_raw, write_rows

SCRIPTS = Path(__file__).parents[1] / "scripts" / "recovery"
RUN = runpy.run_path(str(SCRIPTS / "run.py"))
PLAN = RUN["PLAN"]


@pytest.mark.parametrize("name", PLAN["runs"])
def test_every_run_starts_somewhere_and_its_recipe_is_one(name):
    run = PLAN["runs"][name]
    assert run["start"] in PLAN["starts"]
    if "stages" in run:
        settings = {"stages": run["stages"], "model": "start", **run.get("settings", {})}
        changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        recipe = load_recipe(SCRIPTS / "recipe.yaml", changes)
        assert sum(recipe.options(stage)["max_steps"] for stage in recipe.stages) == 21
        assert any(stage.needs_teacher for stage in recipe.stages) == ("distilled" in name)


TASKS = [task for task, _ in PLAN["evaluate"]]


@pytest.mark.parametrize(("task", "options"), PLAN["evaluate"], ids=TASKS)
def test_every_measurement_is_one_of_coca_eval(task, options):
    parameters = get_command(app).commands[task].params
    known = {word for parameter in parameters for word in parameter.opts}
    assert {f"--{key}" for key in options} <= known


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


def test_the_table_has_the_mean_over_seeds_and_the_ratio_to_original(tmp_path, monkeypatch, capsys):
    novels = {
        **BOOKS,
        "data": "x/books-test.parquet",
        "document_names": ["emma"],
        "variant": "sliding",
    }
    novels |= {"stride": 256, "asked_stride": 256, "max_tokens": 1025}
    values = {
        "original": 40.0,
        "calibrated": 100.0,
        "trained, seed 0": 50.0,
        "trained, seed 1": 70.0,
    }
    rows = [row(name, length=256, value=value, **novels) for name, value in values.items()]
    for name, value in (("original", 0.0), ("calibrated", 0.5)):
        heads = [
            {
                "layer": 0,
                "divergence": value * n,
                "baseline_sink": 0.3 * n,
                "baseline_previous": 0.1,
            }
            for n in range(4)
        ]
        maps = row(name, length=256, value=value, task="attention-maps", **novels)
        maps |= {"baseline": "original", "sink": 0.5}
        rows.append(with_raw(tmp_path / "rows", "heads", maps, heads))
    write_rows(tmp_path / "rows", *rows)
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path)])
    runpy.run_path(str(SCRIPTS / "table.py"))
    assert capsys.readouterr().out.splitlines() == [
        "| run | perplexity, novels, 256 | attention, nats | mass on first token |",
        "|---|---:|---:|---:|",
        "| original | 40.0 | 0.00 | 0.50 |",
        "| calibrated | 100.0, 2.50 x | 0.50 | 0.50 |",
        "| trained | 60.0 (50.0 to 70.0), 1.50 x |  |  |",
        "",
        "| run | others (2 heads) | first token (2 heads) |",
        "|---|---:|---:|",
        "| original | 0.00 | 0.00 |",
        "| calibrated | 0.25 | 1.25 |",
    ]
