"""The peak memory that `coca-train --plan` predicts, against what coca-train measures on this
machine's GPU.

    python scripts/bench/plan.py --out docs/results/h200/plan.json  # one GPU of 32 GB or more

Every setting is a recipe of one stage and two steps, from random weights. Prints a table, writes
JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from measure import DEVICE, SHAPES, clear, show, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coca_hf.train.gpu_plan import GIB, plan_recipe
from coca_hf.train.recipe import Recipe
from coca_hf.train.stages import run_recipe

SETTINGS = {  # what is trained, batch, accumulation, checkpointing
    "t_proj": (["t_proj"], 8, 1, False),
    "t_proj, checkpointing": (["t_proj"], 8, 1, True),
    "all": ("all", 8, 1, False),
    "all, checkpointing": ("all", 8, 1, True),
    "all, checkpointing, accumulated": ("all", 4, 2, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--smoke", action="store_true", help="the tiny shape, on any machine: only whether it runs"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.smoke:
        raise SystemExit(
            "scripts/bench/plan.py: got no GPU, expected one to measure on; --smoke needs none"
        )
    shape, seq_len = ("tiny", 48) if options.smoke else ("smollm2-135m", 2048)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), seq_len)
        rows = [compare(Path(folder), name, shape, seq_len) for name in SETTINGS]
    sizes = {name: (f"{name}_bytes", 1 / GIB) for name in ("predicted", "measured", "reserved")}
    show("GiB", {"setting": "setting", **sizes, "error": "error"}, rows)
    write({"task": "plan-bench", "shape": shape, "seq_len": seq_len, "rows": rows}, options.out)


def write_inputs(folder: Path, seq_len: int) -> None:
    """Write a tokenizer with one word, and a text of that word, long enough for every setting."""
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "word": 1}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(
        folder / "tokenizer"
    )
    (folder / "text.txt").write_text("word " * 20 * seq_len)


def compare(folder: Path, name: str, shape: str, seq_len: int) -> dict:
    """The peak that the plan predicts for a setting, and the peak in the log of its run: on a GPU,
    the most that tensors took.
    """
    recipe = make_recipe(folder, name, shape, seq_len)
    predicted = plan_recipe(recipe).stages[0].memory.peak
    clear()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stage_dir = run_recipe(recipe, folder / "runs" / name.replace(", ", "-"))
    measured = json.loads((stage_dir / "log.jsonl").read_text().splitlines()[-1])["memory_bytes"]
    return {
        "setting": name,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "error": predicted / measured - 1,
    }


def make_recipe(folder: Path, name: str, shape: str, seq_len: int) -> Recipe:
    train, batch_size, accumulation, checkpointing = SETTINGS[name]
    return Recipe.model_validate(
        {
            "tokenizer": str(folder / "tokenizer"),
            "config": {
                "model_type": "coca_llama",
                **SHAPES[shape],
                "max_position_embeddings": seq_len,
            },
            "data": {
                "seq_len": seq_len,
                "held_out_blocks": 0,
                "sources": [{"path": str(folder / "text.txt"), "weight": 1}],
            },
            "training": {
                "max_steps": 2,
                "per_device_train_batch_size": batch_size,
                "gradient_accumulation_steps": accumulation,
                "gradient_checkpointing": checkpointing,
                "bf16": DEVICE == "cuda",
                "optim": "adamw_torch_fused",
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
            },
            "stages": [{"name": "measured", "train": train}],
        }
    )


if __name__ == "__main__":
    main()
