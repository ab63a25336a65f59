"""Which kernels are chosen, and that everything is the same where there are none."""

import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache

from coca_hf import kernels
from coca_hf.models.attention import FOLDS
from tests.models.test_llama import tiny_model, tokens


@pytest.mark.parametrize("constraint", ["slack", "strict"])
@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static"},
    ],
    ids=lambda mode: "-".join(mode),
)
def test_without_a_kernel_the_attention_coca_gives_the_tokens_of_sdpa(constraint, mode):
    model, prompt = tiny_model(constraint).double(), tokens(1, 9).repeat(1, 2)
    expected = model.generate(
        prompt,
        max_new_tokens=20,
        past_key_values=DynamicCache(config=model.config),
        **{} if "cache_implementation" in mode else mode,
    )
    model.set_attn_implementation("coca")
    assert torch.equal(model.generate(prompt, max_new_tokens=20, **mode), expected)


def test_the_attention_coca_trains_as_sdpa_does():
    gradients = []
    for attention in ("sdpa", "coca"):
        model, ids = tiny_model(attn_implementation=attention).double(), tokens()
        model(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("cuda", "triton", "chosen"),
    [("13.0", True, True), ("13.0", False, False), (None, True, False)],
)
def test_kernels_are_chosen_where_pytorch_is_built_for_gpus_and_triton_is_there(
    cuda, triton, chosen, monkeypatch
):
    pytest.importorskip("triton")
    for table in (FOLDS, kernels.DECODERS):
        monkeypatch.delitem(table, "cuda", raising=False)
        monkeypatch.setitem(table, "absent", None)  # so that monkeypatch restores the table
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernels, "find_spec", lambda name: triton or None)
    try:
        kernels.register()
        assert ("cuda" in FOLDS, "cuda" in kernels.DECODERS) == (chosen, chosen)
    finally:
        if not torch.cuda.is_available():
            FOLDS.pop("cuda", None), kernels.DECODERS.pop("cuda", None)


def test_import_coca_hf_starts_no_gpu_driver_and_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None; import coca_hf, torch; assert not "
        "torch.cuda.is_initialized()\n"
        "assert coca_hf.models.attention.FOLDS == {} or torch.version.cuda"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
