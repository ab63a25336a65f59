"""What the speed benchmarks share: shapes, rivals timed in turns, and the record of each run."""

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import CocaLlamaConfig, CocaLlamaForCausalLM
from coca_hf.evaluate.batches import is_out_of_memory
from coca_hf.evaluate.speed import resident_bytes, timed_on_gpu
from coca_hf.files import replace_text
from coca_hf.models import attention
from coca_hf.provenance import now, versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
plain_folds = partial(patch.dict, attention.FOLDS, clear=True)  # without the fused kernel
clear = partial(clear_device_cache, garbage_collection=True)
PACKAGES = ("coca-hf", "torch", "transformers", "accelerate", "xxhash", "triton")
PACKAGES += ("flash-attn", "flash-attn-3", "flash-attn-4")
CACHE_BYTES = 128 << 20  # above the L2 of an H200 (60 MB) and most processors' last level
# of the relative error of an output
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def _shape(hidden: int, mlp: int, layers: int, vocab: int, heads: int, kv_heads: int, **fields):
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    sizes |= {"vocab_size": vocab, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return sizes | fields


SHAPES = {
    "llama-7b": _shape(4096, 11008, 32, 32000, 32, 32),
    "llama-3-8b": _shape(4096, 14336, 32, 128256, 32, 8),
    "350m": _shape(1024, 2736, 24, 50277, 16, 16, tie_word_embeddings=True),  # from-scratch-350m
    "smollm2-135m": _shape(576, 1536, 30, 49152, 9, 3, tie_word_embeddings=True),
    "tiny": _shape(64, 96, 2, 97, 4, 2),
}


def heads_of(shape: str) -> tuple[int, int, int]:
    """Query heads, key/value heads and the dimension of a head."""
    fields = SHAPES[shape]
    heads = fields["num_attention_heads"]
    return heads, fields["num_key_value_heads"], fields["hidden_size"] // heads


def arguments(
    description: str,
    lengths: list[int],
    shape: str = "llama-7b",
    repeats: int = 10,
    warmup: int = 3,
) -> argparse.ArgumentParser:
    """The options of all benchmarks, and their defaults. shape: on a GPU."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    default_shape = shape if DEVICE == "cuda" else "smollm2-135m"
    parser.add_argument("--shape", choices=SHAPES, default=default_shape)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--warmup", type=int, default=warmup)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument(
        "--smoke", action="store_true", help="the tiny shape, one repeat: only whether it runs"
    )
    parser.add_argument("--out", type=Path, help="JSON")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.smoke:
        options.shape, options.repeats, options.warmup = "tiny", 1, 1
        options.lengths = [min(options.lengths[0], 48)]
    if options.threads:
        torch.set_num_threads(options.threads)
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if DEVICE == "cuda" else "float32"))
    torch.manual_seed(0)
    return options


def make_model(name: str, shape: str, dtype: torch.dtype, attention: str = "sdpa", **fields: Any):
    """`LLaMA`, `CoCA slack` or `CoCA strict` of a shape, with random weights, on the device."""
    config_class, model_class = LlamaConfig, LlamaForCausalLM
    if name.startswith("CoCA"):
        config_class, model_class = CocaLlamaConfig, CocaLlamaForCausalLM
        fields["coca_constraint"] = name.split()[1]
    config = config_class(**SHAPES[shape] | {"max_position_embeddings": 1 << 17} | fields)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def check(what: str, error: float, dtype: torch.dtype) -> float:
    """Raises SystemExit if a result is wrong, because its speed would then mean nothing."""
    if not error <= LIMITS[dtype]:
        expected = f"expected at most {LIMITS[dtype]:.0e}"
        raise SystemExit(f"{what}: got a relative error of {error:.2e}, {expected}")
    return error


def sets_for(num_bytes: int) -> int:
    """How many sets of inputs of this size it takes to exceed the cache; at most 16."""
    return max(1, min(16, -(-2 * CACHE_BYTES // max(num_bytes, 1))))


def compare(
    rivals: dict[str, Callable[[int], Any]],
    repeats: int,
    warmup: int,
    sets: int = 1,
    graph: bool = False,
) -> dict[str, dict]:
    """Time `rivals` in turns, so other work on the machine affects all of them.

    A rival is called with the number of the set of inputs to use, in a cycle. With `graph`, on a
    GPU, a CUDA graph of all sets is replayed, so launching costs nothing. Returns by name: seconds
    (median), cpu_seconds (median, of the whole process; CPU only), runs (seconds, in order),
    peak_bytes (what a run added to the GPU's memory, with `graph` the last warm-up run; on a CPU
    what a warm-up run added to that of the process), error (memory that ran out, or null).
    """
    nothing = dict.fromkeys(("seconds", "cpu_seconds", "peak_bytes", "error"))
    results = {name: {**nothing, "runs": [], "cpu_runs": []} for name in rivals}
    graphs: dict[str, Any] = {}
    for number in range(warmup + repeats):
        for name, rival in rivals.items():
            one = results[name]
            if one["error"]:
                continue
            try:
                if graph and DEVICE == "cuda" and number == warmup:
                    graphs[name] = _graph(rival, sets)
                seconds, cpu_seconds, peak = _time(
                    rival, number % sets, graphs.get(name), number < warmup
                )
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as failure:
                if not is_out_of_memory(failure):
                    raise
                one["error"] = "OOM"
                del failure
                clear()
                continue
            # a graph holds its memory, so that of the last run before it counts
            if peak is not None and (DEVICE == "cpu" or number >= warmup - graph):
                one["peak_bytes"] = max(peak, one["peak_bytes"] or 0)
            if number >= warmup:
                one["runs"].append(seconds / (sets if name in graphs else 1))
                one["cpu_runs"].append(cpu_seconds)
    graphs.clear()
    for one in results.values():
        if one["runs"] and not one["error"]:
            one["seconds"] = statistics.median(one["runs"])
            one["cpu_seconds"] = None if DEVICE == "cuda" else statistics.median(one["cpu_runs"])
        del one["cpu_runs"]
    clear()
    return results


def _time(
    rival: Callable[[int], Any], number: int, graph: Any, warm_up: bool
) -> tuple[float, float, int | None]:
    if DEVICE == "cuda":
        seconds, peak = timed_on_gpu(graph.replay if graph else partial(rival, number))
        return seconds, 0.0, None if graph else peak
    gc.collect()
    before = None
    if warm_up and sys.platform == "linux":
        # Memory that the process keeps free would hide what a run takes
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes(reset=True)
    began, cpu_began = time.perf_counter(), time.process_time()
    rival(number)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return seconds, cpu_seconds, None if before is None else resident_bytes(reset=False) - before


def _graph(rival: Callable[[int], Any], sets: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(sets):
            rival(number)
    return graph


def ratio(a: float | None, b: float | None) -> float | None:
    """None if either was not measured."""
    return a / b if a and b else None


def run_all(
    task: str,
    title: str,
    columns: dict[str, Any],
    measured: Callable[..., list[dict]],
    options: argparse.Namespace,
    *over: Sequence,
    first: Sequence[dict] = (),
) -> None:
    """Measure every combination of `over` and show the rows, after those in `first`.

    The file of `--out` is written after each combination, so an interrupted run keeps what it
    measured.
    """
    dtype, rows = str(options.dtype).removeprefix("torch."), [*first]
    about = {"task": task, "dtype": dtype, "repeats": options.repeats, "warmup": options.warmup}
    for one in itertools.product(*over):
        rows += measured(*one)
        write(about | {"rows": rows}, options.out)
    show(f"{title}, {options.shape}, {options.dtype}", columns, rows)


def write(result: dict, out: Path | None) -> None:
    """Write a result as JSON to `out`, if given, with the command, hardware and versions."""
    if not out:
        return
    result = result | {
        "command": _command(),
        "hardware": hardware() | result.get("hardware", {}),
        "versions": versions(*PACKAGES),
        "date": now(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, json.dumps(result, indent=1) + "\n")  # a kill leaves the one before


def _command() -> str:
    """The command as typed in the repository's root, with absolute paths cut to their last part."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", f"scripts/bench/{Path(sys.argv[0]).name}", *words])


def hardware() -> dict:
    if DEVICE == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        return {"gpu": gpu.name, "processors": gpu.multi_processor_count, "bytes": gpu.total_memory}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_at_end": os.getloadavg(),
    }


def show(title: str, columns: dict[str, Any], rows: Sequence[dict]) -> None:
    """A Markdown table, numbers to three digits.

    columns: the key of a row, or a key and a factor, by the column's name.
    """
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|---" + "|---:" * (len(columns) - 1) + "|")
    for row in rows:
        cells = []
        for key in columns.values():
            key, factor = key if isinstance(key, tuple) else (key, None)
            value = row.get(key)
            cells.append(_cell(value if value is None or factor is None else value * factor))
        print("| " + " | ".join(cells) + " |", flush=True)


def _cell(x: Any) -> str:
    if x is None:
        return ""
    return f"{x:.4g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)
