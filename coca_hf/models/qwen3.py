"""Qwen3 with Collinear Constrained Attention: the query keeps its per-head norm, and the
coefficients have none.

Qwen3 divides the query and the key of every head by their root mean square over d. Scores then stay
bounded however the projections grow, and signs tell keys apart. CoCA's coefficients have no signs:
how much attention a token gets is in the size of its t, which a norm would remove. Conversion
therefore drops the key norm and folds its weight into W_T:

    t = ReLU(W_T x),  W_T = scale * fold(key norm's weight o W_K)

Measured on a small Qwen3 (scripts/bench/qwen3_norm.py at f3ddbd4, docs/results/qwen3-norm.json; 2
seeds, perplexity per byte after 200 steps, the original 4.18 / 4.21): no norm 4.72 / 4.51 (slack)
and 4.44 / 4.18 (strict); RMSNorm of t before the ReLU 5.12 / 4.83 and 4.54 / 4.38; after it 5.05 /
4.91 and 4.49 / 4.35.
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GenerationMixin, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .attention import CocaAttention, KeptAttention
from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers, t_plan


@strict
class CocaQwen3Config(Qwen3Config, CocaConfig):
    model_type = "coca_qwen3"
    base_model_tp_plan = t_plan(Qwen3Config.base_model_tp_plan)


class CocaQwen3Attention(CocaAttention):
    def __init__(self, config: CocaQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def queries(self, hidden_states: Tensor) -> Tensor:
        return self.q_norm(super().queries(hidden_states))


class KeptQwen3Attention(KeptAttention, CocaQwen3Attention):
    def __init__(self, config: CocaQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def coefficients(self, hidden_states: Tensor) -> Tensor:
        return self.k_norm(super().coefficients(hidden_states))


class CocaQwen3DecoderLayer(CocaDecoderLayer):
    attention_class = CocaQwen3Attention
    kept_attention_class = KeptQwen3Attention


class CocaQwen3Model(CocaModel):
    config: CocaQwen3Config
    layer_class = CocaQwen3DecoderLayer


class CocaQwen3ForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaQwen3Config
    model_class = CocaQwen3Model


CocaQwen3ForSequenceClassification, CocaQwen3ForTokenClassification = classifiers(CocaQwen3Model)
