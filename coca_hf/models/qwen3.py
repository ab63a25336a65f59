"""Qwen3 with Collinear Constrained Attention: per-head norms on the query and on the coefficients.

Qwen3 divides the query and the key of every head by their root mean square over d, so that scores stay bounded however
the projections grow. The query keeps its norm. The key is gone; what is left of it are the j coefficients of a head,
and they get the norm, with a weight per coefficient, before the ReLU:

    t = ReLU(RMSNorm_j(W_T x))

Before and not after the ReLU, because a divisor over all j coefficients moves no zero of t, and is not tiny where most
of them are negative. With W_T the fold of (key norm's weight) o W_K, such a t is the fold of Qwen3's own normalised key
up to one positive factor per token and head, and `|t_j| <= sqrt(j) * max weight` holds whatever W_T becomes.
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .attention import CocaAttention
from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, CocaPreTrainedModel, t_plan


@strict
class CocaQwen3Config(Qwen3Config, CocaConfig):
    model_type = "coca_qwen3"
    base_model_tp_plan = t_plan(Qwen3Config.base_model_tp_plan)


class CocaQwen3Attention(CocaAttention):
    def __init__(self, config: CocaQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.t_norm = Qwen3RMSNorm(self.head_dim // 2, eps=config.rms_norm_eps)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leading = hidden_states.shape[:-1]
        q = self.q_norm(self.q_proj(hidden_states).view(*leading, -1, self.head_dim)).transpose(1, 2)
        t = self.t_norm(self.t_proj(hidden_states).view(*leading, -1, self.head_dim // 2)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*leading, -1, self.head_dim).transpose(1, 2)
        return q, t.relu(), value


class CocaQwen3DecoderLayer(CocaDecoderLayer):
    attention_class = CocaQwen3Attention
    mlp_class = Qwen3MLP
    norm_class = Qwen3RMSNorm


class CocaQwen3PreTrainedModel(CocaPreTrainedModel):
    config: CocaQwen3Config
    _no_split_modules = ["CocaQwen3DecoderLayer"]


class CocaQwen3Model(CocaQwen3PreTrainedModel, CocaModel):
    layer_class = CocaQwen3DecoderLayer


class CocaQwen3ForCausalLM(CocaQwen3PreTrainedModel, CocaForCausalLM):
    model_class = CocaQwen3Model
