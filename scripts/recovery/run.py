"""Ways from SmolLM2-135M to a CoCA model at one small budget, and what each brings back: run.py [NAME...]

runs.yaml beside this file names the runs: where each starts, how it trains, with which seeds. All train on the same
text in the same order (by seed), and all are measured alike. Every step is a coca-convert, coca-train or coca-eval
command, printed before it runs. Run it again: what is done is skipped, a killed run continues.

    OUT/starts/…          converted checkpoints
    OUT/trained/NAME-…    what coca-train makes of them
    OUT/rows              of coca-eval
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
PLAN = yaml.safe_load((HERE / "runs.yaml").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PLAN["runs"]], help="all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/recovery"))
    parser.add_argument("--seeds", type=int, default=100, help="at most so many of a run's")
    options = parser.parse_args()
    for line in PLAN["prepare"]:
        run("bash", "-ec", line)
    evaluate(PLAN["original"], "original", options.out)
    for name in options.names or PLAN["runs"]:
        plan = PLAN["runs"][name]
        seeds = plan.get("seeds", 1)
        for seed in range(min(seeds, options.seeds)):
            checkpoint = convert(plan["start"], options.out / "starts")
            if "stages" in plan:
                checkpoint = train(plan, checkpoint, seed, options.out / "trained" / f"{slug(name)}-{seed}")
            evaluate(checkpoint, name if seeds == 1 else f"{name}, seed {seed}", options.out)
    trained = sorted((options.out / "trained").glob("[!.]*"))  # no locks
    coca_eval("report", options.out / "rows", *trained, "--out", options.out / "page")


def run(*command) -> None:
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    subprocess.run(words, check=True)


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def convert(start: str, directory: Path) -> Path:
    """The checkpoint of a start."""
    options, checkpoint = dict(PLAN["starts"][start]), directory / slug(start)
    scaled = options.pop("scaled", True)
    if not checkpoint.exists():
        made = checkpoint if scaled else checkpoint.with_name(f".{checkpoint.name}")
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        run("coca-convert", PLAN["original"], made, *words, "--overwrite")
        if not scaled:
            unscale(made)
            made.rename(checkpoint)
    return checkpoint


def unscale(checkpoint: Path) -> None:
    """Make the start of W_T the fold of W_K as it is: the copy that coca-convert scales, because it saturates."""
    from safetensors.torch import load_file, save_file

    scales = json.loads((checkpoint / "conversion.json").read_text())["start"]["scales"]
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for layer, of_heads in enumerate(scales):
        heads = tensors[f"model.layers.{layer}.self_attn.t_proj.weight"].unflatten(0, (len(of_heads), -1))
        heads /= heads.new_tensor(of_heads)[:, None, None]
    save_file(tensors, file, {"format": "pt"})


def train(plan: dict, start: Path, seed: int, out: Path) -> Path:
    settings = {"model": str(start), "data.seed": seed, "training.seed": seed, "stages": plan["stages"]}
    settings |= plan.get("settings", {})
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]  # JSON is YAML
    run("coca-train", HERE / "recipe.yaml", *changes, "--out", out, "--resume")
    return sorted(path.parent for path in out.glob("*/training.json"))[-1]


def evaluate(checkpoint: Path | str, label: str, out: Path) -> None:
    for task, options in PLAN["evaluate"]:
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        coca_eval(task, checkpoint, *words, "--name", label, "--out", out / "rows")


def coca_eval(*command) -> None:
    """In this process, because importing PyTorch takes longer than some of the tasks."""
    sys.argv = ["coca-eval", *map(str, command)]
    print(f"$ {shlex.join(sys.argv)}", flush=True)
    try:
        run_coca_eval()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
