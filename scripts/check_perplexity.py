"""Check coca-eval's perplexity of a real model on real books against two independent computations.

    python scripts/check_perplexity.py quickstart/original ../shared/data/books-test.parquet \\
        --out docs/results/perplexity-check.json

transformers: for lengths up to `--two-windows` tokens, its own loss of every window, with -100 for
tokens that are not scored. Books are cut to the length plus 256 tokens, so there is a second window
`stride` after the first. For longer lengths two windows would take hours on a CPU, so books are cut
to one. No token's loss depends on later tokens, so one forward of the longest window gives
transformers' losses for all of these lengths.

lm-eval: its rolling perplexity. Its windows are disjoint and begin with a token that is not scored,
and the last one reads back. They equal coca-eval's windows with a stride of the length if the text
is a multiple of the length; here it is two windows long.

Everything is in float32. Lengths that OUT already has are not computed again, and other settings
are refused there. The exit code is 1 if a perplexity differs by more than 0.1% or is not a number.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf.documents import read_documents
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, load_model
from coca_hf.evaluate.perplexity import perplexity_rows
from coca_hf.evaluate.rows import RowStore, Run, command_line
from coca_hf.evaluate.sample import Sample, draw_sample
from coca_hf.files import replace_text
from coca_hf.provenance import now, versions

LARGEST_DIFFERENCE = 1e-3
SECOND_WINDOW = 256  # tokens that it scores
PACKAGES = ("coca-hf", "torch", "transformers", "lm-eval")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    against = "lengths of the comparison with lm-eval"
    parser.add_argument("--rolling-lengths", default="512,1024", help=against)
    parser.add_argument("--books", type=int, default=10)
    parser.add_argument("--stride", type=int, default=512)
    longest = "the longest length with a second window"
    parser.add_argument("--two-windows", type=int, default=1024, help=longest)
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every length")
    options = parser.parse_args()
    loaded = load_model(options.model, "float32")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {document.name: document.text for document in read_documents(options.data)}
    settings = {"model": loaded.name, "data": Path(options.data).name}
    settings |= {name: getattr(options, name) for name in ("books", "stride", "two_windows")}
    found = settings | {"rows": []}
    if options.out.exists():
        found = json.loads(options.out.read_text())
    if (made := {name: found.get(name) for name in settings}) != settings:
        parser.error(f"{options.out} was made with {made}, got {settings}; choose another --out")
    rows: list[dict] = found["rows"]
    others = ("lm-eval", "transformers")
    done = {(row["length"], other) for row in rows for other in others if other in row}

    def add(length: int, stride: int, row: dict, against: str, value: float, began: float) -> None:
        one = {"length": length, "stride": stride, "books": row["documents"]}
        one |= {"tokens": row["tokens"], "coca-eval": row["value"], against: value}
        one |= {"difference": row["value"] / value - 1}
        rows.append(one | {"seconds": round(time.perf_counter() - began)})
        print(json.dumps(rows[-1]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(options.out, json.dumps(result(rows, settings, row), indent=1) + "\n")

    def lengths_left(text: str, against: str) -> list[int]:
        return [length for length in map(int, text.split(",")) if (length, against) not in done]

    for length in lengths_left(options.rolling_lengths, "lm-eval"):
        began = time.perf_counter()
        cut = 2 * length
        sample = draw_sample(loaded, options.data, cut, documents=options.books, max_tokens=cut)
        rolling = HFLM(pretrained=model, tokenizer=tokenizer, max_length=length)
        value = rolling_perplexity(rolling, sample)
        prefix = torch.tensor([rolling.prefix_token_id])
        sample.token_ids = [torch.cat((prefix, ids)) for ids in sample.token_ids]
        add(length, length, measure(loaded, sample, length, length), "lm-eval", value, began)
    left = lengths_left(options.lengths, "transformers")
    losses: list[torch.Tensor] = []
    for length in left:
        began, stride = time.perf_counter(), min(options.stride, length)
        second = SECOND_WINDOW if length <= options.two_windows else 0
        cut = length + second + 1
        sample = draw_sample(loaded, options.data, cut, documents=options.books, max_tokens=cut)
        longest = cut if second else max(left) + 1
        ids = [torch.tensor(tokenizer(texts[name])["input_ids"][:longest]) for name in sample.names]
        if second:
            value = plain_perplexity(model, ids, length, stride)
        else:
            losses = losses or [plain_losses(model, some) for some in ids]
            value = math.exp(torch.stack([some[:length] for some in losses]).double().mean())
        add(length, stride, measure(loaded, sample, length, stride), "transformers", value, began)
    # NaN is not at most anything
    return int(not all(abs(row["difference"]) <= LARGEST_DIFFERENCE for row in rows))


def measure(loaded: LoadedModel, sample: Sample, length: int, stride: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        run = Run(loaded, [length], [Rope("default")], RowStore(Path(out)))
        (row,) = perplexity_rows(run, sample, stride)
    return row


@torch.no_grad()
def plain_perplexity(model, texts: list[torch.Tensor], length: int, stride: int) -> float:
    """Perplexity over windows of `length` inputs, which are one token longer with their labels."""
    total, tokens = 0.0, 0
    for ids in texts:
        scored = 1  # nothing predicts the first token
        for start in range(0, len(ids), stride):
            window = ids[None, start : start + length + 1]
            new = start + window.shape[1] - scored
            labels = window.clone()
            labels[:, : window.shape[1] - new] = -100
            total += model(window, labels=labels, use_cache=False).loss.item() * new
            tokens, scored = tokens + new, scored + new
            if scored == len(ids):
                break
    return math.exp(total / tokens)


@torch.no_grad()
def plain_losses(model, ids: torch.Tensor) -> torch.Tensor:
    """Nats of every token but the first."""
    logits = model(ids[None, :-1], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def rolling_perplexity(model: HFLM, sample: Sample) -> float:
    """lm-eval's perplexity of the same tokens, those of `sample`."""
    tokens_of = dict(zip(sample.names, sample.token_ids, strict=True))
    model.tok_encode = lambda name, **_: tokens_of[name].tolist()  # type: ignore[method-assign]
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(name,), idx=number)
        for number, name in enumerate(sample.names)
    ]
    total = math.fsum(model.loglikelihood_rolling(requests, disable_tqdm=True))
    return math.exp(-total / sum(map(len, sample.token_ids)))


def result(rows: list[dict], settings: dict, row: dict) -> dict:
    return {
        "task": "perplexity-check",
        **settings,
        "document_names": row["document_names"],
        "seed": row["seed"],
        "dtype": row["dtype"],
        "rows": rows,
        "command": f"python scripts/{command_line()}",
        "hardware": f"{row['device']} of {os.cpu_count()} cores",
        "versions": versions(*PACKAGES),
        "date": now(),
    }


if __name__ == "__main__":
    sys.exit(main())
