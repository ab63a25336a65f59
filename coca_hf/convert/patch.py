"""Make a LLaMA model in memory a CoCA model: `patch_`."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

from coca_hf.convert.llama import coca_config
from coca_hf.convert.start import start_scales, start_t
from coca_hf.errors import CocaError
from coca_hf.models.llama import CocaLlamaForCausalLM
from coca_hf.models.rotary import CocaRotaryEmbedding


@torch.no_grad()
def patch_(model: LlamaForCausalLM, constraint: str = "slack") -> CocaLlamaForCausalLM:
    """Turn `model` into a `CocaLlamaForCausalLM`, in place, with the same start as `convert_checkpoint`; returns it.

    All weights but `k_proj` stay the very same parameters; `k_proj` is dropped for `t_proj`.

    Raises CocaError where the model is not a plain `LlamaForCausalLM` (already CoCA, quantized, compiled, wrapped).
    """
    if isinstance(model, CocaLlamaForCausalLM):
        raise CocaError("patch_: got a CoCA model already; there is nothing to patch")
    if type(model) is not LlamaForCausalLM:
        raise CocaError(f"patch_: got {type(model).__name__}, expected a LlamaForCausalLM; unwrap it first")
    if getattr(model, "hf_quantizer", None) is not None:
        raise CocaError("patch_: got a quantized model, expected plain weights; load it with dequantize=True")

    config = coca_config(model.config.to_dict(), constraint, where="patch_: model.config")
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        coca = CocaLlamaForCausalLM(config)
    coca.lm_head, coca.generation_config = model.lm_head, model.generation_config
    coca.model.embed_tokens, coca.model.norm = model.model.embed_tokens, model.model.norm
    coca.model.rotary_emb = CocaRotaryEmbedding(config).to(model.device)
    for layer, old in zip(coca.model.layers, model.model.layers, strict=True):
        layer.mlp, layer.input_layernorm = old.mlp, old.input_layernorm
        layer.post_attention_layernorm = old.post_attention_layernorm
        _take_attention(layer.self_attn, old)
    coca.train(model.training)
    model.__class__, model.__dict__ = CocaLlamaForCausalLM, coca.__dict__
    return model


def _take_attention(attention: Any, old_layer: Any) -> None:
    old, config = old_layer.self_attn, attention.config
    attention.q_proj, attention.v_proj, attention.o_proj = old.q_proj, old.v_proj, old.o_proj
    weights = {"norm": old_layer.input_layernorm.weight, "q": old.q_proj.weight, "k": old.k_proj.weight}
    if config.attention_bias:
        weights |= {"q_bias": old.q_proj.bias, "k_bias": old.k_proj.bias}
    scales = start_scales({name: weight.cpu() for name, weight in weights.items()}, config)
    for name, parameter in old.k_proj.named_parameters():
        start = start_t(parameter.cpu(), scales, config.num_key_value_heads).to(parameter.device)
        setattr(attention.t_proj, name, torch.nn.Parameter(start, requires_grad=parameter.requires_grad))
