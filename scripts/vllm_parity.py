"""Compare vLLM's OpenAI-compatible server with transformers, on a CPU: greedy tokens and their log
probabilities.

    scripts/setup_vllm.sh
    python scripts/vllm_parity.py CHECKPOINT --load plugin          # vLLM finds CoCA by coca_hf's plugin
    python scripts/vllm_parity.py CHECKPOINT --load self-contained  # the code in the checkpoint, coca_hf not imported
    python scripts/vllm_parity.py CHECKPOINT --load plugin --config '{"rope_parameters": {"rope_type": "linear", …}}'
    python scripts/vllm_parity.py CHECKPOINT --load plugin --server="--enforce-eager --tensor-parallel-size 2"

The server answers 20 prompts one after another and then all at once. Both sides are float32, and
transformers decodes with its cache. Tokens must be equal, except that greedy decoding may branch if
the two best tokens of transformers are within TOLERANCE of each other: a tie that rounding decides.
Such a prompt is compared up to the tie, and counted. The exit code is 1 if tokens differ otherwise,
or a log probability differs by more than TOLERANCE.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import coca_hf  # noqa: F401  registers CoCA with transformers

TOLERANCE = 2e-3  # in log probability
START_SECONDS = 240
LONG = (
    "The committee met on the first Monday of the month, heard the treasurer's account of the "
    "winter, and asked why "
    "the roof of the library had not been mended before the rain. Nobody answered. "
)
PROMPTS = (
    "A",
    "The",
    "Once upon a time",
    "The capital of France is",
    "To be, or not to be, that is",
    "import numpy as np\n\ndef mean(x):",
    "Q: What is 12 times 12?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "O Romeo, Romeo! wherefore art thou",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondrion is",
    "for i in range(10):\n    print(",
    "She opened the door, and there stood",
    "In the beginning God created",
    "Die Hauptstadt von Deutschland ist",
    LONG,
    2 * LONG + "In short,",
    3 * LONG + "The treasurer said:",
)


class Completion(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # of those tokens
    gaps: list[float]  # from the best token's log probability to the second's; empty for vLLM


class Comparison(NamedTuple):
    prompt: str
    num_prompt_tokens: int
    num_equal: int  # tokens before the first that differs
    num_tokens: int
    largest_difference: float  # of log probabilities, over the equal tokens
    smallest_gap: float  # over the same tokens and the first that differs

    @property
    def branched_at_a_tie(self) -> bool:
        return self.num_equal < self.num_tokens and self.smallest_gap < TOLERANCE

    @property
    def passed(self) -> bool:
        return self.largest_difference <= TOLERANCE and (
            self.num_equal == self.num_tokens or self.branched_at_a_tie
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--load", choices=("plugin", "self-contained"), required=True)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per prompt")
    parser.add_argument(
        "--config", type=json.loads, default={}, help="JSON that replaces fields of config.json"
    )
    parser.add_argument(
        "--server", type=shlex.split, default=["--enforce-eager"], help="options of vLLM's server"
    )
    parser.add_argument("--venv", type=Path, default=Path(__file__).parents[1] / ".venv-vllm")
    parser.add_argument(
        "--log",
        type=Path,
        help="the server's log; by default it is kept only where the server fails",
    )
    options = parser.parse_args()

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        checkpoint, log = directory / "checkpoint", options.log or directory / "server.log"
        prepare(
            options.checkpoint, checkpoint, options.config, alone=options.load == "self-contained"
        )
        expected, lengths = complete_with_transformers(checkpoint, options.tokens)
        max_len = max(lengths) + options.tokens
        arguments = [*options.server, "--max-model-len", str(max_len)]
        with server(options.venv, checkpoint, options.load, log, arguments) as url:
            complete = partial(complete_with_vllm, url, num_tokens=options.tokens)
            one_by_one = [complete(prompt) for prompt in PROMPTS]
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                at_once = list(pool.map(complete, PROMPTS))
        if "Using Transformers modeling backend" not in log.read_text(errors="replace"):
            sys.exit(
                "error: the server's log does not say that it runs the Transformers backend, which "
                "runs CoCA"
            )
    rounds = {
        "one by one": compare(expected, one_by_one, lengths),
        "at once": compare(expected, at_once, lengths),
    }
    show(rounds)
    sys.exit(not all(line.passed for lines in rounds.values() for line in lines))


def prepare(checkpoint: Path, directory: Path, changes: dict, alone: bool) -> None:
    """Make `directory` a copy of the checkpoint, by links, with a changed config; without its code
    unless it is served `alone`.
    """
    directory.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json" and (alone or file.suffix != ".py"):
            (directory / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    if not alone:
        config.pop("auto_map", None)
    (directory / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def complete_with_transformers(
    checkpoint: Path, num_tokens: int
) -> tuple[list[Completion], list[int]]:
    """Greedy completions by `generate`, one prompt at a time, and the number of tokens of every
    prompt.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # all completions have the same length
    completions, lengths = [], []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        lengths.append(inputs.input_ids.shape[1])
        output = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).log_softmax(-1).topk(2)  # (n, 2)
        gaps = best.values[:, 0] - best.values[:, 1]
        completions.append(
            Completion(best.indices[:, 0].tolist(), best.values[:, 0].tolist(), gaps.tolist())
        )
    return completions, lengths


def complete_with_vllm(url: str, prompt: str, num_tokens: int) -> Completion:
    """A greedy completion by the server at `url`."""
    request = {
        "model": "coca",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=300
    ) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    return Completion(
        [int(token.split(":")[1]) for token in logprobs["tokens"]], logprobs["token_logprobs"], []
    )


@contextmanager
def server(
    venv: Path, checkpoint: Path, load: str, log: Path, arguments: list[str]
) -> Iterator[str]:
    """Run vLLM for `checkpoint` on a free port; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", "coca", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm"]
    command += arguments
    command += ["--trust-remote-code"] * (load == "self-contained")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_PLUGINS": "coca" if load == "plugin" else "none",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def wait_until_up(process: subprocess.Popen, url: str, log: Path) -> None:
    """Return when the server is healthy; exit with the end of its log if it ends or is too slow."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    code, end = process.poll(), log.read_text(errors="replace")[-6000:]
    how = f"ended with {code}" if code is not None else f"did not answer in {START_SECONDS} s"
    sys.exit(f"error: vLLM {how}; the end of its log:\n{end}")


def stop(process: subprocess.Popen) -> None:
    """End the server and the processes that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def compare(
    expected: list[Completion], got: list[Completion], lengths: list[int]
) -> list[Comparison]:
    lines = []
    for prompt, num_prompt_tokens, ours, theirs in zip(
        PROMPTS, lengths, expected, got, strict=True
    ):
        pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
        num_equal = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        logprobs = list(zip(ours.logprobs, theirs.logprobs, strict=True))
        largest = max((abs(a - b) for a, b in logprobs[:num_equal]), default=0.0)
        # At a branch, only that token's own gap can excuse it.
        gap = min(ours.gaps) if num_equal == len(pairs) else ours.gaps[num_equal]
        line = Comparison(prompt, num_prompt_tokens, num_equal, len(pairs), largest, gap)
        lines.append(line)
    return lines


def show(rounds: dict[str, list[Comparison]]) -> None:
    """Print a line per prompt, and the worst of all."""
    console = Console(width=110)
    equal = (f"equal, {name}" for name in rounds)
    table = Table("prompt", "tokens", *equal, "logprob difference", "smallest gap", "")
    for lines in zip(*rounds.values(), strict=True):
        table.add_row(
            repr(lines[0].prompt)[:30].replace("[", "\\["),
            str(lines[0].num_prompt_tokens),
            *(f"{line.num_equal}/{line.num_tokens}" for line in lines),
            f"{max(line.largest_difference for line in lines):.1e}",
            f"{min(line.smallest_gap for line in lines):.1e}",
            ("tie" if any(line.branched_at_a_tie for line in lines) else "ok")
            if all(line.passed for line in lines)
            else "DIFFERS",
        )
    console.print(table)
    lines = [line for lines in rounds.values() for line in lines]
    console.print(
        f"{sum(line.passed for line in lines)} of {len(lines)} completions equal, "
        f"{sum(line.passed and line.branched_at_a_tie for line in lines)} of them up to a tie; "
        f"largest log probability difference {max(line.largest_difference for line in lines):.1e}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
