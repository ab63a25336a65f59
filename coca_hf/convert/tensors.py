"""Which tensors a CoCA checkpoint has, which tensor of the source each is made of, and how. Letters: `models/`."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coca_hf.convert import llama
from coca_hf.convert.llama import Shape
from coca_hf.convert.start import fold_pairs, start_scales, start_t
from coca_hf.errors import CocaError


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of the CoCA checkpoint, `name` of `shape`, and the one of the source that it is made of."""

    name: str
    shape: Shape
    source: str
    source_shape: Shape

    @property
    def module(self) -> str:
        """The last module of its name: `t_proj`, `norm`."""
        return self.name.split(".")[-2]

    @property
    def is_carried_over(self) -> bool:
        return self.module != "t_proj"


def check_tensors(shapes: Mapping[str, Shape], config: PreTrainedConfig, where: str) -> tuple[list[Piece], bool]:
    """The pieces of the CoCA checkpoint, after comparing what they need with the `shapes` found, and whether the source
    is of the authors' released code, with full-width t in the place of keys.

    Raises CocaError naming the first tensor that is missing, not understood or of the wrong shape.
    """
    expected = llama.check_tensors(shapes, config, where)
    released = any(name.endswith("t_proj.weight") for name in expected)
    if released and config.coca_constraint != "slack":
        raise CocaError(f"{where}: got the released CoCA layout, which is slack, expected --constraint slack")
    pieces = []
    for source, source_shape in expected.items():
        name = source.replace(".k_proj.", ".t_proj.")
        halves = 2 if ".t_proj." in name else 1
        pieces.append(Piece(name, (source_shape[0] // halves, *source_shape[1:]), source, source_shape))
    return pieces, released


class Maker:
    """Makes pieces from the source's tensors, which `read` fetches by name.

    scales: by layer, what the start of its `W_T` chose; filled as layers come.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        pieces: list[Piece],
        read: Callable[[str], Tensor],
        where: str,
        released: bool = False,
    ):
        self.config, self.read, self.where, self.released = config, read, where, released
        self.scales: dict[int, list[float]] = {}
        self._sources = {piece.source for piece in pieces}

    def make(self, piece: Piece) -> Tensor:
        """The tensor of `piece`, in the dtype of the source."""
        tensor, g = self.read(piece.source), self.config.num_key_value_heads
        if piece.is_carried_over:
            return tensor
        if self.released:
            return fold_pairs(tensor, g)
        layer = int(piece.name.split(".")[2])
        if layer not in self.scales:
            self.scales[layer] = self._layer_scales(layer)
        return start_t(tensor, torch.tensor(self.scales[layer]), g)

    def _layer_scales(self, layer: int) -> list[float]:
        names = {"norm": "input_layernorm.weight"}
        names |= {letter: f"self_attn.{letter}_proj.weight" for letter in "qk"}
        names |= {f"{letter}_bias": f"self_attn.{letter}_proj.bias" for letter in "qk"}
        sources = {letter: f"model.layers.{layer}.{name}" for letter, name in names.items()}
        weights = {letter: self.read(name) for letter, name in sources.items() if name in self._sources}
        finite = all(tensor.isfinite().all() for tensor in weights.values())  # else LAPACK has errors of its own
        scales = start_scales(weights, self.config).tolist() if finite else [float("nan")]
        if not all(0 < scale < float("inf") for scale in scales):
            raise CocaError(
                f"{self.where}: layer {layer}: q_proj or k_proj is zero, infinite or NaN; expected a trained model"
            )
        return scales
