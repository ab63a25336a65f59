"""How much of the original's attention CoCA can reproduce, and what limits it: gradient, text,
steps or expressivity.

    python scripts/bench/attention_limits.py quickstart/original CONVERTED... --text TEXT \\
        --out docs/results/attention-limits.json

CONVERTED: uncalibrated checkpoints from `coca-convert`, one for each constraint. In a few layers,
on the hidden states that the original's layers see, the script measures the divergence of CoCA's
attention maps from the original's on held-out blocks for these fits:

- the start, as converted;
- W_Q and W_T fitted as `--calibrate` does (`fit` of coca_hf/convert/layer_fit.py), with ReLU's own
  gradient or with `Keys`, on text alone or on equal amounts of text and repeated blocks, and on
  more of both;
- `free` queries and coefficients, optimised for every token of the held-out blocks, which no text
  and no projection could surpass.

Heads are grouped by where the original puts more than half of its mass.

`dead` is the share of coefficients that are zero for every token of the fitted text. `previous` and
`induction` are the heads that give 0.4 or more of their mass to the token before, or to the token
after the earlier copy of their own, and the mass that they give it on random sequences of half a
block, repeated once. Prints a table and writes JSON.
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf.convert import layer_fit
from coca_hf.convert.calibration_text import calibration_blocks, crowd_size, reach, repeated_blocks
from coca_hf.convert.layer_fit import (
    LEAK,
    AttentionInputs,
    divergences,
    fit,
    folded,
    later_keys,
    run_original,
    scores,
)
from coca_hf.convert.layer_pairs import Angles
from coca_hf.documents import TextSource
from coca_hf.models.attention import CocaAttention
from coca_hf.tokens import skipped_positions

KINDS = ("first token", "token before", "others")
LOOKUPS = ("previous", "induction")
LOOKUP_BLOCKS = 8
LOOKUP_MASS = 0.4
BLOCK_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("original")
    parser.add_argument("converted", nargs="+")
    parser.add_argument("--text", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 11, 17])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384, 65536], help="of text, rising"
    )
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--free-steps", type=int, default=600)
    parser.add_argument("--free-blocks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    original, models = load(options.original), [load(path) for path in options.converted]
    tokenizer = AutoTokenizer.from_pretrained(options.original)
    source = TextSource(options.text, skip_empty=True)
    text, held_out = calibration_blocks(
        source, tokenizer, original.config, max(options.tokens), BLOCK_TOKENS
    )
    repeated = repeated_blocks(text, tokenizer, original.config)
    half, generator = text.shape[1] // 2, torch.Generator().manual_seed(0)
    passages = torch.randint(text.max() + 1, (LOOKUP_BLOCKS, half), generator=generator)
    parts = [held_out, passages.repeat(1, 2), text, repeated]
    in_order = torch.arange(text.shape[1]).expand(len(held_out) + LOOKUP_BLOCKS, -1)
    skipping = skipped_positions(2 * len(text), text.shape[1], reach(original.config))
    crowd = crowd_size(original.config, text.shape[1])
    positions = torch.cat((in_order, skipping))
    angles = Angles(original.model, models[0], "cpu")
    rows: list[dict] = []
    with torch.no_grad():
        states = original.model.embed_tokens(torch.cat(parts))
    for number, layer in enumerate(original.model.layers[: max(options.layers) + 1]):
        seen = run_original(layer, states, states, positions, angles)
        if number in options.layers:
            by_field = (field.split([len(ids) for ids in parts]) for field in seen)
            split = [AttentionInputs(*of_part) for of_part in zip(*by_field, strict=True)]
            for model in models:
                attention: Any = model.model.layers[number].self_attn
                about = {"layer": number, "constraint": model.config.coca_constraint}
                for row in measured(attention, *split, crowd, options):
                    rows.append(about | row)
                    print(rows[-1], file=sys.stderr, flush=True)
    show(rows)
    about = {"task": "attention-limits", "block_tokens": text.shape[1], "passes": options.passes}
    write(about | {"rows": rows}, options.out)


def measured(
    start: CocaAttention,
    held_out: AttentionInputs,
    twice: AttentionInputs,
    text: AttentionInputs,
    repeated: AttentionInputs,
    crowd: float,
    options: argparse.Namespace,
) -> Iterator[dict]:
    kinds, wanted = kinds_of_heads(maps_of(held_out)), lookups(maps_of(twice))

    def row(name: str, attention: CocaAttention) -> dict:
        with torch.no_grad():
            q, t = attention.queries(twice.inputs), attention.coefficients(twice.inputs)
            maps = log_maps(attention, q, t, twice).exp()
        found = lookups(maps)
        return {
            "fit": name,
            "held_out": by_kind(divergences(attention, held_out), kinds),
            "dead": dead(attention, text),
            **{kind: [found[kind][head] for head in heads(wanted[kind])] for kind in LOOKUPS},
            **{
                f"{kind}_original": [wanted[kind][head] for head in heads(wanted[kind])]
                for kind in LOOKUPS
            },
        }

    yield row("start", start)
    for tokens in options.tokens:
        some, more = (
            AttentionInputs(*(part[: tokens // part.shape[1]] for part in seen))
            for seen in (text, repeated)
        )
        both = AttentionInputs(*(torch.cat(parts) for parts in zip(some, more, strict=True)))
        fits = [("and as many repeated", both, LEAK)]
        if tokens == options.tokens[0]:
            fits = [("ReLU's gradient", some, 0.0), ("", some, LEAK), *fits]
        for name, blocks, leak in fits:
            attention = copy.deepcopy(start)
            layer_fit.LEAK = leak
            fit(attention, blocks, options.passes, 0, crowd)
            yield row(f"{tokens:,} tokens" + f", {name}" * bool(name), attention)
    few = AttentionInputs(*(part[: options.free_blocks] for part in held_out))
    found = free_divergences(start, few, options.free_steps)
    yield {"fit": f"free, {options.free_steps} steps", "held_out": by_kind(found, kinds)}


def log_maps(attention: CocaAttention, q: Tensor, t: Tensor, seen: AttentionInputs) -> Tensor:
    """CoCA's log maps, (b, h, m, n), from queries (b, h, m, d) and coefficients (b, g, n, j)."""
    rows = torch.arange(q.shape[2]).expand(len(q), -1)
    query, key = folded(attention, q, t, (seen.cos, seen.sin), rows)
    return (scores(query, key) + later_keys(rows, q.shape[2])).log_softmax(-1)


def maps_of(seen: AttentionInputs) -> Tensor:
    """The original's maps, (b, h, m, n)."""
    rows = torch.arange(seen.inputs.shape[1]).expand(len(seen.inputs), -1)
    return (
        scores(seen.queries.transpose(1, 2), seen.keys) + later_keys(rows, rows.shape[1])
    ).softmax(-1)


def divergence_of_heads(log_maps: Tensor, maps: Tensor) -> Tensor:
    """KL(original's map || CoCA's) in nats, mean over blocks and queries: (b, h, m, n) to (h,)."""
    return (torch.xlogy(maps, maps) - maps * log_maps).sum(-1).mean((0, 2))


def lookups(maps: Tensor) -> dict[str, list[float]]:
    """The retrieval mass of every head, from maps (b, h, m, n) of sequences whose halves are equal:
    the mean over queries.
    """
    half = maps.shape[-1] // 2
    later = torch.arange(half + 1, 2 * half)
    return {
        "previous": maps.diagonal(-1, dim1=2, dim2=3).mean((0, 2)).tolist(),
        "induction": maps[:, :, later, later - half + 1].mean((0, 2)).tolist(),
    }


def heads(masses: list[float]) -> list[int]:
    return [head for head, mass in enumerate(masses) if mass >= LOOKUP_MASS]


@torch.no_grad()
def dead(attention: CocaAttention, text: AttentionInputs) -> float:
    return 1 - (attention.coefficients(text.inputs) > 0).any(2).any(0).float().mean().item()


def free_divergences(attention: CocaAttention, seen: AttentionInputs, steps: int) -> Tensor:
    """The divergence of every head, (h,), with free queries and coefficients for every token, which
    start from those of `attention`.
    """
    with torch.no_grad():
        q, t = attention.queries(seen.inputs), attention.coefficients(seen.inputs).relu()
    # above zero, where ReLU has a gradient
    q, t = q.requires_grad_(True), (t + 0.05 * t.mean()).requires_grad_(True)
    optimizer = torch.optim.Adam(
        [{"params": [x], "lr": 0.03 * x.detach().square().mean().sqrt().item()} for x in (q, t)]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    maps = maps_of(seen)
    for _ in range(steps):
        divergence_of_heads(log_maps(attention, q, t, seen), maps).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return divergence_of_heads(log_maps(attention, q, t, seen), maps)


def kinds_of_heads(maps: Tensor) -> list[str]:
    """Where each head puts more than half of its mass, as a mean over all queries but the first."""
    first = maps[:, :, 1:, 0].mean((0, 2))
    before = maps[:, :, 1:].diagonal(dim1=2, dim2=3).mean((0, 2))
    return [
        KINDS[0 if a > 0.5 else 1 if b > 0.5 else 2] for a, b in zip(first, before, strict=True)
    ]


def by_kind(divergence: Tensor, kinds: list[str]) -> dict[str, float]:
    of = {
        kind: [value for value, own in zip(divergence.tolist(), kinds, strict=True) if own == kind]
        for kind in KINDS
    }
    found = {kind: sum(values) / len(values) for kind, values in of.items() if values}
    return {"all": divergence.mean().item(), **found}


def show(rows: list[dict]) -> None:
    """Print the held-out divergence as a mean over the layers that have such heads, and the mass of
    retrieval heads as a mean over the heads.
    """
    names = ["all heads", *KINDS, "dead", *LOOKUPS]
    print(f"| constraint | fit | {' | '.join(names)} |\n|---|---|" + "---:|" * len(names))
    for constraint, name in dict.fromkeys((row["constraint"], row["fit"]) for row in rows):
        same = [row for row in rows if (row["constraint"], row["fit"]) == (constraint, name)]
        values = [
            [row["held_out"][kind] for row in same if kind in row["held_out"]]
            for kind in ("all", *KINDS)
        ]
        values += [[row["dead"] for row in same if "dead" in row]]
        values += [[mass for row in same for mass in row.get(kind, [])] for kind in LOOKUPS]
        print(f"| {constraint} | {name} | {' | '.join(mean(found) for found in values)} |")
    masses = {
        kind: [mass for row in rows for mass in row.get(f"{kind}_original", [])] for kind in LOOKUPS
    }
    print("of the original:", ", ".join(f"{kind} {mean(some)}" for kind, some in masses.items()))


def mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
