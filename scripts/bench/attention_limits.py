"""How much of the original's attention CoCA can take over, and what limits it: passes, text, projections or the form.

    python scripts/bench/attention_limits.py quickstart/original CONVERTED... --text TEXT --out docs/results/limits.json

CONVERTED: of `coca-convert`, uncalibrated, one a constraint. In a few layers, on the hidden states that the original's
layers see, it measures the divergence of CoCA's attention maps from the original's: of the start; of W_Q and W_T fitted
as `--calibrate` does (`fit` of coca_hf/convert/calibrate.py) with more passes and more text, on the blocks that were
fitted and on held-out ones, so that their distance shows what more text would bring; and of `free` queries and
coefficients, trained for every token of the held-out blocks by itself: what no text and no projection could surpass.
By what the original's heads do with more than half of their mass. Prints a table, writes JSON.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf.convert.calibrate import (
    Angles,
    Seen,
    calibration_blocks,
    divergence_of_heads,
    divergences,
    fit,
    log_attention,
    run_original,
)
from coca_hf.models.attention import CocaAttention

KINDS = ("first token", "token before", "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("original")
    parser.add_argument("converted", nargs="+")
    parser.add_argument("--text", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 14, 24])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="rising")
    parser.add_argument("--passes", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--free-steps", type=int, default=600)
    parser.add_argument("--free-blocks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    original = AutoModelForCausalLM.from_pretrained(options.original, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(options.original)
    blocks, held_out = calibration_blocks(options.text, tokenizer, original.config, max(options.tokens))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in options.converted]
    angles = Angles(original.model, models[0], blocks.shape[1], "cpu")
    rows: list[dict] = []
    with torch.no_grad():
        states = original.model.embed_tokens(torch.cat((held_out, blocks)))
    for number, layer in enumerate(original.model.layers[: max(options.layers) + 1]):
        seen, states = run_original(layer, states, angles)
        if number in options.layers:
            for model in models:
                attention: Any = model.model.layers[number].self_attn
                for row in measured(attention, seen, len(held_out), angles, options):
                    rows.append({"layer": number, "constraint": model.config.coca_constraint, **row})
                    print(rows[-1], file=sys.stderr, flush=True)
    show(rows)
    write({"task": "attention-limits", "block_tokens": blocks.shape[1], "rows": rows}, options.out)


def measured(
    start: CocaAttention, seen: Seen, num_held_out: int, angles: Angles, options: argparse.Namespace
) -> Iterator[dict]:
    held_out = Seen(*(part[:num_held_out] for part in seen))
    kinds = kinds_of_heads(held_out.maps)
    yield {"fit": "start", "held_out": by_kind(divergences(start, held_out, angles), kinds)}
    for tokens in options.tokens:
        blocks = Seen(*(part[num_held_out:][: tokens // seen.maps.shape[-1]] for part in seen))
        for passes in options.passes:
            attention = copy.deepcopy(start)
            fit(attention, blocks, angles, passes, seed=0)
            some = Seen(*(part[:num_held_out] for part in blocks))
            yield {
                "fit": f"{tokens:,} tokens, {passes} passes",
                "fitted": by_kind(divergences(attention, some, angles), kinds),
                "held_out": by_kind(divergences(attention, held_out, angles), kinds),
            }
    few = Seen(*(part[: options.free_blocks] for part in held_out))
    found = free_divergences(attention, few, angles, options.free_steps)
    yield {"fit": f"free, {options.free_steps} steps", "held_out": by_kind(found, kinds)}


def free_divergences(attention: CocaAttention, seen: Seen, angles: Angles, steps: int) -> Tensor:
    """Of every head, (h,): with queries and coefficients of their own for every token, from those of `attention`."""
    with torch.no_grad():
        q, t = attention.queries(seen.inputs), attention.coefficients(seen.inputs).relu()
    q, t = q.requires_grad_(True), (t + 0.05 * t.mean()).requires_grad_(True)  # above zero, where ReLU has a gradient
    optimizer = torch.optim.Adam(
        [{"params": [x], "lr": 0.03 * x.detach().square().mean().sqrt().item()} for x in (q, t)]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        divergence_of_heads(log_attention(attention, q, t, angles, angles.position_ids[0]), seen.maps).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return divergence_of_heads(log_attention(attention, q, t, angles, angles.position_ids[0]), seen.maps)


def kinds_of_heads(maps: Tensor) -> list[str]:
    """What each head gives more than half of its mass, mean over queries from the second on."""
    first = maps[:, :, 1:, 0].mean((0, 2))
    before = maps[:, :, 1:].diagonal(dim1=2, dim2=3).mean((0, 2))
    return [KINDS[0 if a > 0.5 else 1 if b > 0.5 else 2] for a, b in zip(first, before, strict=True)]


def by_kind(divergence: Tensor, kinds: list[str]) -> dict[str, float]:
    of = {kind: [value for value, own in zip(divergence.tolist(), kinds, strict=True) if own == kind] for kind in KINDS}
    found = {kind: sum(values) / len(values) for kind, values in of.items() if values}
    return {"all": divergence.mean().item(), **found}


def show(rows: list[dict]) -> None:
    """Held-out divergence, mean over the layers that have such heads; in brackets on what was fitted."""
    print("| constraint | fit | all heads | " + " | ".join(KINDS) + " |\n|---|---|" + "---:|" * (1 + len(KINDS)))
    for constraint, name in dict.fromkeys((row["constraint"], row["fit"]) for row in rows):
        same = [row for row in rows if (row["constraint"], row["fit"]) == (constraint, name)]
        print(f"| {constraint} | {name} | " + " | ".join(cell(same, kind) for kind in ("all", *KINDS)) + " |")


def cell(rows: list[dict], kind: str) -> str:
    texts = []
    for part in ("held_out", "fitted"):
        values = [row[part][kind] for row in rows if kind in row.get(part, {})]
        if values:
            texts.append(f"{sum(values) / len(values):.2f}")
    return f"{texts[0]} ({texts[1]})" if len(texts) == 2 else "".join(texts)


if __name__ == "__main__":
    main()
