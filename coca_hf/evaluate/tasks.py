"""lm-eval's tasks in this process, as rows: does a model that reads further still know what it knew?

`opencompass` stands for the lm-eval tasks nearest the suites behind the four dimensions of the paper's table 5
(`DIMENSIONS`); its numbers are not OpenCompass's own. `ruler` lengths run lm-eval's RULER at those lengths: all of its
tasks, or those that are named.

A row, task `tasks`, has besides what `rows.py` lists: `value`, the metric; `benchmark`, lm-eval's name of the task;
`data_hash`, of the files of tasks of one's own, else null; `metric`, `filter`, `stderr` (null where the metric is no
mean over cases), `shots` (null: the task's own), `limit`, `scored` cases; `dimension`, a key of `DIMENSIONS`, "ruler"
or null; `length`, RULER's, in tokens, else null; `metrics`, how many rows the benchmark has. RULER's value is the mean
over its tasks of each one's mean. Its raw table `samples`: benchmark (of a group, one of its tasks), case (lm-eval's
doc_id), target, response (text that the model generated) or loglikelihoods (nats: of every choice, or of the text),
score (the metric of this document, null where it is no number) or parts (the numbers that the metric is computed from,
as log-likelihood and words).
"""

import difflib
import functools
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from coca_hf.errors import CocaError, first_line
from coca_hf.evaluate.batches import auto_batch_size, compute_all
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, trained_length, use_rope_
from coca_hf.evaluate.rows import UNSEEN, RowStore, Track, now, subject_settings

DIMENSIONS = {
    "reasoning": ("piqa", "social_iqa", "hellaswag", "copa", "rte"),
    "understanding": ("race", "openbookqa", "boolq", "lambada_openai"),
    "language": ("wic", "wsc", "winogrande"),
    "examination": ("arc_easy", "arc_challenge", "mmlu"),
}
GROUP = "opencompass"
RULER = "ruler"
SEED = 1234  # of the drawn examples before a question: lm-eval's own
# Those of RULER's tasks that make up their text; the others fetch essays (niah_single_2 and _3, niah_multikey_1,
# niah_multivalue, niah_multiquery) or questions (ruler_qa_squad, ruler_qa_hotpot).
WITHOUT_NETWORK = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")


def parse_tasks(text: str, include_path: str | None = None) -> list[str]:
    """`"hellaswag,opencompass"` as lm-eval's names, each once, and a tag as its tasks. include_path: a directory of
    tasks of one's own.

    Raises CocaError where lm-eval is not installed, or knows no such task or one without a number of its own, or there
    is no such directory.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise CocaError(f"--include-path: got {include_path!r}, expected a directory of lm-eval tasks")
    manager = _task_manager(include_path)
    known = manager.all_tasks
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += itertools.chain(*DIMENSIONS.values()) if name == GROUP else [name]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, GROUP], n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise CocaError(f"--tasks: got {name!r}, expected {GROUP} or a task that lm-eval knows{hint}")
        entry = manager.task_index[name]
        if name in manager.all_groups and not entry.cfg.get("aggregate_metric_list"):
            raise CocaError(
                f"--tasks: got {name!r}, a group without a metric of its own, expected its tasks; {entry.yaml_path} "
                f"names them"
            )
    tags = {name: sorted(manager.task_index[name].tags) for name in names if name in manager.all_tags}
    return list(dict.fromkeys(itertools.chain(*(tags.get(name, [name]) for name in names))))


def ruler_tasks() -> list[str]:
    """lm-eval's names of RULER's tasks, and of all of them together."""
    return [RULER, *_ruler_manager().task_index[RULER].cfg["task"]]


def task_rows(
    subject: Subject,
    names: list[str],
    ropes: list[Rope],
    store: RowStore,
    ruler_lengths: list[int] | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    include_path: str | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield the rows of every RoPE setting and benchmark, and of RULER at every length.

    Dynamic NTK is fixed for RULER's length, or else for the trained one. Benchmarks that `store` has are not run again.

    Raises CocaError where a benchmark cannot be run: its data are not there, or a package of its own.
    """
    of_ruler = [name for name in names if name in ruler_tasks()] if names else []
    if of_ruler and not ruler_lengths:
        raise CocaError(f"--tasks {of_ruler[0]}: got no --ruler, expected the lengths at which to run a task of RULER")
    definitions = _files_hash(Path(include_path)) if include_path else None
    wanted: list[tuple[str, int | None]] = [(name, None) for name in names if name not in of_ruler]
    wanted += itertools.product(of_ruler or [RULER], ruler_lengths or [])

    def settings_of(rope: Rope, name: str, length: int | None) -> dict:
        settings = {
            "task": "tasks",
            "rope": str(rope),
            "length": length,
            "stride": None,
            "seed": SEED,
            "benchmark": name,
            "dimension": _dimension(name, length),
            "data_hash": definitions,
            "shots": shots,
            "limit": limit,
            **subject_settings(subject),
            "batch_size": batch_size,
        }
        settings["versions"] |= {"lm-eval": version("lm-eval")}
        return settings

    def found(settings: dict) -> tuple[list[dict], bool]:
        """The rows of a benchmark, and whether these are all."""
        rows = store.find_all(settings, but=("metric", "filter"))
        return rows, bool(rows) and len(rows) >= rows[0]["metrics"]

    asked = [(rope, settings_of(rope, *each)) for rope, each in itertools.product(ropes, wanted)]
    track.begin([settings for _, settings in asked if not found(settings)[1]], len(asked), "benchmarks")
    for rope, settings in asked:
        rows, all_there = found(settings)
        if not all_there:
            done = {(row["metric"], row["filter"]) for row in rows}
            for result, samples in _measure(subject, rope, settings, include_path, track):
                if (result["metric"], result["filter"]) not in done:
                    rows.append(store.append(settings | result, {"samples": samples}))
            track.finish(settings)
        yield from rows


def _measure(
    subject: Subject, rope: Rope, settings: dict, include_path: str | None, track: Track
) -> list[tuple[dict, list[dict]]]:
    """What every metric of a benchmark came to, and its samples; one without a metric where memory ran out."""
    name, length, began = settings["benchmark"], settings["length"], time.perf_counter()
    use_rope_(subject.model, rope, length or trained_length(subject.model) or 2048)
    found: list[tuple[dict, list[dict]]] = [({"metric": None, "filter": None, "value": None}, [])]
    error = None
    sizes: list[int] = []
    try:
        # lm-eval gives its results on the first process only.
        output = _evaluate(subject, settings, include_path, track, sizes)
        found = broadcast_object_list([_metrics(output, name, length)])[0]
    except _Unanswered as failure:
        error = str(failure)
    except CocaError:
        raise
    except Exception as failure:  # data sets, packages and lm-eval itself raise what they raise
        raise CocaError(
            f"--tasks {name}: lm-eval cannot run it: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            + (f"; without a network, run {', '.join(WITHOUT_NETWORK)}" * bool(length and name not in WITHOUT_NETWORK))
            + "; its tokenizer has no eos_token, which lm-eval needs" * (subject.tokenizer.eos_token_id is None)
        ) from failure
    if not found:
        raise CocaError(f"--tasks {name}: got no number from lm-eval, expected at least one metric")
    shared = {
        "metrics": len(found),
        "tokens": None,
        "batch_size": max(sizes, default=settings["batch_size"]),
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }
    for result, _ in found:
        if error is None and not math.isfinite(result["value"]):
            result |= {"value": None, "error": f"the metric is {result['value']}"}
    defaults = {"stderr": None, "scored": 0, "error": error}
    return [(defaults | result | shared, samples) for result, samples in found]


def _files_hash(directory: Path) -> str:
    """Sixteen hex digits of the names, sizes and times of a directory's files, but for those that Python makes."""
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.suffix != ".pyc")
    facts = [(str(file.relative_to(directory)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class _Unanswered(Exception):
    """Requests without an answer; why, as a row says it."""


@contextmanager
def _watching(subject: Subject, benchmark: str) -> Iterator[list[bool]]:
    """Whether there was a NaN among the logits of each forward inside.

    Raises CocaError, in the forward, for token ids that the model does not embed.
    """
    nans: list[bool] = []
    hooks = [
        subject.model.register_forward_hook(lambda _, __, output: nans.append(bool(output.logits.isnan().any()))),
        subject.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given: check_vocabulary(subject, given[0], f"--tasks {benchmark}")
        ),
    ]
    try:
        yield nans
    finally:
        for hook in hooks:
            hook.remove()


def _evaluate(
    subject: Subject, settings: dict, include_path: str | None, track: Track, sizes: list[int]
) -> dict[str, Any] | None:
    """What lm-eval makes of the model's answers; None on all processes but the first. Adds its batch sizes to `sizes`.

    Every process answers its share of the contexts and gets all answers; lm-eval knows of one process only.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    length = settings["length"]
    model = HFLM(pretrained=subject.model, tokenizer=subject.tokenizer, max_length=length)

    def tokens(request: Any) -> int:
        """Of the sequence that the model gets, with room for its answer."""
        texts = [part for part in request.args if isinstance(part, str)]
        new_tokens = model.max_gen_toks if request.request_type == "generate_until" else 0
        return min(len(model.tok_encode("".join(texts))), model.max_length) + new_tokens

    def dealt(answer: Callable, requests: list[Any]) -> list[Any]:
        # Longest first, so that memory runs out early. Requests of one context stay together: one forward may do.
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].args[0]), requests[i].args[0], i))
        contexts = [list(same) for _, same in itertools.groupby(order, key=lambda i: requests[i].args[0])]

        def compute(batch: list[list[int]]) -> list[tuple[list[Any], bool]]:
            model.batch_size_per_gpu = len(batch)  # also of the windows that it cuts a long text into
            with _watching(subject, settings["benchmark"]) as nans:
                found = iter(answer([requests[i] for same in batch for i in same], disable_tqdm=True))
            return [(list(itertools.islice(found, len(same))), any(nans)) for same in batch]

        batch_size = settings["batch_size"] or auto_batch_size(max(map(tokens, requests)))
        answers, error, size = compute_all(
            [(contexts, batch_size)],
            compute,
            lambda batches: track(batches, f"tasks  {settings['benchmark']}"),
        )
        sizes.append(size)
        if error or any(nan for _, nan in answers):  # of which lm-eval would make a share of answers all the same
            raise _Unanswered(failed(error, length or "too many") if error else "the model's logits are NaN")
        found = itertools.chain.from_iterable(some for some, _ in answers)
        by_request = dict(zip(order, found, strict=True))
        return [by_request[i] for i in range(len(requests))]

    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(model, kind, functools.partial(dealt, getattr(model, kind)))
    return simple_evaluate(
        model,
        tasks=[settings["benchmark"]],
        num_fewshot=settings["shots"],
        limit=settings["limit"],
        fewshot_random_seed=settings["seed"],
        bootstrap_iters=0,
        task_manager=_ruler_manager(length, subject.path) if length else _task_manager(include_path),
    )


def _metrics(output: dict[str, Any] | None, name: str, length: int | None) -> list[tuple[dict, list[dict]]]:
    """Every number that lm-eval gives for `name`, with its samples where it has any."""
    if output is None:
        return []
    if length is not None:
        return _ruler_mean(output, str(length))
    results = output["results"].get(name, {})
    found = []
    for key, value in results.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [
            _line(task, sample, metric)
            for task, some in output["samples"].items()  # of a group, those of all its tasks
            for sample in some
            if sample["filter"] == filter_name
        ]
        scores = [sample["score"] for sample in samples]
        # lm-eval gives standard errors only together with bootstraps, which print, fork and take minutes.
        is_mean = (
            len(scores) > 1
            and math.isfinite(value)
            and None not in scores
            and math.isclose(statistics.fmean(scores), value)
        )
        found.append(
            (
                {
                    "metric": metric,
                    "filter": filter_name,
                    "value": float(value),
                    "stderr": statistics.stdev(scores) / math.sqrt(len(scores)) if is_mean else None,
                    "scored": sum(sizes["effective"] for sizes in output.get("n-samples", {}).values()),
                },
                samples,
            )
        )
    return found


def _ruler_mean(output: dict[str, Any], length: str) -> list[tuple[dict, list[dict]]]:
    """The mean over RULER's tasks, each of one weight: lm-eval's own group has one for 4096 tokens only."""
    samples = [_line(task, sample, length) for task, some in output["samples"].items() for sample in some]
    if not samples:
        return []
    by_task = itertools.groupby(samples, key=lambda sample: sample["benchmark"])
    value = statistics.fmean(statistics.fmean(sample["score"] for sample in some) for _, some in by_task)
    return [({"metric": "string_match", "filter": "none", "value": value, "scored": len(samples)}, samples)]


def _line(benchmark: str, sample: dict[str, Any], metric: str) -> dict:
    """A document's line of the raw table."""
    score, answers = sample.get(metric), sample["filtered_resps"]
    likelihoods = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    return {
        "benchmark": benchmark,
        "case": sample["doc_id"],
        "target": _text(sample["target"]),
        "response": None if _are_numbers(likelihoods) else _text(*answers),
        "loglikelihoods": likelihoods if _are_numbers(likelihoods) else None,
        "score": float(score) if isinstance(score, Real) else None,
        "parts": [*map(float, score)] if isinstance(score, tuple) and _are_numbers(score) else None,
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _are_numbers(values: Sequence) -> bool:
    return all(isinstance(value, Real) for value in values)


def _dimension(name: str, length: int | None) -> str | None:
    return RULER if length else next((key for key, names in DIMENSIONS.items() if name in names), None)


@functools.cache
def _task_manager(include_path: str | None) -> Any:
    """It reads every task's file, which takes a while."""
    manager = _managers()
    try:
        return manager(include_path=include_path)
    except Exception as error:  # of files that are YAML and no tasks
        raise CocaError(
            f"--include-path {include_path}: lm-eval cannot read its tasks ({first_line(error)})"
        ) from error


@functools.cache
def _ruler_manager(length: int | None = None, tokenizer: str | None = None) -> Any:
    """Of RULER's tasks alone, which make their own cases, by the length in tokens and the tokenizer's path."""
    managers = _managers()
    directory = Path(sys.modules[managers.__module__].__file__).with_name(RULER)  # type: ignore[arg-type]
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer}
    return managers(include_path=str(directory), include_defaults=False, metadata=metadata)


def _managers() -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise CocaError("coca-eval tasks needs lm-eval: pip install 'coca-hf[lm-eval]'") from error
    return TaskManager
