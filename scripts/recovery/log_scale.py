"""Compare factors on the scores of a CoCA model's converted layers, by position in long windows:

    log_scale.py MODEL --length 8192 --documents 1 --skip 2 1:0:64 1.1:0:64 1:0.05:64

Each is CONSTANT:SCALE:FROM, for the factor CONSTANT * (1 + SCALE * ln(tokens / FROM)) of a query that sees `tokens`;
docs/results/log-scale has the numbers. The documents are the first of the held-out novels, after `--skip` of them.
"""

import argparse
import itertools

import torch
from pyarrow import parquet

from coca_hf.evaluate.loaded_model import load_model
from coca_hf.evaluate.perplexity import Window, token_losses
from coca_hf.models import attention

BOUNDS = (0, 256, 1024, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("factors", nargs="+")
    parser.add_argument("--data", default="../shared/data/books-test.parquet")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    loaded, length = load_model(options.model, "bfloat16"), options.length
    modules = dict(loaded.model.named_modules())
    coefficients = [module for name, module in modules.items() if name.endswith("t_proj")]
    trained = [module.weight.detach().clone() for module in coefficients]
    texts = parquet.read_table(options.data).column("text").to_pylist()
    documents = (loaded.tokenizer(text[: 8 * length])["input_ids"] for text in texts)
    whole = (torch.tensor(ids) for ids in documents if len(ids) > length)
    chosen = list(itertools.islice(whole, options.skip, options.skip + options.documents))
    for factor in options.factors:
        constant, loaded.model.config.coca_log_scale, start = map(float, factor.split(":"))
        attention.LOG_SCALE_FROM = start
        for module, weight in zip(coefficients, trained, strict=True):
            module.weight.data = weight * constant
        losses = sum(
            token_losses(loaded.model, chosen, [Window(number, 0, length, length)])[0]
            for number in range(len(chosen))
        ) / len(chosen)
        ranges = [pair for pair in itertools.pairwise(BOUNDS) if pair[0] < length]
        cells = [f"{a} to {b}: {losses[a:b].mean().exp():.2f}" for a, b in ranges]
        print(factor, *cells, sep="  ", flush=True)


if __name__ == "__main__":
    main()
