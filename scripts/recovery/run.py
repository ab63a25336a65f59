"""Compare ways from SmolLM2-135M to a CoCA model.

    python scripts/recovery/run.py [--plan PLAN] [NAME...]

A plan names the runs: where each starts, how it trains, and with which seeds. All train on the same
text in the same order (by seed) and are measured in the same way. Every step is a coca-convert,
coca-train or coca-eval command, printed before it runs. Run it again after an interruption:
finished steps are skipped, a killed one continues. The plans beside this file are:

    runs.yaml     issue 7: ways to low perplexity, compared on 21,504 tokens
    lookups.yaml  issue 19: retrieval, with all layers converted and with some kept

It writes:

    OUT/starts/…          converted checkpoints
    OUT/trained/NAME-…    the checkpoints that coca-train makes from them
    OUT/rows              rows of coca-eval
    OUT/page              the report
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from coca_cli.main import evaluate as run_coca_eval

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--plan", type=Path, default=HERE / "runs.yaml")
    parser.add_argument("--out", type=Path, help="by default runs/ and the name in the plan")
    parser.add_argument("--seeds", type=int, default=100, help="the most of any run")
    options = parser.parse_args()
    if not options.plan.is_file():
        parser.error(f"--plan: got {options.plan}, expected a file, as {HERE / 'lookups.yaml'}")
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    if unknown := set(options.names) - set(plan["runs"]):
        parser.error(f"NAME: got {', '.join(unknown)}, expected some of {', '.join(plan['runs'])}")
    out = options.out or Path("runs", plan["name"])
    for line in plan["prepare"]:
        run("bash", "-ec", line)
    evaluate(plan, plan["original"], "original", out)
    for name in options.names or plan["runs"]:
        seeds = plan["runs"][name].get("seeds", 1)
        for seed in range(min(seeds, options.seeds)):
            checkpoint = checkpoint_of(plan, name, seed, out)
            evaluate(plan, checkpoint, name if seeds == 1 else f"{name}, seed {seed}", out)
    trained = sorted((out / "trained").glob("[!.]*"))  # no locks
    coca_eval("report", out / "rows", *trained, "--out", out / "page")


def run(*command) -> None:
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    subprocess.run(words, check=True)


def option(name: str, value) -> tuple:
    return (f"--{name}",) if value is True else (f"--{name}", value)


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def checkpoint_of(plan: dict, name: str, seed: int, out: Path) -> Path:
    """The checkpoint of a run."""
    of_run = plan["runs"][name]
    checkpoint = convert(plan, of_run["start"], out)
    if "stages" in of_run or "settings" in of_run:
        directory = out / "trained" / f"{slug(name)}-{seed}"
        return train(plan, of_run, checkpoint, seed, directory)
    return checkpoint


def convert(plan: dict, start: str, out: Path) -> Path:
    """The checkpoint of a start. Ends the script if it was made with other options."""
    options, checkpoint = dict(plan["starts"][start]), out / "starts" / slug(start)
    asked, record = json.dumps([plan["original"], options]), checkpoint.with_suffix(".made-with")
    if checkpoint.exists() and record.exists() and (made := record.read_text()) != asked:
        sys.exit(f"{checkpoint}: made with {made}, expected {asked}; delete it, and what it became")
    scaled = options.pop("scaled", True)
    if not checkpoint.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(asked)
        target = checkpoint if scaled else checkpoint.with_name(f".{checkpoint.name}")
        words = [word for pair in options.items() for word in option(*pair)]
        run("coca-convert", plan["original"], target, *words, "--overwrite")
        if not scaled:
            unscale(target)
            target.rename(checkpoint)
    return checkpoint


def unscale(checkpoint: Path) -> None:
    """Undo the scaling of W_T, so it starts as the plain fold of W_K, which coca-convert scales
    because it saturates.
    """
    from safetensors.torch import load_file, save_file

    scales = json.loads((checkpoint / "conversion.json").read_text())["start"]["scales"]
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for layer, of_heads in enumerate(scales):
        heads = tensors[f"model.layers.{layer}.self_attn.t_proj.weight"].unflatten(
            0, (len(of_heads), -1)
        )
        heads /= heads.new_tensor(of_heads)[:, None, None]
    save_file(tensors, file, {"format": "pt"})


def train(plan: dict, of_run: dict, start: Path, seed: int, out: Path) -> Path:
    settings = {"model": str(start), "data.seed": seed, "training.seed": seed}
    settings |= {"stages": of_run["stages"]} if "stages" in of_run else {}
    of_plan, own = plan.get("settings", {}), of_run.get("settings", {})
    # coca-train refuses what a later override replaces with all that is around it
    of_plan = {
        key: of_plan[key] for key in of_plan if not any(key.startswith(f"{o}.") for o in own)
    }
    settings |= of_plan | own
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]  # JSON is YAML
    run("coca-train", plan["recipe"], *changes, "--out", out, "--resume")
    return sorted(path.parent for path in out.glob("*/training.json"))[-1]


def evaluate(plan: dict, checkpoint: Path | str, label: str, out: Path) -> None:
    for task, options in plan["evaluate"]:
        words = [word for pair in options.items() for word in option(*pair)]
        coca_eval(task, checkpoint, *words, "--name", label, "--out", out / "rows")


def coca_eval(*command) -> None:
    """Run coca-eval in this process, because importing PyTorch takes longer than some tasks."""
    sys.argv = ["coca-eval", *map(str, command)]
    print(f"$ {shlex.join(sys.argv)}", flush=True)
    try:
        run_coca_eval()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
