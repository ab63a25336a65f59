"""Fixtures of the tests of conversion."""

import contextlib
import functools
import shutil
import sys
from pathlib import Path

import pytest

from coca_cli import main
from coca_hf import convert_checkpoint
from coca_hf.convert.config import Form
from coca_hf.convert.layer_pairs import LayerPairs
from coca_hf.convert.layout import Layout
from coca_hf.convert.source import open_source
from tests.convert.checkpoints import content_of, write_text
from tests.models.families import stock_model


@pytest.fixture
def convert(monkeypatch, capsys):
    """Run `coca-convert`; returns the exit code and what it printed on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["coca-convert", *map(str, arguments)])
        capsys.readouterr()  # the progress of transformers
        with pytest.raises(SystemExit) as stop:
            main.convert()
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def converts(convert):
    """Run `coca-convert`, which ends with code 0; returns what it printed."""

    def run(*arguments):
        code, printed = convert(*arguments)
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def refusal(convert):
    """Run `coca-convert`, which ends with code 2 and one line, and leaves its destination as it was;
    returns that line.
    """

    def run(src, dst, *options):
        before = content_of(dst)
        code, printed = convert(src, dst, *options)
        assert (code, printed.count("\n")) == (2, 1), printed
        assert printed.startswith("error: ")
        assert content_of(dst) == before
        return printed

    return run


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """`converted(case, constraint, kept)`: the directories of source and result, and the record."""

    @functools.cache
    def convert_once(case, constraint="slack", kept=()):
        directory = tmp_path_factory.mktemp("converted")
        src, dst = directory / "src", directory / "dst"
        stock_model(case).save_pretrained(src)
        return src, dst, convert_checkpoint(src, dst, constraint, keep_layers=kept)

    return convert_once


@pytest.fixture
def source(tmp_path, tiny_llama_dir):
    """A copy of `tiny_llama_dir`."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "source"))


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.fixture
def calibrating(text):
    """Options of `convert_checkpoint` for a short calibration."""
    amounts = {"calibrate_tokens": 256, "calibrate_block": 32, "calibrate_passes": 2}
    return amounts | {"calibrate_on": str(text), "device": "cpu"}


@pytest.fixture
def pairs_of(tmp_path):
    """`pairs_of(model, …)`: the `LayerPairs` of a model's checkpoint."""
    with contextlib.ExitStack() as stack:

        def save(
            model, constraint="slack", kept_layers=(), content_pairs=0, content_layers=(), **options
        ):
            path = str(tmp_path / "checkpoint of pairs")
            model.save_pretrained(path)
            source = stack.enter_context(contextlib.closing(open_source(path)))
            content = content_pairs, content_layers
            form = Form(path, constraint, "auto", 10**9, None, False, (), *content)
            return LayerPairs(Layout(source, form, kept_layers), "cpu", **options)

        yield save
