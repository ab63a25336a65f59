"""A table or figure of the paper, from training recipe to page.

    python scripts/paper/make.py table-1 --scale small

NAME.yaml beside this file says what is measured on which models, models.yaml says how the models
are made, and scales.yaml how large they are; scales.yaml wins if both set an option. Every step is
a coca-convert, coca-train or coca-eval command, printed before it runs. Run it again after an
interruption: finished steps are skipped, a killed one continues. Tables of one scale share models.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent


def main() -> None:
    names = sorted({path.stem for path in HERE.glob("*.yaml")} - {"models", "scales"})
    scales = read("scales")
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=names)
    parser.add_argument("--scale", choices=scales, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    options = parser.parse_args()
    table, scale = read(options.name), scales[options.scale]
    work = Work(scale, options.out / options.scale / "models", options.dry_run)
    for line in scale["prepare"]:
        work.run("bash", "-ec", line)
    page = options.out / options.scale / options.name
    for step in table["measure"]:
        for model in step["models"]:
            chosen = step.get("options", {}) | scale["evaluate"][step["task"]]
            others = {}
            for key, name in step.get("beside", {}).items():
                others |= {key: work.model(name), f"{key}-name": work.label(name)}
            words = ["--name", work.label(model), "--out", page / "rows"]
            words += [word for pair in (chosen | others).items() for word in option(*pair)]
            work.run("coca-eval", step["task"], work.model(model), *words)
    paper = ["--paper", table["paper"]] if "paper" in table and scale["published"] else []
    where = " of the paper" if options.name.startswith(("table", "figure")) else ""
    title = f"{options.name.replace('-', ' ').capitalize()}{where} at the scale {options.scale}: {table['title']}"
    work.run("coca-eval", "report", page / "rows", "--out", page, "--title", title, *paper)


def read(name: str) -> dict:
    return yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))


def option(key: str, value) -> list:
    return [f"--{key}"] if value is True else [f"--{key}", value]


class Work:
    """Runs commands, and makes each model only once."""

    def __init__(self, scale: dict, directory: Path, dry_run: bool):
        self.scale, self.directory, self.dry_run = scale, directory, dry_run
        self.models, self.made = read("models"), {}

    def run(self, *command) -> None:
        words = [str(word) for word in command]
        print(f"$ {shlex.join(words)}", flush=True)
        if not self.dry_run:
            subprocess.run(words, check=True)

    def label(self, name: str) -> str:
        label = self.models[name]["label"]
        return label.replace("LLaMA-7B", self.scale["base"]["label"])

    def model(self, name: str) -> Path:
        """The directory of a model, which is made first if it does not exist."""
        if name not in self.made:
            self.made[name] = self._make(name)
        return self.made[name]

    def _make(self, name: str) -> Path:
        if name == "base":
            base = self.scale["base"]
            return self.model(base["model"]) if "model" in base else Path(base["checkpoint"])
        plan, settings = self.models[name], {}
        if "convert" in plan:
            start = self.directory / f"{name}-start"
            if not start.exists():
                self.run("coca-convert", self.model(plan["convert"]), start)
            settings = {"model": str(start)}
        if "continue" in plan:
            settings = {"model": str(self.model(plan["continue"]))}
        out, launch = self.directory / name, shlex.split(self.scale["launch"])
        settings |= self.scale["train"][plan["kind"]] | plan.get("settings", {})
        changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]  # JSON is YAML
        if "world-size" in self.scale and not out.exists():
            on_all = ["--prepare", "--world-size", self.scale["world-size"]]
            self.run("coca-train", plan["recipe"], *changes, *on_all)
        self.run(*launch, plan["recipe"], *changes, "--out", out, "--resume")
        stages = sorted(path.parent for path in out.glob("*/training.json"))
        return stages[-1] if stages else out / "LAST-STAGE"  # the latter in a dry run


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
