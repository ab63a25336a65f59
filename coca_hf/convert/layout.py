"""What a conversion writes: a configuration, tensors with their dtypes, and shards of them.

The CoCA model itself, built without memory, says which tensors it has. Its family says which of the
source's tensors each is made from, and how. Letters: `models/attention.py`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from coca_hf import models, precision, tokens
from coca_hf.convert.config import (
    FAMILIES,
    Family,
    Form,
    bake_ntk_,
    coca_class,
    converted_config,
    head_of,
    is_coca,
    with_kept_window,
)
from coca_hf.convert.initialise import RULE, Initialiser, Shape, TargetTensor
from coca_hf.convert.source import Source
from coca_hf.errors import CocaError, library_errors
from coca_hf.models.attention import QUERY_SCALE
from coca_hf.models.decoder import CocaConfig
from coca_hf.models.rotary import rotary_dim
from coca_hf.weights import HEADS, SINGLE, is_derived

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A change in these files can change weights: the initialisation, the attention, the rotary angles, the
# positions and the fit are there. Shards and fitted layers that other code made are not reused.
CODE = [
    *sorted(Path(__file__).parent.glob("*.py")),
    *sorted(Path(models.__file__).parent.glob("*.py")),
    Path(precision.__file__),
    Path(tokens.__file__),
]
RELEASED_THETA = 10000.0  # of the authors' LLaMA, whatever its config.json says
MOST_ROUNDING = 0.1  # of the norm of a head of W_T: bfloat16 takes 0.002, so this is underflow


class Layout:
    """What is written for `source` in a `form`, with the original's attention in `kept_layers`.

    config: the configuration to write; ntk: what `bake_ntk_` did to it. from_coca: whether the
    source is one of our CoCA checkpoints; released: whether it is from the authors' code.
    converted: numbers of the layers whose attention becomes CoCA's. targets: the tensors to write;
    shards: the same by file. The caller sets what calibration made: `calibrated`, tensors by name,
    and `calibrated_from`, the settings that decide them.

    Raises CocaError for a source that is not understood.
    """

    def __init__(self, source: Source, form: Form, kept_layers: Sequence[int]):
        self.source, self.form, self._dtype = source, form, DTYPES.get(form.dtype)
        shapes, where = source.shapes(), str(source.config_file)
        self.config = converted_config(source.config, form, kept_layers, where)
        if kept_layers and form.kept_window:
            self.config = with_kept_window(self.config, form.kept_window, where)
        self.from_coca = is_coca(source.config)
        num_layers = self.config.num_hidden_layers
        if num_layers > len(shapes):  # checked before anything counts up to it
            raise CocaError(
                f"{where}: got num_hidden_layers={num_layers}, expected no more layers than "
                f"the {len(shapes)} tensors of the weights"
            )
        originals = () if self.from_coca else range(num_layers)
        self.converted = sorted({*originals} - {*self.config.coca_kept_layers})
        self._untie(shapes)
        family = FAMILIES.get(source.config["model_type"])
        self.targets, self.released = check_tensors(
            shapes, self.config, family, form.src, form.released
        )
        self.ntk = None  # after the check of a released config, which has the authors' base
        if form.ntk_length:
            self.ntk = bake_ntk_(self.config, form.ntk_length, where)
        self.calibrated_from: object = None
        self.calibrated: Mapping[str, Tensor] = {}
        self.config.dtype = self._dtype or self._stored_dtype()
        self.shards = self._group(form.shard_bytes)

    def made_from(self) -> str:
        """Hash of everything that decides the shards, except the contents of the source's tensors."""
        tensors = []
        for shard, targets in self.shards.items():
            for target in targets:
                dtypes = self.dtype_of(target), self.source.dtype(target.source)
                shapes = target.name, target.shape, target.source, target.source_shape
                tensors.append((shard, shapes, *dtypes))
        configs = self.config.to_dict(), self.source.config
        facts = tensors, configs, self.released, RULE, self.calibrated_from, code_hashes()
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, default=str).encode())

    def num_bytes(self, *shards: str) -> int:
        """Bytes of the tensors in `shards`."""
        return sum(self._num_bytes(target) for shard in shards for target in self.shards[shard])

    def dtype_of(self, target: TargetTensor) -> torch.dtype:
        """The dtype that `target` is written in. Raises CocaError if the source has integers."""
        own = self.source.dtype(target.source)
        return self._dtype or own

    def is_copied(self, target: TargetTensor) -> bool:
        """Whether its numbers are the source's, in their order, perhaps cast to another dtype."""
        return target.name not in self.calibrated and target.is_carried_over

    def initialiser(self, read: Callable[[str], Tensor]) -> Initialiser:
        """What makes the tensors that are not copied, from those that `read` returns by name."""
        return Initialiser(self.config, self.targets, read, self.form.src, self.released)

    def as_stored(self, target: TargetTensor, numbers: Tensor) -> Tensor:
        """`numbers` of `target`, all or a block of them, as they are written.

        Raises CocaError for NaN, infinity and numbers that the dtype cannot hold.
        """
        # a sum takes a thirtieth of the time of isfinite, and one of these numbers spoils it
        if not numbers.sum().isfinite() and not numbers.isfinite().all():
            raise CocaError(
                f"{self.source.place_of(target.source)}: tensor {target.source}: got NaN or "
                "infinity, expected finite numbers; download the file again, or convert a "
                "checkpoint from before its training diverged"
            )
        return stored_as(self.config, self.dtype_of(target), numbers, target, self.form.src)

    def _num_bytes(self, target: TargetTensor) -> int:
        return math.prod(target.shape) * self.dtype_of(target).itemsize

    def _stored_dtype(self) -> torch.dtype:
        """The dtype of the config with `auto`: the stated one if it is stored, or the commonest."""
        stored = Counter[torch.dtype]()
        for target in self.targets:
            stored[self.dtype_of(target)] += self._num_bytes(target)
        stated = self.config.dtype
        return stated if stated in list(stored) else stored.most_common(1)[0][0]

    def _group(self, limit: int) -> dict[str, list[TargetTensor]]:
        """The tensors of each shard in the model's order, with wider dtypes first to align all."""
        shards, filled = list[list[TargetTensor]]([[]]), 0
        for target in self.targets:
            if shards[-1] and filled + self._num_bytes(target) > limit:
                shards.append([])
                filled = 0
            shards[-1].append(target)
            filled += self._num_bytes(target)
        for shard in shards:
            shard.sort(key=lambda target: -self.dtype_of(target).itemsize)
        if len(shards) == 1:
            return {SINGLE: shards[0]}
        return {
            f"model-{number:05}-of-{len(shards):05}.safetensors": shard
            for number, shard in enumerate(shards, 1)
        }

    def _untie(self, shapes: Mapping[str, Shape]) -> None:
        """Untie the head if the source stores a different one, as transformers would do."""
        embeddings = [n for n in shapes if n.endswith(("embed_tokens.weight", "embed_in.weight"))]
        if self.config.tie_word_embeddings and embeddings:
            heads = [name for name in HEADS if name in shapes]
            tied = all(self._are_equal(embeddings[0], head) for head in heads)
            self.config.tie_word_embeddings = tied

    def _are_equal(self, first: str, second: str) -> bool:
        source, shapes = self.source, self.source.shapes()
        if (source.dtype(first), shapes[first]) != (source.dtype(second), shapes[second]):
            return False
        blocks = zip(source.blocks(first), source.blocks(second), strict=True)
        return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in blocks)


def code_hashes() -> list[str]:
    return [xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in CODE]


def check_tensors(
    shapes: Mapping[str, Shape],
    config: CocaConfig,
    family: Family | None,
    where: str,
    released: bool = False,
) -> tuple[list[TargetTensor], bool]:
    """The tensors of the CoCA checkpoint, which are made from `shapes`, and whether it is released.

    family: the source's; None for one of our CoCA checkpoints. released: whether the source is from
    the authors' code, with full-width t in place of keys. A source with a `t_proj` is; a GPT-NeoX
    source does not show it.

    Raises CocaError naming the first tensor that is missing, not understood or of the wrong shape.
    """
    if family is not None and any(name.endswith("t_proj.weight") for name in shapes):
        released = True
    if released:
        _check_released(config, family, where)
    targets = list(_targets(config, shapes, family, released, where))
    expected = source_shapes(targets, config)
    head = head_of(config.architectures)
    plain = family.causal_lm.__name__ if family else coca_class(config).__name__
    plain = plain.replace("ForCausalLM", head)
    missing = [name for name in expected if name not in shapes]
    if missing:
        rest = missing[0].partition(".")[2]  # of a model with another head or none
        other = next((name for name in shapes if rest in (name, name.partition(".")[2])), None)
        found = f"got {other}, expected a plain {plain}" if other else "is the checkpoint complete?"
        raise CocaError(f"{where}: tensor {missing[0]} is missing{_and_more(missing)}; {found}")
    unknown = [name for name in shapes if name not in expected and not is_derived(name, config)]
    if unknown:
        raise CocaError(
            f"{where}: tensor {unknown[0]} is not understood{_and_more(unknown)}; expected a plain "
            f"{plain}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CocaError(
                f"{where}: tensor {name} has shape {shapes[name]}, expected {shape} from "
                "config.json"
            )
    return targets, released


def source_shapes(targets: Iterable[TargetTensor], config: CocaConfig) -> dict[str, Shape]:
    """Every tensor of the source that `targets` are made from."""
    norms = {target.scaled_by: (config.head_dim,) for target in targets if target.scaled_by}
    return {target.source: target.source_shape for target in targets} | norms


def stored_as(
    config: CocaConfig, dtype: torch.dtype, numbers: Tensor, target: TargetTensor, where: str
) -> Tensor:
    """`numbers` of `target`, all or a block of them, in `dtype`.

    Raises CocaError if `dtype` is too narrow for a number, for the square of a query, or for a
    head of `W_T`, whose numbers can be tiny: rounding may change it by `MOST_ROUNDING`.
    """
    stored = numbers.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(numbers.dtype).max:
        _check_narrow(config, stored, numbers, target, where)
    bounds_queries = target.name.endswith(("q_proj.bias", "q_norm.weight"))
    if bounds_queries and target.layer not in config.coca_kept_layers:  # those square nothing
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
        if (error > MOST_ROUNDING * size).any():
            problem = "zero or nearly so"
    if problem:
        raise CocaError(
            f"{where}: tensor {target.name}: got numbers up to {numbers.abs().max():g}, which in "
            f"{_name(stored.dtype)} are {problem}; expected another dtype, such as float32"
        )


def _check_queries(config: CocaConfig, target: TargetTensor, numbers: Tensor, where: str) -> None:
    """Raise CocaError for a query bias or query norm whose square overflows its dtype."""
    if target.module == "q_norm":
        # it multiplies vectors of length sqrt(d), which may lie in a single number
        got, largest = "queries", numbers.double().abs().max().item() * config.head_dim**0.5
    else:
        # strict squares the length of a pair; slack multiplies it by the pair's larger number
        pairs = numbers.double().abs().view(-1, 2, config.head_dim // 2)
        length = pairs.square().sum(1).sqrt()
        other = length if config.coca_constraint == "strict" else pairs.amax(1)
        got, largest = "numbers", (length * other).max().sqrt().item()
    limit = (torch.finfo(numbers.dtype).max / QUERY_SCALE) ** 0.5
    if limit < largest < float("inf"):
        raise CocaError(
            f"{where}: tensor {target.name}: got {got} up to {largest:g}, whose squares "
            f"{_name(numbers.dtype)} cannot hold, expected at most {limit:.0f}; convert to bfloat16 "
            "or float32"
        )


def _targets(
    config: CocaConfig,
    shapes: Mapping[str, Shape],
    family: Family | None,
    released: bool,
    where: str,
) -> Iterator[TargetTensor]:
    # torch refuses some sizes
    with library_errors(f"{where}: its config.json makes no model"), torch.device("meta"):
        model = coca_class(config)(config)
    others = {"gpt_neox": _gpt_neox_target, "phi3": _phi3_target}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            shape = tuple(tensor.shape)
            if family is None:
                yield TargetTensor(name, shape, name, shape)
            else:
                describe = others.get(family.model_type, _llama_target)
                yield describe(config, name, shape, shapes, released)


def _llama_target(
    config: CocaConfig, name: str, shape: Shape, shapes: Mapping[str, Shape], released: bool
) -> TargetTensor:
    if ".t_proj." not in name:
        return TargetTensor(name, shape, name, shape)
    source = name if released else name.replace(".t_proj.", ".k_proj.")
    has_norm = config.model_type == "coca_qwen3"
    norm = f"{name.partition('.t_proj.')[0]}.k_norm.weight" if has_norm else None
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
    """Part `part` of fused rows of `sizes`: query, key and value, or the MLP's gate and up.

    Query and key rows come in the order of `split_query_key_value`.
    """
    rows = fused.split(sizes)[part]
    if len(sizes) == 3 and part < 2:
        return _by_pairs(rows.unflatten(0, (-1, config.head_dim)), config)
    return rows.clone()  # shares no memory with the other parts


def split_query_key_value(fused: Tensor, part: int, config: CocaConfig) -> Tensor:
    """Query (part 0), key (1) or value (2) rows of GPT-NeoX's fused weight or bias.

    The query and key rows of every head are ordered as rotated first halves, unrotated first
    halves, rotated second halves, unrotated second halves (`models/gpt_neox.py` says why).
    fused: (h * 3 * d, ...). Returns (h * d, ...).
    """
    heads = fused.unflatten(0, (config.num_attention_heads, 3, config.head_dim))[:, part]
    return heads.flatten(0, 1) if part == 2 else _by_pairs(heads, config)


def _by_pairs(heads: Tensor, config: CocaConfig) -> Tensor:
    """Rows (h, d, ...), of which the first are rotated, as (h * d, ...) in CoCA's order of pairs."""
    parts = heads.tensor_split([rotary_dim(config)], dim=1)  # rotated and unrotated
    first, second = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
    return torch.cat((*first, *second), dim=1).flatten(0, 1)


def _check_released(config: CocaConfig, family: Family | None, where: str) -> None:
    """Raise CocaError if `config` does not allow the released layout, which is that of `where`.

    Below a rotary_pct of 1, the released code pairs t wrongly, and its weights are no CoCA model's.
    Its LLaMA ignores `rope_theta`, so what a config says there is not what the weights know.
    """
    kind = config.model_type.removeprefix("coca_")
    problems = {
        "coca_hf's own format": family is None,
        kind: kind not in ("llama", "gpt_neox"),
        "--constraint strict": config.coca_constraint != "slack",
        "--keep-layers": bool(config.coca_kept_layers),
        "--content-pairs": bool(config.coca_content_pairs),
        "--content-layers": bool(config.coca_content_layers),
        "a rotary_pct below 1": rotary_dim(config) != config.head_dim,
    }
    if found := [problem for problem, is_found in problems.items() if is_found]:
        raise CocaError(
            f"{where}: got the released CoCA layout with {', '.join(found)}, expected a llama or "
            "gpt_neox of the authors' code in the slack form, all of whose pairs are rotated and "
            "whose layers stay as they are"
        )
    if kind == "llama" and (theta := config.rope_parameters["rope_theta"]) != RELEASED_THETA:
        raise CocaError(
            f"{where}: got the released CoCA layout with rope_theta={theta:g}, which the authors' code "
            f"ignores: it computes with {RELEASED_THETA:g}; set that in config.json"
        )


def _and_more(names: list[str]) -> str:
    more = len(names) - 1
    return f" (and {more} more)" if more else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
