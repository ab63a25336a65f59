"""The half-width key cache: the coefficients t are stored, and rotated into keys when they are read.

A key follows from its t, which is half as wide, and from its position's angles, which all layers share. Keys and values
together then take 75% of what LLaMA's take. Letters: see `attention.py`.
"""

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from .attention import coca_key


class CocaCache(DynamicCache):
    """A `DynamicCache` whose layers hold t (b, g, n, j) in place of keys (b, g, n, d); decoding gives the same tokens.

    The last of `layers` holds the angles of all positions, cos and sin (b, 1, n, j), so that whatever is done to the
    cache (reorder, crop, repeat, select, reset) is done to them.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.constraint = config.coca_constraint
        self.angles = DynamicLayer()
        self.layers.append(self.angles)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, t: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Store the new `t` (b, g, m, j) and `value_states` (b, g, m, d); return all keys and values of the layer.

        angles: cos and sin of the new positions, (b or 1, 1, m, j). key_states: the keys they make, (b, g, m, d).
        """
        if layer_idx == 0:
            self.angles.update(*(part.expand(len(t), -1, -1, -1) for part in angles))
        t, value = super().update(t, value_states, layer_idx)
        n = t.shape[-2]  # fewer than all positions where the layer has a sliding window
        if n == key_states.shape[-2]:
            return key_states, value
        return coca_key(t, self.angles.keys[..., -n:, :], self.angles.values[..., -n:, :], self.constraint), value

    def prefetch(self, layer_idx: int, *args, **kwargs) -> None:
        """Fetch a layer that was offloaded; after the last comes the first, not the angles, which are never away."""
        super().prefetch(layer_idx % (len(self.layers) - 1), *args, **kwargs)
