"""Every measurement has a command, rows, a section on the page, and reasons for missing values."""

import pytest
import torch
from transformers import LlamaForCausalLM

from coca_hf.evaluate.measurements import MEASUREMENTS
from tests.evaluate.runs import OPTIONS
from tests.evaluate.test_cli import rows_in

SAID = {  # on the page, of the options of each
    "perplexity": "3 documents, stride 25",
    "position-loss": "3 documents, buckets of 10 tokens",
    "passkey": "7 cases per length, uniform depth, 3 new tokens, seed 0",
    "boundary": "3 documents, 50 pairs of positions a document",
    "copying": "Copied: random tokens, 5 cases per length, seed 0.",
    "recall": "lists of 8 lines, 5 cases per length, seed 0",
    "attention-maps": "3 documents, beside tiny-llama",
    "speed": "| plain | 60 |",
}
NAN = {
    "perplexity": "the model's loss is nan",
    "position-loss": "the model's loss is nan",
    "passkey": "the model's logits are NaN",
    "boundary": "products of queries and keys are not finite",
    "copying": "the model's loss is nan",
    "recall": "the model's loss is nan",
    "attention-maps": "an attention map is not finite",
}


@pytest.fixture
def measure(tiny_llama_dir, books, tmp_path, coca_eval):
    """Run a measurement of a model with its options, to this status; returns what it prints."""

    def run(task, model, status=0):
        options = OPTIONS[task].replace("BOOKS", str(books)).replace("LLAMA", str(tiny_llama_dir))
        code, stdout, stderr = coca_eval(task, model, options, f"--out {tmp_path / 'out'}")
        assert code == status, stderr
        return stdout

    return run


@pytest.mark.parametrize("task", SAID)
def test_a_command_makes_rows_with_their_raw_files_and_the_page_shows_them(
    task, measure, tiny_coca_dir, tmp_path, coca_eval, monkeypatch
):
    monkeypatch.setattr("coca_hf.report.write.to_png", lambda figure: b"")
    stdout = measure(task, tiny_coca_dir)
    assert f"{task} by context length" in stdout
    assert MEASUREMENTS[task].explanation in stdout
    rows = rows_in(tmp_path / "out")
    assert {row["task"] for row in rows} == {task}
    assert all(row["value"] is not None and row["raw"] for row in rows)
    files = [path for row in rows for path in row["raw"].values()]
    assert all((tmp_path / "out" / path).is_file() for path in files)
    assert coca_eval(f"report {tmp_path / 'out'} --out {tmp_path / 'page'}")[0] == 0
    page = (tmp_path / "page" / "report.md").read_text()
    assert f"## {MEASUREMENTS[task].title}" in page
    assert SAID[task] in page
    assert ("](" in page) == (task != "copying")  # a figure


@pytest.fixture(scope="module")
def broken(tiny_llama_dir, tiny_tokenizer, tmp_path_factory):
    """The tiny LLaMA, the keys of whose second layer are NaN."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
    torch.nn.init.constant_(model.model.layers[1].self_attn.k_proj.weight, torch.nan)
    directory = tmp_path_factory.mktemp("broken")
    model.save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("task", NAN)
def test_nan_is_an_error_of_the_row(task, measure, broken, tmp_path):
    measure(task, broken, status=1)  # as all rows are
    for row in rows_in(tmp_path / "out"):
        assert row["value"] is None
        assert row["error"].endswith(NAN[task])
        beside = ("nll", "nll_first", "sink", "share_b")
        assert all(row.get(name) is None for name in beside)
