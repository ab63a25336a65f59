"""FlashAttention 2, 3 and 4, FlexAttention and SDPA against eager attention, in half precision:
logits and decoding.

    python scripts/bench/flash.py --out docs/results/h200/flash.json  # a GPU; flash-attn, flash-attn-3, flash-attn-4

It runs slack and strict on rows of different lengths, padded on the left. Packages that are not
installed are named and left out. It prints a table, writes JSON with versions after every row, and
ends with an error if a result is further from eager attention than the dtype's rounding allows.
"""

import argparse
import itertools
from pathlib import Path

import torch
from measure import DEVICE, check, make_model, relative_error, show, write
from torch import Tensor
from transformers.utils import import_utils

from coca_hf.models.attention import CACHE

INSTALLED = {
    "flash_attention_2": import_utils.is_flash_attn_2_available,
    "flash_attention_3": import_utils.is_flash_attn_3_available,
    "flash_attention_4": import_utils.is_flash_attn_4_available,
    "flex_attention": lambda: True,
    "sdpa": lambda: True,
    "coca": lambda: True,
}
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LENGTHS = (200, 131)  # of the rows
DECODED = 9  # tokens at the end that come one by one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--attention", nargs="+", default=list(INSTALLED))
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    missing = [name for name in options.attention if name in INSTALLED and not INSTALLED[name]()]
    for name in missing:
        print(f"{name}: not installed, or no GPU")
    dtype = getattr(torch, options.dtype)
    rows: list[dict] = []
    installed = [name for name in options.attention if name not in missing]
    for name, constraint in itertools.product(installed, ("slack", "strict")):
        rows.append({"attention": name, "constraint": constraint} | errors(name, constraint, dtype))
        write({"task": "flash-bench", "dtype": options.dtype, "rows": rows}, options.out)
    names = ("attention", "constraint", "logits", "decoding")
    show("Relative error against eager attention", dict(zip(names, names, strict=True)), rows)


@torch.no_grad()
def errors(attention: str, constraint: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the logits of all tokens, and of those decoded with a cache."""
    model = make_model(
        f"CoCA {constraint}", "tiny", dtype, "eager", initializer_range=0.06, **SHAPE
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, model.config.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator
    ).to(DEVICE)
    first = max(LENGTHS) - torch.tensor(LENGTHS, device=DEVICE)[:, None]
    mask = (torch.arange(max(LENGTHS), device=DEVICE) >= first).long()
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation(attention)
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    found = {
        "logits": relative_error(logits[mask.bool()], expected[mask.bool()]),
        "decoding": relative_error(decoded(model, ids, mask), expected[:, -DECODED:]),
    }
    return {
        what: check(f"{attention}, {constraint}, {what}", error, dtype)
        for what, error in found.items()
    }


def decoded(model, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of the last `DECODED` tokens, each decoded with the cache of those before it: (b, n,
    vocabulary).
    """
    begun = ids.shape[1] - DECODED
    output = model(ids[:, :begun], attention_mask=mask[:, :begun], use_cache=True)
    steps = []
    for end in range(begun + 1, ids.shape[1] + 1):
        cache = output[CACHE]
        output = model(
            ids[:, end - 1 : end],
            attention_mask=mask[:, :end],
            **{CACHE: cache},
            use_cache=True,
        )
        steps.append(output.logits)
    return torch.cat(steps, dim=1)


if __name__ == "__main__":
    main()
