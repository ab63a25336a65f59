"""Check coca-eval's perplexity of a real model on real books against plain transformers: equal within 0.1%.

    python scripts/check_perplexity.py SmolLM2-135M books-test.parquet --lengths 512,1024,2048,4096,8192

The other computation shares nothing with coca_hf: transformers' own loss of each window, with -100 for what is not
scored. Every book is cut to the length and half a stride more, so that every length has a second window.
Exit code 1 where any length differs by more.
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf.documents import read_documents
from coca_hf.evaluate.load import load_subject
from coca_hf.evaluate.perplexity import perplexity_rows
from coca_hf.evaluate.rope import Rope
from coca_hf.evaluate.rows import RowStore
from coca_hf.evaluate.sample import draw_sample


@torch.no_grad()
def plain_perplexity(model, texts: list[torch.Tensor], length: int, stride: int) -> float:
    """Sum of losses over tokens; windows of `length` inputs, so of one token more with their labels."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--books", type=int, default=10)
    parser.add_argument("--stride", type=int, default=512)
    arguments = parser.parse_args()
    subject = load_subject(arguments.model, "float32")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = {document.name: document.text for document in read_documents(arguments.data)}
    worst = 0.0
    for length in map(int, arguments.lengths.split(",")):
        cut, began = length + arguments.stride // 2, time.perf_counter()
        sample = draw_sample(subject, arguments.data, length, documents=arguments.books, max_tokens=cut)
        with tempfile.TemporaryDirectory() as out:
            (row,) = perplexity_rows(
                subject, sample, [length], arguments.stride, [Rope("default")], RowStore(Path(out))
            )
        ids = [torch.tensor(tokenizer(texts[name])["input_ids"][:cut]) for name in sample.names]
        expected = plain_perplexity(model, ids, length, arguments.stride)
        difference = row["value"] / expected - 1
        worst = max(worst, abs(difference))
        print(
            f"length {length}: coca-eval {row['value']:.6f}, transformers {expected:.6f}, "
            f"difference {difference:+.1e}; {len(ids)} books, {row['tokens']} tokens scored, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
