"""Time and memory of prefill, decoding and training against sequence length.

    prefill   one forward of `length` tokens, logits of the last
    decode    one token after `length` tokens and those of the steps before, in the model's cache
    train     forward, backward and AdamW step of `length` tokens

With a baseline, the two models take turns, step by step, so that other load on the machine affects
both. Steps are timed by CUDA events on a GPU, otherwise by the clock. Memory is the model's
weights, what it holds between steps (cache, optimizer) and what the step adds at its peak:
allocated by PyTorch on a GPU, or held by the process in RAM in one more step (Linux).
"""

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache

from coca_hf.errors import CocaError, one_line
from coca_hf.evaluate.batches import failed_on, is_out_of_memory
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, check_same_dtype, processes, use_rope_
from coca_hf.evaluate.perplexity import only_last
from coca_hf.evaluate.progress import Progress
from coca_hf.evaluate.rows import Count, Identity, Positive, Raw, Row, Run, Setting, about_model
from coca_hf.evaluate.tables import NBSP, Measurement, Table, each_table
from coca_hf.models.attention import CACHE
from coca_hf.page import Fold, Grid, Part
from coca_hf.provenance import now

MODES = ("prefill", "decode", "train")
SEED = 0  # of the tokens


class SpeedRow(Row):
    """The raw table `runs` has repeat and seconds."""

    length: Identity[Count]
    value: Positive  # the median of the repeats, in seconds
    mode: Setting[str]
    batch_size: int
    measured_on: Setting[str]  # the device and the batch size
    warmup: Identity[int | None]  # steps before the timed ones
    repeats: Identity[int | None]
    seed: Identity[int | None]
    baseline: str | None  # a name; null in the baseline's own rows
    baseline_fingerprint: Identity[str | None]
    ratio: float | None  # the value over the baseline's
    tokens_per_second: float | None
    peak_bytes: float | None
    memory_kind: str | None  # device or process


class Step(NamedTuple):
    """A step to time. held_bytes: between steps, besides the weights."""

    run: Callable[[], Any]
    held_bytes: Callable[[], int] = lambda: 0


def parse_modes(text: str) -> list[str]:
    """`"prefill,train"` as a list. Raises CocaError for a name that is not in `MODES`."""
    modes = [part.strip() for part in text.split(",")]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise CocaError(f"--modes: got {unknown[0]!r}, expected some of {', '.join(MODES)}")
    return list(dict.fromkeys(modes))


def speed_rows(
    run: Run,
    baseline: LoadedModel | None = None,
    modes: tuple[str, ...] | list[str] = MODES,
    repeats: int = 10,
    warmup: int = 3,
) -> Iterator[dict]:
    """Yield rows for every mode, RoPE setting and length, the baseline's before the model's.

    Pairs that the store has are not measured again. By default, batches have one sequence.

    Raises CocaError on several processes, for a baseline that rows could not tell from the model or
    that has another dtype, and for decoding with a model that keeps no keys and values.
    """
    if (found := processes().num_processes) > 1:
        reason = "a timing is of one device, and others beside it would slow it down"
        raise CocaError(
            f"coca-eval speed: got {found} processes, expected one: {reason}; run it without "
            f"accelerate launch"
        )
    loaded, batch_size = run.loaded, run.batch_size or 1
    if baseline and (baseline.name, baseline.path) == (loaded.name, loaded.path):
        raise CocaError(
            f"--baseline {baseline.path}: got the model itself, expected another; give it a "
            f"--baseline-name to time one against itself"
        )
    if baseline:
        check_same_dtype(loaded, baseline)
    loaded_models = ([baseline] if baseline else []) + [loaded]

    def settings_of(each: LoadedModel, mode: str, rope: Rope, length: int) -> dict:
        other, about = baseline if each is loaded else None, about_model(each)
        return {
            "task": "speed",
            "mode": mode,
            "rope": str(rope),
            "length": length,
            "batch_size": batch_size,
            "warmup": warmup,
            "repeats": repeats,
            "seed": SEED,
            "baseline": other.name if other else None,
            "baseline_fingerprint": other.fingerprint if other else None,
            "tokens": batch_size * (1 if mode == "decode" else length),
            "measured_on": f"{about['device']}, batch {batch_size}",
            **about,
        }

    def make(rope: Rope, pair: list[dict]) -> list[dict]:
        measured: list[tuple[dict, Raw]] = []
        kind, began = "device" if torch.cuda.is_available() else "process", time.perf_counter()
        timings = _measure([each.model for each in loaded_models], rope, pair[0], run.progress)
        made = {"seconds": round(time.perf_counter() - began, 3), "date": now()}
        for settings, timing in zip(pair, timings, strict=True):
            median = statistics.median(timing.seconds) if timing.seconds else None
            of_baseline = measured[0][0]["value"] if measured else None
            result = {
                "value": median,
                "tokens_per_second": settings["tokens"] / median if median else None,
                "ratio": median / of_baseline if median and of_baseline else None,
                "peak_bytes": timing.peak,
                "memory_kind": kind if timing.peak is not None else None,
                "error": timing.error,
            }
            runs = [{"repeat": number, "seconds": one} for number, one in enumerate(timing.seconds)]
            measured.append((settings | result | made, {"runs": runs}))
        return run.store.append_all(SpeedRow, measured)

    asked = [
        (rope, [settings_of(each, mode, rope, length) for each in loaded_models])
        for mode, rope, length in itertools.product(modes, run.ropes, run.lengths)
    ]
    noun = "pairs of rows" if baseline else "rows"
    return run.each(asked, partial(run.store.find, SpeedRow), make, noun)


@dataclass
class _Timing:
    """The times of one model. peak: in bytes."""

    model: Any
    step: Step | None = None
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    error: str | None = None


def _measure(models: list[Any], rope: Rope, settings: dict, progress: Progress) -> list[_Timing]:
    """The timings of the models, which take turns."""
    mode, length, batch_size = settings["mode"], settings["length"], settings["batch_size"]
    warmup, repeats = settings["warmup"], settings["repeats"]
    timings = [_Timing(model) for model in models]
    steps = [*range(warmup + repeats)]
    for number in progress(steps, f"speed  {mode}  {rope}  {length}"):
        for place, one in enumerate(timings):
            if one.error:
                continue
            try:
                if one.step is None:
                    use_rope_(one.model, rope, length + warmup + repeats)
                    one.step = _step(one.model, mode, length, batch_size)
                taken, peak = _timed(one.step, one.model)
            except IndexError as failure:
                timings[place] = _Timing(one.model, error=failed_on(length, failure))
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure):
                    raise
                error = f"OOM: {one_line(failure)}"
                timings[place] = _Timing(one.model, error=error)
            else:
                if number >= warmup:
                    one.seconds.append(taken)
                    one.peak = max(peak, one.peak or 0) if peak is not None else None
    for one in timings:
        if one.step and one.model.device.type != "cuda":
            with suppress(IndexError):  # of a further token
                one.peak = _resident_peak(one.step, one.model)
        one.step = None
        one.model.zero_grad(set_to_none=True)
        one.model.eval()
    clear_device_cache(garbage_collection=True)
    return timings


def _step(model: Any, mode: str, length: int, batch_size: int) -> Step:
    """The step of a mode, on random tokens."""
    last = only_last(model, 1)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab_size, (batch_size, length), generator=generator).to(model.device)
    if mode == "train":
        model.train()
        # With a learning rate of 0 a step leaves the model as it is
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

        def train() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        def held() -> int:
            return _bytes(value for state in optimizer.state.values() for value in state.values())

        return Step(train, held)
    model.eval()
    if mode == "prefill":
        return Step(torch.inference_mode()(lambda: model(input_ids=ids, use_cache=False, **last)))
    if hasattr(model.config, "coca_constraint"):
        last["rope_length"] = length + 1  # its cache holds under one plan, with longrope
    with torch.inference_mode():
        cache = getattr(model(input_ids=ids, use_cache=True, **last), CACHE, None)
    if cache is None:
        problem = f"got {type(model).__name__}, which keeps no keys and values of earlier tokens"
        raise CocaError(f"--modes decode: {problem}; leave it out")

    @torch.inference_mode()
    def decode() -> None:
        model(input_ids=ids[:, -1:], use_cache=True, **{CACHE: cache}, **last)

    def held_in_cache() -> int:
        parts = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        return _bytes([*parts, *itertools.chain(*getattr(cache, "held_unit_keys", {}).values())])

    return Step(decode, held_in_cache)


def _bytes(tensors: Iterable[Any]) -> int:
    """What the tensors hold, with the room behind views of larger ones."""
    held = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def _timed(step: Step, model: Any) -> tuple[float, int | None]:
    """Seconds of a step, and on a GPU the bytes at its peak."""
    if model.device.type == "cuda":
        held = _bytes(model.parameters()) + step.held_bytes()
        seconds, added = timed_on_gpu(step.run)
        return seconds, held + added
    gc.collect()
    began = time.perf_counter()
    step.run()
    return time.perf_counter() - began, None


def _resident_peak(step: Step, model: Any) -> int | None:
    """Bytes at the peak of a step on a CPU; None if unknown.

    The step is not a timed one: memory that earlier steps have freed goes back to the system first,
    because it would count as nothing when it is used again, and allocating it again takes time.
    """
    held = _bytes(model.parameters()) + step.held_bytes()
    gc.collect()
    with suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    resident = resident_bytes(reset=True)
    step.run()
    peak = resident_bytes(reset=False)
    return None if resident is None or peak is None else held + max(peak - resident, 0)


def timed_on_gpu(run: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of a call, and the bytes that it allocates at its peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated() - before


def resident_bytes(reset: bool) -> int | None:
    """Bytes that the process holds in RAM, or its peak since the last `reset`; None if unknown.

    reset: begin a new peak and return the current bytes. Only Linux tells.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        field = "VmRSS:" if reset else "VmHWM:"
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return None


def _cell(row: dict) -> str:
    ratio = f" ({row['ratio']:.2f}{NBSP}x {row['baseline']}'s)" if row["ratio"] else ""
    return f"{row['value']:.3g}{NBSP}s{ratio}"


def _parts(table: Table) -> list[Part]:
    mode = table.rows[0]["mode"]
    figure = table.figure(
        "speed",
        f"Median seconds of {mode} against length. {table.in_words()}",
        f"Median seconds of {table.settings}, against length.",
        table.values,
        "seconds",
        x_label="length (tokens)",
    )
    return [figure, table.grid(), _memory(table), *table.missing()]


def _memory(table: Table) -> Fold:
    """Tokens per second and peak memory by model and length."""
    header = ["model", "length", "tokens per second", "peak memory", "memory of"]
    lines = []
    for name, rows in table.series.items():
        for row in rows:
            rate, peak = row["tokens_per_second"], row["peak_bytes"]
            cells = ["" if rate is None else f"{rate:,.0f}", "" if peak is None else _size(peak)]
            lines.append([name, str(row["length"]), *cells, row["memory_kind"] or ""])
    return Fold("Memory and throughput", [Grid(header, lines, numbers_from=1)])


def _size(num_bytes: float) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


MEASUREMENT = Measurement(
    task="speed",
    title="Speed and memory",
    explanation="Median seconds of a step. In brackets: times another model's, measured in the same "
    "run.",
    row=SpeedRow,
    settings=lambda row: f"{row['mode']}, batch size {row['batch_size']}, {row['device']}",
    cell=_cell,
    parts=each_table(_parts),
)
