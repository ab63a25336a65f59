"""Which kernels are chosen, and that everything is the same where there are none."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_hf import kernels
from coca_hf.models.attention import CACHE, FOLDS
from coca_hf.models.decoder import CocaPreTrainedModel
from tests.conftest import output_of
from tests.models.families import tiny_model, tokens


def test_the_attention_coca_trains_as_sdpa_does():
    gradients = []
    for attention in ("sdpa", "coca"):
        model, ids = tiny_model(attn_implementation=attention).double(), tokens()
        model(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)


def test_the_attention_coca_has_the_dropout_of_sdpa_for_a_new_token():
    """Such as of `generate` with a model in training mode."""
    logits, ids = [], tokens()
    for attention in ("sdpa", "coca"):
        model = tiny_model(attn_implementation=attention, attention_dropout=0.5).train()
        torch.manual_seed(8)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True)[CACHE]
            logits.append(model(ids[:, -1:], **{CACHE: cache}).logits)
    assert torch.equal(*logits)


def loaded(folder, attention):
    """The attention of a model that was saved with another and is loaded with this one."""
    tiny_model(attn_implementation="eager").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model.config._attn_implementation


@pytest.mark.parametrize(
    ("cuda", "hip", "triton", "chosen"),
    [
        *(("13.0", None, True, (True, True)), ("13.0", None, False, (False, False))),
        *((None, None, True, (False, False)), (None, "7.1", True, (True, False))),
    ],
)
def test_kernels_are_chosen_where_pytorch_is_built_for_gpus_and_triton_is_there(
    cuda, hip, triton, chosen, monkeypatch, tmp_path
):
    pytest.importorskip("triton")
    for table in (FOLDS, kernels.DECODERS):
        monkeypatch.delitem(table, "cuda", raising=False)
        monkeypatch.setitem(table, "absent", None)  # so that monkeypatch restores the table
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels, "find_spec", lambda name: triton or None)
    monkeypatch.setattr(CocaPreTrainedModel, "default_attention", None)
    try:
        kernels.register()
        assert ("cuda" in FOLDS, "cuda" in kernels.DECODERS) == chosen
        used = [loaded(tmp_path, attention) for attention in (None, "sdpa", "eager")]
        assert used == ["coca" if chosen[1] else "sdpa", "sdpa", "eager"]
    finally:
        if not torch.cuda.is_available():
            FOLDS.pop("cuda", None), kernels.DECODERS.pop("cuda", None)


@pytest.mark.real
def test_import_coca_hf_starts_no_gpu_driver_and_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None; import coca_hf, torch; assert not "
        "torch.cuda.is_initialized()\n"
        "assert coca_hf.models.attention.FOLDS == {} or torch.version.cuda"
    )
    output_of(sys.executable, "-c", program)
