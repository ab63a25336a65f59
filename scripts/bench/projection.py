"""Project the paper's fine-tune of LLaMA-7B (three stages, 32 GPUs) from a training step measured
on one GPU.

    python scripts/bench/train.py --batch 8 --checkpointing --train t qkv all --out docs/results/h200/train-stages.json
    python scripts/bench/projection.py docs/results/h200/train-stages.json > docs/results/h200/projection.md

The seconds that a layer adds to a step are measured from two depths, and so is the rest (embedding,
head, loss). The assumptions are printed with the result.
"""

import argparse
import json
from pathlib import Path

LAYERS, STEPS, GPUS = 32, 15_000, 32
BATCH, LENGTH = 8, 2048  # of a GPU's step
LAYER_PARAMETERS = 4096 * (3 * 4096 + 4096 // 2) + 3 * 4096 * 11008  # q, v, o and t; the MLP
OTHER_PARAMETERS = 2 * 32000 * 4096
STAGES = {"t": "t_proj alone", "qkv": "q, t and v", "all": "everything"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, help="of train.py, all three stages")
    parser.add_argument(
        "--network", type=float, default=40.0, help="GB/s into and out of a GPU between machines"
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=1.0,
        help="share of the communication that hides behind work",
    )
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    print(page(result, options.network, options.overlap))


def page(result: dict, network: float, overlap: float) -> str:
    """Raises SystemExit if the results are not of LLaMA-7B's shape, or lack a stage."""
    by_stage = {row["train"]: row for row in result["rows"] if row["rival"].startswith("CoCA")}
    for stage in STAGES:
        row = by_stage.get(stage, {})
        got = tuple(row.get(name) for name in ("shape", "batch", "length"))
        if got != (expected := ("llama-7b", BATCH, LENGTH)):
            raise SystemExit(
                f"projection.py: got {got if row else 'no row'} (shape, batch and length) that trains "
                f"{stage!r}, expected {expected}, the paper's recipe"
            )
    parameters = LAYERS * LAYER_PARAMETERS + OTHER_PARAMETERS
    lines = [
        "# The 7B three-stage run on 32 GPUs, projected",
        "",
        f"From one {result['hardware'].get('gpu', 'CPU')}, {result['date'][:10]}, by `scripts/bench/projection.py`:",
        "",
        f"    {result['command']}",
        "",
        "| stage | learns | s a step, work | s a step, communication | hours | GPU hours |",
        "|---|---|---:|---:|---:|---:|",
    ]
    total = 0.0
    for number, (stage, learns) in enumerate(STAGES.items(), 1):
        row = by_stage[stage]
        rest = row["seconds"] - row["layers"] * row["layer_seconds"]
        work = LAYERS * row["layer_seconds"] + rest
        learning = {
            "t": LAYERS * 4096 * 2048,
            "qkv": LAYERS * 4096 * (2 * 4096 + 2048),
            "all": parameters,
        }[stage]
        # gathered forward, and again backward, in bf16; gradients of what learns scattered once, in
        # float32
        num_bytes = 2 * 2 * parameters + 4 * learning
        communication = num_bytes * (GPUS - 1) / GPUS / (network * 1e9)
        hidden = min(communication * overlap, work)
        hours = STEPS * (work + communication - hidden) / 3600
        total += hours
        lines.append(
            f"| {number} | {learns} | {work:.3f} | {communication:.3f} | {hours:.1f} | "
            f"{GPUS * hours:,.0f} |"
        )
    lines += [
        "",
        f"In all {total:.1f} hours, {GPUS * total:,.0f} GPU hours. Assumed:",
        "",
        f"- {GPUS} GPUs, {STEPS:,} steps a stage of {BATCH} blocks of {LENGTH:,} tokens a "
        "GPU (the paper's recipe);",
        f"- every one of {LAYERS} layers takes what the measured ones add, and the rest does not change with depth;",
        f"- FSDP2 gathers all weights in bf16 twice a step and scatters gradients in float32, at {network:g} GB/s a "
        f"GPU, and {overlap:.0%} of what can hide behind work does;",
        "- the optimizer's step is counted as measured, though 32 GPUs share it: the projection is that much too long;",
        "- no time for data, evaluation, checkpoints or failures.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
