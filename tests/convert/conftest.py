"""What tests of the command share."""

import contextlib
import sys

import pytest

from coca_cli import main
from coca_hf.convert.layer_pairs import LayerPairs
from coca_hf.convert.layout import Form, Layout
from coca_hf.convert.source import open_source


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Run `coca-convert`; returns the exit code and what it printed on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["coca-convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main.convert()
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def pairs_of(tmp_path):
    """`pairs_of(model, …)`: the `LayerPairs` of a model's checkpoint."""
    with contextlib.ExitStack() as stack:

        def save(model, constraint="slack", kept_layers=None, **options):
            path = str(tmp_path / "checkpoint of pairs")
            model.save_pretrained(path)
            source = stack.enter_context(contextlib.closing(open_source(path)))
            form = Form(path, constraint, "auto", 10**9, None, None, False, ())
            return LayerPairs(Layout(source, form, kept_layers), "cpu", **options)

        yield save
