"""The half-width key cache: the coefficients t are stored, and rotated into keys when they are read.

A key follows from its t, which is half as wide, and from its position's angles, which all layers share. Keys and values
together then take 75% of what LLaMA's take. Letters: see `attention.py`.
"""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from .attention import coca_key


class HalfWidth(Cache):
    """A cache whose layers hold t (b, g, n, j), before its ReLU, in place of keys (b, g, n, d).

    The last of `layers` holds the angles of all positions, cos and sin (b, 1, n, j), so that whatever is done to the
    cache (reorder, crop, repeat, select, reset) is done to them.
    """

    def hold_angles(self, config, layer: CacheLayerMixin) -> None:
        self.config = config
        self.angles = layer
        self.layers.append(layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, t: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Store the new `t` (b, g, m, j) and `value_states` (b, g, m, d); return all keys and values of the layer.

        angles: cos and sin of the new positions, (b or 1, 1, m, j). key_states: the keys they make, (b, g, m, d).
        For the attention `coca`, which makes its own keys, all t instead of all keys.
        """
        if layer_idx == 0:
            self.angles.update(*(part.expand(len(t), -1, -1, -1) for part in angles))
        t, value = super().update(t, value_states, layer_idx)
        if t.shape[-2] == key_states.shape[-2]:
            return key_states, value
        if self.config._attn_implementation == "coca":
            return t, value
        return coca_key(t, *self.angles_of(t), self.config.coca_constraint), value

    def angles_of(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (b, 1, n, j), of all `t` of a layer: the last n where a window slides."""
        n = t.shape[-2]
        return self.angles.keys[..., -n:, :], self.angles.values[..., -n:, :]


class CocaCache(HalfWidth, DynamicCache):
    """A `DynamicCache` of half-width keys; decoding gives the same tokens."""

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.hold_angles(config, DynamicLayer())

    def prefetch(self, layer_idx: int, *args, **kwargs) -> None:
        """Fetch a layer that was offloaded; after the last comes the first, not the angles, which are never away."""
        super().prefetch(layer_idx % (len(self.layers) - 1), *args, **kwargs)


class CocaStaticCache(HalfWidth, StaticCache):
    """A `StaticCache` of half-width keys, for models without sliding windows; decoding gives the same tokens."""

    def __init__(self, config, max_cache_len: int, **kwargs):
        super().__init__(config=config, max_cache_len=max_cache_len, **kwargs)
        self.hold_angles(config, StaticLayer(max_cache_len))
