"""Initialisation of `W_T`: the key projection, folded to one row per rotary pair and scaled.

CoCA's scores are quadratic in the query, so a copied `W_K` gives them a different size from the
original's and saturates the softmax; zeros behind the ReLU would never train. The scale follows
from the weights alone. After the layer's norm, an input is at most sqrt(hidden) long. With the
norm's weight multiplied into the columns of W_Q and W_K,

    |original score| <= hidden * |W_Q| |W_K|                                   (|W|: spectral norm)
    |CoCA score|     <= c * hidden^(3/2) * |W_Q|^2 max_j |row j of fold(W_K)|
                        (c: sqrt(2) slack, 1 strict)

and the scale makes the second bound equal to the first, for every key/value head with its query
heads. A bias, of the projection or of a LayerNorm before it, counts as one more column.

If the queries and keys of a head are normalised (Qwen3), with weights w_q and w_k, W_K stands for
w_k o W_K, a query is at most sqrt(d) max |w_q| long, and max |w_q| and max |w_k| take the place of
|W_Q| and |W_K|:

    |original score| <= d * max |w_q| max |w_k|
    |CoCA score|     <= c * d * max |w_q|^2 * hidden^(1/2) max_j |row j of fold(W_K)|

Content pairs, whose scores are linear in the query, have the scale of the others.

Letters: `models/attention.py`.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coca_hf.errors import CocaError

Shape = tuple[int, ...]
RULE = (
    "W_T = scale * fold(W_K) per key/value head; fold: mean of the two rows of a rotary pair; "
    "scale: gives the scores the bound that the original's had over all inputs (formula: "
    "coca_hf/convert/initialise.py)"
)


@dataclasses.dataclass(frozen=True)
class TargetTensor:
    """A tensor of the CoCA checkpoint, and the tensor of the source that it is made from.

    pick: takes the relevant part of the source's tensor, with rows in the order of CoCA's heads;
    None: all of it, unchanged. scaled_by: a tensor of the source, (head_dim,), that multiplies the
    rows of every head (Qwen3's key norm).
    """

    name: str
    shape: Shape
    source: str
    source_shape: Shape
    pick: Callable[[Tensor], Tensor] | None = None
    scaled_by: str | None = None

    @property
    def module(self) -> str:
        """The last module of its name: `t_proj`, `norm`."""
        return self.name.split(".")[-2]

    @property
    def layer(self) -> int:
        """The number of its layer, which only the tensors of layers have."""
        return int(self.name.split(".")[2])

    @property
    def is_carried_over(self) -> bool:
        return self.pick is None and self.shape == self.source_shape


class Initialiser:
    """Makes the tensors to write from the source's tensors, which `read` returns by name.

    released: whether the source has the authors' full-width `t_proj`. scales: the factors on the
    initial `W_T` by layer, filled in as layers are made.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        targets: Iterable[TargetTensor],
        read: Callable[[str], Tensor],
        where: str,
        released: bool = False,
    ):
        self.config, self.read, self.where, self.released = config, read, where, released
        self.scales: dict[int, list[float]] = {}
        self._targets = {target.name: target for target in targets}

    def make(self, target: TargetTensor) -> Tensor:
        """The tensor of `target`: `W_T` in float32 or wider, others in the dtype of the source."""
        tensor = self._picked(target)
        if target.module != "t_proj":
            return tensor
        groups = self.config.num_key_value_heads
        if self.released:  # exact, because the authors' code takes the mean after the projection
            return initial_t(tensor, torch.ones(groups), groups)
        scales = self._layer_scales(target.layer)
        return initial_t(self._scaled(target, tensor), torch.tensor(scales), groups)

    def _picked(self, target: TargetTensor) -> Tensor:
        tensor = self.read(target.source)
        return target.pick(tensor) if target.pick else tensor

    def _scaled(self, target: TargetTensor, rows: Tensor) -> Tensor:
        """The rows of all heads, (g * d, ...), times the tensor that `target` is scaled by."""
        if target.scaled_by is None:
            return rows
        weight = self.read(target.scaled_by).float().repeat(self.config.num_key_value_heads)
        return rows * weight.view(-1, *[1] * (rows.dim() - 1))

    def _layer_scales(self, layer: int) -> list[float]:
        """The factor of every key/value head in a layer."""
        if layer in self.scales:
            return self.scales[layer]
        names = {
            "norm": "input_layernorm.weight",
            "norm_bias": "input_layernorm.bias",
            "q": "self_attn.q_proj.weight",
            "q_bias": "self_attn.q_proj.bias",
            "q_norm": "self_attn.q_norm.weight",
            "k": "self_attn.t_proj.weight",
            "k_bias": "self_attn.t_proj.bias",
        }
        named = {kind: f"model.layers.{layer}.{name}" for kind, name in names.items()}
        found = {kind: self._targets[name] for kind, name in named.items() if name in self._targets}
        weights = {kind: self._scaled(one, self._picked(one)) for kind, one in found.items()}
        if k_norm := found["k"].scaled_by:
            weights["k_norm"] = self.read(k_norm).float()
        scales = initial_scales(weights, self.config).tolist()
        if not all(0 < scale < float("inf") for scale in scales):
            raise CocaError(
                f"{self.where}: layer {layer}: queries or keys are zero, infinite or NaN; expected "
                "a trained model"
            )
        self.scales[layer] = scales
        return scales


@torch.no_grad()
def initial_scales(weights: dict[str, Tensor], config: PreTrainedConfig) -> Tensor:
    """The factor on `fold(W_K)` of every key/value head, (g,): see the top of this file.

    weights: of one layer: `norm` (hidden,), `q` (h * d, hidden), `k` (g * d, hidden), and, if there
    are any, `q_bias`, `k_bias`, `norm_bias` (hidden,), `q_norm` and `k_norm` (d,), by which `k` and
    `k_bias` are already multiplied. The rows of a head are [first of every pair, second of every
    pair].
    """
    g, grams = config.num_key_value_heads, {}
    is_normed = "k_norm" in weights
    for name in "k" if is_normed else "qk":
        biases = [weights[f"{name}_bias"].float()] if f"{name}_bias" in weights else []
        if "norm_bias" in weights:
            biases.append(weights[name].float() @ weights["norm_bias"].float())
        extra = torch.stack(biases).sum(0) if biases else None
        grams[name] = _grams(weights[name], weights["norm"].float(), extra, config.head_dim)
    if not all(gram.isfinite().all() for gram in grams.values()):
        # LAPACK would raise an error of its own
        return torch.full((g,), torch.nan)
    if is_normed:
        q_size, k_size = (weights[f"{name}_norm"].float().abs().max() for name in "qk")
    else:
        q_size = _spectral_norm(grams["q"]).unflatten(0, (g, -1)).amax(1)  # (g,)
        k_size = _spectral_norm(grams["k"])
    c = 2**0.5 if config.coca_constraint == "slack" else 1.0
    return k_size / (c * config.hidden_size**0.5 * q_size * _folded_row_norm(grams["k"]))


def _grams(projection: Tensor, norm: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """Gram matrices of each head's rows, (heads, d, d) in float64, the columns times `norm`.

    bias: (heads * d,), one more column, for an input that is always 1.
    """
    grams, buffer = [], norm.new_empty(head_dim, len(norm))
    for number, head in enumerate(projection.split(head_dim)):
        # one at a time, so the rows stay in the processor's cache
        rows = torch.mul(head, norm, out=buffer)
        gram = (rows @ rows.T).double()
        if bias is not None:
            column = bias[number * head_dim : (number + 1) * head_dim].double()
            gram += column[:, None] * column
        grams.append(gram)
    return torch.stack(grams)


def _spectral_norm(grams: Tensor) -> Tensor:
    """Largest singular value of the matrices with these Gram matrices; quicker than an SVD."""
    return torch.linalg.eigvalsh(grams)[..., -1].sqrt().float()


def _folded_row_norm(grams: Tensor) -> Tensor:
    """Norm of the longest row of every folded matrix.

    Folded: the mean of rows j and j + d/2 of the matrix with Gram `grams`.
    """
    own = grams.diagonal(dim1=-2, dim2=-1)
    both = grams.diagonal(offset=grams.shape[-1] // 2, dim1=-2, dim2=-1)
    first, second = own.chunk(2, dim=-1)
    return ((first + second + 2 * both).clamp(min=0).amax(-1).sqrt() / 2).float()


def initial_t(k: Tensor, scales: Tensor, num_key_value_heads: int) -> Tensor:
    """`W_T` (or its bias) from `W_K` (or its bias), float32 or wider.

    Folded, each key/value head times its scale. It can be far smaller than `W_K`, so storing it in
    16 bits may lose most of it (`stored_as`).
    """
    heads = k.unflatten(0, (num_key_value_heads, 2, -1))
    w_t = k.new_empty(
        num_key_value_heads, *heads.shape[2:], dtype=torch.promote_types(k.dtype, torch.float32)
    )
    wide = torch.float32 if k.dtype.itemsize == 2 else torch.float64
    for head, (first, second) in enumerate(heads):
        # one at a time, so the wide numbers stay in the processor's cache
        w_t[head] = (first.to(wide) + second).mul_(scales[head] / 2)
    return w_t.flatten(0, 1)
