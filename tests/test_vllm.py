"""vLLM's OpenAI-compatible server gives transformers' tokens: `scripts/vllm_parity.py`, on small
random checkpoints.
"""

import runpy
import sys
from pathlib import Path

import pytest

from coca_hf import convert_checkpoint
from tests.models.families import stock_model

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-vllm"
SCRIPT = ROOT / "scripts/vllm_parity.py"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (VENV / "installed").exists(), reason="scripts/setup_vllm.sh makes .venv-vllm"
    ),
]


# head_dim 32 is the least that vLLM's attention for CPUs takes.
SIZES = {"hidden_size": 192, "num_attention_heads": 6, "max_position_embeddings": 1024}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("load", "constraint", "case", "changes", "layers"),
    [
        (
            *("self-contained", "slack", "llama", {"rope_parameters": YARN}),
            {"keep_layers": [0], "content_pairs": 2, "content_layers": [1], "keep_window": 60},
        ),
        ("plugin", "strict", "qwen3-window", {"head_dim": 32, "sliding_window": 100}, {}),
        ("self-contained", "slack", "neox-partial", {}, {"content_pairs": 3}),
    ],
    ids=["llama", "qwen3", "gpt_neox"],
)
def test_the_server_gives_the_tokens_and_logprobs_of_transformers(
    load, constraint, case, changes, layers, tiny_tokenizer, tmp_path, monkeypatch, capsys
):
    stock_model(case, vocab_size=len(tiny_tokenizer), **SIZES, **changes).save_pretrained(
        tmp_path / "stock"
    )
    tiny_tokenizer.save_pretrained(tmp_path / "stock")
    convert_checkpoint(tmp_path / "stock", tmp_path / "coca", constraint, **layers)
    arguments = [str(tmp_path / "coca"), "--load", load, "--venv", str(VENV)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code
    assert "40 of 40 completions equal" in capsys.readouterr().out
