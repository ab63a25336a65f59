"""vLLM's OpenAI-compatible server gives transformers' tokens: `scripts/vllm_parity.py`, on small random checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_hf import convert_checkpoint

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-vllm"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (VENV / "installed").exists(), reason="scripts/setup_vllm.sh makes .venv-vllm"),
]


@pytest.mark.parametrize(
    ("load", "constraint", "rope"),
    [
        ("plugin", "strict", {"rope_type": "default"}),
        ("self-contained", "slack", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}),
    ],
    ids=["plugin", "self-contained"],
)
def test_the_server_gives_the_tokens_and_logprobs_of_transformers(load, constraint, rope, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=192,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,  # head_dim 32, the least that vLLM's attention for CPUs takes
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 10000.0, **rope},
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tiny_tokenizer.save_pretrained(tmp_path / "llama")
    convert_checkpoint(tmp_path / "llama", tmp_path / "coca", constraint)
    command = [sys.executable, ROOT / "scripts" / "vllm_parity.py", tmp_path / "coca", "--load", load, "--venv", VENV]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-3000:]
    assert "40 of 40 completions equal" in finished.stdout
