"""Convert the layers that a trained model kept: convert_kept.py TRAINED CALIBRATED OUT

TRAINED is what coca-train made of a checkpoint with kept layers, CALIBRATED the same original with
all layers calibrated. OUT has TRAINED's weights, but CALIBRATED's queries and coefficients where
TRAINED kept the original's attention, so that all of its layers are CoCA.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def main(trained: Path, calibrated: Path, out: Path) -> None:
    kept = json.loads((trained / "config.json").read_text())["coca_kept_layers"]
    fitted = tuple(f"model.layers.{layer}.self_attn.{p}_proj." for layer in kept for p in "qt")
    ours, theirs = load_file(trained / WEIGHTS), load_file(calibrated / WEIGHTS)
    chosen = {name: (theirs if name.startswith(fitted) else ours)[name] for name in theirs}
    shutil.copytree(calibrated, out, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(chosen, out / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
