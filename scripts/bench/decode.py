"""Decoding: attention of one token to the cache, whole generations, and the cache's bytes, CoCA
beside HF's LLaMA.

    python scripts/bench/decode.py --lengths 8192 32768 131072 --batches 1 8 32 --out docs/results/h200/decode.json
    python scripts/bench/decode.py --what generate --lengths 32768 --out docs/results/h200/generate.json
    python scripts/bench/decode.py --what step --lengths 512 2048 8192 32768 --threads 2   # on a CPU
    python scripts/bench/decode.py --what tune --lengths 32768                # sizes of the kernel's programs

attention   one layer. LLaMA's runs by SDPA's kernels and FlexAttention, and the fastest is the
            baseline. CoCA's runs on t (`fused`), and on keys built first (`plain`). On a GPU, CUDA
            graphs make launching free
step        one token of the whole model, on a growing cache of random numbers, the kind that
            `generate` uses by default
generate    `model.generate` with a static cache, which transformers compiles on a GPU; seconds for
            each new token after the first, as a streamer receives them, and how long the GPU
            works on one. LLaMA with `sdpa`, CoCA with `sdpa` and with `coca`
tune        CoCA's kernel at all sizes of its programs

Every run but `tune` also counts the bytes of the caches.
"""

import functools
import itertools
import statistics
import time

import measure
import torch
from measure import (
    DEVICE,
    check,
    clear,
    compare,
    make_model,
    parse,
    ratio,
    relative_error,
    run_all,
    sets_for,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers.generation.streamers import BaseStreamer

from coca_hf.kernels import DECODERS
from coca_hf.models.attention import CACHE, coca_key

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def main() -> None:
    parser = measure.arguments(__doc__, [8192, 32768], repeats=20)
    parser.add_argument(
        "--what", choices=["attention", "step", "generate", "tune"], default="attention"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    only = "of attention and generate: rivals whose names contain one of these"
    parser.add_argument("--only", nargs="+", default=[""], help=only)
    parser.add_argument("--layers", type=int, help="of step and generate: fewer than the shape has")
    parser.add_argument("--new-tokens", type=int, default=64, help="of generate")
    options = parse(parser)
    if options.smoke:
        options.batches, options.new_tokens = [2], 4
    sizes = {} if options.what == "tune" else cache_bytes(options)
    first = [{"rival": name, "cache_bytes_per_token": size} for name, size in sizes.items()]
    run = {"attention": attention, "step": step, "generate": generate, "tune": tune}[options.what]
    columns = {
        **{"rival": "rival", "length": "length", "batch": "batch"},
        **{"us a token": ("seconds", 1e6), "of it on the GPU": ("gpu_seconds", 1e6)},
        **{"GB/s": "gb_per_second", "x LLaMA's fastest": "over_llama"},
        **{"cache bytes a token": "cache_bytes_per_token", "error": "error"},
    }
    measured, over = functools.partial(run, options=options), (options.lengths, options.batches)
    name = f"decode-{options.what}-bench"
    run_all(name, options.what, columns, measured, options, *over, first=first)


def attention(length: int, batch: int, options) -> list[dict]:
    heads, kv_heads, head_dim = measure.heads_of(options.shape)
    llama_bytes = 2 * batch * kv_heads * length * head_dim * options.dtype.itemsize
    coca_bytes = llama_bytes * 3 // 4 + 2 * batch * length * head_dim // 2 * options.dtype.itemsize
    sets = sets_for(coca_bytes)
    try:
        q, k, t, v, cos, sin = inputs(batch, heads, kv_heads, length, head_dim, sets, options.dtype)
    except torch.OutOfMemoryError:
        clear()
        return [{"rival": "all", "length": length, "batch": batch, "error": "OOM"}]
    scaling = head_dim**-0.5
    grouped = {"enable_gqa": True} if heads != kv_heads else {}

    def llama(i: int):
        return scaled_dot_product_attention(q[i], k[i], v[i], scale=scaling, **grouped)

    def llama_by(i: int, kernel: str):
        with sdpa_kernel(KERNELS[kernel]):
            return llama(i)

    def plain(i: int):
        key = coca_key(t[i], cos[i], sin[i], "slack")
        return scaled_dot_product_attention(q[i], key, v[i], scale=scaling, **grouped)

    rivals = {f"LLaMA {name}": functools.partial(llama_by, kernel=name) for name in KERNELS}
    rivals["LLaMA sdpa"] = llama
    if DEVICE == "cuda":
        torch.compiler.reset()
        flex = torch.compile(flex_attention, dynamic=False)
        rivals["LLaMA flex"] = lambda i: flex(
            q[i], k[i], v[i], scale=scaling, enable_gqa=heads != kv_heads
        )
    rivals["CoCA slack plain"] = plain
    if DEVICE in DECODERS:
        fused = DECODERS[DEVICE]
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=DEVICE)
        for name, given in (("fused", None), ("fused, masked", mask)):
            rivals[f"CoCA slack {name}"] = lambda i, given=given: fused(
                q[i], t[i], v[i], cos[i], sin[i], given, scaling, strict=False
            )
    errors = {
        name: decode_error(name, rival, (q, k, t, v, cos, sin), options)
        for name, rival in rivals.items()
        if any(part in name for part in options.only)
    }
    rivals = {name: rival for name, rival in rivals.items() if errors.get(name) is not None}
    with torch.no_grad():
        results = compare(rivals, options.repeats, options.warmup, sets, graph=True)
    theirs = (one["seconds"] for name, one in results.items() if name.startswith("LLaMA"))
    fastest = min(filter(None, theirs), default=None)
    rows = []
    for name, result in results.items():
        num_bytes = llama_bytes if name.startswith("LLaMA") else coca_bytes
        about = {"shape": options.shape, "length": length, "batch": batch}
        rows.append(
            {
                **{"rival": name, **about, **result},
                "gb_per_second": ratio(num_bytes / 1e9, result["seconds"]),  # the cache, read once
                "over_llama": ratio(fastest, result["seconds"]),
                "relative_error": errors[name],
            }
        )
    return rows


def inputs(batch, heads, kv_heads, length, head_dim, sets, dtype) -> list[list[torch.Tensor]]:
    def made(count: int, n: int, width: int) -> list[torch.Tensor]:
        return [
            torch.randn(batch, count, n, width, device=DEVICE, dtype=dtype) for _ in range(sets)
        ]

    def coefficients() -> list[torch.Tensor]:
        return [x.relu_() for x in made(kv_heads, length, head_dim // 2)]  # as the cache holds them

    angle = torch.arange(length, device=DEVICE)[:, None] * 10000.0 ** -(
        torch.arange(0, head_dim, 2, device=DEVICE) / head_dim
    )
    angles = [
        [part.to(dtype).expand(batch, 1, -1, -1).contiguous() for _ in range(sets)]
        for part in (angle.cos(), angle.sin())
    ]
    return [
        *(made(heads, 1, head_dim), made(kv_heads, length, head_dim), coefficients()),
        *(made(kv_heads, length, head_dim), *angles),
    ]


def decode_error(name: str, rival, tensors, options) -> float | None:
    """The error against attention in float64, for the first row and key/value head; None if PyTorch
    has no such kernel here.
    """
    try:
        with torch.no_grad():
            got = rival(0)
    except torch.OutOfMemoryError:
        clear()
        return 0.0  # `compare` will run out of memory again and note it
    except Exception as failure:
        if name.startswith("LLaMA"):  # name and leave out a rival that this PyTorch cannot run
            print(f"{name}: {type(failure).__name__}: {str(failure).splitlines()[0]}")
            return None
        raise
    q, k, t, v, cos, sin = (x[0] for x in tensors)
    groups = q.shape[1] // v.shape[1]
    query, value = q[:1, :groups].double(), v[:1, :1].double()
    if name.startswith("LLaMA"):
        key = k[:1, :1].double()
    else:
        key = coca_key(t[:1, :1].double(), cos[:1].double(), sin[:1].double(), "slack")
    weights = (query @ key.mT * q.shape[-1] ** -0.5).softmax(-1)
    return check(name, relative_error(got[:1, :groups], weights @ value), options.dtype)


def step(length: int, batch: int, options) -> list[dict]:
    fields = {"num_hidden_layers": options.layers} if options.layers else {}
    token = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
    steps, models = {}, {}
    for name, backend in (
        ("LLaMA", "sdpa"),
        *((f"CoCA {c}", b) for c in ("slack", "strict") for b in ("sdpa", "coca")),
    ):
        model = make_model(name, options.shape, options.dtype, backend, **fields)
        with torch.inference_mode():
            cache = model(token, use_cache=True)[CACHE]
            for layer in cache.layers:
                layer.keys, layer.values = (
                    torch.randn(
                        *x.shape[:2], length, x.shape[-1], device=DEVICE, dtype=options.dtype
                    ).relu()
                    for x in (layer.keys, layer.values)
                )
        models[f"{name} {backend}"] = model

        def run(i: int, model=model, cache=cache) -> None:
            with torch.inference_mode():
                model(token, **{CACHE: cache}, use_cache=True, logits_to_keep=1)

        steps[f"{name} {backend}"] = run
    errors = {
        name: None if "LLaMA" in name else generate_error(model, options.dtype)
        for name, model in models.items()
    }
    results = compare(steps, options.repeats, options.warmup)

    def over(name: str, clock: str) -> float | None:
        return ratio(results["LLaMA sdpa"][clock], results[name][clock])

    return [
        {
            **{"rival": name, "shape": options.shape, "length": length, "batch": batch, **result},
            "layers": models[name].config.num_hidden_layers,
            "tokens_per_second": ratio(batch, result["seconds"]),
            **{"over_llama": over(name, "seconds"), "over_llama_cpu": over(name, "cpu_seconds")},
            "relative_error": errors[name],
        }
        for name, result in results.items()
    ]


TUNED = {  # constants of coca_hf/kernels/decode.py
    "HEADS": (1, 2),
    "TILE": (4096, 8192),
    "STAGES": (2, 3, 4),
    "WARPS": (4, 8),
    "PROGRAMS_PER_PROCESSOR": (1, 2),
}


def tune(length: int, batch: int, options) -> list[dict]:
    """The kernel at all sizes of its programs, fastest first. Put the best into
    coca_hf/kernels/decode.py.
    """
    if DEVICE != "cuda":
        raise SystemExit("decode.py --what tune: got no GPU, expected one")
    from coca_hf.kernels import decode

    heads, kv_heads, head_dim = measure.heads_of(options.shape)
    tensors, rows = inputs(batch, heads, kv_heads, length, head_dim, 4, options.dtype), []
    for configuration in itertools.product(*TUNED.values()):
        settings = dict(zip(TUNED, configuration, strict=True))
        vars(decode).update(settings)
        try:
            found = time_kernel(tensors, options)
        except Exception as failure:  # Triton's, for programs that do not fit into a processor
            found = {"error": type(failure).__name__}
        name = ", ".join(f"{key.lower()} {value}" for key, value in settings.items())
        rows.append({"rival": name, "length": length, "batch": batch} | found)
    return sorted(rows, key=lambda row: row.get("seconds") or 9.0)


def time_kernel(tensors: list[list[torch.Tensor]], options) -> dict:
    q, _, t, v, cos, sin = tensors
    scaling = q[0].shape[-1] ** -0.5

    def run(i: int):
        return DECODERS[DEVICE](q[i], t[i], v[i], cos[i], sin[i], None, scaling, strict=False)

    with torch.no_grad():
        (result,) = compare({"kernel": run}, options.repeats, 2, 4, graph=True).values()
    num_bytes = sum(x[0].nbytes for x in (t, v, cos, sin))
    return {**result, "gb_per_second": num_bytes / result["seconds"] / 1e9}


def generate(length: int, batch: int, options) -> list[dict]:
    fields = {"num_hidden_layers": options.layers} if options.layers else {}
    ids = torch.randint(97, (batch, length), device=DEVICE)
    rows = []
    for name, backend in (
        ("LLaMA", "sdpa"),
        ("CoCA slack", "sdpa"),
        ("CoCA slack", "coca"),
    ):
        if not any(part in f"{name} {backend}" for part in options.only):
            continue
        model = make_model(name, options.shape, options.dtype, backend, **fields)
        run = functools.partial(
            model.generate,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        times, whole = [], []
        for _ in range(2 + min(options.repeats, 3)):
            began, clock = time.perf_counter(), Clock()
            output = run(streamer=clock)
            whole.append(clock.ticks[-1] - began)
            first, *_, last = clock.ticks[1:]  # the first tick is the prompt
            times.append((last - first) / (options.new_tokens - 1))
        assert output.shape[1] == length + options.new_tokens == length + len(clock.ticks) - 1
        about = {"shape": options.shape, "length": length, "batch": batch}
        about |= {"layers": model.config.num_hidden_layers, "new_tokens": options.new_tokens}
        rows.append(
            {
                **{"rival": f"{name} {backend}", **about},
                "seconds": statistics.median(times[2:]),
                "whole_seconds": statistics.median(whole[2:]),
                "gpu_seconds": busy_seconds(run) if DEVICE == "cuda" else None,
                "relative_error": None if name == "LLaMA" else generate_error(model, options.dtype),
            }
        )
        del model
        torch.compiler.reset()
        clear()
    theirs = next((row["seconds"] for row in rows if row["rival"].startswith("LLaMA")), None)
    return [row | {"over_llama": ratio(theirs, row["seconds"])} for row in rows]


class Clock(BaseStreamer):
    """When each token reached the CPU, the prompt first. A profiler starts after the first token."""

    def __init__(self, profiler: profile | None = None) -> None:
        self.ticks: list[float] = []
        self.profiler = profiler

    def put(self, value: torch.Tensor) -> None:
        self.ticks.append(time.perf_counter())
        if self.profiler and len(self.ticks) == 2:
            self.profiler.start()

    def end(self) -> None:
        if self.profiler:
            self.profiler.stop()


def busy_seconds(run) -> float:
    """For each token after the first, how long the GPU works on it, by the profiler."""
    clock = Clock(profile(activities=[ProfilerActivity.CUDA]))
    run(streamer=clock)
    kernels = clock.profiler.key_averages()
    return sum(one.self_device_time_total for one in kernels) / 1e6 / (len(clock.ticks) - 2)


def generate_error(model, dtype: torch.dtype) -> float:
    """The error of the logits of a last token decoded with the cache, against those of the whole
    sequence at once.
    """
    ids = torch.randint(97, (1, 40), device=DEVICE)
    with torch.no_grad():
        expected = model(ids, use_cache=False, logits_to_keep=1).logits
        cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1)[CACHE]
        got = model(ids[:, -1:], **{CACHE: cache}, logits_to_keep=1).logits
    return check("decoding", relative_error(got, expected), dtype)


def cache_bytes(options) -> dict[str, float]:
    """Bytes of keys and values per token in all layers, counted in the cache of two layers after 50
    tokens.
    """
    counted, layers = {}, measure.SHAPES[options.shape]["num_hidden_layers"]
    for name in ("LLaMA", "CoCA slack"):
        model = make_model(name, options.shape, options.dtype, num_hidden_layers=2)
        with torch.no_grad():
            cache = model(torch.zeros(1, 50, dtype=torch.int64, device=DEVICE), use_cache=True)[
                CACHE
            ]
        per_layer = [(layer.keys.nbytes + layer.values.nbytes) / 50 for layer in cache.layers]
        # CoCA's last layer holds the angles, for all layers
        counted[f"cache of {name}"] = layers * per_layer[0] + sum(per_layer[2:])
        del model
        clear()
    return counted


if __name__ == "__main__":
    main()
