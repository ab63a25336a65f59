"""Compare factors on the scores of a CoCA model's converted layers, by position in long windows:

    log_scale.py MODEL --length 8192 --documents 1 --skip 2 1:0:64 1.1:0:64 1:0.05:64

Each is CONSTANT:SCALE:FROM, the factor CONSTANT * (1 + SCALE * ln(tokens / FROM)) of a query that sees these tokens;
docs/results/log-scale has the numbers. The documents are the first of the held-out novels, after `--skip` of them.
"""

import argparse
import itertools

import torch
from pyarrow import parquet
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import coca_hf  # noqa: F401  registers the models
from coca_hf.models.attention import CocaAttention, KeptAttention

BOUNDS = (0, 256, 1024, 8192)


class Factor:
    def __init__(self, text: str):
        self.text = text
        self.constant, self.scale, self.start = map(float, text.split(":"))

    def use_(self, model) -> None:
        """Multiply the scores of converted layers, in place."""
        for module in model.modules():
            if isinstance(module, CocaAttention) and not isinstance(module, KeptAttention):
                module.sharpened = self

    def __call__(self, query: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        tokens = (position_ids + 1)[:, None, :, None] / self.start
        factor = self.constant * (1 + self.scale * tokens.clamp(min=1).log())
        return query * factor.to(query.dtype)


@torch.inference_mode()
def token_losses(model, ids: torch.Tensor) -> torch.Tensor:
    """Nats of every token of (m + 1,) but the first, (m,)."""
    states = model.model(ids[None, :-1]).last_hidden_state[0]
    pairs = zip(states.split(512), ids[1:].split(512), strict=True)
    return torch.cat(
        [cross_entropy(model.lm_head(x).float(), y, reduction="none") for x, y in pairs]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("factors", nargs="+", type=Factor)
    parser.add_argument("--data", default="../shared/data/books-test.parquet")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = parquet.read_table(options.data).column("text").to_pylist()
    documents = (tokenizer(text[: 8 * options.length])["input_ids"] for text in texts)
    whole = [ids for ids in documents if len(ids) > options.length]
    chosen = whole[options.skip : options.skip + options.documents]
    for factor in options.factors:
        factor.use_(model)
        losses = torch.stack(
            [token_losses(model, torch.tensor(ids[: options.length + 1])) for ids in chosen]
        ).mean(0)
        ranges = itertools.pairwise(BOUNDS)
        cells = [
            f"{first} to {end}: {losses[first:end].mean().exp():.2f}"
            for first, end in ranges
            if first < options.length
        ]
        print(factor.text, *cells, sep="  ", flush=True)


if __name__ == "__main__":
    main()
