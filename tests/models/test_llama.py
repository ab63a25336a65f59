"""The CoCA LLaMA: what it computes on every path people take, and what it declares to transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from coca_hf import CocaLlamaForCausalLM
from coca_hf.models.reference import use_reference_
from tests.models.families import tiny_model, tokens


def test_reference_refuses_a_cache_and_a_model_without_coca(tiny_llama_dir):
    with pytest.raises(ValueError, match="expected use_cache=False"):
        use_reference_(tiny_model())(tokens(), use_cache=True)
    with pytest.raises(ValueError, match="which has no CoCA attention"):
        use_reference_(LlamaForCausalLM.from_pretrained(tiny_llama_dir))


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = tiny_model().train(), tokens()
    model(ids, labels=ids).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])
    assert plain["model.layers.0.self_attn.t_proj.weight"].abs().max() > 0


def test_tied_embeddings_stay_tied_through_saving(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, CocaLlamaForCausalLM)
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coca_constraint": "loose"}, "loose"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        (
            {"rope_parameters": ROPE},
            "'proportional' is not supported with CoCA; supported: default",
        ),
    ],
)
def test_values_that_make_no_model_are_refused(fields, message):
    with pytest.raises(Exception, match=message):
        tiny_model(**fields)
