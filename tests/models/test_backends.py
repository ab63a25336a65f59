"""The attention backends and loaders of transformers that run CoCA as they run LLaMA."""

import shutil
import socket
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig

from coca_hf import CocaLlamaConfig
from coca_hf.models.rotary import CocaRotaryEmbedding
from tests.models.test_llama import tiny_model, tokens


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles flex_attention with a C++ compiler")
@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_flex_attention_gives_the_logits_of_eager(constraint):
    model = tiny_model(constraint, hidden_size=96, attn_implementation="eager")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits
    assert (got - expected)[mask.bool()].abs().max() < 2e-5


@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_continuous_batching_gives_the_tokens_of_generate(constraint):
    model = tiny_model(constraint)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 19, 11)]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    got = [result.generated_tokens for result in sorted(results.values(), key=lambda result: result.request_id)]
    expected = [model.generate(torch.tensor([p]), max_new_tokens=9, do_sample=False)[0, len(p) :] for p in prompts]
    assert sorted(got) == sorted(x.tolist() for x in expected)


def test_many_sequences_in_one_row_are_refused_where_the_base_depends_on_the_sequence():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="continuous batching computes many sequences as one row; bake one base in"):
        tiny_model(rope_parameters=rope).generate_batch([[1, 2, 3]])
    config = CocaLlamaConfig(rope_parameters=rope)
    config._attn_implementation = "vllm"  # what vLLM sets before it builds the model
    with pytest.raises(ValueError, match="vLLM computes many sequences as one row"):
        CocaRotaryEmbedding(config)


TENSOR_PARALLEL = """
import sys
import torch
import coca_hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
weight = model.model.layers[0].self_attn.t_proj.weight
local = weight.to_local() if hasattr(weight, "to_local") else weight
assert local.shape[0] * 2 == 8, local.shape  # this process has one of the two key/value heads
with torch.no_grad():
    logits = model(torch.arange(20)[None]).logits
if torch.distributed.get_rank() == 0:
    torch.save(logits, sys.argv[2])
torch.distributed.destroy_process_group()
"""


@pytest.mark.real
def test_tensor_parallel_over_two_processes_gives_the_logits_of_one(tiny_coca_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    (tmp_path / "tp.py").write_text(TENSOR_PARALLEL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    finished = subprocess.run(
        [*command, tmp_path / "tp.py", tiny_coca_dir, tmp_path / "logits.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    expected = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)(torch.arange(20)[None]).logits
    assert (torch.load(tmp_path / "logits.pt") - expected).abs().max() < 1e-4
