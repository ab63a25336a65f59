"""What every CoCA family shares: the configuration's own fields, the stack of layers, generation.

transformers derives its Mistral, Qwen2 and Qwen3 from its LLaMA; here, too, the shell of every
family (embedding, final norm, language head, loss, flags) is LLaMA's. A family's file adds its
configuration, its attention and its layer. The families' files and this one travel inside
checkpoints, which therefore load with `trust_remote_code=True` without coca_hf. Letters: see
`attention.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    PreTrainedConfig,
)
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import (
    CACHE,
    CocaAttention,
    ContentPairs,
    KeptAttention,
    cache_of,
    layer_types,
)
from .cache import CocaCache, CocaStaticCache, HalfWidth
from .hub import PushesItsCard
from .rotary import (
    LENGTH_DEPENDENT_ROPE_TYPES,
    CocaRotaryEmbedding,
    one_row_error,
    rotary_dim,
    unscaled_len,
)

MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class CocaConfig(PreTrainedConfig):
    """`coca_constraint`: `"slack"` (the paper's main results) or `"strict"` (its section 4.3).

    `coca_kept_layers`: numbers, from 0, of the layers that keep the original's attention
    (`KeptAttention`).

    `coca_kept_window`: tokens that a kept layer attends to, the query's own included; None for all
    of them. `sliding_window` and `layer_types`, which caches, masks and vLLM read, follow from it,
    so a model cannot have windows of its own beside it, and another one is given to
    `from_pretrained` instead of being set here.

    `coca_content_pairs`: how many of a head's pairs, the slowest ones, are content pairs in CoCA
    layers; `coca_content_layers`: the layers in which every second of the other pairs is one, too
    (`ContentPairs`).

    List it after the family's own configuration among the bases, so the family's defaults win.
    """

    # makes save_pretrained copy the modelling files, as register_for_auto_class would
    _auto_class = "AutoConfig"
    mlp_bias = False  # of families that have none, and no field for it

    coca_constraint: Literal["slack", "strict"] = "slack"
    coca_kept_layers: list[int] = field(default_factory=list)
    coca_kept_window: int | None = None
    coca_content_pairs: int = 0
    coca_content_layers: list[int] = field(default_factory=list)

    @property
    def head_dim(self) -> int:
        """The width of a head, for families whose configuration has no field of this name."""
        return self.hidden_size // self.num_attention_heads

    @property
    def score_scale(self) -> float:
        """The factor of the scores, for families whose configuration does not have it."""
        return self.head_dim**-0.5

    @property
    def output_bias(self) -> bool:
        """Whether the output projection has a bias, as queries, coefficients and values may have."""
        return self.attention_bias

    def __post_init__(self, **kwargs):
        others = {name: kwargs.pop(name) for name in sorted(kwargs) if name.startswith("coca_")}
        if is_set := [name for name, value in others.items() if value]:
            raise ValueError(
                f"{is_set[0]} is unknown to this version of coca_hf, so the weights may mean another "
                "function; load the checkpoint with the version that wrote it, or convert the "
                "original again"
            )
        super().__post_init__(**kwargs)
        if self.coca_kept_layers:
            self.base_model_tp_plan = kept_plan(self.base_model_tp_plan)  # type: ignore[has-type]
        if self.coca_kept_window is not None:
            types = ["full_attention"] * self.num_hidden_layers
            for layer in self.windowed_layers():
                types[layer] = "sliding_attention"
            # A copy of such a config has these types already
            if "sliding_attention" in (own := layer_types(self)) and own != types:
                raise ValueError(
                    f"coca_kept_window is {self.coca_kept_window} beside sliding_window "
                    f"{self.sliding_window}, expected a model without windows of its own"  # type: ignore[has-type]
                )
            self.sliding_window, self.layer_types = self.coca_kept_window, types
        self._made_for_window = self.coca_kept_window
        file = self.model_type.removeprefix("coca_")
        family = type(self).__name__.removesuffix("Config")
        self.auto_map = {
            "AutoConfig": f"{file}.{family}Config",
            "AutoModel": f"{file}.{family}Model",  # vLLM's Transformers backend asks for this one
            "AutoModelForCausalLM": f"{file}.{family}ForCausalLM",
            "AutoModelForSequenceClassification": f"{file}.{family}ForSequenceClassification",
            "AutoModelForTokenClassification": f"{file}.{family}ForTokenClassification",
        }

    def windowed_layers(self) -> list[int]:
        """Numbers of the kept layers that `coca_kept_window` applies to."""
        return sorted(self.coca_kept_layers) if self.coca_kept_window is not None else []

    def content_of(self, layer: int) -> ContentPairs:
        """The content pairs of CoCA layer number `layer`."""
        return ContentPairs(self.coca_content_pairs, layer in self.coca_content_layers)

    def kinds_of_angles(self) -> int:
        """How many sets of angles a cache holds: one for all CoCA layers with the same content pairs."""
        content_layers = {*self.coca_content_layers} - {*self.coca_kept_layers}
        others = self.num_hidden_layers - len(self.coca_kept_layers) - len(content_layers)
        return (len(content_layers) > 0) + (others > 0)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As transformers', which would set `from_pretrained(..., coca_kept_window=N)` and the like
        after validation, and after `sliding_window` and `layer_types`, which follow from it.
        """
        ours = {name: kwargs.pop(name) for name in CocaConfig.__annotations__ if name in kwargs}
        return super().from_dict({**config_dict, **ours}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As transformers', without what follows from `coca_kept_window`."""
        fields = super().to_dict()
        fields.pop("_made_for_window", None)
        if self.coca_kept_window is not None:
            for name in ("layer_types", "sliding_window"):
                fields.pop(name, None)
            if "sliding_window" in self.__dataclass_fields__:  # Mistral's default is 4096
                fields["sliding_window"] = None
        return fields

    def _validate_default_rope_parameters(self, rope_parameters, ignore_keys=None):
        """As transformers', which would warn at every load of a key that `--ntk-length` writes."""
        ignored = {*(ignore_keys or ()), "original_max_position_embeddings"}
        super()._validate_default_rope_parameters(rope_parameters, ignore_keys=ignored)

    def validate_sizes(self):
        """Called by `@strict`. Raises ValueError for a size below 1, and for heads that cannot be
        grouped.
        """
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
        for name in (*sizes, "head_dim"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected at least 1 and below 2^31"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads, which is {self.num_key_value_heads}"
            )

    def validate_layers(self):
        """Called by `@strict`. Raises ValueError for kept or content layers that do not exist or that
        are named twice, for a layer that is both, and for a window of one token or no layers, or one
        that was set after `sliding_window` had followed from another.
        """
        last = self.num_hidden_layers - 1
        for name in ("coca_kept_layers", "coca_content_layers"):
            layers = getattr(self, name)
            if len(set(layers)) < len(layers) or not all(0 <= layer <= last for layer in layers):
                raise ValueError(
                    f"{name} is {layers}, expected each layer once, numbered from 0 to {last}"
                )
        if both := sorted({*self.coca_kept_layers} & {*self.coca_content_layers}):
            raise ValueError(
                f"coca_content_layers has layers {both}, which keep the original's attention, expected "
                "CoCA layers"
            )
        window = self.coca_kept_window
        # transformers' caches keep all tokens of a window of 1
        if window is not None and not (2 <= window < 2**31 and self.coca_kept_layers):
            raise ValueError(
                f"coca_kept_window is {window} beside coca_kept_layers {self.coca_kept_layers}, "
                "expected at least 2 tokens, below 2^31, and layers that are kept"
            )
        follows = getattr(self, "sliding_window", None)
        is_changed = window is not None and follows != window
        if is_changed or window != self._made_for_window:
            raise ValueError(
                f"coca_kept_window is {window}, but sliding_window, which follows from it, is "
                f"{follows}; pass coca_kept_window to from_pretrained"
            )

    def validate_numbers(self):
        """Called by `@strict`. Raises ValueError for an epsilon, a rotary base or a factor of RoPE
        with which nothing is finite.
        """
        rope = self.rope_parameters or {}
        for name in ("rms_norm_eps", "layer_norm_eps", "rope_theta", "factor"):
            value = rope.get(name, getattr(self, name, None))
            least = 0 if name.endswith("eps") else torch.finfo(torch.float32).tiny
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{name} is {value}, expected a finite number above 0")

    def validate_dropout(self):
        """Called by `@strict`. Raises ValueError for a dropout that is not from 0 to below 1."""
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(
                f"attention_dropout is {self.attention_dropout}, expected from 0 to below 1"
            )

    def validate_pairs(self):
        """Called by `@strict`. Raises ValueError if the rotated dimensions do not form pairs, or a
        head has fewer pairs than content pairs.
        """
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, expected an even number: rotary embedding "
                f"rotates pairs"
            )
        if rotary_dim(self) % 2:
            raise ValueError(
                f"head_dim {self.head_dim} * partial_rotary_factor "
                f"{self.rope_parameters['partial_rotary_factor']} is {rotary_dim(self)}, expected "
                f"an even number"
            )
        if not 0 <= self.coca_content_pairs <= self.head_dim // 2:
            raise ValueError(
                f"coca_content_pairs is {self.coca_content_pairs}, expected 0 to the "
                f"{self.head_dim // 2} pairs of a head"
            )


def t_plan(plan: Mapping[str, str]) -> dict[str, str]:
    """A family's tensor-parallel plan, with `t_proj` instead of `k_proj` and its norm."""
    return {
        name.replace("k_proj", "t_proj"): style
        for name, style in plan.items()
        if "k_norm" not in name
    }


def kept_plan(plan: Mapping[str, str]) -> dict[str, str]:
    """A CoCA model's tensor-parallel plan, with the keys of kept layers and their norms added."""
    keys = {
        name.replace("t_proj", "k_proj").replace("q_norm", "k_norm"): style
        for name, style in plan.items()
    }
    return {**plan, **keys}


class CocaDecoderLayer(LlamaDecoderLayer):
    """Norm, attention, norm, MLP, with two residuals; a family names its own classes."""

    attention_class: type[CocaAttention] = CocaAttention
    kept_attention_class: type[KeptAttention] = KeptAttention
    mlp_class: type[nn.Module] = LlamaMLP

    def __init__(self, config: CocaConfig, layer_idx: int):
        # not LlamaDecoderLayer's, which would build the attention twice
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        is_kept = layer_idx in config.coca_kept_layers
        self.self_attn = (self.kept_attention_class if is_kept else self.attention_class)(
            config, layer_idx
        )
        self.mlp = self.mlp_class(config)
        self.input_layernorm = self.make_norm(config)
        self.post_attention_layernorm = self.make_norm(config)

    @classmethod
    def make_norm(cls, config: Any) -> nn.Module:
        """A norm of a layer; the one after the last layer is of the same kind."""
        return LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class CocaPreTrainedModel(PushesItsCard, LlamaPreTrainedModel):
    config: CocaConfig
    _no_split_modules: list[str] | None = None  # `CocaModel` has its layers
    _can_record_outputs = {"hidden_states": GradientCheckpointingLayer, "attentions": CocaAttention}
    default_attention: ClassVar[str | None] = None  # coca_hf.kernels sets it on CUDA builds

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """The attention to use: `default_attention` if none is requested."""
        return super().get_correct_attn_implementation(
            requested_attention or self.default_attention, is_init_check
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CocaRotaryEmbedding):
            for name, initial in module.initial_buffers().items():
                init.copy_(getattr(module, name), initial)


class CocaModel(CocaPreTrainedModel):
    """Embedding, layers of `layer_class`, and a last norm."""

    layer_class: type[CocaDecoderLayer]

    def __init__(self, config: CocaConfig):
        for validate in (config.validate_layers, config.validate_pairs):
            validate()  # fields may have been set since it was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [self.layer_class(config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = self.layer_class.make_norm(config)
        self.rotary_emb = CocaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._no_split_modules = [self.layer_class.__name__]
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        rope_length: int | None = None,
        left_padding: Tensor | int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As `LlamaModel.forward`, with two more arguments.

        The cache may also have the name `CACHE`. rope_length: the total length that fixes the angles
        of dynamic NTK and longrope. A cache keeps the `rope_length` that it began with.
        left_padding: (b,), the padding on the left of each row, which does not count towards its
        length; by default it is counted from a 2-d mask.

        If `position_ids` is absent, it is counted from a 2-d `attention_mask`, because the slack
        score depends on absolute positions, which padding must not move.

        Raises ValueError for a cache of a model with other keys, for another `rope_length` than that
        of the cache, or if it has none (`planned_length`), and if a layer was made with other
        content pairs than the config says; TypeError for a cache of another name (`cache_of`).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"{type(self).__name__}.forward: got both or neither, expected one of input_ids "
                f"and inputs_embeds"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        self._check_content()
        cache = cache_of(kwargs, past_key_values)
        if isinstance(cache, HalfWidth):
            cache.check_keys_of(self.config)
        if use_cache and cache is None:
            cache = CocaCache(self.config)
        if cache is not None and self.rotary_emb.rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
            rope_length = planned_length(
                cache, rope_length, inputs_embeds.shape[1], unscaled_len(self.config), position_ids
            )
        own_length: Tensor | int | None = rope_length
        if rope_length is not None:
            own_length = rope_length - (
                padding_on_the_left(attention_mask) if left_padding is None else left_padding
            )
        if position_ids is None:
            past_len = cache.get_seq_length() if cache is not None else 0
            position_ids = positions(inputs_embeds, attention_mask, past_len)

        masks = self.causal_masks(inputs_embeds, attention_mask, cache, position_ids)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids, own_length)
        hidden_states = self.before_layers(inputs_embeds)
        kinds = layer_types(self.config)
        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[kinds[i]],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), cache)

    def _check_content(self) -> None:
        """Raise ValueError if a layer was made with other content pairs than the config says."""
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, CocaDecoderLayer):  # vLLM, of a layer on another machine
                continue
            if (made_with := layer.self_attn.content) != self.config.content_of(i):
                raise ValueError(
                    f"layer {i} was made with {made_with}, but coca_content_pairs is "
                    f"{self.config.coca_content_pairs} and coca_content_layers is "
                    f"{self.config.coca_content_layers}; if layers were dropped or repeated, set "
                    "coca_content_layers to their new numbers"
                )

    def before_layers(self, inputs_embeds: Tensor) -> Tensor:
        """What a family does to the embeddings, (b, m, hidden); nothing by default."""
        return inputs_embeds

    def causal_masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None,
        cache: Cache | None,
        position_ids: Tensor,
    ) -> dict[str, Tensor]:
        """The mask of every kind of layer that the model has; `generate` may have prepared them."""
        if isinstance(attention_mask, dict):
            return attention_mask
        arguments = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            CACHE: cache,
            "position_ids": position_ids,
        }
        return {kind: MASKS[kind](**arguments) for kind in set(layer_types(self.config))}


def positions(
    inputs_embeds: Tensor, attention_mask: Tensor | dict[str, Tensor] | None, past_len: int | Tensor
) -> Tensor:
    """Positions of the new tokens, (b or 1, m): tokens before them in the row, without padding.

    Raises ValueError for a 2-d mask that leaves out cached or new tokens.
    """
    new_len = inputs_embeds.shape[1]
    # a static cache's length is a tensor, and to read it would break a compiled graph
    place = past_len + torch.arange(new_len, device=inputs_embeds.device)  # (m,)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_readable = isinstance(past_len, int) or not torch.compiler.is_compiling()
        if is_readable and attention_mask.shape[1] < past_len + new_len:
            raise ValueError(
                f"attention_mask: got {attention_mask.shape[1]} columns, expected one for each of the "
                f"{int(past_len)} cached and {new_len} new tokens"
            )
        seen = (attention_mask != 0).cumsum(-1)  # a mask may hold the segments' numbers
        return (seen - 1).clamp(min=0)[:, place]
    return place[None]


def padding_on_the_left(attention_mask: Tensor | dict[str, Tensor] | None) -> Tensor | int:
    """Tokens before the first that a 2-d mask lets through, (b,); 0 without such a mask."""
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return ((attention_mask != 0).cumsum(-1) == 0).sum(-1)
    return 0


def planned_length(
    cache: Cache,
    asked: int | None,
    new_len: int,
    trained_len: int,
    position_ids: Tensor | None = None,
) -> int | None:
    """The `rope_length` for the next tokens of `cache`, which is noted on the cache, because cached
    keys keep their angles.

    asked: the caller's, if any. new_len: the number of new tokens; position_ids: their positions, if
    the caller gave them. Up to the trained length all plans have the same angles, so no plan is
    shorter than that, and an empty cache without a plan gets it.

    Raises ValueError if the cached keys have other angles, or unknown ones.
    """
    noted = getattr(cache, "rope_length", None)
    asked = None if asked is None else max(asked, trained_len)
    # checked first, because reading the length of a static cache would break a compiled graph
    if asked is not None and asked == noted:
        return asked
    total_len = int(cache.get_seq_length()) + new_len
    if position_ids is not None and not torch.compiler.is_compiling():
        total_len = int(position_ids.max()) + 1  # without padding
    if not cache.get_seq_length():
        unplanned = trained_len if total_len <= trained_len else None
        cache.rope_length = unplanned if asked is None else asked
        return cache.rope_length
    if noted is None:
        raise ValueError(
            f"{CACHE}: got keys whose rotary angles were not planned, and this RoPE type "
            "has them depend on the total length; start again without the old cache, with "
            "rope_length=(tokens in all) from the first call on"
        )
    wanted = asked if asked is not None else total_len
    if asked is not None or wanted > noted:
        raise ValueError(
            f"{CACHE}: got {wanted} tokens in all, but the rotary angles were planned for "
            f"{noted}; start again without the old cache, with rope_length={wanted}"
        )
    return noted


class CocaForCausalLM(CocaPreTrainedModel, LlamaForCausalLM):
    """`LlamaForCausalLM` over a model of `model_class`; `forward` and the sharding plans are
    inherited.

    A family's class names `GenerationMixin` among its bases: transformers would derive another
    class from one that came with a checkpoint and does not, and models of it cannot be pickled.
    """

    model_class: type[CocaModel]

    def __init__(self, config: CocaConfig):
        # not LlamaForCausalLM's, which would build a LlamaModel
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args, **kwargs):
        """As transformers', by `sdpa` if the attention is `coca`, of which transformers knows nothing,
        until the batches end.

        Raises ValueError for a RoPE type whose angles depend on each sequence's length.
        """
        rope_type = self.config.rope_parameters["rope_type"]
        if rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
            raise ValueError(one_row_error("continuous batching", rope_type))
        is_coca = self.config._attn_implementation == "coca"
        if is_coca:
            self.set_attn_implementation("sdpa")
        manager = super().init_continuous_batching(*args, **kwargs)
        if is_coca:
            manager._original_attn_impl = "coca"  # what its stop() sets
        return manager

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args,
        # named, as rope_length is, because generate reads this signature
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rope_length: int | None = None,
        **kwargs,
    ) -> dict:
        """As transformers', with `rope_length`, which `generate` passes on to `forward`."""
        kwargs |= {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if rope_length is not None:  # counted here, because a static cache's masks do not show it
            inputs |= {
                "rope_length": rope_length,
                "left_padding": padding_on_the_left(attention_mask),
            }
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Use half-width keys unless another cache is asked for, and fix the angles for the whole
        generation.

        Cached keys keep the angles they were computed with, so all keys have those of
        `rope_length`, the planned total length: the one passed to `generate`, that of the cache
        passed to it, or prompt and new tokens. Each draft of an assistant is one generation, whose
        plan has room for as many tokens again; one that needs more starts again.

        Raises ValueError if more tokens are asked for than were planned, and for a cache without a
        plan.
        """
        given, total_len = model_kwargs.get(CACHE), max_cache_length + 1  # inputs_embeds included
        by_length = self.config.rope_parameters["rope_type"] in LENGTH_DEPENDENT_ROPE_TYPES
        is_draft = generation_config.is_assistant and model_kwargs.get("rope_length") is None
        if by_length and is_draft:
            room = getattr(given, "rope_length", None) or 0
            if total_len > room:
                given = model_kwargs[CACHE] = None
                room = 2 * total_len
            model_kwargs["rope_length"] = room
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get(CACHE)
        if type(cache) is DynamicCache and given is None:
            cache = model_kwargs[CACHE] = CocaCache(self.config, offloading=cache.offloading)
            if generation_config.is_assistant:  # as super does to the cache that this one replaces
                cache.activate_past_recording()
        fresh = type(cache) is StaticCache and given is None and not cache.is_initialized
        if fresh and not cache.offloading and not any(cache.is_sliding):
            cache = model_kwargs[CACHE] = CocaStaticCache(
                self.config, cache.layers[0].max_cache_len
            )
        if not by_length:
            return
        planned, trained_len = model_kwargs.get("rope_length"), unscaled_len(self.config)
        if cache is not None and cache.get_seq_length():
            new_len = total_len - int(cache.get_seq_length())
            planned = planned_length(cache, planned, new_len, trained_len)
        planned = model_kwargs["rope_length"] = max(planned or total_len, trained_len)
        if total_len > planned:
            raise ValueError(
                f"generate: got {total_len} tokens in all, but the rotary angles were planned for "
                f"{planned}; start again without the old cache, with rope_length={total_len}"
            )
        if cache is not None:
            cache.rope_length = planned

    def _get_logits_processor(self, *args, model_kwargs=None, **kwargs):
        """As transformers', but with the plan of `model_kwargs` for what guidance computes beside it."""
        processors = super()._get_logits_processor(*args, model_kwargs=model_kwargs, **kwargs)
        callers = kwargs.get("logits_processor") or []
        if rope_length := (model_kwargs or {}).get("rope_length"):
            for processor in processors:
                guides = isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
                if guides and processor not in callers:
                    processor.model = partial(self.__call__, rope_length=rope_length)
        return processors

    def _get_candidate_generator(self, *args, model_kwargs, assistant_model=None, **kwargs):
        """As transformers', but without this model's plan for an assistant, whose tokens and angles
        may be others.
        """
        if assistant_model is not None:
            model_kwargs = {n: value for n, value in model_kwargs.items() if n != "rope_length"}
        return super()._get_candidate_generator(
            *args, model_kwargs=model_kwargs, assistant_model=assistant_model, **kwargs
        )


def classifiers(model: type[CocaModel]) -> tuple[Any, Any]:
    """A family's models with transformers' heads for sequences and for tokens, over its `model`.

    All three are registered with transformers' Auto classes: the heads build their model with
    `AutoModel`, even if this code came with a checkpoint.
    """
    config, family = model.config_class, model.__name__.removesuffix("Model")
    AutoModel.register(config, model)
    # register does not: Trainer's label smoothing does not shift the labels of other models
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = f"{family}ForCausalLM"
    made = []
    for auto, head in (
        (AutoModelForSequenceClassification, GenericForSequenceClassification),
        (AutoModelForTokenClassification, GenericForTokenClassification),
    ):
        name = head.__name__.replace("Generic", family)
        own = {"__module__": model.__module__, "config_class": config}
        made.append(type(name, (head, CocaPreTrainedModel), own))
        auto.register(config, made[-1])
    return made[0], made[1]
