"""SmolLM3 with Collinear Constrained Attention. Its layers without rotary embedding
(`no_rope_layers`) have no angles that CoCA could constrain; they keep the original's attention.
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GenerationMixin, SmolLM3Config

from .attention import KeptAttention
from .decoder import (
    CocaConfig,
    CocaDecoderLayer,
    CocaForCausalLM,
    CocaModel,
    classifiers,
    kept_plan,
    t_plan,
)


@strict
class CocaSmolLM3Config(SmolLM3Config, CocaConfig):
    """`coca_kept_layers` always has the layers without rotary embedding."""

    model_type = "coca_smollm3"
    base_model_tp_plan = t_plan(SmolLM3Config.base_model_tp_plan)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        is_rotated = self.no_rope_layers[: self.num_hidden_layers]
        still = {layer for layer, rotated in enumerate(is_rotated) if not rotated}
        self.coca_kept_layers = sorted([*self.coca_kept_layers, *still - {*self.coca_kept_layers}])
        if self.coca_kept_layers:
            self.base_model_tp_plan = kept_plan(self.base_model_tp_plan)

    def windowed_layers(self) -> list[int]:
        """Layers without rotary embedding meet no angle that they were not trained for."""
        return [layer for layer in super().windowed_layers() if self.no_rope_layers[layer]]


class KeptSmolLM3Attention(KeptAttention):
    def __init__(self, config: CocaSmolLM3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.use_rope = config.no_rope_layers[layer_idx]

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if not self.use_rope:
            return q, k
        return super().rotated(q, k, cos, sin)


class CocaSmolLM3DecoderLayer(CocaDecoderLayer):
    kept_attention_class = KeptSmolLM3Attention


class CocaSmolLM3Model(CocaModel):
    config: CocaSmolLM3Config
    layer_class = CocaSmolLM3DecoderLayer


class CocaSmolLM3ForCausalLM(CocaForCausalLM, GenerationMixin):
    config: CocaSmolLM3Config
    model_class = CocaSmolLM3Model


CocaSmolLM3ForSequenceClassification, CocaSmolLM3ForTokenClassification = classifiers(
    CocaSmolLM3Model
)
