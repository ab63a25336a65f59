import gc
import itertools
import os
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import CocaLlamaConfig, CocaLlamaForCausalLM
from coca_hf.errors import CocaError
from coca_hf.evaluate import rows, speed
from coca_hf.evaluate.loaded_model import load_model
from coca_hf.evaluate.speed import MEASUREMENT, MODES, parse_modes, speed_rows
from coca_hf.models.cache import ROOM
from tests.conftest import TINY, refused
from tests.evaluate.runs import raw_of, run_of


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage():
    """Every timed step collects garbage, which goes over all that other files have imported."""
    gc.freeze()


def test_every_mode_has_a_row_for_the_model_and_its_baseline(coca, llama, tmp_path):
    before = {name: value.clone() for name, value in coca.model.state_dict().items()}
    run = run_of(coca, tmp_path, 16, 48, batch_size=2)
    rows = list(speed_rows(run, llama, repeats=3, warmup=0))
    expected = itertools.product(MODES, (16, 48), ("tiny-llama", "tiny-coca"))
    assert [(row["mode"], row["length"], row["model"]) for row in rows] == [*expected]
    for plain, row in zip(rows[::2], rows[1::2], strict=True):
        assert (row["baseline"], plain["baseline"], plain["ratio"]) == ("tiny-llama", None, None)
        assert row["ratio"] == pytest.approx(row["value"] / plain["value"])
        assert row["value"] > 0
        assert row["seed"] == 0
        assert row["tokens"] == 2 * (1 if row["mode"] == "decode" else row["length"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["value"])
        runs = raw_of(row, tmp_path, "runs")
        assert statistics.median(run["seconds"] for run in runs) == row["value"]
        assert [run["repeat"] for run in runs] == [0, 1, 2]
        weights = sum(parameter.nbytes for parameter in coca.model.parameters())
        if row["memory_kind"] == "process":
            assert row["peak_bytes"] >= weights * (3 if row["mode"] == "train" else 1)
    assert MEASUREMENT.cell(rows[1]).endswith("x tiny-llama's)")
    assert list(speed_rows(run, llama, repeats=3, warmup=0)) == rows
    for name, value in coca.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert not coca.model.training


def test_a_command_that_is_killed_as_it_writes_a_pair_leaves_both_rows_or_none(
    coca, llama, tmp_path, monkeypatch
):
    append_line = rows.append_line

    def append_and_die(path, line):
        append_line(path, line)
        raise KeyboardInterrupt

    def measured():
        run = run_of(coca, tmp_path, 16)
        return list(speed_rows(run, llama, ["prefill"], repeats=1, warmup=0))

    with monkeypatch.context() as patch:
        patch.setattr(rows, "append_line", append_and_die)
        with pytest.raises(KeyboardInterrupt):
            measured()
    assert measured() == rows.read_rows(tmp_path / "rows.jsonl")


def test_the_peak_of_a_step_counts_memory_that_earlier_steps_have_freed(tiny_tokenizer, tmp_path):
    """Logits, their gradient and the like, several times 40 MB, in every step."""
    config = LlamaConfig(**TINY | {"vocab_size": 40_000})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    run = run_of(load_model(str(tmp_path / "model")), tmp_path, 256)
    (row,) = speed_rows(run, modes=["train"], repeats=1, warmup=3)
    if row["memory_kind"]:
        weights = sum(parameter.nbytes for parameter in run.loaded.model.parameters())
        assert row["peak_bytes"] > 3 * weights + 2 * 256 * 40_000 * 4


def test_decoding_holds_a_cache_of_three_quarters_of_a_plain_one_with_its_room_and_unit_keys(
    coca, llama
):
    plain, ours = (speed._step(each.model, "decode", 640, 1) for each in (llama, coca))
    for step in (plain, ours):
        step.run()
    # Of 2 key/value heads, head_dim 8: keys and values of 3 layers, 641 tokens, 4 bytes
    width = 2 * 8
    assert plain.held_bytes() == 641 * 3 * 2 * width * 4
    angles = unit_keys = 8
    held = (641 + ROOM) * (3 * (width + width // 2) + angles) + 641 * unit_keys
    assert ours.held_bytes() == 4 * held


@pytest.mark.parametrize("length", [14, 40])  # of the original's 16 tokens
def test_longrope_decodes_across_and_past_its_original_length(coca, length, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    coca.model = CocaLlamaForCausalLM(
        CocaLlamaConfig(**TINY, vocab_size=len(coca.tokenizer), rope_parameters=rope)
    )
    (row,) = speed_rows(run_of(coca, tmp_path, length), modes=["decode"], repeats=3, warmup=1)
    assert row["value"] > 0


def test_memory_that_runs_out_is_a_row_and_the_other_model_goes_on(coca, llama, tmp_path):
    message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"

    def full(*args, **kwargs):
        raise RuntimeError(message)

    coca.model.forward = full
    plain, ours = speed_rows(run_of(coca, tmp_path, 16), llama, ["prefill"], repeats=2, warmup=0)
    assert (ours["value"], ours["ratio"], ours["raw"]) == (None, None, {})
    assert ours["error"] == f"OOM: {message}"
    assert plain["value"] > 0


def test_modes_are_read_and_others_refused():
    assert parse_modes("train, decode,train") == ["train", "decode"]
    said = "--modes: got 'serve', expected some of prefill, decode, train"
    refused(said, parse_modes, "train,serve")


def test_a_model_without_a_cache_cannot_decode_and_one_line_says_so(llama, tmp_path):
    llama.model.forward = lambda **inputs: SimpleNamespace(logits=None)
    said = "--modes decode: got LlamaForCausalLM, which keeps no keys and values"
    with pytest.raises(CocaError, match=said):
        list(speed_rows(run_of(llama, tmp_path, 16), modes=["decode"], repeats=1, warmup=0))


def test_another_warmup_is_another_measurement(llama, tmp_path):
    run = run_of(llama, tmp_path, 16)
    first, second, again = (
        next(speed_rows(run, None, ["prefill"], repeats=1, warmup=warmup)) for warmup in (0, 1, 0)
    )
    assert (first["warmup"], second["warmup"]) == (0, 1)
    assert again == first


def test_a_model_beside_itself_is_refused_and_one_of_the_same_name_is_told_apart(
    tiny_llama_dir, tiny_coca_dir, tmp_path, coca_eval
):
    same = shutil.copytree(tiny_coca_dir, tmp_path / tiny_llama_dir.name)
    options = f"--lengths 16 --modes prefill --repeats 1 --warmup 0 --out {tmp_path / 'out'}"
    code, _, stderr = coca_eval(f"speed {tiny_llama_dir} --baseline {tiny_llama_dir}/", options)
    assert (code, stderr.count("\n")) == (2, 1)
    assert "got the model itself, expected another; give it a --baseline-name" in stderr
    code, stdout, _ = coca_eval(f"speed {same} --baseline {tiny_llama_dir}", options)
    assert code == 0
    paths = [os.path.relpath(path) for path in (same, tiny_llama_dir)]
    assert [stdout.count(f" {path} ") for path in paths] == [1, 1]
