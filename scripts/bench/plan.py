"""The peak of memory that `coca-train --plan` predicts, against the one measured on this machine's GPU.

    python scripts/bench/plan.py --out docs/results/plan.json  # one GPU of 24 GB or more

Every setting runs two real optimizer steps in a process of its own, from random weights. Prints a table, writes JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from measure import write

import coca_hf
from coca_hf.train.model import freeze_, model_from_config
from coca_hf.train.plan import GIB, Setting, measure
from coca_hf.train.recipe import Recipe, load_recipe
from coca_hf.train.trainer import StageTrainer

SMOLLM2 = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
SETTINGS = {  # stage, batch, accumulation, checkpointing
    "t_proj": ("k", 8, 1, False),
    "t_proj, checkpointing": ("k", 8, 1, True),
    "all": ("full", 8, 1, False),
    "all, checkpointing": ("full", 8, 1, True),
    "all, checkpointing, accumulated": ("full", 4, 2, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the setting that a process of its own measures
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("scripts/bench/plan.py: got no GPU, expected one to measure on")
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), options.seq_len)
        if options.one:
            print(json.dumps(run(recipe, options.one)))
            return
        rows = [compare(recipe, name, options.seq_len) for name in SETTINGS]
    show(rows)
    write({"task": "plan-bench", "seq_len": options.seq_len, "rows": rows}, options.out)


def make_recipe(folder: Path, seq_len: int) -> Recipe:
    """SmolLM2-135M's shape as CoCA, bf16; no weights and no text are needed."""
    coca_hf.CocaLlamaConfig(**SMOLLM2).save_pretrained(folder)
    tree = {
        "model": str(folder),
        "data": {"seq_len": seq_len, "sources": [{"path": "absent", "weight": 1}]},
        "training": {"max_steps": 2, "bf16": True, "optim": "adamw_torch_fused"},
        "stages": [{"name": "k", "train": ["t_proj"]}, {"name": "full", "train": "all"}],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return load_recipe(folder / "recipe.yaml")


def compare(recipe: Recipe, name: str, seq_len: int) -> dict:
    stage, batch_size, accumulation, checkpointing = SETTINGS[name]
    number = ("k", "full").index(stage)
    predicted = measure(recipe, recipe.stages[number], Setting(1, batch_size, accumulation, checkpointing))
    command = [sys.executable, __file__, "--seq-len", str(seq_len), "--one", name]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    measured = json.loads(output.splitlines()[-1])
    error = predicted.peak / measured["allocated_bytes"] - 1
    return {"setting": name, "predicted_bytes": predicted.peak, **measured, "error": error}


def run(recipe: Recipe, name: str) -> dict:
    """Two steps of the Trainer that trains stages; the most that tensors took, and that the process held."""
    from transformers import TrainingArguments, default_data_collator

    stage, batch_size, accumulation, checkpointing = SETTINGS[name]
    model = model_from_config(recipe)
    freeze_(model, recipe.stages[("k", "full").index(stage)])
    block = torch.zeros(recipe.data.seq_len, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=checkpointing,
            save_strategy="no",
            **recipe.training,
        )
        blocks = [{"input_ids": block, "labels": block}] * (2 * batch_size * accumulation)
        StageTrainer(model, arguments, default_data_collator, blocks).train()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def show(rows: list[dict]) -> None:
    print("| setting | predicted | measured | error | reserved |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        sizes = [row[key] / GIB for key in ("predicted_bytes", "allocated_bytes", "reserved_bytes")]
        print(f"| {row['setting']} | {sizes[0]:.2f} GiB | {sizes[1]:.2f} | {row['error']:+.1%} | {sizes[2]:.2f} |")


if __name__ == "__main__":
    main()
