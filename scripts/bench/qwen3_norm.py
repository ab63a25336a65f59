"""What Qwen3's key norm should become in CoCA, on a small Qwen3 trained from scratch on bytes of
English.

    python scripts/bench/qwen3_norm.py --out docs/results/qwen3-norm.json

Every seed trains one model, converts it three ways and trains each on with the same batches:
`none`, which is what coca_hf does (coca_hf/models/qwen3.py says why); RMSNorm of a head's
coefficients `before` the ReLU, and `after` it. All start with scores bounded as the original's.
Prints held-out perplexity per byte, writes JSON. The text is pydoc's own, which every Python has.
"""

import argparse
import copy
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from measure import write
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from coca_hf import patch_
from coca_hf.models.qwen3 import CocaQwen3Attention

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LENGTH, BATCH = 128, 8


class NormBefore(CocaQwen3Attention):
    def coefficients(self, hidden_states: Tensor) -> Tensor:
        return self.t_norm(super().coefficients(hidden_states)).relu()


class NormAfter(CocaQwen3Attention):
    def coefficients(self, hidden_states: Tensor) -> Tensor:
        return self.t_norm(super().coefficients(hidden_states).relu())


VARIANTS = {"before": NormBefore, "after": NormAfter, "none": CocaQwen3Attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="of the original")
    parser.add_argument(
        "--coca-steps", type=int, nargs="+", default=[0, 50, 200], help="where to measure"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = torch.tensor(list(TEXT.encode()))
    held_out, training = data[: 64 * (LENGTH + 1)].view(64, -1), data[64 * (LENGTH + 1) :]
    rows = []
    for seed in range(options.seeds):
        original = qwen3(seed)
        train(original, training, range(options.steps), 1e-3, seed)
        rows.append(
            {
                "seed": seed,
                "variant": "original",
                "steps": options.steps,
                "ppl": perplexity(original, held_out),
            }
        )
        for constraint in ("slack", "strict"):
            for name, attention in VARIANTS.items():
                model = converted(original, attention, constraint)
                for first, last in zip([0, *options.coca_steps], options.coca_steps, strict=False):
                    train(model, training, range(first, last), 5e-4, seed + 100)
                    value = perplexity(model, held_out)
                    rows.append(
                        {
                            "seed": seed,
                            "constraint": constraint,
                            "variant": name,
                            "steps": last,
                            "ppl": value,
                        }
                    )
                    print(rows[-1], file=sys.stderr)
    show(rows, options.coca_steps)
    write({"task": "qwen3-norm", "rows": rows}, options.out)


def qwen3(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=256, max_position_embeddings=LENGTH, **sizes, **heads)
    )


def converted(original: Qwen3ForCausalLM, attention: type, constraint: str) -> torch.nn.Module:
    model = patch_(copy.deepcopy(original), constraint)
    for layer, old in zip(model.model.layers, original.model.layers, strict=True):
        ours = layer.self_attn
        ours.__class__ = attention
        # |score| <= c d |w_q|^2 sqrt(j) w_t, the original's d |w_q| |w_k|
        if attention is not CocaQwen3Attention:
            q_size, k_size = (
                norm.weight.abs().max() for norm in (old.self_attn.q_norm, old.self_attn.k_norm)
            )
            c = 2**0.5 if constraint == "slack" else 1.0
            ours.t_norm = Qwen3RMSNorm(ours.head_dim // 2, eps=original.config.rms_norm_eps)
            ours.t_norm.weight.data[:] = k_size / (c * q_size * (ours.head_dim / 2) ** 0.5)
    return model


def train(model: torch.nn.Module, data: Tensor, steps: range, rate: float, seed: int) -> None:
    """AdamW with a warm-up of 20 steps; its moments start anew with every call, alike for all
    variants.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for number, step in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate * min((number + 1) / 20, 1)
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=draw)
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: Tensor) -> float:
    return math.exp(model(ids, labels=ids).loss.item())


def show(rows: list[dict], steps: list[int]) -> None:
    print("| form | norm of t | " + " | ".join(f"{step} steps" for step in steps) + " |")
    print("|---|---|" + "---|" * len(steps))
    kinds = dict.fromkeys(
        (row["constraint"], row["variant"]) for row in rows if "constraint" in row
    )
    for constraint, variant in kinds:
        cells = []
        for step in steps:
            same = [
                r
                for r in rows
                if (r.get("constraint"), r["variant"], r["steps"]) == (constraint, variant, step)
            ]
            cells.append(" / ".join(f"{row['ppl']:.2f}" for row in same))
        print(f"| {constraint} | {variant} | " + " | ".join(cells) + " |")
    print(
        "original: "
        + " / ".join(f"{row['ppl']:.2f}" for row in rows if row["variant"] == "original")
    )


if __name__ == "__main__":
    main()
