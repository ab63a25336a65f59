"""Rotary position angles, as a function of the positions at hand and nothing else. Letters: see `attention.py`.

The stock module keeps the base of the longest sequence it has seen, so that a short prompt after a long one, or beside
one in its batch, gets the wrong angles. Here every row of the batch has the base of its own length.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def ntk_base(base: float, factor: float, seq_len, trained_len: int, head_dim: int):
    """The rotary base of dynamic NTK for a sequence of `seq_len` tokens; `base` itself up to the trained length.

    base * (factor * seq_len / trained_len - (factor - 1)) ^ (d / (d - 2)), the form that transformers and the paper's
    released code use. `seq_len` and the result are numbers, or tensors of one shape.
    """
    stretch = factor * seq_len / trained_len - (factor - 1)
    stretch = stretch.clamp(min=1.0) if isinstance(stretch, Tensor) else max(stretch, 1.0)
    return base * stretch ** (head_dim / (head_dim - 2))


class CocaRotaryEmbedding(nn.Module):
    """cos and sin of every pair's angle, for the RoPE types in `SUPPORTED_ROPE_TYPES`.

    Raises ValueError for another type.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        if self.rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"config.rope_parameters: rope_type {self.rope_type!r} is not supported with CoCA; "
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        inv_freq, self.attention_scaling = self.initial_inv_freq()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)  # (j,)

    def initial_inv_freq(self) -> tuple[Tensor, float]:
        """The angle per position of every pair, (j,), at the trained length, and the factor on cos and sin."""
        if self.rope_type in ("default", "dynamic"):
            return LlamaRotaryEmbedding.compute_default_rope_parameters(self.config)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, rope_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (b, m, j), in the dtype of `x`.

        position_ids: (b, m). rope_length: the length that fixes the base of dynamic NTK for all rows, for decoding with
        a cache; by default each row's last position + 1.
        """
        inv_freq = self.inv_freq.float()
        if self.rope_type == "dynamic":
            inv_freq = self._dynamic_inv_freq(position_ids, rope_length)[:, None]  # (b, 1, j)
        angles = position_ids[..., None].float() * inv_freq  # (b, m, j)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)

    def _dynamic_inv_freq(self, position_ids: Tensor, rope_length: int | None) -> Tensor:
        rope, head_dim = self.config.rope_parameters, self.config.head_dim
        seq_len = position_ids.amax(-1) + 1 if rope_length is None else position_ids.new_full((1,), rope_length)
        trained_len = rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
        precise = torch.float32 if seq_len.device.type == "mps" else torch.float64  # MPS has no float64
        base = ntk_base(rope["rope_theta"], rope["factor"], seq_len.to(precise), trained_len, head_dim).float()
        exponent = torch.arange(0, head_dim, 2, device=position_ids.device).float() / head_dim
        return 1.0 / base[:, None] ** exponent  # (b or 1, j)
