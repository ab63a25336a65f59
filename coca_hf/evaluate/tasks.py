"""lm-eval's tasks in this process, as rows: does a model that reads further still know what it knew?

`opencompass` stands for the lm-eval tasks nearest the suites behind the four dimensions of the paper's table 5
(`DIMENSIONS`); its numbers are not OpenCompass's own. `ruler` lengths run lm-eval's RULER group at those lengths.

A row, task `tasks`, has besides what `rows.py` lists: `value`, the metric; `benchmark`, lm-eval's name of the task;
`metric`, `filter`, `stderr` or null, `shots` (null: the task's own), `limit`, `scored` cases; `dimension`, a key of
`DIMENSIONS`, "ruler" or null; `length`, RULER's, in tokens, else null; `metrics`, how many rows the benchmark has. Its
raw table `samples`: case, score (the metric of one document, null where it is no number); for RULER the mean of each of
its tasks: benchmark, score.
"""

import difflib
import functools
import itertools
import math
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Track, processes
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.rope import Rope, trained_length, use_rope_
from coca_hf.evaluate.rows import RowStore, now, subject_settings

DIMENSIONS = {
    "reasoning": ("piqa", "social_iqa", "hellaswag", "copa", "rte"),
    "understanding": ("race", "openbookqa", "boolq", "lambada_openai"),
    "language": ("wic", "wsc", "winogrande"),
    "examination": ("arc_easy", "arc_challenge", "mmlu"),
}
GROUP = "opencompass"
RULER = "ruler"


def parse_tasks(text: str, include_path: str | None = None) -> list[str]:
    """`"hellaswag,opencompass"` as lm-eval's names, each once. include_path: a directory of tasks of one's own.

    Raises CocaError where lm-eval is not installed, or knows no such task.
    """
    known = _task_manager(include_path).all_tasks
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += itertools.chain(*DIMENSIONS.values()) if name == GROUP else [name]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, GROUP], n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise CocaError(f"--tasks: got {name!r}, expected {GROUP} or a task that lm-eval knows{hint}")
    return list(dict.fromkeys(names))


def task_rows(
    subject: Subject,
    names: list[str],
    ropes: list[Rope],
    store: RowStore,
    ruler_lengths: list[int] | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    include_path: str | None = None,
    track: Track = lambda items, description: items,
) -> Iterator[dict]:
    """Yield the rows of every RoPE setting and benchmark, and of RULER at every length.

    Dynamic NTK is fixed for RULER's length, or else for the trained one. Benchmarks that `store` has are not run again.

    Raises CocaError on several processes, and where a benchmark cannot be run: its data are not there, or a package of
    its own.
    """
    if processes().num_processes > 1:
        raise CocaError(f"coca-eval tasks: got {processes().num_processes} processes, expected one; run without launch")
    wanted: list[tuple[str, int | None]] = [(name, None) for name in names]
    wanted += [(RULER, length) for length in ruler_lengths or []]
    for rope in ropes:
        for name, length in track(wanted, f"tasks  {rope}"):
            settings = {
                "task": "tasks",
                "rope": str(rope),
                "length": length,
                "stride": None,
                "benchmark": name,
                "dimension": _dimension(name),
                "shots": shots,
                "limit": limit,
                **subject_settings(subject),
                "batch_size": batch_size,
            }
            settings["versions"] |= {"lm-eval": version("lm-eval")}
            rows = store.find_all(settings, but=("metric", "filter"))
            if not rows or len(rows) < rows[0]["metrics"]:
                done = {(row["metric"], row["filter"]) for row in rows}
                for result, samples in _measure(subject, rope, settings, include_path):
                    if (result["metric"], result["filter"]) not in done:
                        rows.append(store.append(settings | result, {"samples": samples}))
            yield from rows


def _measure(subject: Subject, rope: Rope, settings: dict, include_path: str | None) -> list[tuple[dict, list[dict]]]:
    """What every metric of a benchmark came to, and its samples; one without a metric where memory ran out."""
    name, length, began = settings["benchmark"], settings["length"], time.perf_counter()
    use_rope_(subject.model, rope, length or trained_length(subject.model) or 2048)
    output, error, batch_size = None, None, settings["batch_size"]
    while output is None and error is None:
        try:
            output = _evaluate(subject, settings, batch_size, include_path)
        except Exception as failure:  # data sets, packages and lm-eval itself raise what they raise
            reason = " ".join(str(failure).split())[:300]
            if not (isinstance(failure, MemoryError) or should_reduce_batch_size(failure)):
                raise CocaError(
                    f"--tasks {name}: lm-eval cannot run it: {type(failure).__name__}: {reason}"
                ) from failure
            error = f"OOM: {reason}" if batch_size == 1 else None
            batch_size //= 2
        clear_device_cache(garbage_collection=True)
    found = _metrics(output, name, length) if output else [({"metric": None, "filter": None, "value": None}, [])]
    if not found:
        raise CocaError(f"--tasks {name}: got no number from lm-eval, expected at least one metric")
    shared = {
        "metrics": len(found),
        "tokens": None,
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }
    for result, _ in found:
        if error is None and not math.isfinite(result["value"]):
            result |= {"value": None, "error": f"the metric is {result['value']}"}
    defaults = {"stderr": None, "scored": 0, "error": error}
    return [(defaults | result | shared, samples) for result, samples in found]


def _evaluate(subject: Subject, settings: dict, batch_size: int, include_path: str | None) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    length = settings["length"]
    model = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=batch_size, max_length=length)
    tokenizer = subject.path if length else None
    return simple_evaluate(
        model,
        tasks=[settings["benchmark"]],
        num_fewshot=settings["shots"],
        limit=settings["limit"],
        bootstrap_iters=0,
        task_manager=_task_manager(include_path, length, tokenizer),
    )


def _metrics(output: dict[str, Any], name: str, length: int | None) -> list[tuple[dict, list[dict]]]:
    """Every number that lm-eval gives for `name`, with its samples where it has any."""
    if name == RULER:
        return _ruler_mean(output, str(length))
    results = output["results"].get(name, {})
    found = []
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [
            {"case": sample["doc_id"], "score": _number(sample.get(metric))}
            for task, some in output.get("samples", {}).items()
            for sample in some
            if task == name and sample.get("filter", filter_name) == filter_name
        ]
        stderr = results.get(f"{metric}_stderr,{filter_name}")
        found.append(
            (
                {
                    "metric": metric,
                    "filter": filter_name,
                    "value": float(value),
                    "stderr": stderr if isinstance(stderr, int | float) else None,
                    "scored": sum(sizes["effective"] for sizes in output.get("n-samples", {}).values()),
                },
                samples,
            )
        )
    return found


def _ruler_mean(output: dict[str, Any], length: str) -> list[tuple[dict, list[dict]]]:
    """The mean over RULER's tasks, each of one weight: lm-eval's own group has one for 4096 tokens only."""
    scores = {task: result.get(f"{length},none") for task, result in output["results"].items() if task != RULER}
    samples = [
        {"benchmark": task, "score": float(score)} for task, score in scores.items() if score is not None and score >= 0
    ]
    if not samples:
        return []
    value = sum(sample["score"] for sample in samples) / len(samples)
    scored = sum(sizes["effective"] for sizes in output.get("n-samples", {}).values())
    return [({"metric": "string_match", "filter": "none", "value": value, "scored": scored}, samples)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _dimension(name: str) -> str | None:
    return RULER if name == RULER else next((key for key, names in DIMENSIONS.items() if name in names), None)


@functools.cache
def _task_manager(include_path: str | None, ruler_length: int | None = None, tokenizer: str | None = None) -> Any:
    """It reads every task's file, which takes a while. RULER makes its own cases, by the length and the tokenizer."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise CocaError("coca-eval tasks needs lm-eval: pip install 'coca-hf[lm-eval]'") from error
    metadata = {"max_seq_lengths": [ruler_length], "tokenizer": tokenizer} if ruler_length else None
    return TaskManager(include_path=include_path, metadata=metadata)
