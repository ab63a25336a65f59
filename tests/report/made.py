"""Hand-made rows with the raw files of `coca-eval`, for what no tiny model would show."""

import itertools
import json
import math
import random

import pyarrow
import pyarrow.parquet

BOOKS = {"data": "books", "column": "text", "split": "test", "max_tokens": 32768, "seed": 0}
BOOKS["skipped_documents"] = []
MACHINE = {
    "device": "cpu (x86_64, 2 threads)",
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "date": "2026-01-02T03:04:05+00:00",
    "seconds": 61.5,
}


def row(model="llama", rope="default", length=512, value=7.25, task="perplexity", **changes):
    """A row of any task; its model is CoCA if its name says so."""
    shared = {"task": task, "model": model, "rope": rope, "length": length, "value": value}
    shared |= {"error": None, "raw": {}, "command": f"coca-eval {task} {model}", **MACHINE}
    shared |= {"model_path": f"/models/{model}", "model_type": "llama", "dtype": "float32"}
    shared |= {"trained_length": 2048, "trained_seq_len": None}
    shared |= {"coca_constraint": None, "tokens_seen": None}
    if "coca" in model.lower():
        shared |= {"model_type": "coca_llama", "coca_constraint": "slack", "tokens_seen": 123_904}
    emma, share = {**BOOKS, "document_names": ["emma.txt"]}, value or 0
    books = {**BOOKS, "document_names": ["emma.txt", "persuasion.txt"], "max_tokens": None}
    strides = {"variant": "sliding", "stride": 256, "asked_stride": 256}
    variant = {"variant": "paper", "depths": None, "new_tokens": 64}
    shares = {"share_b": 1 - share, "share_d_weighted": value, "share_abnormal": share / 2}
    shares["share_absolute"] = 0.0
    speed = {"peak_bytes": 2**30, "memory_kind": "process", "baseline": None, "ratio": None}
    speed["tokens_per_second"] = length and value and length / value
    metric = {"benchmark": "arc_easy", "metric": "acc", "filter": "none", "stderr": 0.012}
    of_task = {
        "perplexity": {**books, **strides, "tokens": 98_301},
        "position-loss": {**emma, "bucket": 64, "tokens": 8192, "nll": math.log(7)},
        "passkey": {**variant, "stride": None, "tokens": 51_100, "cases": 100, "seed": 0},
        "copying": {"stride": None, "cases": 16, "seed": 0, "tokens": 2032, "nll_first": 10.8},
        "recall": {"stride": None, "cases": 20, "pairs": 8, "seed": 0, "tokens": 5000, "nll": 0.25},
        "layers": {**emma, "baseline": "llama", "cases": 6, "order": [1, 0], "tokens": 4608},
        "attention-maps": emma
        | {"max_tokens": 256, "baseline": "llama", "sink": 0.4, "baseline_sink": 0.5},
        "boundary": {**emma, **shares, "pairs_per_document": 1000, "mean_abs_angle": 3 * share},
        "speed": {"mode": "prefill", "batch_size": 1, "measured_on": "cpu, batch 1", **speed},
        "tasks": {**metric, "shots": 0, "limit": None, "dimension": "reasoning", "cases": 500},
    }
    return shared | of_task[task] | changes


def write_rows(directory, *rows):
    directory.mkdir(exist_ok=True)
    with (directory / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return directory


def with_raw(directory, name, row, lines):
    """`row` with `lines`, numbered as cases are, as its raw file `name` in `directory`."""
    file = f"{row['task']}-{name}/{random.Random(str(row)).getrandbits(64):016x}.parquet"
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"case": n} | line for n, line in enumerate(lines)]),
        directory / file,
    )
    return row | {"raw": row["raw"] | {name: file}}


def full_run(directory):
    """Rows of every task for every model at every length, out of memory and overflow among them."""
    models, lengths = ("LLaMA-7B", "+ CoCA, trained"), (512, 1024, 2048, 4096, 8192)
    rng, rows = random.Random(0), []

    def add(name, made, lines):
        rows.append(with_raw(directory, name, made, lines))

    for number, model in enumerate(models):
        coca = "CoCA" in model
        trained = {"trained_length": 2048, "trained_seq_len": 512 if coca else None}
        for rope, length in itertools.product(("default", "dynamic:4"), lengths):
            inside = max(1.0, length / 2048)
            value = (8 + number) * inside ** (2.5 if rope == "default" else 0.4)
            made = row(model, rope, length, value, **trained)
            if value > 200:
                made |= {"value": None, "error": "the perplexity is beyond a float64"}
            nlls = [100 * (math.log(value) + rng.gauss(0, 0.15)) for _ in range(10)]
            windows = [{"start": 0, "tokens": 100, "nll": nll} for nll in nlls]
            add("windows", made, [{"document": d} | line for d, line in enumerate(windows)])
            found = [rng.random() < min(1.0, 1.1 / inside) for _ in range(100)]
            cases = [
                {"depth": n / 100, "distance": int((1 - n / 100) * length), "correct": correct}
                for n, correct in enumerate(found)
            ]
            add("cases", row(model, rope, length, sum(found) / 100, "passkey", **trained), cases)
        buckets = [
            {
                "first": n,
                "tokens": 64,
                "nll": 64 * (2 + 64 / (64 + n) + max(0, n / 2048 - 1) * number),
            }
            for n in range(0, 8192, 64)
        ]
        add("buckets", row(model, length=8192, task="position-loss", **trained), buckets)
        angles = []
        for layer, head in itertools.product(range(12), range(8)):
            waves = [math.cos(math.radians(10 * bin + 9 * layer)) for bin in range(36)]
            counts = [1000] + [0] * 35 if coca else [int(60 + 40 * wave) for wave in waves]
            line = {"layer": layer, "head": head, "pair": 0, "angle_counts": counts}
            angles.append(line | {"tau_counts": [sum(counts[18:]) // 24] * 24})
        made = row(model, length=2048, value=0.5 * (not coca), task="boundary", **trained)
        places = itertools.product(range(3), (0, 1, 4, 16, 64, 256, 1024))
        bounds = [
            {"bound_rope": 90 / (s + 1) ** 0.3, "bound_coca": 50 / (s + 1)} for s in range(1025)
        ]
        decay = [{"layer": n, "distance": s, **bounds[s]} for n, s in places]
        add("decay", with_raw(directory, "angles", made, angles), decay)
        for mode, length in itertools.product(("prefill", "train"), lengths):
            about = {"task": "speed", "mode": mode, **trained}
            step = row(model, length=length, value=(1 + 0.1 * number) * length / 5000, **about)
            step |= {"ratio": 1.1, "baseline": models[0]} if number else {}
            if length == 8192 and mode == "train":
                step |= {"error": "OOM: 24 GiB", "value": None, "ratio": None}
                step |= {"tokens_per_second": None, "peak_bytes": None, "memory_kind": None}
            rows.append(step)
        metrics = {"arc_easy": "acc", "hellaswag": "acc_norm", "lambada_openai": "acc"}
        for benchmark, metric in metrics.items():
            scores = {"benchmark": benchmark, "metric": metric}
            scores["value"] = round(0.4 + rng.random() / 5, 4)
            rows.append(row(model, length=None, task="tasks", **trained) | scores)
    return write_rows(directory, *rows)
