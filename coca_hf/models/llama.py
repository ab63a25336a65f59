"""LLaMA with Collinear Constrained Attention. Everything that is not attention, rotation or cache
is LLaMA's own.
"""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin, LlamaConfig

from .decoder import (
    CocaConfig,
    CocaDecoderLayer,
    CocaForCausalLM,
    CocaModel,
    CocaPreTrainedModel,
    classifiers,
    t_plan,
)


@strict
class CocaLlamaConfig(LlamaConfig, CocaConfig):
    model_type = "coca_llama"
    base_model_tp_plan = t_plan(LlamaConfig.base_model_tp_plan)


class CocaLlamaDecoderLayer(CocaDecoderLayer):
    pass


class CocaLlamaPreTrainedModel(CocaPreTrainedModel):
    config: CocaLlamaConfig
    _no_split_modules = ["CocaLlamaDecoderLayer"]


class CocaLlamaModel(CocaLlamaPreTrainedModel, CocaModel):
    layer_class = CocaLlamaDecoderLayer


class CocaLlamaForCausalLM(CocaLlamaPreTrainedModel, CocaForCausalLM, GenerationMixin):
    model_class = CocaLlamaModel


CocaLlamaForSequenceClassification, CocaLlamaForTokenClassification = classifiers(
    CocaLlamaPreTrainedModel, CocaLlamaModel
)
