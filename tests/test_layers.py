"""Imports point down, never up, and the files that travel in checkpoints stand alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import coca_hf

ROOT = Path(coca_hf.__file__).parent
FLOORS = {
    "errors": 0,
    "precision": 0,
    "provenance": 0,
    "files": 1,
    "models": 0,
    "kernels": 1,
    "weights": 1,
    "card": 2,
    "documents": 1,
    "tokens": 1,
    "held_out": 2,
    "page": 0,
    "convert": 3,
    "evaluate": 4,
    "report": 5,
    "train": 4,
    "vllm": 5,
}
SHARED = {"attention.py", "cache.py", "decoder.py", "hub.py", "rotary.py"}
CONFIGS = [getattr(coca_hf, name) for name in coca_hf.__all__ if name.endswith("Config")]


def imported(file):
    """Every coca_hf module that a file imports, wherever in the file, as absolute dotted names."""
    package = (ROOT.name, *file.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name for name in names if name.split(".")[0] == "coca_hf")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module == "coca_hf":
                yield from (f"coca_hf.{alias.name}" for alias in node.names)
            elif module.startswith("coca_hf."):
                yield module


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file):
    part = file.relative_to(ROOT).parts[0].removesuffix(".py")
    # Only __main__.py reaches up to the commands
    assert file.name == "__main__.py" or "coca_cli" not in file.read_text()
    if part == "__init__":
        return
    for module in imported(file):
        target = module.split(".")[1]
        if target not in FLOORS:  # a public name of coca_hf; importing it registers the models
            assert part not in ("models", "errors", "report", "documents", "card")
        elif target != part:
            assert FLOORS[target] < FLOORS[part], f"{file.relative_to(ROOT)} imports {module}"


def test_every_part_has_a_floor():
    parts = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert parts - {"__init__", "__pycache__", "py.typed"} == set(FLOORS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_travels_in_checkpoints_imports_only_what_travels(tmp_path, config):
    config().save_pretrained(tmp_path)
    travelling = {file.name for file in tmp_path.glob("*.py")}
    for name in travelling:
        siblings = {f"{module.split('.')[2]}.py" for module in imported(ROOT / "models" / name)}
        assert siblings <= travelling
    family = config.model_type.removeprefix("coca_") + ".py"
    is_alibi = config is coca_hf.AlibiLlamaConfig
    assert travelling == ({"alibi.py", "attention.py"} if is_alibi else SHARED | {family})


def test_loading_a_model_imports_no_conversion():
    code = (
        "import sys, coca_hf\n"
        "assert not [name for name in sys.modules if name.startswith('coca_hf.convert')]\n"
        "from coca_hf import patch_\n"
        "assert coca_hf.patch_ is patch_ is sys.modules['coca_hf.convert.patch'].patch_"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'coca_hf' has no attribute 'pach_'"):
        coca_hf.pach_  # noqa: B018
