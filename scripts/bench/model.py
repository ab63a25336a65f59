"""Prefill: one forward of the whole model over a prompt, with the logits of the last token, CoCA
beside HF's LLaMA.

    python scripts/bench/model.py --lengths 2048 8192 32768 --out docs/results/h200/prefill.json
    python scripts/bench/model.py --shape 350m --lengths 32768                     # peak memory; the paper: about 60 GB
    python scripts/bench/model.py --shape smollm2-135m --lengths 2048 --threads 2  # on a CPU

Weights are random, because the time does not depend on them. All rivals use the attention backend
of `--attention`. `peak` is everything allocated on the GPU while the model runs, including weights.
Before it is timed, CoCA is compared with the three-operand contraction over a short prompt, in
float32, because correctness does not depend on the rounding of 32 random layers.
"""

import copy
import functools

import measure
import torch
from measure import (
    DEVICE,
    check,
    clear,
    compare,
    make_model,
    parse,
    plain_folds,
    ratio,
    relative_error,
    run_all,
)

from coca_hf.models.attention import FOLDS
from coca_hf.models.reference import use_reference_


def main() -> None:
    parser = measure.arguments(__doc__, [2048, 8192, 32768])
    parser.add_argument("--attention", default="sdpa", help="of transformers")
    parser.add_argument("--constraints", nargs="+", choices=["slack", "strict"], default=["slack"])
    options = parse(parser)
    names = ["LLaMA", *(f"CoCA {constraint}" for constraint in options.constraints)]
    models = {
        name: make_model(name, options.shape, options.dtype, options.attention) for name in names
    }
    errors = {name: check_model(name, model) for name, model in models.items() if name != "LLaMA"}
    columns = {
        **{"rival": "rival", "length": "length", "s": "seconds", "CPU s": "cpu_seconds"},
        **{"tokens/s": "tokens_per_second", "x LLaMA": "over_llama"},
        **{"x LLaMA, CPU time": "over_llama_cpu", "peak GiB": ("total_bytes", 2**-30)},
    }
    measured = functools.partial(measure_length, models=models, errors=errors, options=options)
    title = f"prefill, {options.attention}"
    run_all("prefill-bench", title, columns, measured, options, options.lengths)


def check_model(name: str, model) -> float:
    ids = torch.randint(model.config.vocab_size, (1, 40), device=DEVICE)
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        got = exact(ids, use_cache=False).logits
        expected = use_reference_(exact)(ids, use_cache=False).logits
    del exact
    clear()
    return check(name, relative_error(got, expected), torch.float32)


def measure_length(length: int, models: dict, errors: dict, options) -> list[dict]:
    ids = [torch.randint(97, (1, length), device=DEVICE) for _ in range(4)]

    @torch.inference_mode()
    def prefill(i: int, model) -> None:
        model(input_ids=ids[i], use_cache=False, logits_to_keep=1)

    rivals = {name: functools.partial(prefill, model=model) for name, model in models.items()}
    if DEVICE in FOLDS:
        folded = next(name for name in rivals if name != "LLaMA")

        def plain(i: int) -> None:
            with plain_folds():
                rivals[folded](i)

        rivals[f"{folded} plain"] = plain
    results = compare(rivals, options.repeats, options.warmup, sets=4)
    baseline = results["LLaMA"]
    rows = []
    for name, result in results.items():
        model = models[name.removesuffix(" plain")]
        weights = sum(p.nbytes for p in model.parameters())
        about = {"shape": options.shape, "layers": model.config.num_hidden_layers}
        about |= {"length": length, "attention": options.attention}
        peak = result["peak_bytes"]
        rows.append(
            {
                **{"rival": name, **about, **result},
                "tokens_per_second": ratio(length, result["seconds"]),
                "total_bytes": None if peak is None else weights + peak,
                "over_llama": ratio(baseline["seconds"], result["seconds"]),
                "over_llama_cpu": ratio(baseline["cpu_seconds"], result["cpu_seconds"]),
                "relative_error": errors.get(name.removesuffix(" plain")),
            }
        )
    return rows


if __name__ == "__main__":
    main()
