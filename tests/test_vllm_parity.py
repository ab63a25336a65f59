"""`scripts/vllm_parity.py` without vLLM."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/vllm_parity.py"
ENDS = {"raise SystemExit(3)": "ended with 3", "input()": "did not answer in 0 s"}


@pytest.mark.parametrize("program", ENDS)
def test_a_server_that_ends_and_one_that_is_too_slow_are_told_apart(program, tmp_path):
    (tmp_path / "log").write_text("last words")
    wait_until_up = runpy.run_path(str(SCRIPT))["wait_until_up"]
    wait_until_up.__globals__["START_SECONDS"] = 0
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        if program != "input()":
            process.wait()
        with pytest.raises(SystemExit) as found:
            wait_until_up(process, "http://127.0.0.1:9", tmp_path / "log")
        process.kill()
    assert str(found.value) == f"error: vLLM {ENDS[program]}; the end of its log:\nlast words"
