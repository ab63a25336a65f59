"""Rows made by hand, with the raw files beside them that `coca-eval` writes: for what no tiny model
would show.
"""

import json
import math
import random

import pyarrow
import pyarrow.parquet

BOOKS = {
    "data": "books",
    "column": "text",
    "split": "test",
    "max_tokens": 32768,
    "seed": 0,
    "skipped_documents": [],
}


def row(model="llama", rope="default", length=512, value=7.25, task="perplexity", **changes):
    """A row of any task; its model is CoCA where its name says so."""
    shared = {
        "model": model,
        "model_path": f"/models/{model}",
        "model_type": "coca_llama" if "coca" in model.lower() else "llama",
        "rope": rope,
        "length": length,
        "value": value,
        "task": task,
        "error": None,
        "trained_length": 2048,
        "trained_seq_len": None,
        "coca_constraint": "slack" if "coca" in model.lower() else None,
        "tokens_seen": 123_904 if "coca" in model.lower() else None,
        "dtype": "float32",
        "device": "cpu (x86_64, 2 threads)",
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "command": f"coca-eval {task} {model}",
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 61.5,
        "raw": {},
    }
    of_task = {
        "perplexity": {
            **BOOKS,
            **{
                "document_names": ["emma.txt", "persuasion.txt"],
                "max_tokens": None,
                "variant": "sliding",
            },
            **{"stride": 256, "asked_stride": 256, "tokens": 98_301},
        },
        "position-loss": {
            **BOOKS,
            "document_names": ["emma.txt"],
            "bucket": 64,
            "tokens": 8192,
            "nll": math.log(7),
        },
        "passkey": {
            **{"stride": None, "tokens": 51_100, "cases": 100, "new_tokens": 64, "seed": 0},
            **{"variant": "paper", "depths": None},
        },
        "copying": {"stride": None, "cases": 16, "seed": 0, "tokens": 2032, "nll_first": 10.8},
        "recall": {"stride": None, "cases": 20, "pairs": 8, "seed": 0, "tokens": 5000, "nll": 0.25},
        "layers": {
            **BOOKS,
            **{
                "document_names": ["emma.txt"],
                "baseline": "llama",
                "cases": 6,
                "order": [1, 0],
                "tokens": 4608,
            },
        },
        "attention-maps": {
            **BOOKS,
            **{"document_names": ["emma.txt"], "max_tokens": 256, "baseline": "llama"},
            **{"sink": 0.4, "baseline_sink": 0.5},
        },
        "boundary": {
            **BOOKS,
            **{
                "document_names": ["emma.txt"],
                "pairs_per_document": 1000,
                "share_a": 0.0,
                "share_b": 1 - (value or 0),
            },
            **{"share_c": 0.0, "share_d": value, "share_d_weighted": value, "share_undefined": 0.0},
            **{
                "share_abnormal": (value or 0) / 2,
                "mean_abs_angle": (value or 0) * 3,
                "share_absolute": 0.0,
            },
        },
        "speed": {
            **{"mode": "prefill", "batch_size": 1, "measured_on": "cpu, batch 1"},
            **{"tokens_per_second": length and value and length / value},
            **{"peak_bytes": 2**30, "memory_kind": "process", "baseline": None, "ratio": None},
        },
        "tasks": {
            **{
                "benchmark": "arc_easy",
                "metric": "acc",
                "filter": "none",
                "stderr": 0.012,
                "shots": 0,
            },
            **{"limit": None, "dimension": "reasoning", "cases": 500},
        },
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


def full_run(
    directory, models=("LLaMA-7B", "+ CoCA, trained"), lengths=(512, 1024, 2048, 4096, 8192)
):
    """Rows of every task for every model at every length, out of memory and overflow among them."""
    rng, rows = random.Random(0), []
    directory.mkdir(exist_ok=True)
    for number, model in enumerate(models):
        trained = {"trained_length": 2048, "trained_seq_len": 512 if "CoCA" in model else None}
        coca = "CoCA" in model
        for rope in ("default", "dynamic:4"):
            for length in lengths:
                inside = max(1.0, length / 2048)
                value = (8 + number) * inside ** (2.5 if rope == "default" else 0.4)
                made = row(model, rope, length, value, **trained)
                if value > 200:
                    made |= {"value": None, "error": "the perplexity is beyond a float64"}
                windows = [
                    {
                        "document": d,
                        "start": 0,
                        "tokens": 100,
                        "nll": 100 * (math.log(value) + rng.gauss(0, 0.15)),
                    }
                    for d in range(10)
                ]
                rows.append(with_raw(directory, "windows", made, windows))
                found = min(1.0, 1.1 / inside)
                cases = [
                    {
                        "depth": depth / 100,
                        "distance": int((1 - depth / 100) * length),
                        "correct": rng.random() < found,
                    }
                    for depth in range(100)
                ]
                share = sum(case["correct"] for case in cases) / len(cases)
                rows.append(
                    with_raw(
                        directory,
                        "cases",
                        row(model, rope, length, share, "passkey", **trained),
                        cases,
                    )
                )
        buckets = [
            {
                "first": first,
                "tokens": 64,
                "nll": 64 * (2 + 1 / (1 + first / 64) + max(0, first / 2048 - 1) * number),
            }
            for first in range(0, 8192, 64)
        ]
        rows.append(
            with_raw(
                directory,
                "buckets",
                row(model, length=8192, task="position-loss", **trained),
                buckets,
            )
        )
        angles = []
        for layer in range(12):
            for head in range(8):
                counts = [1000 if bin == 0 else 0 for bin in range(36)]
                if not coca:
                    counts = [
                        int(60 + 40 * math.cos(math.radians(10 * bin + 9 * layer)))
                        for bin in range(36)
                    ]
                taus = [sum(counts[18:]) // 24 if not coca else 0] * 24
                angles.append(
                    {
                        "layer": layer,
                        "head": head,
                        "pair": 0,
                        "angle_counts": counts,
                        "tau_counts": taus,
                    }
                )
        share = 0.0 if coca else 0.5
        made = with_raw(
            directory,
            "angles",
            row(model, length=2048, value=share, task="boundary", **trained),
            angles,
        )
        decay = [
            {
                "layer": layer,
                "distance": s,
                "bound_rope": 90 / (s + 1) ** 0.3,
                "bound_coca": 50 / (s + 1) ** 0.3,
            }
            for layer in range(3)
            for s in (0, 1, 4, 16, 64, 256, 1024)
        ]
        rows.append(with_raw(directory, "decay", made, decay))
        for mode in ("prefill", "train"):
            for length in lengths:
                step = row(
                    model,
                    length=length,
                    value=(1 + 0.1 * number) * length / 5000,
                    task="speed",
                    mode=mode,
                    **trained,
                )
                step |= {"ratio": 1.1, "baseline": models[0]} if number else {}
                if length == 8192 and mode == "train":
                    step |= {
                        "value": None,
                        "ratio": None,
                        "error": "OOM: 24 GiB",
                        "tokens_per_second": None,
                    }
                    step |= {"peak_bytes": None, "memory_kind": None}
                rows.append(step)
        for benchmark, metric in (
            ("arc_easy", "acc"),
            ("hellaswag", "acc_norm"),
            ("lambada_openai", "acc"),
        ):
            scores = {
                "benchmark": benchmark,
                "metric": metric,
                "value": round(0.4 + rng.random() / 5, 4),
            }
            rows.append(row(model, length=None, task="tasks", **trained) | scores)
    return write_rows(directory, *rows)
