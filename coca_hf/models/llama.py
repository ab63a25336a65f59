"""LLaMA with Collinear Constrained Attention: configuration, model, causal language model.

Everything that is not attention, rotation or cache is transformers' own LLaMA. This file and those that it imports from
this folder are copied into every checkpoint, so that it loads with `trust_remote_code=True` without coca_hf.
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaPreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import CocaAttention
from .cache import CocaCache
from .hub import PushesItsCard
from .rotary import CocaRotaryEmbedding


@strict
class CocaLlamaConfig(LlamaConfig):
    """`LlamaConfig` with `coca_constraint`: `"slack"` (the paper's main results) or `"strict"` (its section 4.4)."""

    model_type = "coca_llama"
    _auto_class = "AutoConfig"  # save_pretrained copies the modelling files, as register_for_auto_class makes it do
    base_model_tp_plan = {
        name.replace("k_proj", "t_proj"): style for name, style in LlamaConfig.base_model_tp_plan.items()
    }

    coca_constraint: Literal["slack", "strict"] = "slack"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.auto_map = {
            "AutoConfig": "llama.CocaLlamaConfig",
            "AutoModel": "llama.CocaLlamaModel",  # vLLM's Transformers backend asks for this one
            "AutoModelForCausalLM": "llama.CocaLlamaForCausalLM",
        }

    def validate_architecture(self):
        """Called by `@strict`. Raises ValueError for an odd head dimension: rotation needs pairs."""
        super().validate_architecture()
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even number: rotary embedding turns pairs")


class CocaLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: CocaLlamaConfig, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)  # not LlamaDecoderLayer's: it would build the attention twice
        self.hidden_size = config.hidden_size
        self.self_attn = CocaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class CocaLlamaPreTrainedModel(PushesItsCard, LlamaPreTrainedModel):
    config: CocaLlamaConfig
    _no_split_modules = ["CocaLlamaDecoderLayer"]
    _can_record_outputs = {"hidden_states": CocaLlamaDecoderLayer, "attentions": CocaAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CocaRotaryEmbedding):
            init.copy_(module.inv_freq, module.initial_inv_freq()[0])


class CocaLlamaModel(CocaLlamaPreTrainedModel):
    def __init__(self, config: CocaLlamaConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([CocaLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = CocaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        rope_length: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As `LlamaModel.forward`, with `rope_length`: the total length that fixes the base of dynamic NTK.

        Where `position_ids` is absent it is counted from a 2-d `attention_mask`, because the slack score depends on
        absolute positions: padding must not move them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("CocaLlamaModel.forward: got both or neither, expected one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = CocaCache(self.config)
        if position_ids is None:
            past_len = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = _positions(inputs_embeds, attention_mask, past_len)

        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids, rope_length)
        hidden_states = inputs_embeds
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


def _positions(inputs_embeds: Tensor, attention_mask: Tensor | None, past_len: int) -> Tensor:
    """Positions of the new tokens, (b or 1, m): tokens before them in the row, padding not counted."""
    new_len = inputs_embeds.shape[1]
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past_len : past_len + new_len]
    return torch.arange(past_len, past_len + new_len, device=inputs_embeds.device)[None]


class CocaLlamaForCausalLM(CocaLlamaPreTrainedModel, LlamaForCausalLM):
    """`LlamaForCausalLM` over `CocaLlamaModel`; `forward` and the sharding plans are inherited."""

    def __init__(self, config: CocaLlamaConfig):
        PreTrainedModel.__init__(self, config)  # not LlamaForCausalLM's: it would build a LlamaModel
        self.model = CocaLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Half-width keys unless another cache is asked for; the base of dynamic NTK fixed for the whole generation.

        Cached keys keep the base they were made with, so the base has to be that of the planned total length.
        """
        if self.config.rope_parameters["rope_type"] == "dynamic":
            model_kwargs.setdefault("rope_length", generation_config.max_length)
        asked_for = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if type(cache) is DynamicCache and asked_for is None:
            model_kwargs["past_key_values"] = CocaCache(self.config, offloading=cache.offloading)
