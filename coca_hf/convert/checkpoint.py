"""Convert a checkpoint on disk, a block at a time: `convert_checkpoint`. The destination is absent or complete."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig

from coca_hf.card import base_metadata, write_card
from coca_hf.convert.export import coca_source_config
from coca_hf.convert.families import coca_config
from coca_hf.convert.ntk import bake_ntk_
from coca_hf.convert.source import GgufSource, SafetensorsSource, open_source
from coca_hf.convert.staging import FinishedShard, Staging, locked_staging, staging_directory
from coca_hf.convert.start import RULE
from coca_hf.convert.tensors import Maker, Piece, check_tensors, source_shapes, untie_
from coca_hf.convert.writer import ShardWriter, bytes_of, file_hash
from coca_hf.errors import CocaError
from coca_hf.weights import INDEX, SINGLE, checkpoint_file, parse_size, read_json

RECORD = "conversion.json"
TRAINING_RECORD = "training.json"
TOKENIZER = "tokenizer_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int, int], None]


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    constraint: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_size: str = "1GB",
    ntk_length: int | None = None,
    ntk_factor: float | None = None,
    released: bool = False,
) -> dict:
    """Write a CoCA checkpoint made from the checkpoint `src` to the directory `dst`; returns its record.

    src: a directory (safetensors, single or sharded, also the released full-width CoCA layout; or GGUF), a .gguf file,
    or a hub id. constraint: `slack` (by default) or `strict`. dtype: `auto` (the source's) or a name in `DTYPES`.
    overwrite: replace a checkpoint at `dst`. progress: called with bytes written and bytes in all. max_shard_size: of
    the files of weights, as in `500MB`; a tensor that is larger has a file to itself. ntk_length: total tokens for
    which the base of dynamic NTK is written into the configuration (`bake_ntk_`; ntk_factor: its factor); then `src`
    may also be a CoCA checkpoint, whose weights are copied. released: `src` is a GPT-NeoX checkpoint of the authors'
    released code, which no file of it says. The record is also written to `dst/conversion.json`.

    Safetensors sources are read in blocks; memory holds the projections of one layer, not a shard. An interrupted run
    leaves what is finished in a hidden directory beside `dst`, and the same call continues from there.

    Raises CocaError for input that is not understood, and leaves `dst` as it was.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    _check_options(constraint, dtype, ntk_length, ntk_factor)
    shard_bytes = parse_size(max_shard_size, "--max-shard-size")
    for path in (Path(src).absolute(), target, staging_directory(target)):
        _check_path(path)
    _check_target(src, target, overwrite)
    with contextlib.closing(open_source(src)) as source, _os_errors(target):
        conversion = _Conversion(source, src, constraint, dtype, shard_bytes, ntk_length, ntk_factor, released)
        with locked_staging(target) as staging:
            _check_target(src, target, overwrite)
            staging.begin(conversion.made_from())
            conversion.check_disk_space(staging)
            record = conversion.write(staging, progress or (lambda done, total: None))
            staging.publish()
    return record


class _Conversion:
    """One checkpoint on its way: what is read, and what is made of it."""

    def __init__(
        self,
        source: SafetensorsSource | GgufSource,
        src: str,
        constraint: str | None,
        dtype: str,
        shard_bytes: int,
        ntk_length: int | None,
        ntk_factor: float | None,
        released: bool,
    ):
        self.source, self.src, self.dtype = source, src, DTYPES.get(dtype)
        shapes, where = source.shapes(), _config_path(source)
        self.config, self.from_coca = _read_config(source.config, constraint, ntk_length, where)
        if self.config.num_hidden_layers > len(shapes):  # and before anything counts up to it
            raise CocaError(
                f"{where}: got num_hidden_layers={self.config.num_hidden_layers}, expected no more layers than the "
                f"{len(shapes)} tensors of the weights"
            )
        untie_(self.config, shapes, self._are_equal)
        self.pieces, self.released = check_tensors(shapes, self.config, src, released, self.from_coca)
        self.maker = Maker(self.config, self.pieces, self._read, src, self.released)
        self.ntk = bake_ntk_(self.config, ntk_length, ntk_factor, where) if ntk_length else None
        self.config.dtype = self.dtype or self._stored_dtype()
        self._check_tokenizer()
        self.shards = self._group(shard_bytes)
        self._hashes: dict[str, str] = {}  # of the tensors of the source that were read since the last shard

    def made_from(self) -> str:
        """Whatever decides the shards, other than the contents of the source's tensors, as a hash."""
        plan = {
            shard: [[*dataclasses.astuple(piece)[:4], str(self._dtype_of(piece))] for piece in pieces]
            for shard, pieces in self.shards.items()
        }
        sources = {piece.source: str(self.source.dtype(piece.source)) for piece in self.pieces}
        facts = [plan, sources, self.config.to_dict(), self.source.config, self.released, RULE, version("coca-hf")]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, default=str).encode())

    def check_disk_space(self, staging: Staging) -> None:
        missing = (pieces for shard, pieces in self.shards.items() if shard not in staging.finished)
        needed = sum(self._num_bytes(piece) for pieces in missing for piece in pieces)
        free = shutil.disk_usage(staging.directory).free
        if needed > free:
            raise OSError(
                f"disk full: {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB; free some or choose another "
                f"destination"
            )

    def write(self, staging: Staging, progress: Progress) -> dict:
        self._write_weights(staging, progress)
        self.source.check_unchanged()
        directory = staging.checkpoint
        self.config.save_pretrained(directory)  # also copies the modelling files
        self._save_companions(directory)
        record = self._record(_source_hash(staging))
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        write_card(directory)
        return record

    def _write_weights(self, staging: Staging, progress: Progress) -> None:
        sizes = {shard: sum(self._num_bytes(piece) for piece in pieces) for shard, pieces in self.shards.items()}
        total, done = sum(sizes.values()), 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        self._keep_finished(staging)
        advance(sum(sizes[shard] for shard in staging.finished))
        with ThreadPoolExecutor(1) as pool:  # waits for the disk while the next shard is made
            recorded: Future | None = None
            for shard in [shard for shard in self.shards if shard not in staging.finished]:
                facts = self._write_shard(staging.checkpoint / shard, self.shards[shard], advance)
                if recorded:
                    recorded.result()
                recorded = pool.submit(staging.record, facts)
            if recorded:
                recorded.result()
        if len(self.shards) > 1:
            weight_map = {piece.name: shard for shard, pieces in self.shards.items() for piece in pieces}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (staging.checkpoint / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _keep_finished(self, staging: Staging) -> None:
        """Drop the finished shards that are damaged; all of them where the source is another than it was."""
        current: dict[str, str] = {}
        known = self.source.shapes()
        for shard, facts in list(staging.finished.items()):
            for name, expected in facts.read.items():
                if name not in current and name in known:
                    current[name] = _hash(self.source.blocks(name))
                if current.get(name) != expected:
                    staging.start_over(self.made_from())
                    self.maker.scales = {}
                    return
            if shard not in self.shards or file_hash(staging.checkpoint / shard) != facts.written:
                del staging.finished[shard]
            else:
                self.maker.scales |= facts.scales

    def _write_shard(self, file: Path, pieces: list[Piece], advance: Callable[[int], None]) -> FinishedShard:
        """Write all pieces of a shard; returns what `_keep_finished` checks by."""
        scales_before = set(self.maker.scales)
        self._hashes = {}
        with (
            contextlib.closing(ShardWriter(file, [(piece, self._dtype_of(piece)) for piece in pieces])) as writer,
            ThreadPoolExecutor(1) as pool,
        ):
            made = _ahead(pool, self.maker.make, [piece for piece in pieces if not self._is_copied(piece)])
            for piece in pieces:
                for block in self._blocks(piece.source) if self._is_copied(piece) else [next(made)]:
                    advance(writer.write(self._as_stored(piece, block)))
        return FinishedShard(
            shard=file.name,
            written=writer.hash.hexdigest(),
            read=self._hashes,
            scales={layer: s for layer, s in self.maker.scales.items() if layer not in scales_before},
        )

    def _is_copied(self, piece: Piece) -> bool:
        return self.from_coca or piece.is_carried_over

    def _blocks(self, name: str) -> Iterator[Tensor]:
        digest = xxhash.xxh3_128()
        for block in self.source.blocks(name):
            digest.update(bytes_of(block))
            yield block
        self._hashes[name] = digest.hexdigest()

    def _read(self, name: str) -> Tensor:
        tensor = self.source.read(name)
        self._hashes[name] = _hash([tensor])
        return tensor

    def _group(self, limit: int) -> dict[str, list[Piece]]:
        """The pieces of every shard, in the order of the model, then those of wider numbers first: all are aligned."""
        shards: list[list[Piece]] = [[]]
        filled = 0
        for piece in self.pieces:
            if shards[-1] and filled + self._num_bytes(piece) > limit:
                shards.append([])
                filled = 0
            shards[-1].append(piece)
            filled += self._num_bytes(piece)
        ordered = [sorted(shard, key=lambda piece: -self._dtype_of(piece).itemsize) for shard in shards]
        if len(shards) == 1:
            return {SINGLE: ordered[0]}
        return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(ordered, 1)}

    def _num_bytes(self, piece: Piece) -> int:
        return math.prod(piece.shape) * self._dtype_of(piece).itemsize

    def _dtype_of(self, piece: Piece) -> torch.dtype:
        own = self.source.dtype(piece.source)  # also where it is not used: it refuses what is no floating point number
        return self.dtype or own

    def _stored_dtype(self) -> torch.dtype:
        """What `auto` calls the type of the whole: the source config's where it is stored, else the commonest."""
        stored = Counter[torch.dtype]()
        for piece in self.pieces:
            stored[self._dtype_of(piece)] += self._num_bytes(piece)
        stated = self.config.dtype
        return stated if stated in list(stored) else stored.most_common(1)[0][0]

    def _as_stored(self, piece: Piece, numbers: Tensor) -> Tensor:
        """`numbers` of `piece` in the type they are written in. Raises CocaError where that has no such numbers."""
        stored = numbers.to(self._dtype_of(piece))
        if torch.finfo(stored.dtype).max < torch.finfo(numbers.dtype).max:
            overflows = stored.isinf().any() and (stored.isinf() & numbers.isfinite()).any()
            vanishes = piece.module == "t_proj" and numbers.any() and not stored.any()
            if overflows or vanishes:
                name, largest = str(stored.dtype).removeprefix("torch."), numbers.abs().max().item()
                raise CocaError(
                    f"{self.src}: tensor {piece.name}: got numbers up to {largest:g}, which in {name} are "
                    f"{'infinite' if overflows else 'zero'}; expected another --dtype, as float32"
                )
        return stored

    def _are_equal(self, first: str, second: str) -> bool:
        same_kind = [(self.source.dtype(name), self.source.shapes()[name]) for name in (first, second)]
        return same_kind[0] == same_kind[1] and _hash(self.source.blocks(first)) == _hash(self.source.blocks(second))

    def _check_tokenizer(self) -> None:
        """Of what `_save_companions` edits: before any weight is written, and by the name that its owner knows."""
        directory = self.source.directory
        if self.ntk and isinstance(self.source, SafetensorsSource) and os.path.lexists(directory / TOKENIZER):
            read_json(checkpoint_file(directory, TOKENIZER))

    def _save_companions(self, directory: Path) -> None:
        self.source.save_companions(directory)
        if self.from_coca and isinstance(self.source, SafetensorsSource):
            self.source.copy_if_there(TRAINING_RECORD, directory)
        tokenizer_file = directory / TOKENIZER
        if self.ntk and tokenizer_file.is_file():  # serving engines take the smaller of its length and the model's
            tokenizer = read_json(tokenizer_file)
            length = tokenizer.get("model_max_length")
            if isinstance(length, int) and length < self.ntk["ntk_length"]:
                tokenizer["model_max_length"] = self.ntk["ntk_length"]
                tokenizer_file.write_text(json.dumps(tokenizer, indent=2) + "\n")

    def _record(self, source_hash: str) -> dict:
        start: dict = {"rule": RULE, "scales": [self.maker.scales[layer] for layer in sorted(self.maker.scales)]}
        if self.released:
            start = {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
        if self.from_coca:
            start = {"rule": "none: all weights are those of the source, which is a CoCA checkpoint"}
        layout = ", released CoCA layout" if self.released else ", CoCA" if self.from_coca else ""
        return {
            "source": str(Path(self.src).absolute()) if Path(self.src).exists() else self.src,
            "source_format": self.source.kind + layout,
            "source_xxh3_128": source_hash,
            "base": base_metadata(self.src, self.source.directory),
            "constraint": self.config.coca_constraint,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "start": start,
            **({"rope": self.ntk} if self.ntk else {}),
            **self._summary(),
            "versions": {name: version(name) for name in ("coca-hf", "transformers", "torch", "safetensors")}
            | {"python": platform.python_version()},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def _summary(self) -> dict:
        """Parameters before and after, the fraction that each of the paper's stages trains, and cache bytes per token.

        The cache is the half-width one of `models/cache.py`; a CoCA source has it before as well as after.
        """
        before = {name: math.prod(shape) for name, shape in source_shapes(self.pieces, self.config).items()}
        after = {piece.name: math.prod(piece.shape) for piece in self.pieces}
        total = sum(after.values())

        def fraction(*modules: str) -> float:
            return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

        d, itemsize = self.config.head_dim, self.config.dtype.itemsize
        width = self.config.num_hidden_layers * self.config.num_key_value_heads * d
        cache = (3 * width // 2 + d) * itemsize  # keys' halves, values, and the angles that all layers share
        return {
            "parameters": {"before": sum(before.values()), "after": total},
            "trainable_fraction": {
                "k": fraction("t_proj"),
                "qkv": fraction("q_proj", "t_proj", "v_proj"),
                "full": 1.0,
            },
            "kv_cache_bytes_per_token": {"before": cache if self.from_coca else 2 * width * itemsize, "after": cache},
        }


def _read_config(
    config: dict, constraint: str | None, ntk_length: int | None, where: str
) -> tuple[PreTrainedConfig, bool]:
    """The configuration of what is written, and whether the source is CoCA already, which is good for --ntk-length."""
    if ntk_length and str(config.get("model_type")).startswith("coca_"):
        result = coca_source_config(config, where)
        if constraint and constraint != result.coca_constraint:
            raise CocaError(f"{where}: --constraint: got {constraint}, expected {result.coca_constraint}, the source's")
        return result, True
    return coca_config(config, constraint or "slack", where), False


def _ahead(pool: ThreadPoolExecutor, make: Callable[[Piece], Tensor], pieces: list[Piece]) -> Iterator[Tensor]:
    """What `make` gives for every piece, the next one in the making while one is used."""
    coming = [pool.submit(make, piece) for piece in pieces[:1]]
    for piece in [*pieces[1:], None]:
        tensor = coming.pop().result()
        if piece:
            coming.append(pool.submit(make, piece))
        yield tensor
        del tensor


def _hash(blocks: Iterable[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(bytes_of(block))
    return digest.hexdigest()


def _source_hash(staging: Staging) -> str:
    """The xxh3_128 of the names and xxh3_128 of all tensors read, in the order of their names."""
    read = {name: digest for facts in staging.finished.values() for name, digest in facts.read.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode())


def _config_path(source: SafetensorsSource | GgufSource) -> str:
    return str(source.files[0] if isinstance(source, GgufSource) else source.directory / "config.json")


def _check_options(constraint: str | None, dtype: str, ntk_length: int | None, ntk_factor: float | None) -> None:
    if constraint not in (None, "slack", "strict"):
        raise CocaError(f"--constraint: got {constraint!r}, expected slack or strict")
    if dtype != "auto" and dtype not in DTYPES:
        raise CocaError(f"--dtype: got {dtype!r}, expected auto, {', '.join(DTYPES)}")
    if ntk_length is not None and ntk_length < 1:
        raise CocaError(f"--ntk-length: got {ntk_length}, expected the total number of tokens")
    if ntk_factor is not None and not (ntk_length and 1 <= ntk_factor < math.inf):
        raise CocaError(f"--ntk-factor: got {ntk_factor}, expected at least 1, together with --ntk-length")


def _check_path(path: Path) -> None:
    """Raise CocaError for a path that the system cannot look up, or that no file in UTF-8 can name."""
    try:
        str(path).encode()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UnicodeEncodeError:
        raise CocaError(f"{path}: got a name that is not UTF-8, which no JSON can hold; rename it") from None
    except (OSError, ValueError) as error:  # too long, a circle of links, not permitted; a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise CocaError(f"{path}: cannot be used ({reason}); choose another path") from error


def _check_target(src: str, target: Path, overwrite: bool) -> None:
    source = Path(src).absolute().resolve()
    if source.exists() and (target.resolve() == source or target.resolve() in source.parents):
        raise CocaError(f"{target}: is the source itself or holds it; choose another destination")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CocaError(
            f"{target}: exists and is left as it is; pass --overwrite to replace it, or choose another name"
        )
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise CocaError(
            f"{target}: --overwrite replaces a checkpoint directory only, and there is no config.json in it"
        )


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    """Disk full, read-only, not permitted: one line instead of a traceback. Rust writers have errors of their own."""
    try:
        yield
    except CocaError:
        raise
    except Exception as error:
        full = "No space left on device" in str(error)
        if not full and not isinstance(error, OSError):
            raise
        reason = "disk full while writing; free some space" if full else str(error)
        staging = staging_directory(target)
        kept = f"; what is finished is kept in {staging}, and the same command continues" if staging.exists() else ""
        raise CocaError(f"{target}: not written: {reason}{kept}") from error
