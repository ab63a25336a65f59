"""What a conversion reads and what it writes, decided before the first number of the weights is read: `Plan`."""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.metadata import version

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from coca_hf.card import base_metadata
from coca_hf.convert.export import coca_source_config
from coca_hf.convert.families import coca_config
from coca_hf.convert.ntk import bake_ntk_
from coca_hf.convert.source import GgufSource, SafetensorsSource, Source
from coca_hf.convert.start import RULE
from coca_hf.convert.tensors import TargetTensor, check_tensors, untie_
from coca_hf.errors import CocaError
from coca_hf.weights import SINGLE, checkpoint_file, read_json

TOKENIZER = "tokenizer_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Plan:
    """The conversion of `source`, which messages call `src`. The other arguments are those of `convert_checkpoint`.

    config: of what is written; ntk: what `bake_ntk_` did to it. targets: the tensors that are written; shards: the same
    by file. base: what the card says about the base model. calibrated: by the name of their target, tensors that
    `calibrate` made of `calibrated_from`; tokenizer: the source's, where it has one that loads; these are for the
    caller to set. from_coca: whether the source is a CoCA checkpoint of ours; released: whether it is of the
    authors' code.

    Raises CocaError for a source that is not understood.
    """

    def __init__(
        self,
        source: Source,
        src: str,
        constraint: str | None,
        dtype: str,
        shard_bytes: int,
        ntk_length: int | None,
        ntk_factor: float | None,
        released: bool,
        keep_layers: Sequence[int] | None,
        ignored_fields: Collection[str] = (),
    ):
        self.source, self.src, self._dtype, self.ignored_fields = source, src, DTYPES.get(dtype), list(ignored_fields)
        shapes, where = source.shapes(), _config_path(source)
        self.config, self.from_coca = _read_config(
            source.config, constraint, ntk_length, keep_layers, ignored_fields, where
        )
        if self.config.num_hidden_layers > len(shapes):  # and before anything counts up to it
            raise CocaError(
                f"{where}: got num_hidden_layers={self.config.num_hidden_layers}, expected no more layers than the "
                f"{len(shapes)} tensors of the weights"
            )
        untie_(self.config, shapes, self._are_equal)
        self.targets, self.released = check_tensors(shapes, self.config, src, released, self.from_coca)
        self.base = base_metadata(src, source.directory)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.calibrated_from: object = None
        self.calibrated: dict[str, Tensor] = {}
        self.ntk = bake_ntk_(self.config, ntk_length, ntk_factor, where) if ntk_length else None
        self.config.dtype = self._dtype or self._stored_dtype()
        self._check_tokenizer()
        self.shards = self._group(shard_bytes)

    def made_from(self) -> str:
        """Whatever decides the shards, other than the contents of the source's tensors, as a hash."""
        plan = {
            shard: [[*dataclasses.astuple(target)[:4], str(self.dtype_of(target))] for target in targets]
            for shard, targets in self.shards.items()
        }
        sources = {target.source: str(self.source.dtype(target.source)) for target in self.targets}
        facts = [plan, sources, self.config.to_dict(), self.source.config, self.released, RULE, self.calibrated_from]
        facts.append(version("coca-hf"))
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, default=str).encode())

    def num_bytes(self, *shards: str) -> int:
        """Of the tensors in `shards`."""
        return sum(self._num_bytes(target) for shard in shards for target in self.shards[shard])

    def dtype_of(self, target: TargetTensor) -> torch.dtype:
        """What `target` is written in. Raises CocaError where the source has no floating point numbers for it."""
        own = self.source.dtype(target.source)
        return self._dtype or own

    def is_copied(self, target: TargetTensor) -> bool:
        """Whether its numbers are the source's, in their order, though maybe of another type."""
        return target.name not in self.calibrated and (self.from_coca or target.is_carried_over)

    def _num_bytes(self, target: TargetTensor) -> int:
        return math.prod(target.shape) * self.dtype_of(target).itemsize

    def _stored_dtype(self) -> torch.dtype:
        """What `auto` calls the type of the whole: the source config's where it is stored, else the commonest."""
        stored = Counter[torch.dtype]()
        for target in self.targets:
            stored[self.dtype_of(target)] += self._num_bytes(target)
        stated = self.config.dtype
        return stated if stated in list(stored) else stored.most_common(1)[0][0]

    def _group(self, limit: int) -> dict[str, list[TargetTensor]]:
        """The targets of every shard, in the order of the model, then those of wider numbers first: all are aligned."""
        shards: list[list[TargetTensor]] = [[]]
        filled = 0
        for target in self.targets:
            if shards[-1] and filled + self._num_bytes(target) > limit:
                shards.append([])
                filled = 0
            shards[-1].append(target)
            filled += self._num_bytes(target)
        ordered = [sorted(shard, key=lambda target: -self.dtype_of(target).itemsize) for shard in shards]
        if len(shards) == 1:
            return {SINGLE: ordered[0]}
        return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(ordered, 1)}

    def _are_equal(self, first: str, second: str) -> bool:
        same_kind = [(self.source.dtype(name), self.source.shapes()[name]) for name in (first, second)]
        blocks = zip(self.source.blocks(first), self.source.blocks(second), strict=False)
        return same_kind[0] == same_kind[1] and all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in blocks
        )

    def _check_tokenizer(self) -> None:
        """Of what is edited later: before any weight is written, and by the name that its owner knows."""
        directory = self.source.directory
        if self.ntk and isinstance(self.source, SafetensorsSource) and os.path.lexists(directory / TOKENIZER):
            read_json(checkpoint_file(directory, TOKENIZER))


def _read_config(
    config: dict,
    constraint: str | None,
    ntk_length: int | None,
    keep_layers: Sequence[int] | None,
    ignored: Collection[str],
    where: str,
) -> tuple[PreTrainedConfig, bool]:
    """The configuration of what is written, and whether the source is CoCA already, which is good for --ntk-length."""
    if ntk_length and str(config.get("model_type")).startswith("coca_"):
        result = coca_source_config(config, where, ignored)
        if constraint and constraint != result.coca_constraint:
            raise CocaError(f"{where}: --constraint: got {constraint}, expected {result.coca_constraint}, the source's")
        if keep_layers is not None and sorted(keep_layers) != sorted(result.coca_kept_layers):
            raise CocaError(
                f"{where}: --keep-layers: got {list(keep_layers)}, expected {result.coca_kept_layers}, the source's"
            )
        return result, True
    return coca_config(config, constraint or "slack", where, sorted(keep_layers or ()), ignored), False


def _config_path(source: Source) -> str:
    return str(source.files[0] if isinstance(source, GgufSource) else source.directory / "config.json")
