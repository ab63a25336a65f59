"""The half-width key cache stores the coefficients t and computes keys when they are read.

A key follows from its t, which is half as wide, and from its position's angles, which all layers
with the same content pairs share. Keys and values together take 75% of LLaMA's bytes. Letters: see `attention.py`.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    StaticCache,
    StaticLayer,
)

from .attention import CACHE, ContentPairs, own_angles, rectified, scaled_key, unit_key

ROOM = 256  # tokens
# fields of a model's config that its keys depend on
KEY_FIELDS = "coca_constraint", "coca_kept_layers", "coca_content_pairs", "coca_content_layers"
Place = tuple[torch.device, ContentPairs]  # of layers that share their angles


class HalfWidth(Cache):
    """A cache whose layers hold t (b, g, n, j), rectified, in place of keys (b, g, n, d).

    After the model's own layers, `layers` has one more for every device and its content pairs, with
    the angles of all positions, cos and sin (b, 1, n, j). Whatever is done to the cache (reorder,
    crop, repeat, select, reset) is then done to them as well.
    """

    def hold_angles(self, config, new_layer: Callable[[], CacheLayerMixin]) -> None:
        self.constraint, self.new_layer = config.coca_constraint, new_layer
        self.made_for = {name: getattr(config, name) for name in KEY_FIELDS}
        self.angles: dict[Place, CacheLayerMixin] = {}
        self.first_layers: dict[Place, int] = {}

    def check_keys_of(self, config) -> None:
        """Raises ValueError if a model of `config` has other keys than the model that the cache was
        made for.
        """
        for name, made_for in self.made_for.items():
            if (own := getattr(config, name)) != made_for:
                raise ValueError(
                    f"{CACHE}: got keys of a model with {name} {made_for}, expected {own}; start again "
                    "without the old cache"
                )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args,
        t: Tensor,
        angles: tuple[Tensor, Tensor],
        content: ContentPairs,
        half_width: bool,
    ) -> tuple[Tensor, Tensor]:
        """Store the new `t` (b, g, m, j) and `value_states` (b, g, m, d); return all keys and
        values of the layer.

        angles: cos and sin of the new positions, (b or 1, 1, m, j). content: the layer's content
        pairs. key_states: the new keys, (b, g, m, d). half_width: return all t instead of all keys,
        unless all are new, for an attention that computes its own keys. The t of a kept layer are
        keys before rotation, (b, g, m, d); its `key_states` are stored unchanged.
        """
        if t.shape == key_states.shape:
            return super().update(key_states, value_states, layer_idx)
        place = t.device, content
        if self.first_layers.setdefault(place, layer_idx) == layer_idx:
            if place not in self.angles:
                self.angles[place] = self.new_layer()
                self.layers.append(self.angles[place])
            angles = own_angles(*angles, content)
            self.angles[place].update(*(part.expand(len(t), -1, -1, -1) for part in angles))
        t, value = super().update(rectified(t, content), value_states, layer_idx)
        if t.shape[-2] == key_states.shape[-2]:
            return key_states, value
        return t if half_width else self.keys_of(t, content), value

    def keys_of(self, t: Tensor, content: ContentPairs) -> Tensor:
        """Keys (b, g, n, d) for all `t` of a layer."""
        return scaled_key(t, self.unit_keys((t.device, content))[..., -t.shape[-2] :, :, :])

    def unit_keys(self, place: Place) -> Tensor:
        """Keys for coefficients of 1 at all positions, (b, 1, n, 2, j)."""
        held = self.angles[place]
        return unit_key(held.keys, held.values, self.constraint)

    def angles_of(self, t: Tensor, content: ContentPairs) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (b, 1, n, j), for all `t` of a layer, which are the last n under
        a sliding window.
        """
        held, n = self.angles[t.device, content], t.shape[-2]
        return held.keys[..., -n:, :], held.values[..., -n:, :]


class CocaCache(HalfWidth, DynamicCache):
    """A `DynamicCache` of half-width keys; decoding gives the same tokens."""

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        if not self.offloading:  # offloading moves a layer, but not its room
            self.layers: list[CacheLayerMixin] = [
                RoomyLayer() if type(layer) is DynamicLayer else layer for layer in self.layers
            ]
        self.hold_angles(config, RoomyLayer)
        # the cosines that the unit keys were computed from, and the unit keys
        self.held_unit_keys: dict[Place, tuple[Tensor, Tensor]] = {}

    def unit_keys(self, place: Place) -> Tensor:
        """Computed once for all layers of a place."""
        cos = self.angles[place].keys
        if place not in self.held_unit_keys or self.held_unit_keys[place][0] is not cos:
            self.held_unit_keys[place] = cos, super().unit_keys(place)
        return self.held_unit_keys[place][1]

    def prefetch(self, layer_idx: int, *args, **kwargs) -> None:
        """Fetch an offloaded layer. After the last layer comes the first, not the angles, which are
        never offloaded.
        """
        super().prefetch(layer_idx % (len(self.layers) - len(self.angles)), *args, **kwargs)


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` that writes a new token after the others; the stock layer copies all of them
    to add one.
    """

    keys: Tensor
    values: Tensor

    def lazy_initialization(self, *args) -> None:
        super().lazy_initialization(*args)
        self.of_keys, self.of_values = Room(), Room()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states)
        self.keys = self.of_keys.append(self.keys, key_states)
        self.values = self.of_values.append(self.values, value_states)
        return self.keys, self.values


class Room:
    """Appends to a tensor (b, g, n, width), in the memory after it if that is its own."""

    def __init__(self):
        self.capacity = 0  # tokens
        # a weak reference, so memory is freed with the layer's tensor
        self.filled: Callable[[], Tensor | None] = lambda: None

    def __reduce__(self):
        return Room, ()  # a copy of a cache has no room yet

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`torch.cat((held, new), -2)`. Everything is copied once in `ROOM` tokens, and when
        something else, such as beam search, has replaced `held`.
        """
        b, g, n, width = held.shape
        length = n + new.shape[-2]
        mine = self.filled() is held and held.is_inference() <= torch.is_inference_mode_enabled()
        if mine and length <= self.capacity:
            grown = held.as_strided((b, g, length, width), held.stride())
        else:
            self.capacity = length + ROOM
            grown = held.new_empty(b, g, self.capacity, width)[..., :length, :]
            grown[..., :n, :] = held
        grown[..., n:, :] = new
        self.filled = weakref.ref(grown)
        return grown


class CocaStaticCache(HalfWidth, StaticCache):
    """A `StaticCache` of half-width keys, for models without sliding windows; decoding gives the
    same tokens.
    """

    def __init__(self, config, max_cache_len: int, **kwargs):
        super().__init__(config=config, max_cache_len=max_cache_len, **kwargs)
        if any(self.is_sliding):
            raise ValueError(
                "CocaStaticCache: got a model with sliding windows, expected one without; use "
                "StaticCache"
            )
        self.hold_angles(config, partial(StaticLayer, max_cache_len))
