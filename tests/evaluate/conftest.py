"""Models and documents small enough for a slow reference, and `coca-eval` as a person runs it."""

import copy
import json
import math
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_cli import main
from coca_hf.evaluate.loaded_model import load_model


@pytest.fixture(scope="session")
def loaded(tiny_llama_dir, tiny_coca_dir):
    """The tiny models, of which tests get copies to change."""
    return load_model(str(tiny_llama_dir)), load_model(str(tiny_coca_dir))


@pytest.fixture
def llama(loaded):
    return copy.deepcopy(loaded[0])


@pytest.fixture
def coca(loaded):
    return copy.deepcopy(loaded[1])


def put_around_texts(tokenizer, template):
    """Let a tokenizer put the special tokens of `template` around every text, `$A`."""
    names = [word for word in template.split() if word != "$A"]
    specials = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    processor = TemplateProcessing(single=template, special_tokens=specials)
    tokenizer.backend_tokenizer.post_processor = processor


@pytest.fixture
def books(tmp_path):
    """Three documents of 210, 230 and 250 bytes, which are tokens of the tiny tokenizer."""
    directory = tmp_path / "books"
    directory.mkdir()
    for number, name in enumerate(("austen", "bronte", "conrad")):
        text = f"{name} wrote of {number} sea voyages, one ball and no trains. " * 9
        (directory / f"{name}.txt").write_text(text[: 210 + 20 * number])
    return directory


# Where lm-eval has the tasks of `DIMENSIONS`; all of its directories take seconds to read
DIRECTORIES = (
    *("arc", "glue", "hellaswag", "lambada", "mmlu/default", "openbookqa", "piqa", "race", "siqa"),
    *("super_glue", "winogrande"),
)


@pytest.fixture
def own_tasks(monkeypatch):
    """lm-eval with the tasks of a given directory, or of `DIRECTORIES`."""
    import lm_eval.tasks

    class OwnTasks(lm_eval.tasks.TaskManager):
        __module__ = lm_eval.tasks.TaskManager.__module__

        def __init__(self, include_path=None, include_defaults=False, **options):
            tasks = Path(lm_eval.tasks.__file__).parent
            paths = include_path or [tasks / name for name in DIRECTORIES]
            super().__init__(include_path=paths, include_defaults=False, **options)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OwnTasks)


@pytest.fixture
def one_thread():
    """As many threads as in the processes that tests start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def coca_eval(monkeypatch, capsys):
    """Run `coca-eval` with arguments, each several words; returns exit code, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        words = [word for argument in arguments for word in shlex.split(str(argument))]
        monkeypatch.setattr(sys, "argv", ["coca-eval", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_info:
            main.evaluate()
        out, err = capsys.readouterr()
        return exit_info.value.code or 0, out, err

    return run


PAIRS = [("two and two", " make four"), ("the cat sat on", " the mat")]
PAIRS += [("a b c d", " e"), ("1 2 3 4 5", " 6 7")]
NEW_TOKENS = 7


@pytest.fixture(scope="session")
def expected(tiny_coca_dir):
    """The results of the tasks of `task_dir`, from the tiny CoCA model itself."""
    model = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_coca_dir)
    total, answers = 0.0, []
    for context, target in PAIRS:
        head, tail = (torch.tensor(tokenizer(text).input_ids) for text in (context, target))
        with torch.no_grad():
            logprobs = model(torch.cat((head, tail))[None]).logits[0].log_softmax(-1)
        total += logprobs[len(head) - 1 : -1].gather(1, tail[:, None]).sum().item()
        output = model.generate(head[None], max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(tokenizer.decode(output[0, len(head) :], skip_special_tokens=True))
    return {"perplexity": math.exp(-total / len(PAIRS)), "answers": answers}


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory, expected):
    """Two tasks on local rows: `coca_likelihood`, and `coca_answer`, whose last target is wrong."""
    directory = tmp_path_factory.mktemp("tasks")
    answers = [*expected["answers"][:-1], "nothing that it says"]
    rows = [
        {"context": context, "target": target, "answer": answer}
        for (context, target), answer in zip(PAIRS, answers, strict=True)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
    }
    likelihood = {"output_type": "loglikelihood", "doc_to_target": "{{target}}"}
    answer = {"output_type": "generate_until", "doc_to_target": "{{answer}}"}
    greedy = {"until": ["\u00ff no such text"], "max_gen_toks": NEW_TOKENS, "do_sample": False}
    for name, task, metric, aggregation in (
        ("coca_likelihood", likelihood, "perplexity", "perplexity"),
        ("coca_answer", answer | {"generation_kwargs": greedy}, "exact_match", "mean"),
    ):
        metrics = {"metric": metric, "aggregation": aggregation}
        metrics["higher_is_better"] = metric == "exact_match"
        task |= shared | {"task": name, "metric_list": [metrics]}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return directory
