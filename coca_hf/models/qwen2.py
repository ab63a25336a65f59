"""Qwen2 and Qwen2.5 with Collinear Constrained Attention: biases on q, t and v, and sliding windows
by layer.
"""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin, Qwen2Config

from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers, t_plan


@strict
class CocaQwen2Config(Qwen2Config, CocaConfig):
    model_type = "coca_qwen2"
    base_model_tp_plan = t_plan(Qwen2Config.base_model_tp_plan)
    attention_bias = True  # on q, t and v; Qwen2 has no field for it
    output_bias = False

    # some checkpoints set it, and Qwen2Attention reads it
    head_dim: int | None = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs):
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class CocaQwen2DecoderLayer(CocaDecoderLayer):
    pass


class CocaQwen2Model(CocaModel):
    config: CocaQwen2Config
    layer_class = CocaQwen2DecoderLayer


class CocaQwen2ForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaQwen2Config
    model_class = CocaQwen2Model


CocaQwen2ForSequenceClassification, CocaQwen2ForTokenClassification = classifiers(CocaQwen2Model)
