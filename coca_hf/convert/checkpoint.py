"""Convert a checkpoint on disk, a shard at a time: `convert_checkpoint`. The destination is absent or complete."""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from coca_hf.card import base_metadata, write_card
from coca_hf.convert.llama import Shape, check_tensors, coca_config
from coca_hf.convert.source import INDEX, SINGLE, GgufSource, SafetensorsSource, open_source, sha256
from coca_hf.convert.start import RULE, fold_pairs, start_scales, start_t
from coca_hf.errors import CocaError
from coca_hf.models.llama import CocaLlamaConfig

RECORD = "conversion.json"
SHARD_BYTES = 1_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[int, int], None]


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    constraint: str = "slack",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Write a CoCA checkpoint made from the LLaMA checkpoint `src` to the directory `dst`; returns its record.

    src: a directory (safetensors, single or sharded, also the released full-width CoCA layout; or GGUF), a .gguf file,
    or a hub id. constraint: `slack` or `strict`. dtype: `auto` (the source's) or a name in `DTYPES`. overwrite: replace
    a checkpoint at `dst`. progress: called with bytes written and bytes in all. Safetensors sources are read tensor by
    tensor; memory holds one output shard. The record is also written to `dst/conversion.json`.

    Raises CocaError for input that is not understood, and leaves `dst` as it was.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    _check_options(constraint, dtype)
    _check_target(src, target, overwrite)
    with _only_one_writer(target), _os_errors(target):
        _check_target(src, target, overwrite)
        conversion = _Conversion(open_source(src), src, constraint, dtype)
        conversion.check_disk_space(target.parent)
        staging = target.parent / f".{target.name}.incomplete"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            record = conversion.write(staging, progress or (lambda done, total: None))
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return record


class _Conversion:
    """One checkpoint on its way: what is read, and what is made of it."""

    def __init__(self, source: SafetensorsSource | GgufSource, src: str, constraint: str, dtype: str):
        self.source, self.src, self.dtype = source, src, DTYPES.get(dtype)
        self.config = coca_config(source.config, constraint, where=_config_path(source))
        self.tensors = check_tensors(source.shapes(), self.config, where=src)
        self.released_layout = any(name.endswith("t_proj.weight") for name in self.tensors)
        if self.released_layout and constraint != "slack":
            raise CocaError(f"{src}: got the released CoCA layout, which is slack, expected --constraint slack")
        self.scales: list[list[float]] = []

    def check_disk_space(self, directory: Path) -> None:
        while not directory.exists():
            directory = directory.parent
        needed, free = sum(size for _, size in self._outputs()), shutil.disk_usage(directory).free
        if needed > free:
            raise CocaError(
                f"{directory}: disk full: {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB; free some or "
                f"choose another destination"
            )

    def write(self, directory: Path, progress: Progress) -> dict:
        self._write_weights(directory, progress)
        self.config.dtype = self._dtype_of("model.embed_tokens.weight")
        self.config.save_pretrained(directory)  # also copies the modelling files
        self.source.save_companions(directory)
        record = self._record()
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        write_card(directory)
        return record

    def _outputs(self) -> list[tuple[str, int]]:
        """Source name and bytes of every tensor that is written, in the order of the model."""
        sizes = []
        for name, shape in self.tensors.items():
            count = torch.Size(shape).numel() // (2 if _becomes_t(name) else 1)
            sizes.append((name, count * self._dtype_of(name).itemsize))
        return sizes

    def _write_weights(self, directory: Path, progress: Progress) -> None:
        shards = _group(self._outputs(), SHARD_BYTES)
        total, done, weight_map = sum(size for shard in shards for _, size in shard), 0, {}
        for number, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for name, size in shard:
                tensors[_coca_name(name)] = self._convert(name)
                done += size
                progress(done, total)
            save_file(tensors, directory / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _convert(self, name: str) -> Tensor:
        tensor = self.source.read(name)
        if _becomes_t(name):
            g = self.config.num_key_value_heads
            if self.released_layout:
                tensor = fold_pairs(tensor, g)
            else:
                layer = int(name.split(".")[2])
                if layer == len(self.scales):  # the weight comes before its bias
                    self.scales.append(self._scales(layer).tolist())
                tensor = start_t(tensor, torch.tensor(self.scales[layer]), g)
        return tensor.to(self._dtype_of(name)).contiguous()

    def _scales(self, layer: int) -> Tensor:
        prefix = f"model.layers.{layer}."
        weights = {"norm": self.source.read(prefix + "input_layernorm.weight")}
        for letter in "qk":
            weights[letter] = self.source.read(f"{prefix}self_attn.{letter}_proj.weight")
            if self.config.attention_bias:
                weights[f"{letter}_bias"] = self.source.read(f"{prefix}self_attn.{letter}_proj.bias")
        scales = start_scales(weights, self.config)
        if not (scales.isfinite().all() and (scales > 0).all()):
            raise CocaError(
                f"{self.src}: layer {layer}: q_proj or k_proj is zero, infinite or NaN; expected a trained model"
            )
        return scales

    def _dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.source.dtype(name)

    def _record(self) -> dict:
        start = {"rule": RULE, "scales": self.scales}
        if self.released_layout:
            start = {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
        return {
            "source": str(Path(self.src).absolute()) if Path(self.src).exists() else self.src,
            "source_format": self.source.kind + (", released CoCA layout" if self.released_layout else ""),
            "source_sha256": {file.name: sha256(file) for file in self.source.files},
            "base": base_metadata(self.src, self.source.files[0].parent),
            "constraint": self.config.coca_constraint,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "start": start,
            **_summary(self.config, self.tensors, self._dtype_of("model.embed_tokens.weight")),
            "versions": {name: version(name) for name in ("coca-hf", "transformers", "torch", "safetensors")}
            | {"python": platform.python_version()},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def _summary(config: CocaLlamaConfig, tensors: dict[str, Shape], dtype: torch.dtype) -> dict:
    """Parameters before and after, the fraction that each of the paper's stages trains, and cache bytes per token."""
    before = sum(torch.Size(shape).numel() for shape in tensors.values())
    after = {_coca_name(n): torch.Size(s).numel() // (2 if _becomes_t(n) else 1) for n, s in tensors.items()}
    total = sum(after.values())

    def fraction(*modules: str) -> float:
        return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

    width = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return {
        "parameters": {"before": before, "after": total},
        "trainable_fraction": {"k": fraction("t_proj"), "qkv": fraction("q_proj", "t_proj", "v_proj"), "full": 1.0},
        "kv_cache_bytes_per_token": {"before": 2 * width, "after": 2 * width},
    }


def _becomes_t(name: str) -> bool:
    return name.split(".")[-2] in ("k_proj", "t_proj")


def _coca_name(name: str) -> str:
    return name.replace(".k_proj.", ".t_proj.")


def _group(sizes: list[tuple[str, int]], limit: int) -> list[list[tuple[str, int]]]:
    shards: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for name, size in sizes:
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append((name, size))
        filled += size
    return shards


def _config_path(source: SafetensorsSource | GgufSource) -> str:
    return str(source.files[0] if isinstance(source, GgufSource) else source.directory / "config.json")


def _check_options(constraint: str, dtype: str) -> None:
    if constraint not in ("slack", "strict"):
        raise CocaError(f"--constraint: got {constraint!r}, expected slack or strict")
    if dtype != "auto" and dtype not in DTYPES:
        raise CocaError(f"--dtype: got {dtype!r}, expected auto, {', '.join(DTYPES)}")


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
def _only_one_writer(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, which lies in the temporary directory so that no litter stays beside checkpoints."""
    name = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    lock = FileLock(Path(tempfile.gettempdir()) / f"coca-convert-{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CocaError(f"{target}: another conversion is writing it; wait for it or choose another name") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    """Disk full, read-only, not permitted: one line instead of a traceback. safetensors wraps the first of them."""
    try:
        yield
    except CocaError:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)
        if not full and not isinstance(error, OSError):
            raise
        reason = "disk full while writing; free some space" if full else str(error)
        raise CocaError(f"{target}: not written: {reason}") from error


def _publish(staging: Path, target: Path) -> None:
    """Put the finished directory in place: written to disk, then renamed."""
    mode = (staging / "config.json").stat().st_mode
    for file in staging.iterdir():
        file.chmod(mode)  # safetensors leaves its files unreadable to the group
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if not target.exists():
        staging.rename(target)
        return
    replaced = target.parent / f".{target.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    try:
        staging.rename(target)
    except BaseException:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced)
