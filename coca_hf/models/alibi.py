"""LLaMA with ALiBi instead of rotation: one of the paper's baselines from scratch (its tables 1 and
2). It is not CoCA.

A head adds a penalty to its scores that grows with the distance: `-slope (m - n)` (Press et al.,
arXiv 2108.12409). The bias goes into the attention mask, so blocks, cache and generation are
LLaMA's own, and a rotation by angle zero replaces its rotary embedding. Attention runs by eager or
sdpa, which accept a bias. Letters: see `attention.py`.
"""

import math

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from .attention import CACHE, cache_of


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of every head, (h,), float32: 2^(-8/h), 2^(-16/h), ... for a power of two.

    For other h: the slopes of the next lower power of two, then every second one of the next
    higher.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = [-8 * i / power for i in range(1, power + 1)]
    exponents += [-4 * i / power for i in range(1, 2 * (num_heads - power), 2)]
    return 2.0 ** torch.tensor(exponents)


def alibi_mask(mask: Tensor, past_len: int | Tensor, dtype: torch.dtype, num_heads: int) -> Tensor:
    """`-slope (m - n)` where `mask` allows attention, and the lowest number elsewhere.

    mask: (b, 1, m, n), True where attention is allowed, or 0 there and the lowest number elsewhere;
    the first query is at index `past_len`. Distances are counted in the padded row: padding lies
    outside the text, so it changes none. Returns (b, h, m, n).
    """
    new_len, total_len = mask.shape[-2:]
    query_index = past_len + torch.arange(new_len, device=mask.device)
    distance = query_index[:, None] - torch.arange(total_len, device=mask.device)  # (m, n)
    # (h, m, n)
    bias = (-alibi_slopes(num_heads).to(mask.device)[:, None, None] * distance).to(dtype)
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    return (mask + bias).clamp(min=lowest)


@strict
class AlibiLlamaConfig(LlamaConfig):
    """`LlamaConfig` without `rope_parameters`."""

    model_type = "alibi_llama"
    # makes save_pretrained copy this file, as register_for_auto_class would
    _auto_class = "AutoConfig"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.rope_parameters = None
        self.auto_map = {
            "AutoConfig": "alibi.AlibiLlamaConfig",
            "AutoModel": "alibi.AlibiLlamaModel",
            "AutoModelForCausalLM": "alibi.AlibiLlamaForCausalLM",
        }


def no_rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The cos and sin of angle zero, each (1, m, 1), for LLaMA's blocks."""
    cos = x.new_ones(1, x.shape[1], 1)
    return cos, torch.zeros_like(cos)


class AlibiLlamaPreTrainedModel(LlamaPreTrainedModel):
    config: AlibiLlamaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False


class AlibiLlamaModel(AlibiLlamaPreTrainedModel, LlamaModel):
    def __init__(self, config: AlibiLlamaConfig):
        if config._attn_implementation == "vllm":
            raise ValueError(
                "config.model_type: got 'alibi_llama', whose bias vLLM's attention does not take; use "
                "transformers"
            )
        # not LlamaModel's, which would build a rotary embedding
        PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = no_rotation
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As `LlamaModel.forward`, which uses a four-dimensional mask unchanged: here, the one with
        the bias.
        """
        cache = cache_of(kwargs, past_key_values)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            allow_is_causal_skip=False,
            **{CACHE: cache},
        )
        past_len = cache.get_seq_length() if cache is not None else 0
        return super().forward(
            attention_mask=alibi_mask(
                mask, past_len, inputs_embeds.dtype, self.config.num_attention_heads
            ),
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **{CACHE: cache},
            **kwargs,
        )


class AlibiLlamaForCausalLM(AlibiLlamaPreTrainedModel, LlamaForCausalLM):
    """`LlamaForCausalLM` over `AlibiLlamaModel`; `forward` and the sharding plans are inherited."""

    def __init__(self, config: AlibiLlamaConfig):
        # not LlamaForCausalLM's, which would build a LlamaModel
        PreTrainedModel.__init__(self, config)
        self.model = AlibiLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args, **kwargs):
        """Raises ValueError: the bias follows places in a row, which many sequences share here."""
        raise ValueError(
            "config.model_type: got 'alibi_llama', whose bias continuous batching does not take; use "
            "generate"
        )


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["alibi_llama"] = "AlibiLlamaForCausalLM"  # see `classifiers`
