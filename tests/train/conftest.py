"""A recipe that trains the tiny CoCA model in three stages, in a second, and its unbroken run."""

import json
import random
import sys
from contextlib import redirect_stdout
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import yaml

from coca_cli import main
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """`words/*.txt` (5 documents) and `digits.jsonl` (7 rows, column `code`); they share no letters."""
    draw = random.Random(0)
    directory = tmp_path_factory.mktemp("texts")
    (directory / "words").mkdir()
    for number in range(5):
        text = " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(60 + 11 * number))
        (directory / "words" / f"{number}.txt").write_text(text)
    rows = ["".join(draw.choices("0123456789", k=130 + 17 * number)) for number in range(7)]
    (directory / "digits.jsonl").write_text("".join(f'{{"code": "{row}"}}\n' for row in rows))
    return directory


@pytest.fixture(scope="session")
def words(texts) -> Source:
    return Source(path=str(texts / "words/*.txt"), weight=3)


@pytest.fixture(scope="session")
def digits(texts) -> Source:
    return Source(path=str(texts / "digits.jsonl"), weight=1, column="code")


def make_recipe_tree(model: Path, texts: Path) -> dict:
    words = {"path": str(texts / "words/*.txt"), "weight": 3}
    digits = {"path": str(texts / "digits.jsonl"), "weight": 1, "column": "code"}
    data = {"seq_len": 20, "held_out_blocks": 0, "sources": [words, digits]}
    data["prepared"] = str(texts.parent / "prepared")
    training = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    training |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3}
    training |= {"logging_steps": 1, "save_steps": 2}
    projections = ["q_proj", "t_proj", "v_proj"]
    stages = [
        {"name": "k", "train": ["t_proj"], "max_steps": 3},
        {"name": "qkv", "train": projections, "max_steps": 5, "logging_steps": 3},
        {"name": "full", "train": "all", "max_steps": 4, "learning_rate": 5e-4},
    ]
    return {"model": str(model), "data": data, "training": training, "stages": stages}


@pytest.fixture
def recipe_tree(tiny_coca_dir, texts) -> dict:
    return make_recipe_tree(tiny_coca_dir, texts)


@pytest.fixture
def recipe_path(recipe_tree, tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_tree, sort_keys=False))
    return path


@pytest.fixture
def train(recipe_path, tmp_path):
    """Runs a stage of the recipe with overrides, or all of it, in `tmp_path/out`; returns the last
    stage's directory.
    """

    def run(*settings, stage: str | None = "k", out=tmp_path / "out", resume=False) -> Path:
        return run_recipe(load_recipe(recipe_path, settings), out, stage, resume)

    return run


@pytest.fixture
def coca_train(monkeypatch):
    """Calls coca-train with these arguments; returns its exit code."""

    def call(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["coca-train", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.train()
        return ended.value.code

    return call


@pytest.fixture(scope="session")
def unbroken(tiny_coca_dir, texts, tmp_path_factory) -> Path:
    """OUT of the recipe, run in one go; beside it, in `printed.txt`, what was printed."""
    directory = tmp_path_factory.mktemp("unbroken")
    (directory / "recipe.yaml").write_text(yaml.safe_dump(make_recipe_tree(tiny_coca_dir, texts)))
    with (directory / "printed.txt").open("w") as printed, redirect_stdout(printed):
        run_recipe(load_recipe(directory / "recipe.yaml"), directory / "out")
    return directory / "out"


@pytest.fixture(scope="session")
def real_text(tmp_path_factory) -> Path:
    """`topics.jsonl` and `code.jsonl`: 60 documents of 700 characters each, from Python itself."""
    directory = tmp_path_factory.mktemp("real-text")
    code = sorted(Path(json.__file__).parent.parent.glob("[a-h]*.py"))[:60]
    documents = {"topics": [*topics.values()][:60]}
    documents["code"] = [path.read_text(encoding="utf-8") for path in code]
    for name, texts in documents.items():
        lines = [json.dumps({"text": text[:700]}) + "\n" for text in texts]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture(scope="session")
def real_recipe(tiny_coca_dir, real_text, tmp_path_factory) -> Path:
    """Three stages on real text, 4 blocks a step on any number of processes, with held-out blocks."""
    path = tmp_path_factory.mktemp("real-recipe") / "real.yaml"
    tree = make_recipe_tree(tiny_coca_dir, real_text)
    weights = {"topics": 3, "code": 1}
    sources = [{"path": f"{real_text}/{name}.jsonl", "weight": weights[name]} for name in weights]
    tree["data"] |= {"seq_len": 44, "held_out_blocks": 7, "sources": sources}
    tree["training"] |= {"per_device_train_batch_size": 2, "global_batch_size": 4}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="session")
def real_unbroken(real_recipe, tmp_path_factory) -> Path:
    """OUT of `real_recipe`, run in one go by one process."""
    out = tmp_path_factory.mktemp("real-unbroken") / "out"
    run_recipe(load_recipe(real_recipe), out)
    return out
