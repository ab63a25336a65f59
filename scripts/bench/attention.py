"""Attention alone, from projections to output: CoCA in every implementation that this machine has,
beside LLaMA's.

    python scripts/bench/attention.py --graph --lengths 2048 8192 32768 --out docs/results/h200/attention.json
    python scripts/bench/attention.py --mode forward --lengths 512 1024 2048 4096 8192 16384 32768 65536 131072
    python scripts/bench/attention.py --mode fold                                 # rotation and fold alone

`contraction` is the released code's arithmetic: scores of three operands by opt_einsum
(coca_hf/models/reference.py), a mask, softmax in fp32, a product with the values. `plain`,
`compiled` (torch.compile) and `fused` (Triton, GPU) are ways to fold; attention is SDPA with the
kernel that PyTorch chooses, or with the one named. One layer's heads, batch 1.
"""

import contextlib
import itertools
from functools import partial

import measure
import torch
from measure import DEVICE, check, compare, parse, ratio, relative_error, run_all, sets_for
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from coca_hf.models.attention import FOLDS, QUERY_SCALE, plain_fold
from coca_hf.models.reference import coca_scores

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def main() -> None:
    parser = measure.arguments(__doc__, [2048, 8192, 32768])
    parser.add_argument(
        "--mode",
        choices=["both", "forward", "fold"],
        default="both",
        help="both: forward and backward",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="on a GPU: replay CUDA graphs, so that launching costs nothing",
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rivals whose names contain one of these"
    )
    options = parse(parser)
    columns = {
        **{"rival": "rival", "length": "length", "ms": ("seconds", 1e3)},
        **{"CPU ms": ("cpu_seconds", 1e3), "GiB added": ("peak_bytes", 2**-30)},
        **{"x contraction": "over_contraction", "x LLaMA": "over_llama", "error": "error"},
    }
    measured = partial(measure_length, options=options)
    run_all("attention-bench", options.mode, columns, measured, options, options.lengths)


def measure_length(length: int, options) -> list[dict]:
    heads, kv_heads, head_dim = measure.heads_of(options.shape)
    bytes_per_set = length * head_dim * (2 * heads + 3 * kv_heads) * options.dtype.itemsize
    sets = sets_for(bytes_per_set)
    learns = options.mode == "both"

    def projected(count: int, width: int) -> list[Tensor]:
        made = [
            torch.randn(1, length, count, width, device=DEVICE, dtype=options.dtype)
            for _ in range(sets)
        ]
        return [x.transpose(1, 2).requires_grad_(learns) for x in made]

    q, v = projected(heads, head_dim), projected(kv_heads, head_dim)
    k, t = projected(kv_heads, head_dim), projected(kv_heads, head_dim // 2)
    gradients = [
        torch.randn(1, heads, length, head_dim, device=DEVICE, dtype=options.dtype)
        for _ in range(sets)
    ]
    pairs = torch.arange(0, head_dim, 2, device=DEVICE) / head_dim
    angle = torch.arange(length, device=DEVICE)[:, None] * 10000.0**-pairs
    cos, sin = (x.to(options.dtype)[None, None] for x in (angle.cos(), angle.sin()))  # (1, 1, m, j)
    # (1, m, d), as LLaMA takes them
    whole_cos, whole_sin = (torch.cat((x, x), -1)[0] for x in (cos, sin))

    def attend(
        query: Tensor, key: Tensor, value: Tensor, kernel: str, scaling: float = head_dim**-0.5
    ) -> Tensor:
        grouped = {"enable_gqa": True} if heads != kv_heads else {}
        with sdpa_kernel(KERNELS[kernel]) if kernel in KERNELS else contextlib.nullcontext():
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, **grouped
            )

    def llama(i: int, kernel: str) -> Tensor:
        query, key = apply_rotary_pos_emb(q[i], k[i], whole_cos, whole_sin)
        return torch.cat((query, key), 1) if kernel == "none" else attend(query, key, v[i], kernel)

    def coca(i: int, fold, constraint: str, kernel: str) -> Tensor:
        query, key = fold(q[i], t[i], cos, sin, constraint)
        if kernel == "none":
            return torch.cat((query, key), 1)
        return attend(query, key, v[i], kernel, head_dim**-0.5 / QUERY_SCALE)

    def contraction(i: int) -> Tensor:
        scores = coca_scores(q[i], t[i], cos, sin, "slack") * head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(options.dtype)
        return weights @ repeat_kv(v[i], heads // kv_heads)

    torch.compiler.reset()
    folds = {
        "plain": plain_fold,
        "compiled": torch.compile(plain_fold, fullgraph=True, dynamic=False),
    }
    if DEVICE in FOLDS:
        folds["fused"] = FOLDS[DEVICE]
    if options.mode == "fold":
        forwards = {"LLaMA rotation": partial(llama, kernel="none")}
        kernels = dict.fromkeys(folds, ("none",))
    else:
        all_kernels = ("sdpa", *KERNELS)
        forwards = {"contraction": contraction}
        forwards |= {f"LLaMA {kernel}": partial(llama, kernel=kernel) for kernel in all_kernels}
        kernels = dict.fromkeys(folds, ("sdpa",)) | {"plain": all_kernels}
    for constraint, (name, fold) in itertools.product(("slack", "strict"), folds.items()):
        for kernel in kernels[name]:
            label = f"CoCA {constraint} {name}" + ("" if kernel == "none" else f" {kernel}")
            forwards[label] = partial(coca, fold=fold, constraint=constraint, kernel=kernel)
    forwards = {
        name: f for name, f in forwards.items() if any(part in name for part in options.only)
    }

    def runs(forward):
        def run(i: int) -> None:
            if learns:
                inputs = [x for x in (q[i], t[i], k[i], v[i]) if x.requires_grad]
                torch.autograd.grad(forward(i), inputs, gradients[i], allow_unused=True)
            else:
                with torch.no_grad():
                    forward(i)

        return run

    usable = {}
    for name, forward in forwards.items():
        if name == "contraction" and DEVICE == "cpu" and length > 8192:
            continue  # it would take minutes
        try:
            runs(forward)(0)
        except RuntimeError as failure:  # `compare` notes memory that runs out
            if any(words in str(failure) for words in ("No available kernel", "No viable backend")):
                continue
        usable[name] = forward
    errors = {name: check_small(name, folds, options) for name in usable}
    results = compare(
        {name: runs(f) for name, f in usable.items()},
        options.repeats,
        options.warmup,
        sets,
        options.graph,
    )

    def over(name: str, other: str) -> float | None:
        return ratio(results.get(other, {}).get("seconds"), results[name]["seconds"])

    against = "LLaMA rotation" if options.mode == "fold" else "LLaMA sdpa"
    about = {"shape": options.shape, "mode": options.mode, "length": length, "sets": sets}
    return [
        {
            **{"rival": name, **about, **result},
            **{"over_contraction": over(name, "contraction"), "over_llama": over(name, against)},
            "relative_error": errors[name],
        }
        for name, result in results.items()
    ]


def check_small(name: str, folds: dict, options) -> float | None:
    """The relative error of a fold's scores of 33 tokens, against the float64 contraction."""
    if not name.startswith("CoCA"):
        return None
    _, constraint, fold, *_ = name.split()
    heads, kv_heads, head_dim = measure.heads_of(options.shape)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, heads, 33, head_dim, generator=generator).to(DEVICE, options.dtype)
    t = torch.randn(1, kv_heads, 33, head_dim // 2, generator=generator).to(DEVICE, options.dtype)
    angle = torch.randn(1, 1, 33, head_dim // 2, generator=generator).to(DEVICE)
    cos, sin = angle.cos().to(options.dtype), angle.sin().to(options.dtype)
    query, key = folds[fold](q, t, cos, sin, constraint)
    scores = query @ repeat_kv(key, heads // kv_heads).mT / QUERY_SCALE
    expected = coca_scores(*(x.double() for x in (q, t, cos, sin)), constraint)
    return check(name, relative_error(scores, expected), options.dtype)


if __name__ == "__main__":
    main()
