"""lm-eval on a CoCA checkpoint: in this process, and by its command on a self-contained directory
without coca_hf.
"""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf.evaluate.tasks import parse_tasks

PAIRS = [
    ("two and two", " make four"),
    ("the cat sat on", " the mat"),
    ("a b c d", " e"),
    ("1 2 3 4 5", " 6 7"),
]
NEW_TOKENS = 7


@pytest.fixture(scope="module")
def loaded(tiny_coca_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_coca_dir), AutoTokenizer.from_pretrained(
        tiny_coca_dir
    )


@pytest.fixture(scope="module")
def expected(loaded):
    """What both tasks must come to, by the model alone."""
    model, tokenizer = loaded
    total, answers = 0.0, []
    for context, target in PAIRS:
        head, tail = (torch.tensor(tokenizer(text).input_ids) for text in (context, target))
        with torch.no_grad():
            logprobs = model(torch.cat((head, tail))[None]).logits[0].log_softmax(-1)
        total += logprobs[len(head) - 1 : -1].gather(1, tail[:, None]).sum().item()
        output = model.generate(
            head[None],
            attention_mask=torch.ones_like(head[None]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        answers.append(tokenizer.decode(output[0, len(head) :], skip_special_tokens=True))
    return {"perplexity": math.exp(-total / len(PAIRS)), "answers": answers}


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory, expected):
    """Two tasks over local rows: `coca_likelihood`, and `coca_answer`, whose last target is wrong."""
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
    tasks = {
        "coca_likelihood": {
            "output_type": "loglikelihood",
            "doc_to_target": "{{target}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
            ],
        },
        "coca_answer": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {
                "until": ["\u00ff no such text"],
                "max_gen_toks": NEW_TOKENS,
                "do_sample": False,
            },
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
    }
    for name, task in tasks.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | shared | task))
    return directory


def values(results):
    """Perplexity of the first task, and share of right answers of the second."""
    return [
        results["coca_likelihood"]["perplexity,none"],
        results["coca_answer"]["exact_match,none"],
    ]


def test_in_process_it_measures_what_the_model_says(loaded, task_dir, expected):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = loaded
    output = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3),
        tasks=["coca_likelihood", "coca_answer"],
        task_manager=TaskManager(include_path=str(task_dir), include_defaults=False),
        bootstrap_iters=0,
    )
    assert values(output["results"]) == pytest.approx(
        [expected["perplexity"], 1 - 1 / len(PAIRS)], rel=1e-4
    )


@pytest.mark.real
def test_coca_eval_knows_the_tasks_of_lm_eval_and_those_of_a_directory(task_dir):
    assert parse_tasks("piqa,coca_answer", str(task_dir)) == ["piqa", "coca_answer"]


@pytest.mark.real
def test_its_command_runs_a_self_contained_directory_without_coca_hf(
    tiny_coca_dir, task_dir, expected, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['coca_hf'] = None  # importing it fails\n"
    )
    finished = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "lm_eval",
                "run",
                "--model",
                "hf",
                "--device",
                "cpu",
                "--batch_size",
                "3",
            ),
            *("--model_args", f"pretrained={tiny_coca_dir},trust_remote_code=True,dtype=float32"),
            *("--tasks", "coca_likelihood,coca_answer", "--include_path", str(task_dir)),
            *("--output_path", str(tmp_path / "results")),
        ],
        env=os.environ
        | {"PYTHONPATH": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    written = next((tmp_path / "results").rglob("results_*.json"))
    assert values(json.loads(written.read_text())["results"]) == pytest.approx(
        [expected["perplexity"], 1 - 1 / len(PAIRS)], rel=1e-4
    )
