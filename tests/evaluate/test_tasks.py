"""lm-eval's numbers as rows, on tasks over local files."""

import importlib
import inspect
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from statistics import fmean

import lm_eval
import pytest
import torch
import wonderwords
import yaml
from lm_eval.api.metrics import mean_stderr, pooled_sample_stderr
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from coca_hf.errors import CocaError
from coca_hf.evaluate import tasks
from coca_hf.evaluate.tasks import DIMENSIONS, WITHOUT_NETWORK, parse_tasks, ruler_tasks, task_rows
from coca_hf.report.read import read_tables
from tests.conftest import refused
from tests.evaluate.conftest import PAIRS, put_around_texts
from tests.evaluate.runs import raw_of, run_of

NAMES = ["coca_likelihood", "coca_answer"]
pytestmark = pytest.mark.usefixtures("own_tasks")


def measured(coca, names, out, own=None, lengths=(), batch_size=None, **options):
    """The rows of tasks; own: the directory that they are in. lengths: RULER's."""
    run = run_of(coca, out, *lengths, batch_size=batch_size)
    return list(task_rows(run, names, include_path=str(own) if own else None, **options))


def test_rows_have_the_numbers_of_the_model_itself(coca, task_dir, expected, tmp_path, monkeypatch):
    """And nothing runs pip, which lm-eval would ask for what is installed."""
    asked_pip = []
    monkeypatch.setattr("torch.utils.collect_env.get_env_info", lambda: asked_pip.append(1))
    assert parse_tasks(",".join(NAMES), str(task_dir)) == NAMES
    rows = measured(coca, NAMES, tmp_path, task_dir, batch_size=3)
    assert asked_pip == []
    likelihood, answer = rows
    assert likelihood["value"] == pytest.approx(expected["perplexity"], rel=1e-4)
    assert answer["value"] == 1 - 1 / len(PAIRS)
    assert (answer["metric"], answer["scored"]) == ("exact_match", len(PAIRS))
    scores = [line["score"] for line in raw_of(answer, tmp_path, "samples")]
    assert sum(scores) / len(scores) == answer["value"]
    assert (answer["stderr"], likelihood["stderr"]) == (pytest.approx(mean_stderr(scores)), None)
    assert (answer["length"], answer["dimension"], answer["filter"]) == (None, None, "none")
    assert "lm-eval" in answer["versions"]
    seed = inspect.signature(lm_eval.simple_evaluate).parameters["fewshot_random_seed"]
    assert answer["seed"] == seed.default
    monkeypatch.setattr(tasks, "_evaluate", None)
    assert measured(coca, NAMES, tmp_path, task_dir, batch_size=3) == rows


@pytest.mark.parametrize("around", ["$A </s>", "<s> $A </s>"])
def test_tokens_that_the_tokenizer_puts_after_texts_are_not_between_question_and_answer(
    coca, task_dir, expected, tmp_path, around
):
    """What the model reads, and is asked to say, is what it is without them."""
    put_around_texts(coca.tokenizer, around.removesuffix(" </s>"))
    wanted = [row["value"] for row in measured(coca, NAMES, tmp_path / "without", task_dir)]
    put_around_texts(coca.tokenizer, around)
    found = [row["value"] for row in measured(coca, NAMES, tmp_path / "with", task_dir)]
    assert found == wanted
    of_model = pytest.approx(expected["perplexity"], rel=1e-4)
    assert (found[0] == of_model) == ("<s>" not in around)
    assert coca.tokenizer("a").input_ids[-1] == coca.tokenizer.eos_token_id  # as it was


def test_a_tokenizer_that_ends_texts_and_cannot_be_changed_is_refused(coca):
    """As one of Python's, without a post-processor."""

    class Slow:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [5, 2] if add_special_tokens else [5]}

        def convert_ids_to_tokens(self, ids):
            return []

        def decode(self, ids):
            return "</s>"

    with pytest.raises(CocaError, match="got a tokenizer that puts '</s>' after texts, expected"):
        tasks._ending_nothing(replace(coca, tokenizer=Slow()))


def test_examples_before_a_question_are_lm_evals(coca, task_dir, tmp_path, monkeypatch):
    """Tasks without a number of their own, with none and with one, each asked for several."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
    shared = yaml.safe_load((task_dir / "coca_likelihood.yaml").read_text())
    own = {"unset": {}, "never": {"num_fewshot": 0}, "one": {"num_fewshot": 1}}
    for name, number in own.items():
        task = shared | {"task": name, "fewshot_split": "test"} | number
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    values = {}
    for shots in (2, None, 0):
        options = {"num_fewshot": shots, "limit": 3, "bootstrap_iters": 0, "task_manager": manager}
        model = HFLM(pretrained=coca.model, tokenizer=coca.tokenizer)
        theirs = lm_eval.simple_evaluate(model, tasks=[*own], **options)["results"]
        rows = measured(coca, [*own], tmp_path / "out", tmp_path, limit=3, shots=shots)
        for name, row in zip(own, rows, strict=True):
            values[name, shots] = row["value"]
            if name == "never" and shots:
                assert row["error"] == "--shots 2: the benchmark's definition has 0; leave it out"
            else:
                assert row["value"] == pytest.approx(theirs[name]["perplexity,none"], rel=1e-4)
    assert values["unset", 2] == values["one", 2] != values["one", None] != values["one", 0]
    assert values["never", 2] is None
    assert values["never", 0] == values["unset", None] == values["one", 0]


@pytest.mark.parametrize("room", [1, 0])
def test_a_benchmark_is_tried_smaller_then_says_oom(coca, task_dir, expected, tmp_path, room):
    """Memory for `room` sequences at a time."""
    tried, forward = [], coca.model.forward

    def limited(input_ids=None, *args, **kwargs):
        tried.append(len(input_ids))
        if len(input_ids) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(input_ids, *args, **kwargs)

    coca.model.forward = limited
    (row,) = measured(coca, NAMES[:1], tmp_path, task_dir, batch_size=4)
    if room:
        assert tried == [4, 2, 1, 1, 1, 1]
        assert row["value"] == pytest.approx(expected["perplexity"], rel=1e-4)
        assert row["error"] is None
    else:
        assert tried == [4, 2, 1]
        assert (row["value"], row["metric"]) == (None, None)
        assert row["error"].startswith("OOM: one sequence alone does not fit (CUDA out of memory.")
        coca.model.forward = forward
        (again,) = measured(coca, NAMES[:1], tmp_path, task_dir, batch_size=4)
        assert again["value"] == pytest.approx(expected["perplexity"], rel=1e-4)
        (table,) = read_tables([tmp_path])
        assert [row["value"] for row in table.rows] == [again["value"]]


def samples_by_task(scores, metric, **others):
    """Samples of a multiple choice as lm-eval gives them. scores: (task, number, score)."""
    answers = {"target": 0, "filtered_resps": [(-1.5, True), (-2.0, False)], "filter": "none"}
    found = {task: [] for task, _, _ in scores}
    for task, number, score in scores:
        found[task].append({"doc_id": number, metric: score} | answers | others)
    return found


def test_every_value_can_be_computed_from_what_the_model_said(coca, task_dir, expected, tmp_path):
    """Each kind of request, and each kind of metric: a mean, a function of one, and one of several
    numbers.
    """
    choices = [target for _, target in PAIRS]
    shared = yaml.safe_load((task_dir / "coca_likelihood.yaml").read_text())
    for name, kind, metric in (
        ("choice", "multiple_choice", "acc_norm"),
        ("rolling", "loglikelihood_rolling", "word_perplexity"),
    ):
        task = {"task": name, "output_type": kind, "metric_list": [{"metric": metric}]}
        task |= {"doc_to_choice": choices} if name == "choice" else {}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(shared | task))
    rows = measured(coca, NAMES, tmp_path, task_dir)
    rows += measured(coca, ["choice", "rolling"], tmp_path, tmp_path)
    likelihood, answer, choice, rolling = (raw_of(row, tmp_path, "samples") for row in rows)
    assert [line["target"] for line in likelihood] == choices
    assert [line["response"] for line in answer] == expected["answers"]
    normed = [
        [nats / len(text) for nats, text in zip(x["loglikelihoods"], choices, strict=True)]
        for x in choice
    ]
    parts = [sum(column) for column in zip(*(line["parts"] for line in rolling), strict=True)]
    assert parts == [
        sum(line["loglikelihoods"][0] for line in rolling),
        sum(len(re.split(r"\s", x)) for x in choices),
    ]
    best = [choices[x.index(max(x))] for x in normed]
    assert [row["value"] for row in rows] == [
        pytest.approx(math.exp(-fmean(line["loglikelihoods"][0] for line in likelihood))),
        fmean(line["response"] == line["target"] for line in answer),
        fmean(said == line["target"] for said, line in zip(best, choice, strict=True)),
        pytest.approx(math.exp(-parts[0] / parts[1])),
    ]
    for lines in (likelihood, answer, choice, rolling):
        assert [line["case"] for line in lines] == [*range(len(PAIRS))]
        assert all((line["score"] is None) != (line["parts"] is None) for line in lines)
        assert all((line["response"] is None) != (line["loglikelihoods"] is None) for line in lines)


def test_a_group_has_the_samples_of_all_its_tasks():
    scores = [("a", 0, 1.0), ("a", 1, 0.0), ("a", 2, 1.0), ("b", 0, 0.0), ("b", 1, 0.0)]
    output = {
        "results": {"group": {"alias": "group", "acc,none": 0.4}},
        "samples": samples_by_task(scores, "acc"),
        "n-samples": {"a": {"effective": 3}, "b": {"effective": 2}},
    }
    ((result, lines),) = tasks._metrics(output, "group", None)
    assert [(line["benchmark"], line["case"], line["score"]) for line in lines] == scores
    assert (result["value"], result["scored"]) == (0.4, 5)
    stderr = pooled_sample_stderr([mean_stderr([1.0, 0.0, 1.0]), 0.0], [3, 2])
    assert result["stderr"] == pytest.approx(stderr)


def test_a_groups_metric_that_some_of_its_tasks_lack_counts_the_cases_of_the_others():
    scores, others = [("b", 0, 1.0), ("b", 1, 0.0), ("b", 2, 1.0)], [("a", 0, 1.0), ("a", 1, 0.0)]
    samples = samples_by_task(others, "acc") | samples_by_task(scores, "acc_norm")
    output = {
        "results": {"group": {"acc_norm,none": 2 / 3}},
        "samples": samples,
        "n-samples": {name: {"effective": len(some)} for name, some in samples.items()},
    }
    ((result, lines),) = tasks._metrics(output, "group", None)
    assert [(line["benchmark"], line["case"], line["score"]) for line in lines] == scores
    assert (result["scored"], result["stderr"]) == (3, pytest.approx(mean_stderr([1.0, 0.0, 1.0])))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("number", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinite")])
def test_a_model_that_gives_no_numbers_has_no_score(coca, task_dir, tmp_path, name, number, kind):
    with torch.no_grad():
        coca.model.lm_head.weight[7, 0] = number
    (row,) = measured(coca, [name], tmp_path, task_dir)
    assert (row["value"], row["error"]) == (None, f"the model's logits are {kind}")


def test_a_tokenizer_of_another_model_is_refused(coca, task_dir, tmp_path):
    coca.model.resize_token_embeddings(20)
    said = r"--tasks coca_answer: got token id \d+ from .* vocabulary of 20; the tokenizer"
    refused(said, measured, coca, ["coca_answer"], tmp_path, task_dir)
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_group_of_the_paper_has_four_dimensions_of_tasks_that_lm_eval_knows():
    assert set(DIMENSIONS) == {"reasoning", "understanding", "language", "examination"}
    names = parse_tasks("opencompass,piqa")
    assert names == [name for some in DIMENSIONS.values() for name in some]


def test_unknown_tasks_and_missing_directories_are_refused():
    said = "--tasks: got 'helaswag', expected opencompass or .* nearest: hellaswag"
    refused(said, parse_tasks, "helaswag")
    said = "--include-path: got '/nowhere', expected a directory of lm-eval tasks"
    refused(said, parse_tasks, "piqa", "/nowhere")


def test_without_lm_eval_a_line_says_what_to_install(
    monkeypatch, tiny_coca_dir, tmp_path, coca_eval
):
    # That remembers nothing
    monkeypatch.setattr(tasks, "_task_manager", tasks._task_manager.__wrapped__)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    code, stdout, stderr = coca_eval(f"tasks {tiny_coca_dir} --tasks piqa --out {tmp_path}")
    assert (code, stdout) == (2, "")
    said = "this needs lm_eval, which is not installed: pip install 'coca-hf[lm-eval]'"
    assert stderr == f"error: {said}\n"


def test_tasks_that_lm_eval_cannot_read_or_run_are_one_line(coca, task_dir, tmp_path):
    for name in ("a", "7"):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\n")
    refused(r"--include-path .*: lm-eval cannot read its tasks: ", parse_tasks, "a", str(tmp_path))
    own = tmp_path / "own"
    own.mkdir()
    task = yaml.safe_load((task_dir / "coca_likelihood.yaml").read_text()) | {"task": "lost"}
    task["dataset_kwargs"]["data_files"]["test"] = str(tmp_path / "nowhere.jsonl")
    (own / "lost.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(CocaError, match="--tasks lost: lm-eval cannot run it: ") as error:
        measured(coca, ["lost"], tmp_path, own, limit=1)
    assert "\n" not in str(error.value)
    coca.tokenizer.bos_token = coca.tokenizer.eos_token = None
    without_eos = r"cannot run it: .*; its tokenizer has no eos_token, which lm-eval needs$"
    refused(without_eos, measured, coca, NAMES[:1], tmp_path, task_dir)


def test_own_tasks_that_would_not_run_are_refused(tmp_path):
    """lm-eval passes over what is not YAML, and would then run its own task of that name."""
    file = tmp_path / "piqa.yaml"
    file.write_text("task: piqa\ndataset_path: [json\n")
    with pytest.raises(CocaError, match=r"--include-path: .*piqa\.yaml is not YAML, so lm-eval"):
        parse_tasks("piqa", str(tmp_path))
    file.write_text("task: niah_single_1\ndataset_path: json\ncustom: !function own.function\n")
    said = "got task 'niah_single_1', a name of lm-eval's RULER, which would run instead"
    tasks._task_manager.cache_clear()
    refused(said, parse_tasks, "niah_single_1", str(tmp_path))


@pytest.mark.parametrize(
    ("other", "said"),
    {
        "task: mine\n": r"/b\.yaml: got 'mine', which lm-eval takes from .*/a\.yaml;",
        "group: mine\ntask: [x]\n": r"/b\.yaml: got 'mine', which lm-eval takes from .*/a\.yaml;",
        "task: b\ninclude: nowhere.yaml\n": r"/b\.yaml: got 'b', which lm-eval takes from nowhere;",
        "task: common\n": r"/b\.yaml: got 'common', which lm-eval takes from a tag;",
    }.items(),
)
def test_a_task_file_that_lm_eval_leaves_out_is_refused(tmp_path, other, said):
    """It takes one of two files of a name, and would run its own task in place of a broken file."""
    for name in ("__pycache__", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.yaml").write_text("task: mine\n")
    (tmp_path / "base.yaml").write_text("dataset_path: json\n")
    (tmp_path / "a.yaml").write_text("task: mine\ntag: common\ninclude: base.yaml\n")
    tasks._task_manager.cache_clear()
    assert parse_tasks("mine", str(tmp_path)) == ["mine"]
    (tmp_path / "b.yaml").write_text(other)
    tasks._task_manager.cache_clear()
    refused(f"--include-path: .*{said}", parse_tasks, "mine", str(tmp_path))


def test_a_tag_is_its_tasks_and_a_group_without_a_metric_is_refused_before_a_run(tmp_path):
    for name in "ba":
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ntag: letters\ndataset_path: json\n")
    group = {"group": "both", "task": ["a", "b"]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    mean = {"aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "mean.yaml").write_text(yaml.safe_dump(group | mean | {"group": "mean"}))
    assert parse_tasks("b,letters,mean", str(tmp_path)) == ["b", "a", "mean"]
    said = r"got 'both', a group without a metric of its own, .*both\.yaml names them"
    refused(said, parse_tasks, "both", str(tmp_path))


def test_own_tasks_are_measured_again_when_they_or_their_data_elsewhere_change(
    coca, task_dir, tmp_path
):
    mine, elsewhere = shutil.copytree(task_dir, tmp_path / "tasks"), tmp_path / "rows.jsonl"
    shutil.move(mine / "rows.jsonl", elsewhere)
    task = mine / "coca_likelihood.yaml"
    task.write_text(task.read_text().replace(str(task_dir / "rows.jsonl"), str(elsewhere)))

    arguments = (coca, NAMES[:1], tmp_path / "out", mine)
    first = measured(*arguments)
    assert measured(*arguments) == first
    values = [first[0]["value"]]
    for file, old, new in (
        (elsewhere, '"target": "', '"target": "not '),
        (task, "{{target}}", "{{context}}"),
    ):
        file.write_text(file.read_text().replace(old, new))
        tasks._task_manager.cache_clear()
        values.append(measured(*arguments)[0]["value"])
    assert len({*values}) == 3


def test_ruler_at_a_length_is_the_mean_of_its_tasks_there(coca, tmp_path, monkeypatch):
    """Samples as lm-eval's RULER files make them: -1 at lengths that were not run."""
    lengths, scores = [], [("niah_single_1", n, score) for n, score in enumerate((1.0, 0.0, 1, 1))]
    scores += [("ruler_vt", 0, 0.0), ("ruler_vt", 1, 0.5)]

    def ran(loaded, settings, include_path, batches):
        lengths.append(settings["length"])
        return {"samples": samples_by_task(scores, str(lengths[-1]), **{"4096": -1})}

    monkeypatch.setattr(tasks, "_evaluate", ran)
    rows = measured(coca, [], tmp_path, lengths=[8192, 16384])
    assert [(row["length"], row["value"], row["dimension"], row["scored"]) for row in rows] == [
        *((8192, 0.5, "ruler", 6), (16384, 0.5, "ruler", 6))
    ]
    lines = raw_of(rows[0], tmp_path, "samples")
    assert [(line["benchmark"], line["case"], line["score"]) for line in lines] == scores
    measured(coca, [], tmp_path, lengths=[8192, 16384])
    assert lengths == [8192, 16384]


@pytest.fixture(scope="module")
def few_words():
    """RULER joins every adjective with every noun when it is imported: six million words. Here,
    fifty with fifty.
    """
    every_word = wonderwords.RandomWord

    def few():
        words = every_word()
        for kind in ("adjectives", "nouns"):
            words._categories[kind] = sorted(words._categories[kind])[:50]
        return words

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", few)
        importlib.import_module("lm_eval.tasks.ruler.prepare_niah")


def knows_the_needle(model, tokenizer):
    """Let `generate` find what RULER hid: "... for KEY is: VALUE." of the key in the question."""
    prompts = []

    def generate(input_ids, **kwargs):
        prompts.extend(input_ids)
        texts = tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        keys = [re.search("magic .* for ([^ ]+) mentioned", text)[1] for text in texts]
        values = [
            re.search(rf"for {key} is: ([^ ]+)[.]", text)[1]
            for key, text in zip(keys, texts, strict=True)
        ]
        answers = [tokenizer(f" {value}").input_ids for value in values]
        return torch.cat((input_ids, torch.tensor(answers)), dim=1)

    model.generate = generate
    return prompts


@pytest.mark.parametrize("name", ["ruler_vt", "ruler_cwe"])
def test_questions_of_ruler_that_do_not_fit_have_no_value(coca, tmp_path, name):
    """lm-eval would look for shorter ones of ruler_vt without end, and ask ruler_cwe's without an
    answer; other lengths are measured.
    """
    (row,) = measured(coca, [name], tmp_path, lengths=[1024], limit=2)
    problem = "its questions do not fit 1024 tokens of this tokenizer; choose a longer --ruler"
    assert (row["value"], row["error"].partition(", or")[0]) == (None, problem)


def test_questions_do_not_depend_on_the_benchmarks_before(coca, tmp_path):
    """ruler_cwe draws from a generator of its module."""
    prompts = []

    def generate(input_ids, **kwargs):
        prompts.append(input_ids.tolist())
        return torch.cat((input_ids, input_ids[:, -1:]), dim=1)

    coca.model.generate = generate
    for name in ("first", "second"):
        measured(coca, ["ruler_cwe"], tmp_path / name, lengths=[2500], batch_size=2, limit=2)
    first, second = prompts
    assert first == second


def test_questions_of_ruler_are_sized_by_the_tokenizer_that_was_loaded(coca, tmp_path):
    """Not by another that lm-eval loads: from another branch, or with code that nobody trusted."""
    texts = []

    def generate(input_ids, **kwargs):
        texts.extend(coca.tokenizer.batch_decode(input_ids, skip_special_tokens=True))
        return torch.cat((input_ids, input_ids[:, -1:]), dim=1)

    coca.model.generate = generate
    for path in (coca.path, "somebody/no-such-model"):
        of_path = replace(coca, path=path)
        measured(of_path, ["ruler_cwe"], tmp_path / str(len(texts)), lengths=[2500], limit=1)
    here, nowhere = texts
    assert here == nowhere


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_a_real_task_of_ruler_fits_the_length_and_scores_one_for_a_model_that_finds_the_needle(
    coca, few_words, tmp_path, name
):
    prompts = knows_the_needle(coca.model, coca.tokenizer)
    (row,) = measured(coca, [name], tmp_path, lengths=[1500], limit=3)
    for line in raw_of(row, tmp_path, "samples"):
        assert (line["benchmark"], line["score"]) == (name, 1.0)
        assert json.loads(line["target"]) == [line["response"].strip()]
    assert (row["benchmark"], row["length"], row["value"], row["scored"]) == (name, 1500, 1.0, 3)
    assert (row["metric"], row["dimension"]) == ("string_match", "ruler")
    assert all(800 < len(prompt) <= 1500 for prompt in prompts)  # in steps of five lines
    texts = coca.tokenizer.batch_decode(prompts, skip_special_tokens=True)
    assert all(text.startswith("A special magic ") for text in texts)  # whole


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("ruler_vt", [], "--tasks ruler_vt: got no --ruler, expected the lengths at which to run"),
        ("ruler_vt", [1500, 512], "--ruler: got 512, expected at least 1024 tokens: in fewer, the"),
        ("niah_single_2", [1500], r"lm-eval cannot run it: .*without a network, run niah_"),
    ],
    ids=["no length", "too short", "needs the network"],
)
def test_tasks_of_ruler_that_cannot_run_are_refused(
    coca, few_words, tmp_path, name, lengths, message
):
    """Of those that need the network, with the names of those that do not."""
    assert set(WITHOUT_NETWORK) < set(ruler_tasks())
    with pytest.raises(CocaError, match=message) as error:
        measured(coca, [name], tmp_path, lengths=lengths, limit=1)
    assert ("network" in str(error.value)) == (name == "niah_single_2")
