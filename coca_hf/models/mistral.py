"""Mistral with Collinear Constrained Attention; its sliding window cuts CoCA's scores as it cuts
Mistral's own.
"""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin, MistralConfig

from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers, t_plan


@strict
class CocaMistralConfig(MistralConfig, CocaConfig):
    model_type = "coca_mistral"
    base_model_tp_plan = t_plan(MistralConfig.base_model_tp_plan)
    attention_bias = False  # Mistral has none, and no field for it


class CocaMistralDecoderLayer(CocaDecoderLayer):
    pass


class CocaMistralModel(CocaModel):
    config: CocaMistralConfig
    layer_class = CocaMistralDecoderLayer


class CocaMistralForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaMistralConfig
    model_class = CocaMistralModel


CocaMistralForSequenceClassification, CocaMistralForTokenClassification = classifiers(
    CocaMistralModel
)
