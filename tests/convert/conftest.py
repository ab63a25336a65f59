"""What tests of the command share."""

import sys

import pytest

from coca_cli import main


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Run `coca-convert`; returns the exit code and what it printed on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["coca-convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main.convert()
        return stop.value.code, capsys.readouterr().err

    return run
