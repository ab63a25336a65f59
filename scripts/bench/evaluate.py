"""Perplexity over long documents: tokens/s of `coca-eval perplexity` beside the arithmetic of
YaRN's script.

    python scripts/bench/evaluate.py --out docs/results/h200/evaluate.json            # documents and windows of 32k
    python scripts/bench/evaluate.py --model DIR --lengths 2048 --documents 2 --tokens 8192 --threads 2

Both score the same windows of the same model (all tokens of a document's first window, the last
`stride` of later ones) and must find the same perplexity. YaRN's script asks the model for its loss
with -100 before the scored tokens: logits of every position, in fp32, shifted. coca-eval asks for
the logits of scored positions only and adds up their losses in pieces. Token ids are random; so are
the weights without `--model`.
"""

import functools
import math

import measure
import torch
from measure import DEVICE, check, clear, make_model, parse, ratio, run_all
from transformers import AutoModelForCausalLM

from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.perplexity import VARIANTS, Window, compute_windows, token_losses


def main() -> None:
    parser = measure.arguments(__doc__, [32768], shape="350m", repeats=3, warmup=1)
    parser.add_argument("--model", help="a checkpoint, instead of random weights of the shape")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768 + 1024, help="of a document")
    parser.add_argument("--stride", type=int, default=256, help="256 is the script's default")
    parser.add_argument(
        "--batch", type=int, default=1, help="windows at a time, of ours; the script has one"
    )
    options = parse(parser)
    if options.smoke:
        options.tokens, options.stride, options.model = 90, 16, None
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
        model = model.to(DEVICE).eval()
    else:
        model = make_model("CoCA slack", options.shape, options.dtype)
    documents = [torch.randint(97, (options.tokens,)) for _ in range(options.documents)]
    columns = {
        **{"rival": "rival", "length": "length", "s": "seconds", "CPU s": "cpu_seconds"},
        **{"scored tokens/s": "tokens_per_second", "x YaRN's": "over_yarn"},
        **{"x, CPU time": "over_yarn_cpu", "perplexity": "perplexity"},
        "GiB added": ("peak_bytes", 2**-30),
    }
    about = f"documents of {options.tokens}, stride {options.stride}"
    title = f"perplexity, {options.model or 'random weights'}, {about}"
    measured = functools.partial(measure_length, model=model, documents=documents, options=options)
    run_all("evaluate-bench", title, columns, measured, options, options.lengths)


def measure_length(length: int, model, documents: list[torch.Tensor], options) -> list[dict]:
    windows = VARIANTS["yarn"].windows([len(ids) for ids in documents], length, options.stride, [])
    scored = sum(window.tokens for window in windows)
    means: dict[str, list[float]] = {}

    def theirs(i: int) -> None:
        means["YaRN's script"] = [yarn_loss(model, documents, window) for window in windows]

    def ours(i: int) -> None:
        def compute(batch: list[Window]) -> list[float]:
            return token_losses(model, documents, batch).double().mean(-1).tolist()

        try:
            _, means["coca-eval"] = compute_windows(windows, compute, Batches(options.batch))
        except NoValue as failure:
            raise torch.OutOfMemoryError(str(failure)) from failure

    rivals = {"YaRN's script": theirs, "coca-eval": ours}
    results = measure.compare(rivals, options.repeats, options.warmup)
    perplexity = {name: math.exp(math.fsum(each) / len(each)) for name, each in means.items()}
    if len(perplexity) == 2:
        expected, got = (math.log(perplexity[name]) for name in rivals)
        check("perplexity", abs(got - expected) / expected, options.dtype)
    clear()
    baseline = results["YaRN's script"]
    about = {"shape": options.shape, "length": length, "stride": options.stride}
    about |= {"batch": options.batch, "windows": len(windows), "scored_tokens": scored}
    return [
        {
            **{"rival": name, **about, **result, "perplexity": perplexity.get(name)},
            "tokens_per_second": ratio(scored, result["seconds"]),
            "over_yarn": ratio(baseline["seconds"], result["seconds"]),
            "over_yarn_cpu": ratio(baseline["cpu_seconds"], result["cpu_seconds"]),
        }
        for name, result in results.items()
    ]


@torch.no_grad()
def yarn_loss(model, documents: list[torch.Tensor], window: Window) -> float:
    """The mean loss of a window's scored tokens, as eval/perplexity.py of jquesnelle/yarn computes
    it.
    """
    ids = documents[window.document][window.start : window.start + window.input_len + 1][None].to(
        model.device
    )
    labels = ids.clone()
    labels[:, : -window.tokens] = -100
    return model(ids, labels=labels, use_cache=False).loss.item()


if __name__ == "__main__":
    main()
