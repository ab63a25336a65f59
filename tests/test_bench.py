"""The benchmarks run, check what they time and say what they were made on; how fast anything is, no
test asserts.
"""

import argparse
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from coca_hf import convert_checkpoint
from tests.train.results import no_file_above

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
SMOKE = [
    "attention --only contraction sdpa",
    "attention --mode fold --only rotation plain",
    "model --attention sdpa --constraints slack strict",
    "decode --batches 1",
    "decode --what step",
    "decode --what generate",
    "train --train t all",
    "evaluate --batch 2",
]


@pytest.fixture
def bench(monkeypatch):
    """Run a script, words of options at a time, as if it were called; returns its globals.

    In this process, because imports take seconds.
    """

    def run(*options):
        script, *words = [word for some in options for word in str(some).split()]
        monkeypatch.syspath_prepend(BENCH)
        monkeypatch.setattr(sys, "argv", [str(BENCH / f"{script}.py"), *words])
        return runpy.run_path(str(BENCH / f"{script}.py"), run_name="__main__")

    return run


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("command", SMOKE)
def test_a_benchmark_checks_its_rivals_and_records_what_it_was_made_on(
    command, bench, tmp_path, capsys
):
    bench(command, "--smoke --out", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    rivals = [row["rival"] for row in result["rows"]]
    assert any("LLaMA" in rival or "YaRN" in rival for rival in rivals)
    assert any("CoCA" in rival or "coca" in rival for rival in rivals)
    timed = [row for row in result["rows"] if "cache" not in row["rival"]]
    assert all(row["seconds"] > 0 for row in timed)
    checked = [row for row in timed if "CoCA" in row["rival"]]
    assert all(0 <= row["relative_error"] < 1e-4 for row in checked)
    assert {"hardware", "versions", "date", "dtype"} <= set(result)
    assert result["command"].startswith(f"python scripts/bench/{command.split()[0]}.py")
    assert str(tmp_path) not in result["command"]
    assert timed[0]["rival"] in capsys.readouterr().out


def test_plans_are_compared_with_what_coca_train_measures(tmp_path, bench, capsys):
    """On a CPU that is the whole process, so that the error says nothing."""
    bench("plan --smoke --out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["error"] == row["predicted_bytes"] / row["measured_bytes"] - 1
    predicted = [row["predicted_bytes"] for row in rows]
    # checkpointing takes less, training all takes more
    assert predicted[1] < predicted[0] < predicted[2]
    assert "| all, checkpointing, accumulated |" in capsys.readouterr().out


def test_calibrations_memory_on_a_gpu_is_projected_with_the_text_there_and_elsewhere(
    tmp_path, bench, capsys
):
    bench("calibrate_memory --smoke --dir", tmp_path, "--out", tmp_path / "out.json")
    on_gpu, on_cpu = json.loads((tmp_path / "out.json").read_text())["rows"]
    inputs, queries, keys = (on_gpu["tokens"] * 4 * width for width in (64, 64, 32))
    kept = on_gpu["at_peak"]["keep"] - on_cpu["at_peak"].get("keep", 0)
    assert kept == inputs + queries + keys
    assert on_gpu["projected_bytes"] > on_cpu["projected_bytes"] + kept / 2
    assert on_gpu["projected_bytes"] == sum(on_gpu["at_peak"].values())
    assert "| 4,096 | gpu | " in capsys.readouterr().out


def test_a_rival_that_is_wrong_ends_the_run(bench, monkeypatch):
    from coca_hf.models import attention

    monkeypatch.setitem(attention.FOLDS, "cpu", lambda q, t, *rest: (q, torch.cat((t, t), -1)))
    with pytest.raises(SystemExit, match="relative error"):
        bench("model --smoke")


@pytest.mark.parametrize(
    ("ratio", "error", "shown", "missing"),
    [
        *((1.0625, None, "1.06x", 20), (None, "OOM", "out of memory", 20)),
        (None, None, "not yet measured", 21),
    ],
)
def test_the_floors_are_printed_beside_what_was_measured_or_ran_out_of_memory(
    tmp_path, bench, capsys, ratio, error, shown, missing
):
    row = {"rival": "CoCA slack", "length": 8192, "over_llama": ratio, "error": error}
    (tmp_path / "prefill.json").write_text(json.dumps({"rows": [row]}))
    bench("floors --results", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "prefill, 7B, 8k" in line).endswith(f"| {shown} |")
    assert sum("not yet measured" in line for line in lines) == missing
    assert "524,288 and 393,472: 0.7505x" in "\n".join(lines)


def test_the_projection_adds_up_measured_layers(tmp_path, bench, capsys):
    shared = {"rival": "CoCA slack", "shape": "llama-7b", "layers": 6, "layer_seconds": 0.1}
    shared |= {"batch": 8, "length": 2048}
    seconds = {"t": 0.8, "qkv": 0.9, "all": 1.0}
    rows = [shared | {"train": stage, "seconds": taken} for stage, taken in seconds.items()]
    file, result = tmp_path / "train-stages.json", {"rows": rows, "hardware": {"gpu": "H200"}}
    result |= {"command": "python x", "date": "2026-01-01T00:00:00+00:00"}
    file.write_text(json.dumps(result))
    bench("projection", file, "--overlap 0")
    page = capsys.readouterr().out
    # 32 * 0.1, and 0.8 - 6 * 0.1 for what is no layer
    assert "| 1 | t_proj alone | 3.400 |" in page
    # weights in bf16, twice; gradients in float32, as coca-train sums them
    communication = (2 * 2 * 6470.1e6 + 4 * 268.4e6) * 31 / 32 / 40e9
    assert f"| {communication:.3f} |" in page
    file.write_text(json.dumps(result | {"rows": rows[:2]}))
    with pytest.raises(SystemExit, match=r"got no row .* that trains 'all', expected"):
        bench("projection", file)
    file.write_text(json.dumps(result | {"rows": [row | {"batch": 1} for row in rows]}))
    with pytest.raises(SystemExit, match=r"got \('llama-7b', 1, 2048\) .* that trains 't'"):
        bench("projection", file)


def test_what_limits_the_attention_falls_from_the_start_over_the_fit_to_what_is_free(
    tiny_llama_dir, tmp_path, bench, capsys
):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n % 7} is {n * (n % 7)}; " for n in range(400)))
    convert_checkpoint(tiny_llama_dir, tmp_path / "strict", constraint="strict")
    where = f"{tiny_llama_dir} {tmp_path / 'strict'} --text {text} --out {tmp_path / 'out.json'}"
    steps = "--layers 1 --tokens 512 1024 --passes 10 --free-steps 200"
    bench("attention_limits", where, steps)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    fits = ["start", "512 tokens, ReLU's gradient", "512 tokens"]
    fits += ["512 tokens, and as many repeated", "1,024 tokens, and as many repeated"]
    assert [row["fit"] for row in rows] == [*fits, "free, 200 steps"]
    start, fitted, free = rows[0], rows[-2], rows[-1]
    assert start["held_out"]["all"] > fitted["held_out"]["all"] > 1.5 * free["held_out"]["all"]
    assert rows[1]["held_out"] != rows[2]["held_out"]
    assert all(0 <= row["dead"] < 1 for row in rows[:-1])
    assert {(row["layer"], row["constraint"]) for row in rows} == {(1, "strict")}
    assert f"| strict | start | {start['held_out']['all']:.2f} |" in capsys.readouterr().out


def test_mass_of_lookups_is_that_of_the_token_before_and_of_the_one_after_the_earlier_copy(
    monkeypatch,
):
    monkeypatch.syspath_prepend(BENCH)
    attention_limits = importlib.import_module("attention_limits")
    maps = torch.zeros(2, 3, 8, 8)
    for query in range(8):
        maps[:, 0, query, max(query - 1, 0)] = 1  # the token before
        # of 0 1 2 3 0 1 2 3, the token after the earlier copy
        maps[:, 1, query, query - 3 if query > 4 else 0] = 1
        maps[:, 2, query, : query + 1] = 1 / (query + 1)
    found = attention_limits.lookups(maps)
    assert (found["previous"][0], found["induction"][1]) == (1, 1)
    assert found["previous"][2] == pytest.approx(sum(1 / n for n in range(2, 9)) / 7)
    assert found["induction"][2] == pytest.approx(sum(1 / n for n in (6, 7, 8)) / 3)


@pytest.mark.parametrize(
    "attention",
    [
        "sdpa",
        pytest.param(
            "flash", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_flash_attention_decodes_as_eager_attention_does_within_the_rounding_of_its_type(
    attention, tmp_path, bench, capsys
):
    words = "--attention sdpa" if attention == "sdpa" else ""
    found = bench("flash", words, "--out", tmp_path / "out.json")
    installed = [name for name, is_installed in found["INSTALLED"].items() if is_installed()]
    if attention == "flash" and not installed:
        pytest.skip("no FlashAttention is installed")
    result = json.loads((tmp_path / "out.json").read_text())
    made = [(row["attention"], row["constraint"]) for row in result["rows"]]
    names = ["sdpa"] if attention == "sdpa" else installed
    assert made == [(name, constraint) for name in names for constraint in ("slack", "strict")]
    assert all(0 < row[what] < 4e-2 for row in result["rows"] for what in ("logits", "decoding"))
    assert {"hardware", "versions", "date", "dtype"} <= set(result)
    assert "| strict |" in capsys.readouterr().out


@pytest.mark.real
def test_converting_is_timed_beside_a_copy_and_its_memory_noted(tmp_path, bench, capsys):
    options = "--shape tiny --layers 1 --rounds 1"
    bench("convert --dir", tmp_path, options, "--out", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    copy, ours = result["rows"]
    assert (copy["command"], ours["command"]) == ("cp -r", "coca-convert")
    assert result["ratio_by_round"] == [ours["seconds"] / copy["seconds"]]
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64  # q, k, v, o; MLP; norms
    assert result["source_bytes"] == 2 * (2 * 97 * 64 + layer + 64)
    assert ours["rss_bytes"] > ours["anonymous_bytes"] > 1e8  # of torch's libraries alone
    assert "| 1 | coca-convert |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(("passes", "seconds"), [(1, 10.0), (40, 0.25)])
def test_calibration_is_projected_from_as_many_steps_as_were_taken(
    passes, seconds, tmp_path, monkeypatch
):
    """Of 256 blocks: --calibrate-passes can give more than the steps of the default."""
    monkeypatch.syspath_prepend(BENCH)
    convert = importlib.import_module("convert")

    def run(command: list[str]) -> dict:
        facts = {"tokens": 32768, "repeated_tokens": 32768, "block_tokens": 256, "passes": passes}
        facts["seconds_by_part"] = {"steps": 4.0}
        Path(command[4]).mkdir()
        (Path(command[4]) / "conversion.json").write_text(json.dumps({"calibration": facts}))
        return {"seconds": 1.0, "user_seconds": 1.0, "system_seconds": 0.0}

    monkeypatch.setattr(convert, "run", run)
    options = {"shape": "tiny", "layers": 2, "calibrate": "t", "calibrate_tokens": 32768}
    options = argparse.Namespace(**options, calibrate_passes=passes)
    result = convert.measure_calibration(tmp_path, options)
    assert result["steps"] == 256 * passes
    assert result["projected_seconds_per_layer"]["steps"] == pytest.approx(seconds)


def test_what_fails_on_the_gpu_is_named_and_the_rest_is_measured(tmp_path):
    """`python3` notes what it is called with; one benchmark fails, one takes too long."""
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        'case "$*" in *tune*) exit 3;; *model.py*32768*--repeats\\ 5) exit 124;; esac\n'
    )
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = partial(subprocess.run, env=env, capture_output=True, text=True, check=False)
    finished = run([BENCH / "gpu.sh", tmp_path / "out", "2", "3", "4"])
    assert finished.returncode == 1
    failed = [line for line in finished.stderr.splitlines() if line.startswith("failed")]
    assert [line.split()[2] for line in failed] == ["124", "3", "3"]
    calls = (tmp_path / "calls").read_text()
    results = "decode tune prefill prefill-350m generate train train-stages evaluate plan"
    results += " calibrate-memory"
    assert all(f"--out {tmp_path}/out/{name}.json" in calls for name in results.split())
    assert "floors.py --results" in calls.splitlines()[-1]
    (tmp_path / "calls").unlink()
    run([BENCH / "gpu.sh", tmp_path / "out", "decode", "flash", "4"])
    names = re.findall(r"out/(\S+)\.json", (tmp_path / "calls").read_text())
    assert names == ["flash", "flash-fp16", "decode", "plan", "calibrate-memory", "train-stages"]
    wrong = run([BENCH / "gpu.sh", tmp_path / "out", "decod"])
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: got decod, expected 1, 2, 3, 4 or one of attention ")


def test_what_was_measured_before_a_run_ends_is_kept(tmp_path, bench, monkeypatch):
    from coca_hf.models import decoder

    forward, out = decoder.CocaModel.forward, tmp_path / "out.json"

    def killed(self, input_ids, **kwargs):
        if input_ids.shape[1] == 56:
            raise KeyboardInterrupt
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(decoder.CocaModel, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        bench("model --shape tiny --lengths 48 56 --repeats 1 --out", out)
    assert {row["length"] for row in json.loads(out.read_text())["rows"]} == {48}


def test_a_result_that_is_cut_short_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    measure, out = importlib.import_module("measure"), tmp_path / "out.json"
    measure.write({"rows": [7]}, out)
    with no_file_above(64), pytest.raises(OSError, match="File too large"):
        measure.write({"rows": [8, 9]}, out)
    assert json.loads(out.read_text())["rows"] == [7]


def test_the_plot_is_of_ratios_to_llama(tmp_path, bench):
    def result(task, **ratios):
        rows = [
            {"rival": rival, "length": length, "over_llama": ratio}
            for rival, values in ratios.items()
            for length, ratio in zip((512, 2048), values, strict=True)
        ]
        return {"task": task, "rows": rows}

    decode = {"LLaMA sdpa": (1.0, 1.0), "slack": (1.1, 1.4), "strict": (1.2, 1.5)}
    results = [
        result("prefill-bench", LLaMA=(1.0, 1.0), slack=(1.01, 1.02)),
        result("decode-step-bench", **decode),
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, one in zip(files, results, strict=True):
        file.write_text(json.dumps(one))
    found = bench("plot", *files, "--out", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    drawn = {curve.key.label: curve.values for curve in found["curves"](results)}
    assert drawn == {
        "LLaMA": [1.0, 1.0],
        "prefill, slack": [1.01, 1.02],
        "decoding, slack": [1.1, 1.4],
        "decoding, strict": [1.2, 1.5],
    }
    said = "got a result of 'train-bench', expected one of prefill-bench, decode-step"
    with pytest.raises(SystemExit, match=said):
        found["curves"]([result("train-bench")])
