"""What a conversion writes: a configuration, tensors with their dtypes, and shards of them."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

import torch
import xxhash
from torch import Tensor

from coca_hf.card import base_metadata
from coca_hf.convert.config import FAMILIES, Form, is_coca, written_config
from coca_hf.convert.initialise import RULE
from coca_hf.convert.source import Source
from coca_hf.convert.tensors import (
    Initialiser,
    TargetTensor,
    check_tensors,
    stored_as,
    untie_,
)
from coca_hf.errors import CocaError
from coca_hf.weights import SINGLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Layout:
    """What is written of `source` in a `form`, with the original's attention in `kept_layers`.

    config: of what is written; ntk: what `bake_ntk_` did to it. from_coca: whether the source is a
    CoCA checkpoint of ours; released: whether it is of the authors' code. converted: numbers of the
    layers whose attention becomes CoCA's. targets: the tensors that are written; shards: the same
    by file. records: by name, of a CoCA source. base: what the card says about the base model. The
    caller sets what calibration made: `calibrated`, tensors by name, and `calibrated_from`, what
    decided them.

    Raises CocaError for a source that is not understood.
    """

    def __init__(self, source: Source, form: Form, kept_layers: Sequence[int] | None):
        self.source, self.form, self._dtype = source, form, DTYPES.get(form.dtype)
        shapes, where = source.shapes(), str(source.config_file)
        self.config, self.ntk = written_config(source.config, form, kept_layers, where)
        self.from_coca = is_coca(source.config)
        if self.config.num_hidden_layers > len(shapes):  # and before anything counts up to it
            raise CocaError(
                f"{where}: got num_hidden_layers={self.config.num_hidden_layers}, expected no more "
                f"layers than the {len(shapes)} tensors of the weights"
            )
        if form.released and self.from_coca:
            raise CocaError(
                f"--released: got {form.src}, a CoCA checkpoint of coca_hf, expected one of the "
                "authors' code; leave --released out"
            )
        every_layer = range(self.config.num_hidden_layers)
        before = source.config.get("coca_kept_layers", ()) if self.from_coca else every_layer
        self.converted = sorted({*before} - {*self.config.coca_kept_layers})
        untie_(self.config, shapes, self._are_equal)
        self.targets, self.released = check_tensors(
            shapes,
            self.config,
            FAMILIES.get(source.config["model_type"]),
            self.converted,
            form.src,
            form.released,
        )
        if self.released and form.partial_rotary:
            raise CocaError(
                f"--partial-rotary: got {sorted(form.partial_rotary)} with {form.src}, a CoCA model "
                "whose attention would change; expected a checkpoint of an original"
            )
        self.records = source.records() if self.from_coca else {}
        self.base = base_metadata(form.src, source.directory)
        self.calibrated_from: object = None
        self.calibrated: Mapping[str, Tensor] = {}
        self.config.dtype = self._dtype or self._stored_dtype()
        self.shards = self._group(form.shard_bytes)

    def made_from(self) -> str:
        """Hash of whatever decides the shards, other than the contents of the source's tensors."""
        tensors = [
            (
                shard,
                dataclasses.astuple(target)[:4],
                self.dtype_of(target),
                self.source.dtype(target.source),
            )
            for shard, targets in self.shards.items()
            for target in targets
        ]
        configs = self.config.to_dict(), self.source.config
        facts = tensors, configs, self.released, RULE, self.calibrated_from, version("coca-hf")
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, default=str).encode())

    def num_bytes(self, *shards: str) -> int:
        """Bytes of the tensors in `shards`."""
        return sum(self._num_bytes(target) for shard in shards for target in self.shards[shard])

    def dtype_of(self, target: TargetTensor) -> torch.dtype:
        """The dtype that `target` is written in. Raises CocaError where the source has integers."""
        own = self.source.dtype(target.source)
        return self._dtype or own

    def is_cast(self, target: TargetTensor) -> bool:
        return self.source.dtype(target.source) != self.dtype_of(target)

    def is_copied(self, target: TargetTensor) -> bool:
        """Whether its numbers are the source's, in their order, though maybe of another type."""
        return target.name not in self.calibrated and target.is_carried_over

    def initialiser(self, read: Callable[[str], Tensor]) -> Initialiser:
        """What makes the tensors that are not copied, of those that `read` fetches by name."""
        return Initialiser(self.config, self.targets, read, self.form.src, self.released)

    def as_stored(self, target: TargetTensor, numbers: Tensor) -> Tensor:
        """`numbers` of `target` as written.

        Raises CocaError for NaN and infinity, and where the dtype cannot hold them.
        """
        # One of them spoils the sum, which takes a thirtieth of the time of isfinite
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
        """The dtype that `auto` gives the config: the source's, or the commonest stored."""
        stored = Counter[torch.dtype]()
        for target in self.targets:
            stored[self.dtype_of(target)] += self._num_bytes(target)
        stated = self.config.dtype
        return stated if stated in list(stored) else stored.most_common(1)[0][0]

    def _group(self, limit: int) -> dict[str, list[TargetTensor]]:
        """Each shard's tensors in the model's order, wider numbers first: all are aligned."""
        shards: list[list[TargetTensor]] = [[]]
        filled = 0
        for target in self.targets:
            if shards[-1] and filled + self._num_bytes(target) > limit:
                shards.append([])
                filled = 0
            shards[-1].append(target)
            filled += self._num_bytes(target)
        ordered = [
            sorted(shard, key=lambda target: -self.dtype_of(target).itemsize) for shard in shards
        ]
        if len(shards) == 1:
            return {SINGLE: ordered[0]}
        return {
            f"model-{number:05}-of-{len(shards):05}.safetensors": shard
            for number, shard in enumerate(ordered, 1)
        }

    def _are_equal(self, first: str, second: str) -> bool:
        same_kind = [
            (self.source.dtype(name), self.source.shapes()[name]) for name in (first, second)
        ]
        blocks = zip(self.source.blocks(first), self.source.blocks(second), strict=False)
        return same_kind[0] == same_kind[1] and all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in blocks
        )
