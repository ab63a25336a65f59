"""What `coca-convert --calibrate` prints, and which options need it."""

import re

import pytest

from tests.convert.checkpoints import record_of


def test_command_prints_what_it_was_worth_or_one_line_of_error(
    tiny_llama_dir, text, tmp_path, converts, refusal
):
    options = "--calibrate", text, "--calibrate-passes", 2, "--calibrate-tokens"
    printed = converts(tiny_llama_dir, tmp_path / "dst", *options, 256)
    values = record_of(tmp_path / "dst")["calibration"]["perplexity"]
    assert f"{values['start']:,.4g} before, {values['calibrated']:,.4g} after" in printed
    needed = r"about \d+ s, 7\d\d\.\d\d MB of memory and \d\.\d\d MB of disk in"
    assert re.match(f"calibrating 3 of 3 layers: {needed}", printed)
    printed = refusal(tiny_llama_dir, tmp_path / "other", *options, 10**6)
    assert "give more text, or a smaller --calibrate-tokens" in printed


OPTIONS = "calibrate-tokens=9 calibrate-block=9 calibrate-passes=9 column=text split=test subset=en"


@pytest.mark.parametrize("option", f"{OPTIONS} device=cpu seed=1".split())
def test_an_option_of_calibration_is_refused_without_it(tiny_llama_dir, tmp_path, refusal, option):
    printed = refusal(tiny_llama_dir, tmp_path / "dst", f"--{option}")
    name = option.partition("=")[0]
    assert printed == f"error: --{name}: got it without --calibrate, expected both\n"
    assert not list(tmp_path.iterdir())
