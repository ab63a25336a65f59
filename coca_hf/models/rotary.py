"""Rotary angles as a function of the given positions and nothing else. Letters: see `attention.py`.

The stock module keeps the base of the longest sequence it has seen, so a short prompt after a long
one, or beside one in its batch, gets the wrong angles. Here every sequence has the base of its own
length, whether or not it shares a row with others.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")  # a cache holds only under one `rope_length`


def ntk_base(base: float, factor: float, seq_len, trained_len: int, head_dim: int):
    """The rotary base of dynamic NTK for a sequence of `seq_len` tokens; `base` itself up to the
    trained length.

    base * (factor * seq_len / trained_len - (factor - 1)) ^ (d / (d - 2)), the form that
    transformers and the paper's released code use. `seq_len` and the result are numbers, or tensors
    of one shape. For d = 2 the result is `base`, because the angle of a single pair does not depend
    on it.
    """
    stretch = factor * seq_len / trained_len - (factor - 1)
    stretch = stretch.clamp(min=1.0) if isinstance(stretch, Tensor) else max(stretch, 1.0)
    return base * stretch ** (head_dim / (head_dim - 2) if head_dim > 2 else 0)


def rotary_dim(config) -> int:
    """How many of a head's dimensions are rotated; fewer than `head_dim` if rotation is partial
    (GPT-NeoX).
    """
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def unscaled_len(config) -> int:
    """The length up to which dynamic NTK and longrope change no angle.

    As in transformers, dynamic NTK does not read `original_max_position_embeddings`.
    """
    rope = config.rope_parameters
    original = rope.get("original_max_position_embeddings")
    return (rope["rope_type"] != "dynamic" and original) or config.max_position_embeddings


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """The length of each token's sequence, (b, m): its last position + 1.

    A row holds several sequences if its positions decrease.
    """
    sequence = (position_ids.diff(dim=-1, prepend=position_ids[:, :1]) < 0).cumsum(-1)
    last = torch.zeros_like(position_ids).scatter_reduce(-1, sequence, position_ids, "amax")
    return last.gather(-1, sequence) + 1


def one_row_error(engine: str, rope_type: str) -> str:
    """Why an engine that joins sequences in one row cannot run a RoPE type, and what to do."""
    return (
        f"config.rope_parameters: got rope_type {rope_type!r}, whose angles depend on each "
        f"sequence's length; {engine} computes many sequences as one row; bake one base in with "
        "coca-convert SRC DST --ntk-length L"
    )


class CocaRotaryEmbedding(nn.Module):
    """cos and sin of every pair's angle, for the RoPE types in `SUPPORTED_ROPE_TYPES`.

    If rotation is partial, the unrotated pairs come last, with cos 1 and sin 0.

    Raises ValueError for any other type, and under vLLM, which computes many sequences as one row,
    for a type whose angles depend on a sequence's length.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        if self.rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"config.rope_parameters: rope_type {self.rope_type!r} is not supported with CoCA; "
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        if self.rope_type in LENGTH_DEPENDENT_ROPE_TYPES and config._attn_implementation == "vllm":
            raise ValueError(one_row_error("vLLM", self.rope_type))
        self.attention_scaling = self._rope()[1]
        for name, inv_freq in self.initial_buffers().items():
            self.register_buffer(name, inv_freq, persistent=False)  # (rotated pairs,)

    def _apply(self, fn, recurse: bool = True):
        """Move with the model, but stay float32: 16-bit frequencies, as after `model.half()`, give
        far positions wrong angles.
        """
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self

    def initial_buffers(self) -> dict[str, Tensor]:
        """The angle per position of every rotated pair at the trained length, and for longrope also
        past it.
        """
        buffers = {"inv_freq": self._rope()[0]}
        if self.rope_type == "longrope":
            buffers["long_inv_freq"] = self._rope(seq_len=unscaled_len(self.config) + 1)[0]
        return buffers

    def _rope(self, **options) -> tuple[Tensor, float]:
        """`inv_freq` as transformers initialises it, and the factor on cos and sin."""
        if self.rope_type in ("default", "dynamic"):
            return GPTNeoXRotaryEmbedding.compute_default_rope_parameters(self.config)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, **options)

    @torch.no_grad()
    def forward(
        self, x: Tensor, position_ids: Tensor, rope_length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (b, m, j), in the dtype of `x`.

        position_ids: (b, m). rope_length: the length that fixes the base of dynamic NTK or the
        factors of longrope when decoding with a cache, for all rows, or (b,) for each; by default
        each sequence's last position + 1.
        """
        inv_freq = self.inv_freq.float()
        if self.rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
            if rope_length is None:
                seq_len = sequence_lengths(position_ids)
            else:
                seq_len = torch.as_tensor(rope_length, device=position_ids.device).reshape(-1, 1)
            by_length = (
                self._dynamic_inv_freq if self.rope_type == "dynamic" else self._longrope_inv_freq
            )
            inv_freq = by_length(seq_len)  # (b or 1, m or 1, rotated pairs)
        angles = position_ids[..., None].float() * inv_freq  # (b, m, rotated pairs)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        still = self.config.head_dim // 2 - cos.shape[-1]  # unrotated pairs
        return pad(cos, (0, still), value=1.0).to(x.dtype), pad(sin, (0, still)).to(x.dtype)

    def _dynamic_inv_freq(self, seq_len: Tensor) -> Tensor:
        """seq_len: (b or 1, m or 1). Returns (b or 1, m or 1, rotated pairs)."""
        rope, rotated = self.config.rope_parameters, rotary_dim(self.config)
        # MPS has no float64
        precise = torch.float32 if seq_len.device.type == "mps" else torch.float64
        base = ntk_base(
            rope["rope_theta"],
            rope["factor"],
            seq_len.to(precise),
            unscaled_len(self.config),
            rotated,
        ).float()
        exponent = torch.arange(0, rotated, 2, device=seq_len.device).float() / rotated
        return 1.0 / base[..., None] ** exponent

    def _longrope_inv_freq(self, seq_len: Tensor) -> Tensor:
        """As `_dynamic_inv_freq`, with the short factors up to the trained length."""
        is_long = (seq_len > unscaled_len(self.config))[..., None]
        return torch.where(is_long, self.long_inv_freq.float(), self.inv_freq.float())
