"""Bytes and operations of every row of docs/performance.md, and the least time they take on an
H200.

    python scripts/bench/floors.py --results docs/results/h200   # the page's table, as Markdown

A floor is the larger of the bytes that must move through memory (inputs read once, outputs written
once) over 4.8 TB/s and the multiplications and additions of matrix products over 989 TFLOPS, dense
bf16: the vendor's numbers (nvidia.com/en-us/data-center/h200). `predicted` is the rival's floor
over CoCA's. `measured` comes from the results of the other benchmarks in this folder, if they
exist.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import NamedTuple

BANDWIDTH, RATE = 4.8e12, 989e12
BF16 = 2
UNMEASURED = "not yet measured"


class Shape(NamedTuple):
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    def layer_weights(self, coca: bool) -> int:
        kv = self.kv_heads * self.dim
        return (
            2 * self.hidden**2
            + self.hidden * (kv + (kv // 2 if coca else kv))
            + 3 * self.hidden * self.mlp
        )


LLAMA_7B = Shape(4096, 11008, 32, 32, 32, 32000)
LLAMA_3_8B = Shape(4096, 14336, 32, 32, 8, 128256)
M350 = Shape(1024, 2736, 24, 16, 16, 50277)
SMOLLM2 = Shape(576, 1536, 30, 9, 3, 49152)


class Row(NamedTuple):
    what: str
    against: str
    goal: str
    theirs: float  # seconds, their floor
    ours: float  # seconds
    measured: str


def floor(num_bytes: float, operations: float) -> float:
    return max(num_bytes / BANDWIDTH, operations / RATE)


def attention(shape: Shape, length: int) -> tuple[float, float]:
    """The floors of forward and backward of a layer's attention after its projections, batch 1: the
    contraction's, and ours.

    Ours is causal attention that skips masked positions: 2 products forward and 5 backward, each of
    h L^2 d operations. The contraction computes all L^2: 2 products forward and 4 backward. For
    each of h L^2 numbers, PyTorch's operators (product, scaling, mask, softmax to fp32, cast and
    product) read and write 22 bytes forward, and backward as many plus 6 bytes of what was kept.
    """
    product = shape.heads * length**2 * shape.dim
    tokens = length * shape.dim * BF16
    fold = tokens * (2 * shape.heads + 1.5 * shape.kv_heads)  # q and t read, q' and k' written
    # query, key, value read, output written
    around = tokens * (2 * shape.heads + 2 * shape.kv_heads)
    ours = floor(3 * fold + 3 * around, 7 * product)
    theirs = floor(shape.heads * length**2 * (22 + 22 + 6), 6 * 2 * product)
    return theirs, ours


def model_operations(shape: Shape, length: int, coca: bool, logits: int) -> float:
    """Operations of a causal forward over `length` tokens, with the logits of `logits` of them."""
    linear = 2 * shape.layers * shape.layer_weights(coca) * length
    attention = 2 * shape.layers * shape.hidden * length**2  # two products over half of the square
    return linear + attention + 2 * shape.hidden * shape.vocab * logits


def decode_bytes(shape: Shape, length: int, coca: bool) -> float:
    """The bytes of a layer's cache for one row: keys or t, values, and CoCA's angles, once for all
    heads.
    """
    kv = shape.kv_heads * shape.dim
    return BF16 * length * (kv * 1.5 + shape.dim if coca else kv * 2)


def rows(results: Path) -> list[Row]:
    made: list[Row] = []

    def add(what: str, against: str, goal: str, floors, file: str, rival: str, **where) -> None:
        key = where.pop("key", "over_llama")
        found = lookup(results / file, key, rival=rival, **where)
        made.append(Row(what, against, goal, *floors, found))

    for length, goal in ((2048, ">= 5x"), (8192, ">= 10x"), (32768, "it runs out of memory")):
        what, file = f"attention forward + backward, {length // 1024}k", "attention.json"
        where = {"key": "over_contraction", "length": length}
        floors, rival = attention(LLAMA_7B, length), "CoCA slack fused sdpa"
        add(what, "released contraction", goal, floors, file, rival, **where)
        if lookup(results / file, "error", rival="contraction", length=length) == "OOM":
            made[-1] = made[-1]._replace(measured="it did, we do not")

    length = 2048
    linear = [6 * LLAMA_7B.layer_weights(coca) * length for coca in (False, True)]
    floors = [floor(0, operations + 7 * LLAMA_7B.hidden * length**2) for operations in linear]
    where = {"train": "all", "length": length}
    what = "training step, 7B layer, 2k"
    add(what, "HF LLaMA", ">= 1.03x", floors, "train.json", "CoCA slack", **where)

    for length in (2048, 8192, 32768):
        forwards = [model_operations(LLAMA_7B, length, coca, 1) for coca in (False, True)]
        floors = [floor(0, operations) for operations in forwards]
        what, file = f"prefill, 7B, {length // 1024}k", "prefill.json"
        add(what, "HF LLaMA", ">= 1.03x", floors, file, "CoCA slack", length=length)

    decoded = [(LLAMA_7B, "7B", "decode.json", n) for n in (8192, 32768, 131072)]
    decoded.append((LLAMA_3_8B, "llama-3-8b", "decode-gqa.json", 32768))
    for (shape, name, file, length), batch in itertools.product(decoded, (1, 8, 32)):
        caches = [batch * decode_bytes(shape, length, coca) for coca in (False, True)]
        floors = [floor(num_bytes, 0) for num_bytes in caches]
        what = f"decode attention, {name} layer, {length // 1024}k, batch {batch}"
        goal = ">= 1.25x" if (shape, length) == (LLAMA_7B, 32768) else ""
        where = {"length": length, "batch": batch}
        against, rival = "fastest of HF LLaMA's", "CoCA slack fused"
        add(what, against, goal, floors, file, rival, **where)

    length, layers = 32768, 8
    whole = [
        BF16 * (layers * LLAMA_7B.layer_weights(coca) + LLAMA_7B.hidden * LLAMA_7B.vocab)
        + layers * decode_bytes(LLAMA_7B, length, coca)
        for coca in (False, True)
    ]
    floors, file = [floor(num_bytes, 0) for num_bytes in whole], "generate.json"
    what = f"a new token, {layers} layers of 7B, 32k, compiled"
    where = {"length": length, "layers": layers}
    add(what, "HF LLaMA", ">= 1.10x", floors, file, "CoCA slack coca", **where)

    stride = 256
    windows = -(-1024 // stride) + 1  # of documents of `length` and 1024 tokens
    # logits: of every position, of those that are scored
    asked = [windows * length, length + (windows - 1) * stride]
    operations = [
        windows * model_operations(M350, length, True, 0) + 2 * M350.hidden * M350.vocab * logits
        for logits in asked
    ]
    # fp32 logits of every position: the cast, the log-softmax and the loss read or write them five
    # times
    num_bytes = [logits * M350.vocab * (BF16 + 5 * 4) for logits in asked]
    floors = [o / RATE + n / BANDWIDTH for o, n in zip(operations, num_bytes, strict=True)]
    what, where = "perplexity, 350M, 32k documents", {"key": "over_yarn", "length": length}
    add(what, "YaRN's script", ">= 1.5x", floors, "evaluate.json", "coca-eval", **where)
    return made


def lookup(file: Path, key: str, **where) -> str:
    """A rival's value in a benchmark's result, or that it was not measured."""
    if not file.exists():
        return UNMEASURED
    for row in json.loads(file.read_text())["rows"]:
        if all(row.get(name) == value for name, value in where.items()):
            value = row.get(key)
            if value is None:
                return "out of memory" if row.get("error") == "OOM" else UNMEASURED
            return f"{value:.2f}x" if isinstance(value, float) else value
    return UNMEASURED


def table(made: list[Row]) -> str:
    lines = [
        "| | against | goal | their floor | our floor | predicted | measured |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.what} | {row.against} | {row.goal} | {duration(row.theirs)} | "
        f"{duration(row.ours)} | {row.theirs / row.ours:.2f}x | {row.measured} |"
        for row in made
    ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    unit, factor = next(x for x in (("s", 1), ("ms", 1e3), ("us", 1e6)) if seconds * x[1] >= 1)
    return f"{seconds * factor:.3g} {unit}"


def others() -> list[tuple[str, str]]:
    """The rows that are not times on an H200."""
    cache = [LLAMA_7B.layers * decode_bytes(LLAMA_7B, 1, False)]
    cache.append(
        LLAMA_7B.layers * (decode_bytes(LLAMA_7B, 1, True) - BF16 * LLAMA_7B.dim)
        + BF16 * LLAMA_7B.dim
    )
    length = 32768
    weights = BF16 * (M350.layers * M350.layer_weights(True) + M350.hidden * M350.vocab)
    held = BF16 * length * (2 * M350.hidden + 3 * M350.mlp)  # residual, normed, and the MLP's three
    operations = [model_operations(SMOLLM2, 2048, coca, 1) for coca in (False, True)]
    return [
        ("cache bytes a token, 7B", f"{cache[0]:,.0f} and {cache[1]:,.0f}: {cache[1] / cache[0]:.4f}x, with angles"),
        ("peak memory, 350M, 32k prefill", f"{(weights + held) / 2**30:.2f} GiB: weights, and one layer's activations"),
        ("prefill, SmolLM2-135M, 2k, operations", f"{operations[0]:.4g} and {operations[1]:.4g}: "
         f"{operations[0] / operations[1]:.3f}x"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=Path("docs/results/h200"))
    options = parser.parse_args()
    print(table(rows(options.results)) + "\n")
    print("\n".join(f"- {what}: {value}" for what, value in others()))


if __name__ == "__main__":
    main()
