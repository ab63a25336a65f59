"""LLaMA with Collinear Constrained Attention. Everything that is not attention, rotation or cache
is LLaMA's own.
"""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin, LlamaConfig

from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers, t_plan


@strict
class CocaLlamaConfig(LlamaConfig, CocaConfig):
    model_type = "coca_llama"
    base_model_tp_plan = t_plan(LlamaConfig.base_model_tp_plan)


class CocaLlamaDecoderLayer(CocaDecoderLayer):
    pass


class CocaLlamaModel(CocaModel):
    config: CocaLlamaConfig
    layer_class = CocaLlamaDecoderLayer


class CocaLlamaForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaLlamaConfig
    model_class = CocaLlamaModel


CocaLlamaForSequenceClassification, CocaLlamaForTokenClassification = classifiers(CocaLlamaModel)
