"""lm-eval's tasks, run in this process: what a model that reads further still knows.

`opencompass` stands for the lm-eval tasks nearest to the suites behind the four dimensions of the
paper's table 5 (`DIMENSIONS`); its numbers are not OpenCompass's own. `ruler` lengths run lm-eval's
RULER at those lengths: all of its tasks, or those named.
"""

import copy
import glob
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from coca_hf.errors import CocaError, library_errors, nearest, one_line
from coca_hf.evaluate.batches import Batches, NoValue, check_logits
from coca_hf.evaluate.loaded_model import (
    LoadedModel,
    Rope,
    check_vocabulary,
    state_of,
    trained_length,
    use_rope_,
)
from coca_hf.evaluate.rows import Count, Identity, Row, Run, Setting
from coca_hf.evaluate.tables import NBSP, Measurement, Table
from coca_hf.page import Grid, Part
from coca_hf.provenance import now, versions
from coca_hf.tokens import around_text

DIMENSIONS = {
    "reasoning": ("piqa", "social_iqa", "hellaswag", "copa", "rte"),
    "understanding": ("race", "openbookqa", "boolq", "lambada_openai"),
    "language": ("wic", "wsc", "winogrande"),
    "examination": ("arc_easy", "arc_challenge", "mmlu"),
}
GROUP = "opencompass"
RULER = "ruler"
SHORTEST_RULER = 1024
SEED = 1234  # of the examples drawn before a question: lm-eval's default
# RULER's tasks that generate their text; the others download essays (niah_single_2 and _3,
# niah_multikey_1, niah_multivalue, niah_multiquery) or questions (ruler_qa_squad, ruler_qa_hotpot).
WITHOUT_NETWORK = (
    *("niah_single_1", "niah_multikey_2", "niah_multikey_3"),
    *("ruler_vt", "ruler_cwe", "ruler_fwe"),
)


class TasksRow(Row):
    """A row for each metric of a benchmark. RULER's value is the mean of its tasks' means.

    The raw table `samples` has benchmark (in a group, one of its tasks), case (lm-eval's doc_id),
    target, response (generated text) or loglikelihoods (nats: of every choice, or of the text), and
    score (the metric of this document, null if it is not a number) or parts (the numbers that the
    metric is computed from, such as log-likelihood and words).
    """

    length: Identity[Count | None]  # RULER's, in tokens; null for others
    value: float | None
    benchmark: Setting[str]  # lm-eval's name of the task
    metric: Setting[str | None]
    filter: Setting[str | None]
    shots: Setting[int | None]  # null: the task's own
    limit: Setting[int | None]
    data_hash: Identity[str | None]  # of the files of your own tasks and their data
    seed: Identity[int | None]
    stderr: float | None  # null if the metric is not a mean over cases
    scored: int | None  # cases
    dimension: str | None  # a key of `DIMENSIONS`, "ruler" or null
    metrics: int | None  # rows of the benchmark


def parse_tasks(text: str, include_path: str | None = None) -> list[str]:
    """`"hellaswag,opencompass"` as lm-eval's names, each once, with tags replaced by their tasks.

    include_path: a directory of your own tasks.

    Raises CocaError if lm-eval does not know a task or has no number for a group of tasks, or if
    there is no such directory, or one of tasks that would not run.
    """
    if include_path is not None and not Path(include_path).is_dir():
        problem = f"got {include_path!r}, expected a directory of lm-eval tasks"
        raise CocaError(f"--include-path: {problem}")
    manager = _task_manager(include_path)
    if include_path is not None:
        _check_own(Path(include_path), manager.task_index)
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += itertools.chain(*DIMENSIONS.values()) if name == GROUP else [name]
    tasks: list[str] = []
    for name in names:
        if name not in manager.all_tasks:
            expected = f"expected {GROUP} or a task that lm-eval knows"
            near = nearest(name, [*manager.all_tasks, GROUP])
            raise CocaError(f"--tasks: got {name!r}, {expected}; nearest: {near}")
        entry = manager.task_index[name]
        if name in manager.all_groups and not entry.cfg.get("aggregate_metric_list"):
            raise CocaError(
                f"--tasks: got {name!r}, a group without a metric of its own, expected its tasks; "
                f"{entry.yaml_path} names them"
            )
        tasks += sorted(entry.tags) if name in manager.all_tags else [name]
    return list(dict.fromkeys(tasks))


def _check_own(directory: Path, index: dict[str, Any]) -> None:
    """Raise CocaError for a file that lm-eval passes over without a word, running another task of
    that name if there is one, and for a task with a name of RULER's, which would run instead.
    """
    import yaml  # lm-eval brings it

    for file in sorted(directory.rglob("*.yaml")):
        if {"__pycache__", ".ipynb_checkpoints"} & {*file.parts}:
            continue  # lm-eval does not look there
        with library_errors(f"--include-path: {file} is not YAML, so lm-eval would pass over it"):
            content = yaml.compose(file.read_text(encoding="utf-8"))
        pairs = content.value if isinstance(content, yaml.MappingNode) else []
        names = {key.value: value.value for key, value in pairs}
        name = names.get("group", names.get("task"))
        entry = index.get(name) if isinstance(name, str) else None
        if isinstance(name, str) and (entry is None or entry.yaml_path != file):
            raise CocaError(
                f"--include-path: {file}: got {name!r}, which lm-eval takes from "
                f"{entry.yaml_path or 'a tag' if entry else 'nowhere'}; expected a name that no "
                "other file or tag there has, and only includes that exist"
            )
    for name in ruler_tasks():
        path = index[name].yaml_path if name in index else None
        if path and path.is_relative_to(directory):
            raise CocaError(
                f"--include-path: {path}: got task {name!r}, a name of lm-eval's RULER, which would run "
                "instead; give it another name"
            )


def ruler_tasks() -> list[str]:
    """lm-eval's name of RULER, and those of its tasks."""
    return [RULER, *_ruler_manager().task_index[RULER].cfg["task"]]


def task_rows(
    run: Run,
    names: list[str],
    shots: int | None = None,
    limit: int | None = None,
    include_path: str | None = None,
) -> Iterator[dict]:
    """Yield the rows of every RoPE setting and benchmark, and of RULER at every length of the run.

    Dynamic NTK is fixed for RULER's length, otherwise for the trained one. Benchmarks that the
    store has are not run again.

    Raises CocaError if a benchmark cannot be run: its data or a package that it needs are missing.
    """
    of_ruler = [name for name in names if name in ruler_tasks()]
    if of_ruler and not run.lengths:
        expected = "the lengths at which to run a task of RULER"
        raise CocaError(f"--tasks {of_ruler[0]}: got no --ruler, expected {expected}")
    if run.lengths and min(run.lengths) < SHORTEST_RULER:
        raise CocaError(
            f"--ruler: got {min(run.lengths)}, expected at least {SHORTEST_RULER} tokens: in fewer, the "
            "questions of some tasks do not fit, and lm-eval looks for shorter ones without end"
        )
    definitions = _files_hash(include_path) if include_path else None
    wanted: list[tuple[str, int | None]] = [(name, None) for name in names if name not in of_ruler]
    wanted += itertools.product(of_ruler or [RULER], run.lengths)

    def settings_of(rope: Rope, name: str, length: int | None) -> dict:
        dimensions = (key for key, names in DIMENSIONS.items() if name in names)
        return {
            "task": "tasks",
            "rope": str(rope),
            "length": length,
            "seed": SEED,
            "benchmark": name,
            "dimension": RULER if length else next(dimensions, None),
            "data_hash": definitions,
            "shots": shots,
            "limit": limit,
            **run.about,
            "versions": run.about["versions"] | {"lm-eval": versions("lm-eval").get("lm-eval")},
            "batch_size": run.batch_size,
        }

    def complete(settings: dict) -> list[dict]:
        """The rows of every metric and filter, which are known once a benchmark has run."""
        rows = run.store.find(TasksRow, settings, but=("metric", "filter"))
        return rows if rows and len(rows) >= rows[0].get("metrics", 1) else []

    def make(rope: Rope, wanted: list[dict]) -> list[dict]:
        (settings,) = wanted
        watch = partial(run.progress, description=f"tasks  {settings['benchmark']}")
        batches = Batches(run.batch_size, watch, settings["length"] or "too many")
        found = _measure(run.loaded, rope, settings, include_path, batches)
        rows = [(settings | result, {"samples": samples}) for result, samples in found]
        return run.store.append_all(TasksRow, rows)

    each_rope = itertools.product(run.ropes, wanted)
    asked = [(rope, [settings_of(rope, *benchmark)]) for rope, benchmark in each_rope]
    return run.each(asked, complete, make, "benchmarks")


def _measure(
    loaded: LoadedModel, rope: Rope, settings: dict, include_path: str | None, batches: Batches
) -> list[tuple[dict, list[dict]]]:
    """The result of every metric of a benchmark, and its samples.

    If there is no value, there is one result without a metric.
    """
    name, length, began = settings["benchmark"], settings["length"], time.perf_counter()
    use_rope_(loaded.model, rope, length or trained_length(loaded.model.config) or 2048)
    found: list[tuple[dict, list[dict]]]
    try:
        found = _metrics(_evaluate(loaded, settings, include_path, batches), name, length)
    except NoValue as failure:
        found = [({"metric": None, "filter": None, "value": None, "error": str(failure)}, [])]
    except CocaError:
        raise
    except Exception as failure:  # data sets, packages and lm-eval itself raise anything
        reason = f"{type(failure).__name__}: {one_line(failure)}"
        if length and name not in WITHOUT_NETWORK:
            reason += f"; without a network, run {', '.join(WITHOUT_NETWORK)}"
        if loaded.tokenizer.eos_token_id is None:
            reason += "; its tokenizer has no eos_token, which lm-eval needs"
        raise CocaError(f"--tasks {name}: lm-eval cannot run it: {reason}") from failure
    if not found:
        raise CocaError(f"--tasks {name}: got no number from lm-eval, expected at least one metric")
    shared = {
        "metrics": len(found),
        "batch_size": batches.used or settings["batch_size"],
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }
    defaults = {"stderr": None, "scored": 0, "error": None}
    return [(defaults | result | shared, samples) for result, samples in found]


def _files_hash(include_path: str) -> str:
    """Sixteen hex digits of the names and states of a directory's files, except .pyc files, and of
    the local data sets that its tasks name.
    """
    directory, index = Path(include_path), _task_manager(include_path).task_index
    found = {file for file in directory.rglob("*") if file.suffix != ".pyc"}
    for entry in index.values():
        if entry.yaml_path and Path(entry.yaml_path).is_relative_to(directory):
            data_set = [entry.cfg.get("dataset_path"), entry.cfg.get("dataset_kwargs")]
            for path in map(Path, itertools.chain(*map(glob.iglob, _texts_in(data_set)))):
                found |= {path, *path.rglob("*")}
    facts = []
    for file in sorted(file for file in found if file.is_file()):
        inside = file.is_relative_to(directory)
        name = str(file.relative_to(directory)) if inside else file.name
        facts.append((name, *state_of(file)))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _texts_in(tree: Any) -> Iterator[str]:
    """The texts among the values of nested lists and mappings."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts_in(value)


@contextmanager
def _checking(loaded: LoadedModel, benchmark: str) -> Iterator[None]:
    """In every forward inside, raise NoValue for logits that are no numbers, which lm-eval would
    count as an answer, and CocaError for token ids without an embedding.
    """

    def check_output(_: Any, __: Any, output: Any) -> None:
        check_logits(output.logits)

    def check_ids(_: Any, given: Any) -> None:
        check_vocabulary(loaded, given[0], f"--tasks {benchmark}")

    embeddings = loaded.model.get_input_embeddings()
    with (
        loaded.model.register_forward_hook(check_output),
        embeddings.register_forward_pre_hook(check_ids),
    ):
        yield


def _evaluate(
    loaded: LoadedModel, settings: dict, include_path: str | None, batches: Batches
) -> dict[str, Any]:
    """lm-eval's output, on every process: each answers its share of the contexts and gets all
    answers. lm-eval knows of one process only.
    """
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    length = settings["length"]
    # RULER does not count the beginning of the answer, which follows a prompt, so some exceed the
    # length by a few dozen tokens; with this limit, lm-eval would cut their first ones, bos too
    limit = length and 2 * length
    tokenizer = _ending_nothing(loaded)
    model = HFLM(pretrained=loaded.model, tokenizer=tokenizer, max_length=limit)

    def tokens(request: Any) -> int:
        """The tokens that the model gets, with room for its answer."""
        texts = [part for part in request.args if isinstance(part, str)]
        new_tokens = model.max_gen_toks if request.request_type == "generate_until" else 0
        return min(len(model.tok_encode("".join(texts))), model.max_length) + new_tokens

    def dealt(answer: Callable, requests: list[Any]) -> list[Any]:
        # Longest first, so that memory runs out early. Requests of one context stay together: one
        # forward may answer them all.
        texts = [request.args[0] for request in requests]
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i], i))
        contexts = [list(same) for _, same in itertools.groupby(order, key=lambda i: texts[i])]

        def compute(batch: list[list[int]]) -> list[list[Any]]:
            # lm-eval cuts a long text into windows, and batches these itself
            model.batch_size_per_gpu = len(batch)
            with _checking(loaded, settings["benchmark"]):
                found = iter(
                    answer([requests[i] for same in batch for i in same], disable_tqdm=True)
                )
            return [list(itertools.islice(found, len(same))) for same in batch]

        answers = batches.compute([(contexts, max(map(tokens, requests)))], compute)
        by_request = dict(zip(order, itertools.chain.from_iterable(answers), strict=True))
        return [by_request[i] for i in range(len(requests))]

    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(model, kind, partial(dealt, getattr(model, kind)))
    manager = _ruler_manager(length, loaded.path) if length else _task_manager(include_path)
    _forget_modules_that_draw()
    # As simple_evaluate of lm-eval does, which also runs pip to describe the machine
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    too_long = (
        f"its questions do not fit {length} tokens of this tokenizer; choose a longer --ruler"
    )
    if settings["benchmark"] in (RULER, "ruler_vt") and not _chains_fit(loaded.tokenizer, length):
        raise NoValue(f"{too_long}, or leave ruler_vt out")
    # RULER counts the tokens of its questions with a tokenizer that lm-eval would load by the model's
    # path, from the main branch of a model on the hub, with the code that it carries. Not patched in
    # lm-eval's modules, which it loads several times
    sizing = patch.object(AutoTokenizer, "from_pretrained", lambda *_, **__: loaded.tokenizer)
    with sizing if length else nullcontext():
        tasks = manager.load([settings["benchmark"]])
    for task in tasks["tasks"].values():
        if length and not all(doc["outputs"] for doc in task.eval_docs):
            raise NoValue(too_long)
        own, shots = task.get_config("num_fewshot"), settings["shots"]
        if own == 0 and shots:  # lm-eval would ignore them
            raise NoValue(f"--shots {shots}: the benchmark's definition has 0; leave it out")
        if own is None or shots is not None:
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=settings["seed"])
    return evaluate(model, tasks, limit=settings["limit"], bootstrap_iters=0)


def _ending_nothing(loaded: LoadedModel) -> Any:
    """The tokenizer, or a copy that puts no special tokens after a text. lm-eval would put them
    between a question and its answer, whose first token it would not score.

    Raises CocaError for such a tokenizer without a post-processor to replace.
    """
    before, after = around_text(loaded.tokenizer)
    if not after:
        return loaded.tokenizer
    tokenizer = copy.deepcopy(loaded.tokenizer)
    names = tokenizer.convert_ids_to_tokens(before)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        found = f"got a tokenizer that puts {tokenizer.decode(after)!r} after texts"
        remedy = "expected one that does not; set add_eos_token to false in tokenizer_config.json"
        raise CocaError(f"{loaded.path}: {found}, {remedy}")
    backend.post_processor = TemplateProcessing(
        single=[*names, "$A"], special_tokens=[*zip(names, before, strict=True)]
    )
    return tokenizer


def _chains_fit(tokenizer: Any, length: int) -> bool:
    """Whether a prompt of ruler_vt fits: an example of up to 500 tokens and a question. If none does,
    lm-eval looks for a shorter one without end.
    """
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    def tokens(num_lines: int, is_example: bool) -> int:
        text, answer = generate_input_output(num_lines, 1, 4, is_example)
        return len(tokenizer(f"{text} {answer}").input_ids) + 30  # of the answer

    examples = [tokens(num_lines, True) for num_lines in range(5, 51, 5)]
    fitting = [num_tokens for num_tokens in examples if num_tokens <= 500]
    return bool(fitting) and max(fitting) + tokens(10, False) <= length


def _forget_modules_that_draw() -> None:
    """Make lm-eval load the modules of tasks again that hold a random generator, such as ruler_cwe's;
    otherwise the questions would depend on the benchmarks before.
    """
    generators = random.Random, np.random.RandomState, np.random.Generator
    for name, module in [*sys.modules.items()]:
        content = getattr(module, "__dict__", {})
        if "__mtime__" in content and any(isinstance(v, generators) for v in content.values()):
            del sys.modules[name]  # lm-eval sets __mtime__ in those that it loads


def _metrics(
    output: dict[str, Any], name: str, length: int | None
) -> list[tuple[dict, list[dict]]]:
    """Every number that lm-eval gives for `name`, with its samples if it has any."""
    if length is not None:
        return _ruler_mean(output, str(length))
    found = []
    for key, value in output["results"].get(name, {}).items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        samples = [
            _line(task, sample, metric)
            for task, some in output["samples"].items()  # of a group, those with the metric
            for sample in some
            if sample["filter"] == filter_name and metric in sample
        ]
        result = {"metric": metric, "filter": filter_name, "value": float(value)}
        result |= {"scored": len(samples), "stderr": _stderr(samples, value)}
        if not math.isfinite(value):
            result |= {"value": None, "error": f"the metric is {float(value)}"}
        found.append((result, samples))
    return found


def _stderr(samples: list[dict], value: float) -> float | None:
    """The standard error of a `value` that is the mean of the scores, otherwise None; of a group,
    with the variance inside of its tasks, as in lm-eval.

    lm-eval gives it only with bootstraps, which print, fork and take minutes.
    """
    scores, by_task = [sample["score"] for sample in samples], defaultdict(list)
    for sample in samples:
        by_task[sample["benchmark"]].append(sample["score"])
    freedom = len(scores) - len(by_task)
    if freedom < 1 or None in scores or not math.isfinite(value):
        return None
    if not math.isclose(statistics.fmean(scores), value):
        return None
    means = {name: statistics.fmean(some) for name, some in by_task.items()}
    squares = math.fsum((one["score"] - means[one["benchmark"]]) ** 2 for one in samples)
    return math.sqrt(squares / freedom / len(scores))


def _ruler_mean(output: dict[str, Any], length: str) -> list[tuple[dict, list[dict]]]:
    """The mean over RULER's tasks, with equal weights; lm-eval's own group only has 4096 tokens."""
    samples = [
        _line(task, sample, length) for task, some in output["samples"].items() for sample in some
    ]
    by_task = itertools.groupby(samples, key=lambda sample: sample["benchmark"])
    value = statistics.fmean(
        statistics.fmean(sample["score"] for sample in some) for _, some in by_task
    )
    result = {"metric": "string_match", "filter": "none", "value": value, "scored": len(samples)}
    return [(result, samples)]


def _line(benchmark: str, sample: dict[str, Any], metric: str) -> dict:
    """The line of a document in the raw table."""
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


@cache
def _task_manager(include_path: str | None) -> Any:
    """The manager of all tasks, whose files take a while to read."""
    from lm_eval.tasks import TaskManager

    with library_errors(f"--include-path {include_path}: lm-eval cannot read its tasks"):
        return TaskManager(include_path=include_path)


@cache
def _ruler_manager(length: int | None = None, tokenizer: str | None = None) -> Any:
    """The manager of RULER's tasks, which generate their cases for a length in tokens.

    tokenizer: its path.
    """
    from lm_eval import tasks

    directory = Path(tasks.__file__).with_name(RULER)
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer}
    return tasks.TaskManager(include_path=str(directory), include_defaults=False, metadata=metadata)


def _settings(row: dict) -> str:
    return f"{row['benchmark']}, {_metric(row)}, {_shots(row)}"


def _metric(row: dict) -> str:
    """A benchmark that failed has none."""
    return f"{row['metric']} ({row['filter']})" if row["metric"] else "no metric"


def _shots(row: dict) -> str:
    """Examples before a question, and the number of cases if that is limited."""
    shots = "the task's own shots" if row["shots"] is None else f"{row['shots']} shots"
    return shots + (f", first {row['limit']} cases" if row["limit"] else "")


def _cell(row: dict) -> str:
    stderr = "" if row["stderr"] is None else f"{NBSP}±{NBSP}{row['stderr']:.3f}"
    return f"{row['value']:.3f}{stderr}"


def _parts(tables: list[Table]) -> list[Part]:
    """Benchmark and metric against model."""
    names = list(dict.fromkeys(name for table in tables for name in table.series))
    lines = []
    for table in tables:
        row = table.rows[0]
        for length in table.lengths or (None,):
            cells = {
                name: MEASUREMENT.show(found)
                for name, rows in table.series.items()
                for found in rows
                if found["length"] == length
            }
            benchmark = row["benchmark"] + (f" at {length}" if length else "")
            facts = [benchmark, row["dimension"] or "", _metric(row), _shots(row)]
            lines.append([*facts, *(cells.get(name, "") for name in names)])
    header = ["benchmark", "dimension", "metric", "shots", *names]
    missing = [part for table in tables for part in table.missing()]
    return [Grid(header, lines, numbers_from=4), *missing]


MEASUREMENT = Measurement(
    task="tasks",
    title="Short context",
    explanation="Benchmarks of lm-eval at short context: what a longer context must not cost. ± "
    "the standard error, where the metric is a mean over cases.",
    row=TasksRow,
    settings=_settings,
    cell=_cell,
    parts=_parts,
)
