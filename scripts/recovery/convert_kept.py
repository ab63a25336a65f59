"""Convert the layers that a trained model kept, and fit them to what they were.

    convert_kept.py TRAINED CALIBRATED OUT [--text TEXT] [--partial-rotary]

TRAINED is what coca-train made of a checkpoint with kept layers, CALIBRATED the same original with
all layers calibrated. OUT has TRAINED's weights, but CALIBRATED's queries and coefficients where
TRAINED kept the original's attention, so that all of its layers are CoCA. With TEXT, a .parquet of
documents, those are fitted to the attention maps of TRAINED's kept layers, on TRAINED's own hidden
states, as coca-convert --calibrate fits them to the original's, but for longer: most of the blocks
repeat a passage. `--partial-rotary` is that of coca-convert, in these layers.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import coca_hf  # noqa: F401 the Auto classes know CoCA's models
from coca_hf.convert import calibrate
from coca_hf.convert.calibrate import divergences, fit, run_original
from coca_hf.convert.calibration_text import (
    calibration_blocks,
    reach,
    repeated_blocks,
    skipped_positions,
)
from coca_hf.convert.layer_pairs import FITTED, Angles, run_layer

WEIGHTS = "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path)
    parser.add_argument("calibrated", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--partial-rotary", action="store_true")
    parser.add_argument(
        "--blocks", type=int, default=384, help="with repeats; a quarter as many are plain text"
    )
    parser.add_argument("--block-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15360, help="of every layer")
    given = parser.parse_args()
    trained, start = (
        json.loads((path / "config.json").read_text()) for path in (given.trained, given.calibrated)
    )
    kept = trained["coca_kept_layers"]
    if trained["coca_constraint"] != start["coca_constraint"]:
        sys.exit(f"{given.calibrated}: got {start['coca_constraint']}, expected TRAINED's form")
    still = {*trained.get("coca_partial_rotary_layers", [])}
    start["coca_partial_rotary_layers"] = sorted(still | {*kept} if given.partial_rotary else still)
    theirs, ours = (load_file(path / WEIGHTS) for path in (given.calibrated, given.trained))
    fitted = tuple(f"model.layers.{layer}.self_attn.{p}." for layer in kept for p in FITTED)
    weights = {name: (theirs if name.startswith(fitted) else ours)[name] for name in theirs}
    shutil.copytree(given.calibrated, given.out, ignore=shutil.ignore_patterns(WEIGHTS))
    (given.out / "config.json").write_text(json.dumps(start, indent=2) + "\n")
    save_file(weights, given.out / WEIGHTS, {"format": "pt"})
    if given.text:
        found = fitted_to_kept(given)
        weights |= {name: tensor.to(weights[name].dtype) for name, tensor in found.items()}
        save_file(weights, given.out / WEIGHTS, {"format": "pt"})


def fitted_to_kept(given: argparse.Namespace) -> dict[str, Tensor]:
    """The queries' and coefficients' projections of OUT, by name, where TRAINED kept attention."""
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (given.trained, given.out)
    )
    tokenizer = AutoTokenizer.from_pretrained(given.trained)
    place = given.text, "text", "train", None, None, True
    amounts = given.blocks * given.block_tokens, given.block_tokens
    text, held_out = calibration_blocks(place, tokenizer, student.config, *amounts)
    repeated = repeated_blocks(text, tokenizer, student.config, seed=3)
    blocks = torch.cat((text[: given.blocks // 4], repeated))
    held_out = held_out[:6]
    positions = skipped_positions(*blocks.shape, reach(student.config), seed=5)
    in_order = torch.arange(given.block_tokens).expand(held_out.shape)
    texts = [
        (teacher.model.embed_tokens(ids).detach(), places)
        for ids, places in ((blocks, positions), (held_out, in_order))
    ]
    angles = Angles(teacher.model, student, "cpu")
    kept, found = teacher.config.coca_kept_layers, {}
    calibrate.STEPS = given.steps
    passes = max(1, round(given.steps / len(blocks)))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for number, layer in enumerate(teacher.model.layers[: max(kept) + 1]):
            if number not in kept:
                for states, places in texts:
                    run_layer(layer, states, states, places, angles.original)
                continue
            seen = [run_original(layer, states, states, places, angles) for states, places in texts]
            attention = student.model.layers[number].self_attn
            before, began = divergences(attention, seen[1]).mean(), time.perf_counter()
            fit(attention, seen[0], passes, number)
            after, seconds = divergences(attention, seen[1]).mean(), time.perf_counter() - began
            print(f"layer {number}: {before:.3f} to {after:.3f} nats, {seconds:,.0f} s", flush=True)
            for name, tensor in attention.state_dict().items():
                if name.startswith(FITTED):
                    found[f"model.layers.{number}.self_attn.{name}"] = tensor.clone()
    return found


if __name__ == "__main__":
    main()
