"""Which tensors a CoCA checkpoint has, which tensor of the source each is made of, and how.

The CoCA model itself, built without memory, says what it has; a family says what its source calls
those tensors. Letters: `models/attention.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from coca_hf.convert.config import Family, coca_class, family_of, head_of
from coca_hf.convert.initialise import fold_pairs, initial_scales, initial_t
from coca_hf.errors import CocaError, library_errors
from coca_hf.models.attention import QUERY_SCALE
from coca_hf.models.decoder import CocaConfig
from coca_hf.models.rotary import rotary_dim
from coca_hf.weights import HEADS, is_derived

Shape = tuple[int, ...]
ROUNDING = 0.1  # bfloat16 takes 0.002; so much is underflow


@dataclasses.dataclass(frozen=True)
class TargetTensor:
    """A tensor of the CoCA checkpoint, and the one of the source that it is made of.

    pick: the part of the source's tensor that is meant, rows in the order of CoCA's heads; None:
    all, as it is. scaled_by: a tensor of the source, (head_dim,), that multiplies the rows of every
    head (Qwen3's key norm).
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
    def bounds_queries(self) -> bool:
        """Whether its numbers alone say how large queries become: their bias or their norm."""
        return self.name.endswith(("q_proj.bias", "q_norm.weight"))

    @property
    def is_carried_over(self) -> bool:
        return self.pick is None and self.shape == self.source_shape


def untie_(
    config: CocaConfig, shapes: Mapping[str, Shape], are_equal: Callable[[str, str], bool]
) -> None:
    """Untie the head in `config` where one of its own is stored, as transformers would load it.

    are_equal: compares two tensors of the source by name.
    """
    embeddings = [
        name for name in shapes if name.endswith(("embed_tokens.weight", "embed_in.weight"))
    ]
    heads = [name for name in HEADS if name in shapes]
    if (
        config.tie_word_embeddings
        and embeddings
        and not all(are_equal(embeddings[0], head) for head in heads)
    ):
        config.tie_word_embeddings = False


def check_tensors(
    shapes: Mapping[str, Shape],
    config: CocaConfig,
    family: Family | None,
    converted: Collection[int],
    where: str,
    released: bool = False,
) -> tuple[list[TargetTensor], bool]:
    """The tensors of the CoCA checkpoint, whose sources are among `shapes`; and `released`.

    family: of the source; None for a CoCA checkpoint of ours. converted: numbers of the layers
    whose coefficients are made of the source's keys. released: whether the source is of
    the authors' released code, with full-width t in the place of keys. Where it has a `t_proj`, it
    is; GPT-NeoX sources do not say.

    Raises CocaError naming the first tensor that is missing, not understood or of the wrong shape.
    """
    released = family is not None and (
        released or any(name.endswith("t_proj.weight") for name in shapes)
    )
    _check_released(released, config, where)
    targets = list(_targets(config, shapes, family, converted, released, where))
    expected = source_shapes(targets, config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CocaError(
            f"{where}: tensor {missing[0]} is missing{_and_more(missing)}; is the checkpoint "
            "complete?"
        )
    unknown = [name for name in shapes if name not in expected and not is_derived(name, config)]
    if unknown:
        head = head_of(config.architectures)
        plain = (family.causal_lm if family else family_of(config).coca_causal_lm).__name__
        raise CocaError(
            f"{where}: tensor {unknown[0]} is not understood{_and_more(unknown)}; expected a plain "
            f"{plain.replace('ForCausalLM', head)}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CocaError(
                f"{where}: tensor {name} has shape {shapes[name]}, expected {shape} from "
                "config.json"
            )
    return targets, released


def source_shapes(targets: Iterable[TargetTensor], config: CocaConfig) -> dict[str, Shape]:
    """Every tensor of the source that `targets` are made of."""
    norms = {target.scaled_by: (config.head_dim,) for target in targets if target.scaled_by}
    return {target.source: target.source_shape for target in targets} | norms


def _check_queries(config: CocaConfig, target: TargetTensor, numbers: Tensor, where: str) -> None:
    """Raise CocaError for a bias or a norm of queries whose square their dtype cannot hold.

    Kept layers square nothing.
    """
    if not target.bounds_queries or _layer_number(target.name) in config.coca_kept_layers:
        return
    dtype = str(numbers.dtype).removeprefix("torch.")
    if target.module == "q_norm":
        # it multiplies vectors of length sqrt(d), all of which may be in one number
        got, largest = "queries", numbers.double().abs().max().item() * config.head_dim**0.5
    else:
        # strict squares the length of a pair; slack multiplies it by the larger number of the pair
        pairs = numbers.double().abs().view(-1, 2, config.head_dim // 2)
        length = pairs.square().sum(1).sqrt()
        other = length if config.coca_constraint == "strict" else pairs.amax(1)
        got, largest = "numbers", (length * other).max().sqrt().item()
    limit = (torch.finfo(numbers.dtype).max / QUERY_SCALE) ** 0.5
    if limit < largest < float("inf"):
        raise CocaError(
            f"{where}: tensor {target.name}: got {got} up to {largest:g}, whose squares {dtype} "
            f"cannot hold, expected at most {limit:.0f}; convert to bfloat16 or float32"
        )


def stored_as(
    config: CocaConfig, dtype: torch.dtype, numbers: Tensor, target: TargetTensor, where: str
) -> Tensor:
    """`numbers` of `target`, all or a block of them, as they are written.

    Raises CocaError where `dtype` is too narrow: for a number, for the square of queries, or, as
    `W_T` can be tiny, for a head of it, of which rounding takes more than `ROUNDING` of the norm.
    """
    stored = numbers.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(numbers.dtype).max:
        _check_narrow(config, stored, numbers, target, where)
    _check_queries(config, target, stored, where)
    return stored


def _check_narrow(
    config: CocaConfig, stored: Tensor, numbers: Tensor, target: TargetTensor, where: str
) -> None:
    problem, num_heads = "", config.num_key_value_heads if numbers.shape == target.shape else 1
    if stored.isinf().any() and (stored.isinf() & numbers.isfinite()).any():
        problem = "infinite"
    elif target.module == "t_proj":
        error, size = (
            x.double().reshape(num_heads, -1).norm(dim=1) for x in (stored - numbers, numbers)
        )
        if (error > ROUNDING * size).any():
            problem = "zero or nearly so"
    if problem:
        raise CocaError(
            f"{where}: tensor {target.name}: got numbers up to {numbers.abs().max():g}, which in "
            f"{str(stored.dtype).removeprefix('torch.')} are {problem}; expected another dtype, as "
            "float32"
        )


class Initialiser:
    """Makes the tensors that are written from the source's tensors, which `read` fetches by name.

    scales: by layer, the factors that the initial `W_T` has; filled as layers come.
    """

    def __init__(
        self,
        config: CocaConfig,
        targets: list[TargetTensor],
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
        if self.released:
            return fold_pairs(tensor, groups)
        return initial_t(self._scaled(target, tensor), torch.tensor(self._scales(target)), groups)

    def _scaled(self, target: TargetTensor, rows: Tensor) -> Tensor:
        """The rows of all heads, (g * d, ...), times what `target` is scaled by."""
        if target.scaled_by is None:
            return rows
        weight = self._norm_weight(target).repeat(self.config.num_key_value_heads)
        return rows * weight.view(-1, *[1] * (rows.dim() - 1))

    def _norm_weight(self, target: TargetTensor) -> Tensor:
        assert target.scaled_by is not None
        return self.read(target.scaled_by).float()

    def _scales(self, target: TargetTensor) -> list[float]:
        """The factor of every key/value head in the layer of `target`."""
        layer = _layer_number(target.name)
        if layer not in self.scales:
            scales = self._layer_scales(target.name.partition(".self_attn.")[0])
            if not all(0 < scale < float("inf") for scale in scales):
                raise CocaError(
                    f"{self.where}: layer {layer}: queries or keys are zero, infinite or NaN; "
                    "expected a trained model"
                )
            self.scales[layer] = scales
        return self.scales[layer]

    def _layer_scales(self, layer: str) -> list[float]:
        names = {
            "norm": "input_layernorm.weight",
            "norm_bias": "input_layernorm.bias",
            "q": "self_attn.q_proj.weight",
            "q_bias": "self_attn.q_proj.bias",
            "q_norm": "self_attn.q_norm.weight",
            "k": "self_attn.t_proj.weight",
            "k_bias": "self_attn.t_proj.bias",
        }
        targets = {letter: self._targets.get(f"{layer}.{name}") for letter, name in names.items()}
        found = {letter: target for letter, target in targets.items() if target is not None}
        weights = {
            letter: self._scaled(target, self._picked(target)) for letter, target in found.items()
        }
        if found["k"].scaled_by:
            weights["k_norm"] = self._norm_weight(found["k"])
        return initial_scales(weights, self.config).tolist()

    def _picked(self, target: TargetTensor) -> Tensor:
        tensor = self.read(target.source)
        return target.pick(tensor) if target.pick else tensor


def _targets(
    config: CocaConfig,
    shapes: Mapping[str, Shape],
    family: Family | None,
    converted: Collection[int],
    released: bool,
    where: str,
) -> Iterator[TargetTensor]:
    # torch refuses some sizes
    with library_errors(f"{where}: its config.json makes no model"), torch.device("meta"):
        model = coca_class(config)(config)
    others = {"gpt_neox": _gpt_neox_target, "phi3": _phi3_target}
    describe = others.get(family.model_type, _llama_target) if family else _llama_target
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            shape = tuple(tensor.shape)
            if ".t_proj." in name and _layer_number(name) not in converted:
                yield TargetTensor(name, shape, name, shape)
            else:
                yield describe(config, name, shape, shapes, released)


def _llama_target(
    config: CocaConfig, name: str, shape: Shape, shapes: Mapping[str, Shape], released: bool
) -> TargetTensor:
    if ".t_proj." not in name:
        return TargetTensor(name, shape, name, shape)
    source = name if released else name.replace(".t_proj.", ".k_proj.")
    norm = (
        f"{name.partition('.t_proj.')[0]}.k_norm.weight"
        if config.model_type == "coca_qwen3"
        else None
    )
    return TargetTensor(name, shape, source, (2 * shape[0], *shape[1:]), scaled_by=norm)


GPT_NEOX_NAMES = {
    ".self_attn.o_proj.": ".attention.dense.",
    ".embed_tokens.": ".embed_in.",
    "gpt_neox.norm.": "gpt_neox.final_layer_norm.",
}


def _gpt_neox_target(
    config: CocaConfig, name: str, shape: Shape, shapes: Mapping[str, Shape], released: bool
) -> TargetTensor:
    part = re.fullmatch(r"model\.(.*)\.self_attn\.([qktv])_proj\.(weight|bias)", name)
    if part:
        source = f"gpt_neox.{part[1]}.attention.query_key_value.{part[3]}"
        pick = partial(split_query_key_value, part={"q": 0, "v": 2}.get(part[2], 1), config=config)
        return TargetTensor(name, shape, source, (3 * config.hidden_size, *shape[1:]), pick)
    if name == "lm_head.weight":  # older files, and GPT-NeoX's own code, have the second name
        return TargetTensor(name, shape, name if name in shapes else "embed_out.weight", shape)
    if name.startswith("score.") and head_of(config.architectures) == "ForTokenClassification":
        return TargetTensor(name, shape, name.replace("score", "classifier"), shape)
    source = name.replace("model.", "gpt_neox.", 1)
    for ours, theirs in GPT_NEOX_NAMES.items():
        source = source.replace(ours, theirs)
    return TargetTensor(name, shape, source, shape)


PHI3_FUSED = {
    "q": ("qkv_proj", 0),
    "k": ("qkv_proj", 1),
    "t": ("qkv_proj", 1),
    "v": ("qkv_proj", 2),
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
}


def _phi3_target(
    config: CocaConfig, name: str, shape: Shape, shapes: Mapping[str, Shape], released: bool
) -> TargetTensor:
    module = re.fullmatch(r"(.*\.)(q|k|t|v|gate|up)_proj\.weight", name)
    if module is None:
        return TargetTensor(name, shape, name, shape)
    fused, part = PHI3_FUSED[module[2]]
    sizes = [config.intermediate_size] * 2
    if fused == "qkv_proj":
        groups = config.num_key_value_heads
        sizes = [heads * config.head_dim for heads in (config.num_attention_heads, groups, groups)]
    pick = partial(split_rows, sizes=sizes, part=part, config=config)
    return TargetTensor(name, shape, f"{module[1]}{fused}.weight", (sum(sizes), shape[1]), pick)


def split_rows(fused: Tensor, sizes: list[int], part: int, config: CocaConfig) -> Tensor:
    """Part `part`, of `sizes`, of the rows of query, key and value, or of the MLP's gate and up.

    Query and key rows come in the order of `split_query_key_value`.
    """
    rows = fused.split(sizes)[part]
    if len(sizes) == 3 and part < 2:
        return _by_pairs(rows.unflatten(0, (-1, config.head_dim)), config)
    return rows.clone()  # shares no memory with the others


def split_query_key_value(fused: Tensor, part: int, config: CocaConfig) -> Tensor:
    """Query (part 0), key (1) or value (2) rows of GPT-NeoX's fused weight or bias.

    Query and key rows of every head come as rotated first halves, unrotated first halves, rotated
    second halves, unrotated second halves (`models/gpt_neox.py` says why). fused: (h * 3 * d, ...).
    Returns (h * d, ...).
    """
    heads = fused.unflatten(0, (config.num_attention_heads, 3, config.head_dim))[:, part]
    return heads.flatten(0, 1) if part == 2 else _by_pairs(heads, config)


def _by_pairs(heads: Tensor, config: CocaConfig) -> Tensor:
    """Rows (h, d, ...), of which the first are rotated, as (h * d, ...) in CoCA's order of pairs."""
    rotated, unrotated = heads.tensor_split([rotary_dim(config)], dim=1)
    halves = [
        half for side in (0, 1) for half in (rotated.chunk(2, 1)[side], unrotated.chunk(2, 1)[side])
    ]
    return torch.cat(halves, dim=1).flatten(0, 1)


def _check_released(released: bool, config: CocaConfig, where: str) -> None:
    if not released:
        return
    if config.coca_constraint != "slack":
        raise CocaError(
            f"{where}: got the released CoCA layout, which is slack, expected --constraint slack"
        )
    if config.model_type not in ("coca_llama", "coca_gpt_neox"):
        raise CocaError(
            f"{where}: got the released CoCA layout for {config.model_type!r}, expected llama or "
            "gpt_neox"
        )
    if config.coca_kept_layers:
        raise CocaError(
            f"{where}: --keep-layers: got the released CoCA layout, which has no keys, expected an "
            "original checkpoint"
        )
    if rotary_dim(config) != config.head_dim:
        raise CocaError(
            f"{where}: got rotary_pct {config.rope_parameters['partial_rotary_factor']} in the "
            "released CoCA layout, expected 1: below it the released code pairs t wrongly, and "
            "such weights are of no CoCA model"
        )


def _layer_number(name: str) -> int:
    return int(name.split(".")[2])


def _and_more(names: list[str]) -> str:
    more = len(names) - 1
    return f" (and {more} more)" if more else ""
