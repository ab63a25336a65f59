"""Convert a checkpoint on disk, a block at a time: `convert_checkpoint`. The destination is absent or complete."""

import contextlib
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig

from coca_hf.convert.export import coca_source_config, coca_source_tensors
from coca_hf.convert.llama import Shape, check_tensors, coca_config
from coca_hf.convert.ntk import bake_ntk_
from coca_hf.convert.source import GgufSource, SafetensorsSource, open_source
from coca_hf.convert.staging import Staging, locked_staging, staging_directory
from coca_hf.convert.start import RULE, fold_pairs, start_scales, start_t
from coca_hf.errors import CocaError
from coca_hf.weights import INDEX, SINGLE, parse_size, read_json

RECORD = "conversion.json"
TRAINING_RECORD = "training.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_AS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Progress = Callable[[int, int], None]


class Output(NamedTuple):
    """A tensor that is written, and the tensor of the source that it takes the place of."""

    name: str
    source: str
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
) -> dict:
    """Write a CoCA checkpoint made from the LLaMA checkpoint `src` to the directory `dst`; returns its record.

    src: a directory (safetensors, single or sharded, also the released full-width CoCA layout; or GGUF), a .gguf file,
    or a hub id. constraint: `slack` (by default) or `strict`. dtype: `auto` (the source's) or a name in `DTYPES`.
    overwrite: replace a checkpoint at `dst`. progress: called with bytes written and bytes in all. max_shard_size: of
    the files of weights, as in `500MB`; a tensor that is larger has a file to itself. ntk_length: total tokens for
    which the base of dynamic NTK is written into the configuration (`bake_ntk_`; ntk_factor: its factor); then `src`
    may also be a CoCA checkpoint, whose weights are copied. The record is also written to `dst/conversion.json`.

    Safetensors sources are read in blocks; memory holds the projections of one layer, not a shard. An interrupted run
    leaves what is finished in a hidden directory beside `dst`, and the same call continues from there.

    Raises CocaError for input that is not understood, and leaves `dst` as it was.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    _check_options(constraint, dtype, ntk_length, ntk_factor)
    shard_bytes = parse_size(max_shard_size, "--max-shard-size")
    _check_target(src, target, overwrite)
    with contextlib.closing(open_source(src)) as source, _os_errors(target):
        conversion = _Conversion(source, src, constraint, dtype, shard_bytes, ntk_length, ntk_factor)
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
    ):
        self.source, self.src, self.dtype = source, src, DTYPES.get(dtype)
        shapes, where = source.shapes(), _config_path(source)
        self.config, self.from_coca = _read_config(source.config, constraint, ntk_length, where)
        if self.config.num_hidden_layers > len(shapes):  # and before anything counts up to it
            raise CocaError(
                f"{where}: got num_hidden_layers={self.config.num_hidden_layers}, expected no more layers than the "
                f"{len(shapes)} tensors of the weights"
            )
        check = coca_source_tensors if self.from_coca else check_tensors
        self.tensors = check(shapes, self.config, where=src)
        self.released_layout = not self.from_coca and any(name.endswith("t_proj.weight") for name in self.tensors)
        if self.released_layout and constraint == "strict":
            raise CocaError(f"{src}: got the released CoCA layout, which is slack, expected --constraint slack")
        self.ntk = bake_ntk_(self.config, ntk_length, ntk_factor, where) if ntk_length else None
        self.config.dtype = self._dtype_of(next(iter(self.tensors)))
        self.shards = _name_shards(_group([self._output(name) for name in self.tensors], shard_bytes))
        self.scales: dict[int, list[float]] = {}

    def made_from(self) -> str:
        """Whatever decides the shards, other than the contents of the source's tensors, as a hash."""
        facts = [
            self.config.to_dict(),
            self.src_config_and_shapes(),
            [[str(part) for part in output] for outputs in self.shards.values() for output in outputs],
            list(self.shards),
            RULE,
            version("coca-hf"),
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())

    def src_config_and_shapes(self) -> list:
        names = sorted(self.tensors)
        return [self.source.config, [[name, self.tensors[name], str(self.source.dtype(name))] for name in names]]

    def check_disk_space(self, staging: Staging) -> None:
        missing = (outputs for name, outputs in self.shards.items() if name not in staging.finished)
        needed = sum(output.num_bytes for outputs in missing for output in outputs)
        free = shutil.disk_usage(staging.directory).free
        if needed > free:
            raise OSError(
                f"disk full: {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB; free some or choose another "
                f"destination"
            )

    def write(self, staging: Staging, progress: Progress) -> dict:
        stop = Event()
        with ThreadPoolExecutor(1) as pool:
            try:
                hashes = {file.name: pool.submit(self.source.hash, file, stop) for file in self.source.files}
                self._write_weights(staging, progress)
                source_hash = {name: future.result() for name, future in hashes.items()}
            finally:
                stop.set()
        self.source.check_unchanged()
        directory = staging.checkpoint
        self.config.save_pretrained(directory)  # also copies the modelling files
        self._save_companions(directory)
        record = self._record(source_hash)
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        return record

    def _write_weights(self, staging: Staging, progress: Progress) -> None:
        sizes = {shard: sum(output.num_bytes for output in outputs) for shard, outputs in self.shards.items()}
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
                with contextlib.closing(_ShardWriter(staging.checkpoint / shard, self.shards[shard])) as writer:
                    facts = self._write_shard(writer, advance)
                if recorded:
                    recorded.result()
                recorded = pool.submit(staging.record, shard, **facts)
            if recorded:
                recorded.result()
        if len(self.shards) > 1:
            weight_map = {output.name: shard for shard, outputs in self.shards.items() for output in outputs}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (staging.checkpoint / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _keep_finished(self, staging: Staging) -> None:
        """Drop the finished shards that are damaged; all of them where the source is another than it was."""
        for shard, facts in list(staging.finished.items()):
            read = xxhash.xxh3_128()
            for output in self.shards[shard]:
                for name in self._inputs(output):
                    for block in self.source.blocks(name):
                        read.update(_bytes_of(block))
            if read.hexdigest() != facts["read"]:
                staging.start_over(self.made_from())
                self.scales = {}
                return
            if _file_hash(staging.checkpoint / shard) != facts["written"]:
                del staging.finished[shard]
            else:
                self.scales |= {int(layer): scales for layer, scales in facts["scales"].items()}

    def _write_shard(self, writer: "_ShardWriter", advance: Callable[[int], None]) -> dict:
        """Write all tensors of a shard; returns what `_keep_finished` checks by."""
        read, before = xxhash.xxh3_128(), set(self.scales)
        for output in writer.outputs:
            if self._becomes_t(output.source):
                inputs = {}
                for name in self._inputs(output):
                    inputs[name] = self.source.read(name)
                    read.update(_bytes_of(inputs[name]))
                advance(writer.write(self._make_t(output, inputs).to(output.dtype)))
            else:
                for block in self.source.blocks(output.source):
                    read.update(_bytes_of(block))
                    advance(writer.write(block.to(output.dtype)))
        return {
            "written": writer.hash.hexdigest(),
            "read": read.hexdigest(),
            "scales": {layer: scales for layer, scales in self.scales.items() if layer not in before},
        }

    def _inputs(self, output: Output) -> list[str]:
        """The tensors of the source that an output follows from."""
        if not self._becomes_t(output.source) or self.released_layout:
            return [output.source]
        prefix = output.source.split("self_attn.")[0]
        parts = ["weight", "bias"] if self.config.attention_bias else ["weight"]
        projections = [f"{prefix}self_attn.{letter}_proj.{part}" for letter in "qk" for part in parts]
        return [prefix + "input_layernorm.weight", *projections]

    def _make_t(self, output: Output, inputs: dict[str, Tensor]) -> Tensor:
        g = self.config.num_key_value_heads
        if self.released_layout:
            return fold_pairs(inputs[output.source], g)
        layer = int(output.source.split(".")[2])
        if layer not in self.scales:
            self.scales[layer] = self._scales(layer, inputs).tolist()
        return start_t(inputs[output.source], torch.tensor(self.scales[layer]), g)

    def _scales(self, layer: int, inputs: dict[str, Tensor]) -> Tensor:
        names = {"input_layernorm.weight": "norm"}
        names |= {f"self_attn.{letter}_proj.weight": letter for letter in "qk"}
        names |= {f"self_attn.{letter}_proj.bias": f"{letter}_bias" for letter in "qk"}
        weights = {names[name.split(".", 3)[3]]: tensor for name, tensor in inputs.items()}
        finite = all(tensor.isfinite().all() for tensor in weights.values())
        scales = start_scales(weights, self.config) if finite else torch.tensor(torch.nan)
        if not (scales.isfinite().all() and (scales > 0).all()):
            raise CocaError(
                f"{self.src}: layer {layer}: q_proj or k_proj is zero, infinite or NaN; expected a trained model"
            )
        return scales

    def _output(self, name: str) -> Output:
        shape = self.tensors[name]
        if self._becomes_t(name):
            shape = (shape[0] // 2, *shape[1:])
        return Output(self._coca_name(name), name, shape, self._dtype_of(name))

    def _becomes_t(self, name: str) -> bool:
        return not self.from_coca and name.split(".")[-2] in ("k_proj", "t_proj")

    def _coca_name(self, name: str) -> str:
        return name.replace(".k_proj.", ".t_proj.")

    def _dtype_of(self, name: str) -> torch.dtype:
        own = self.source.dtype(name)  # also where it is not used: it refuses what is no floating point number
        return self.dtype or own

    def _save_companions(self, directory: Path) -> None:
        self.source.save_companions(directory)
        if self.from_coca and isinstance(self.source, SafetensorsSource):
            self.source.copy_if_there(TRAINING_RECORD, directory)
        tokenizer_file = directory / "tokenizer_config.json"
        if self.ntk and tokenizer_file.is_file():  # serving engines take the smaller of its length and the model's
            tokenizer = read_json(tokenizer_file)
            length = tokenizer.get("model_max_length")
            if isinstance(length, int) and length < self.ntk["ntk_length"]:
                tokenizer["model_max_length"] = self.ntk["ntk_length"]
                tokenizer_file.write_text(json.dumps(tokenizer, indent=2) + "\n")

    def _record(self, source_hash: dict[str, str | None]) -> dict:
        start: dict = {"rule": RULE, "scales": [self.scales[layer] for layer in sorted(self.scales)]}
        if self.released_layout:
            start = {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
        if self.from_coca:
            start = {"rule": "none: all weights are those of the source, which is a CoCA checkpoint"}
        layout = ", released CoCA layout" if self.released_layout else ", CoCA" if self.from_coca else ""
        return {
            "source": str(Path(self.src).absolute()) if Path(self.src).exists() else self.src,
            "source_format": self.source.kind + layout,
            "source_xxh3_128": source_hash,
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
        after = {output.name: math.prod(output.shape) for outputs in self.shards.values() for output in outputs}
        total = sum(after.values())

        def fraction(*modules: str) -> float:
            return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

        d, itemsize = self.config.head_dim, self.config.dtype.itemsize
        width = self.config.num_hidden_layers * self.config.num_key_value_heads * d
        cache = (3 * width // 2 + d) * itemsize  # keys' halves, values, and the angles that all layers share
        return {
            "parameters": {"before": sum(math.prod(shape) for shape in self.tensors.values()), "after": total},
            "trainable_fraction": {
                "k": fraction("t_proj"),
                "qkv": fraction("q_proj", "t_proj", "v_proj"),
                "full": 1.0,
            },
            "kv_cache_bytes_per_token": {"before": cache if self.from_coca else 2 * width * itemsize, "after": cache},
        }


class _ShardWriter:
    """A safetensors file in the making: its header, then the numbers of `outputs`, in their order, as they come."""

    def __init__(self, file: Path, outputs: list[Output]):
        self.outputs = outputs
        self.hash = xxhash.xxh3_128()
        self._stream = file.open("wb", buffering=0)
        self._write(memoryview(self._header()))

    def write(self, numbers: Tensor) -> int:
        data = _bytes_of(numbers)
        self._write(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()

    def _write(self, data: memoryview) -> None:
        self.hash.update(data)
        while data:
            data = data[self._stream.write(data) :]

    def _header(self) -> bytes:
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for output in self.outputs:
            start, end = end, end + output.num_bytes
            stored = {"dtype": STORED_AS[output.dtype], "shape": list(output.shape), "data_offsets": [start, end]}
            entries[output.name] = stored
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


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


def _group(outputs: list[Output], limit: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.num_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.num_bytes
    return [sorted(shard, key=lambda output: -output.dtype.itemsize) for shard in shards]  # so that all are aligned


def _name_shards(shards: list[list[Output]]) -> dict[str, list[Output]]:
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _file_hash(file: Path) -> str | None:
    """xxh3: it is to find accidents. Whoever can write to the staging directory can write its hashes, too."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


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
