"""Granite with Collinear Constrained Attention: LLaMA with four factors from its configuration, on
embeddings, scores, residual branches and logits.
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin, GraniteConfig
from transformers.models.granite.modeling_granite import GraniteDecoderLayer, GraniteForCausalLM

from .decoder import CocaConfig, CocaDecoderLayer, CocaForCausalLM, CocaModel, classifiers, t_plan


@strict
class CocaGraniteConfig(GraniteConfig, CocaConfig):
    model_type = "coca_granite"
    base_model_tp_plan = t_plan(GraniteConfig.base_model_tp_plan)

    @property
    def score_scale(self) -> float:
        return self.attention_multiplier

    @property
    def logit_scale(self) -> float:
        """`1 / logits_scaling`, by the name that vLLM's Transformers backend reads."""
        return 1 / self.logits_scaling


class CocaGraniteDecoderLayer(CocaDecoderLayer):
    forward = GraniteDecoderLayer.forward

    def __init__(self, config: CocaGraniteConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.residual_multiplier = config.residual_multiplier


class CocaGraniteModel(CocaModel):
    config: CocaGraniteConfig
    layer_class = CocaGraniteDecoderLayer

    def before_layers(self, inputs_embeds: Tensor) -> Tensor:
        # without the first layer: a later stage of vLLM's pipeline, which is handed hidden states
        if isinstance(self.layers[0], nn.Identity):
            return inputs_embeds
        return inputs_embeds * self.config.embedding_multiplier


class CocaGraniteForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaGraniteConfig
    model_class = CocaGraniteModel
    forward = GraniteForCausalLM.forward


CocaGraniteForSequenceClassification, CocaGraniteForTokenClassification = classifiers(
    CocaGraniteModel
)
