"""GPT-NeoX (Pythia, the paper's 350M models) with Collinear Constrained Attention.

Two things differ from a GPT-NeoX checkpoint, and conversion handles both:

- the fused `query_key_value` is split into `q_proj`, `t_proj` and `v_proj`, and modules have
  LLaMA's names;
- if only the first part of a head is rotated (`rotary_pct` below 1), the rows of a query head are
  reordered: rotated first halves, unrotated first halves, rotated second halves,
  unrotated second halves. Then pair j of a head is `(x[j], x[j + d/2])` throughout, the rotated
  pairs are GPT-NeoX's own, which lie inside the rotated part, and the others are pairs of angle
  zero, whose score `t_j (q_j^2 + q_{j+d/2}^2)` does not depend on positions.

The released code pairs `t` over the whole head and the rotation over its rotated part. With
`rotary_pct` below 1, the two halves of a rotated pair then have different coefficients, and
collinearity is lost. With a `rotary_pct` of 1, as in eq. 1 of the paper and in the released
configuration, both are the same function.
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import GenerationMixin, GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers


@strict
class CocaGPTNeoXConfig(GPTNeoXConfig, CocaConfig):
    model_type = "coca_gpt_neox"
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.t_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    }
    base_model_pp_plan = LlamaConfig.base_model_pp_plan

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads


class CocaGPTNeoXDecoderLayer(CocaDecoderLayer):
    """`GPTNeoXLayer` with CoCA: attention and MLP side by side (`use_parallel_residual`) or one
    after the other.
    """

    mlp_class = GPTNeoXMLP

    def __init__(self, config: CocaGPTNeoXConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.use_parallel_residual = config.use_parallel_residual
        self.dropout = config.hidden_dropout

    @classmethod
    def make_norm(cls, config: CocaGPTNeoXConfig) -> nn.Module:
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """hidden_states: (b, m, hidden); the rest goes to the attention. Returns (b, m, hidden)."""
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        attended = hidden_states + dropout(attention, self.dropout, self.training)
        mlp_input = hidden_states if self.use_parallel_residual else attended
        mlp = self.mlp(self.post_attention_layernorm(mlp_input))
        return attended + dropout(mlp, self.dropout, self.training)


class CocaGPTNeoXModel(CocaModel):
    config: CocaGPTNeoXConfig
    layer_class = CocaGPTNeoXDecoderLayer

    def before_layers(self, inputs_embeds: Tensor) -> Tensor:
        return dropout(inputs_embeds, self.config.hidden_dropout, self.training)


class CocaGPTNeoXForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaGPTNeoXConfig
    model_class = CocaGPTNeoXModel


CocaGPTNeoXForSequenceClassification, CocaGPTNeoXForTokenClassification = classifiers(
    CocaGPTNeoXModel
)
