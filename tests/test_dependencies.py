"""What each installation brings: the base alone loads, patches, converts and generates."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BASE = """
import sys
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import coca_hf
source, converted = sys.argv[1:]
model = coca_hf.patch_(LlamaForCausalLM.from_pretrained(source), keep_layers=[1])
coca_hf.convert_checkpoint(source, converted)
loaded = AutoModelForCausalLM.from_pretrained(converted)
print(loaded.generate(loaded.dummy_inputs["input_ids"], max_new_tokens=3, do_sample=False).shape)
"""


@pytest.fixture(scope="module")
def base_site(tmp_path_factory):
    """A directory to import from that holds what pip installs for the base, linked from here."""
    site = tmp_path_factory.mktemp("base")
    waiting, seen = base_requirements(), set()
    while waiting:
        requirement = waiting.pop()
        wanted = [{"extra": extra} for extra in requirement.extras or {""}]
        if requirement.name in seen or not _applies(requirement, [{"extra": ""}]):
            continue
        seen.add(requirement.name)
        distribution = metadata.distribution(requirement.name)
        for top in {file.parts[0] for file in distribution.files if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
        needs = map(Requirement, distribution.requires or [])
        waiting += [need for need in needs if _applies(need, wanted)]
    for package in ("coca_hf", "coca_cli"):
        (site / package).symlink_to(ROOT / package)
    own = metadata.distribution("coca-hf")  # the version and the extras are read from it
    information = next(file.parts[0] for file in own.files if file.name == "METADATA")
    (site / information).symlink_to(own.locate_file(information))
    return site


def base_requirements():
    requirements = map(Requirement, metadata.requires("coca-hf"))
    return [requirement for requirement in requirements if _applies(requirement, [{"extra": ""}])]


def _applies(requirement, environments):
    return not requirement.marker or any(map(requirement.marker.evaluate, environments))


def _run(site, code, *arguments):
    path = f"import sys; sys.path.append({str(site)!r})\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", path + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.real
def test_the_base_has_at_most_nine_dependencies_and_patches_converts_and_generates(
    base_site, tiny_llama_dir, tmp_path
):
    assert len(base_requirements()) <= 9
    for name in ("datasets", "matplotlib", "accelerate", "pyarrow", "tensorboard"):
        assert not (base_site / name).exists()
    done = _run(base_site, BASE, tiny_llama_dir, tmp_path / "converted")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("torch.Size([3, 8])\n")


@pytest.mark.real
@pytest.mark.parametrize(
    ("command", "arguments", "module", "extra"),
    [
        ("train", ["RECIPE"], "ruamel", "train"),
        (
            "evaluate",
            ["perplexity", "MODEL", "--data", "TEXT", "--lengths", "8", "--out", "OUT"],
            "accelerate",
            "eval",
        ),
        ("evaluate", ["report", "OUT", "--out", "PAGE"], "accelerate", "eval"),
        ("convert", ["MODEL", "DST", "--calibrate", "TEXT"], "pyarrow", "text"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(
    base_site, tiny_llama_dir, tmp_path, command, arguments, module, extra
):
    (tmp_path / "text.parquet").write_bytes(b"PAR1")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.jsonl").touch()
    recipe = ROOT / "recipes/recover.yaml"
    places = {
        "MODEL": tiny_llama_dir,
        "TEXT": tmp_path / "text.parquet",
        "DST": tmp_path / "converted",
    }
    places |= {"OUT": tmp_path / "rows", "PAGE": tmp_path / "page", "RECIPE": recipe}
    code = f"from coca_cli.main import {command}\n{command}()"
    done = _run(base_site, code, *(places.get(argument, argument) for argument in arguments))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: this needs {module}, which is not installed: pip install 'coca-hf[{extra}]'\n"
    )


NOT_TESTED = {"flash-attn"}  # needs a GPU


def test_the_lowest_versions_of_every_extra_are_tested():
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def reached(extra):
        ours = [need for need in map(Requirement, extras[extra]) if need.name == "coca-hf"]
        return {extra}.union(*(reached(other) for need in ours for other in need.extras))

    assert reached("dev") == extras.keys() - NOT_TESTED
    assert '".[dev]"' in (ROOT / "scripts/oldest.sh").read_text()
