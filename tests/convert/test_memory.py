"""Conversion streams: its memory does not grow with the model."""

import ctypes
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import convert_checkpoint
from tests.convert.checkpoints import PROCESSES, exit_code_of


def anonymous_bytes():
    ctypes.CDLL(None).malloc_trim(0)  # what is free may stay with the process, or not
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def convert_watched(src, dst, peak, options):
    seen = []

    def look(*_):
        seen.append(anonymous_bytes())

    options |= {"progress": look, "calibrate_progress": look}
    convert_checkpoint(src, dst, max_shard_size="5MB", **options)
    peak.put(max(seen))


@pytest.mark.real
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux says what a process holds"
)
@pytest.mark.parametrize("calibrates", [False, True], ids=["copied", "calibrated"])
def test_memory_does_not_grow_with_the_number_of_layers(calibrates, tiny_tokenizer, tmp_path):
    peaks, sizes, options = [], [], {}
    if calibrates:
        (tmp_path / "text.txt").write_text(" ".join(map(str, range(4000))))
        options = {"calibrate_on": str(tmp_path / "text.txt"), "calibrate_tokens": 320}
        options |= {"calibrate_block": 64, "calibrate_passes": 1}
    for num_layers in (8, 32):
        src, dst = tmp_path / f"src-{num_layers}", tmp_path / f"dst-{num_layers}"
        shape = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 1000}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 4}
        torch.manual_seed(2)
        config = LlamaConfig(**shape, num_hidden_layers=num_layers)
        LlamaForCausalLM(config).save_pretrained(src, max_shard_size="20MB")
        tiny_tokenizer.save_pretrained(src)
        peak = PROCESSES.SimpleQueue()
        assert exit_code_of(convert_watched, src, dst, peak, options) == 0
        peaks.append(peak.get())
        sizes.append(sum(file.stat().st_size for file in src.glob("*.safetensors")))
        assert len(list(dst.glob("*.safetensors"))) > num_layers // 2
    assert sizes[1] - sizes[0] > 90_000_000
    assert peaks[1] - peaks[0] < 10_000_000
