"""Rows and raw files as `coca-eval` writes them, of tiny models, become a page."""

import itertools
import sys

import pytest

from coca_cli import main
from coca_hf.page import markdown
from coca_hf.report import read_page
from coca_hf.report.plots import draw

TASKS = [
    "perplexity --lengths 32,64 --stride 32 --rope default,dynamic:4 --data {books}",
    "position-loss --lengths 96 --bucket 16 --data {books}",
    "passkey --lengths 256 --cases 4 --new-tokens 2",
    "boundary --lengths 96 --pairs 50 --data {books}",
    "speed --lengths 16 --modes prefill --repeats 1 --warmup 0",
]


@pytest.fixture(scope="module")
def real_page(tiny_llama_dir, tiny_coca_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("real")
    books = directory / "books"
    books.mkdir()
    for name in ("austen", "bronte", "conrad"):
        text = f"{name} wrote of sea voyages, one ball and no trains. " * 5
        (books / f"{name}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for model, task in itertools.product((tiny_llama_dir, tiny_coca_dir), TASKS):
            words = f"coca-eval {task.format(books=books)} --out {directory / 'rows'} {model}"
            patch.setattr(sys, "argv", words.split())
            with pytest.raises(SystemExit) as exit_info:
                main.evaluate()
            assert not exit_info.value.code
    return read_page([directory / "rows"])


def test_every_task_has_its_section_and_every_figure_can_be_drawn(real_page):
    titles = ["Models", "Perplexity", "Loss by position", "Passkey retrieval"]
    titles += ["Rotary boundaries", "Speed and memory", "How each number was made"]
    assert [section.title for section in real_page.parts] == titles
    names = ["perplexity", "position-loss", "passkey", "passkey-beyond", "passkey-distance"]
    names += [
        f"boundary-{name}" for name in ("angle", "tau", "decay", "layers-of-1", "layers-of-2")
    ]
    assert [figure.name for figure in real_page.figures()] == [*names, "speed"]
    for figure in real_page.figures():
        drawn = draw(figure.drawing, 5.0, figure.height, True)
        assert any(axes.has_data() for axes in drawn.axes), figure.name


def test_slack_is_explained_on_the_page_and_has_no_bound_of_decay(real_page):
    page = markdown(real_page)
    assert page.count("The score of a CoCA-slack model has two parts") == 1
    shares = {
        line.split(" | ")[0]: line.split(" | ")[2:]
        for line in page.splitlines()
        if " | 96 | 0.000 | " in line
    }
    assert shares["| tiny-llama"][-1] == "0.000 |"
    assert 0.2 < float(shares["| tiny-coca"][-1].strip("| ")) < 0.8
    (decay,) = (figure for figure in real_page.figures() if figure.name == "boundary-decay")
    (axes,) = draw(decay.drawing, 5.0, decay.height, True).axes
    assert {line.get_label() for line in axes.lines if not line.get_label().startswith("_")} == {
        "tiny-llama"
    }


def test_a_real_page_has_all_raw_results_and_no_heat_map_of_one_share(real_page):
    page = markdown(real_page)
    assert page.count(": 0.00 at every context length and depth, so no heat map.") == 2
    assert "of raw results are not beside their rows" not in page
