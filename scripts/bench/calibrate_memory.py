"""The most memory that calibration takes on a GPU, projected without one; beside it the measured
one, where there is a GPU.

    python scripts/bench/calibrate_memory.py --out docs/results/calibrate-7b-gpu.json

Converts and calibrates a checkpoint of random weights. For the projection everything that would be
on the GPU is on torch's meta device, which has shapes but no numbers, and the bytes of all tensors
there that are alive are counted after every operation. Not in it: the CUDA context (0.5 GB or so),
workspaces of libraries, and what the allocator cannot use of its blocks. Prints a table and writes
JSON.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from convert import byte_tokenizer, make_source
from measure import DEVICE, SHAPES, clear, show, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig

from coca_hf import convert_checkpoint
from coca_hf.convert import calibration, layer_pairs

aten = torch.ops.aten
# PyTorch has none for the meta device; it allocates nothing
torch.library.impl("aten::_fused_adam_.tensor_lr", "Meta", lambda *args, **kwargs: None)
STORAGES = ("gpu", "cpu")
BLOCK_BYTES = 512  # CUDA's allocator gives whole ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("."), help="for a new folder of 6 GB")
    parser.add_argument("--smoke", action="store_true", help="the tiny shape: only whether it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name, layers, tokens, block = "llama-7b", 2, 32768, 2048
    if options.smoke:
        name, layers, tokens, block = "tiny", 1, 2048, 256
    shape = SHAPES[name] | {"num_hidden_layers": layers}
    shape["vocab_size"] = max(shape["vocab_size"], 258)  # of the tokenizer
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".calibrate-memory-") as made:
        folder = Path(made)
        make_source(folder / "source", LlamaConfig(**shape, max_position_embeddings=2048))
        byte_tokenizer().save_pretrained(folder / "source")
        write_text(folder / "text.jsonl", 4 * tokens)
        result = {"task": "calibrate-memory", "shape": name, "layers": layers, "block": block}
        rows = result["rows"] = [measured(folder, tokens, block, where) for where in STORAGES]
        write(result, options.out)
        for row in rows:
            project(row, folder, tokens, block)
            write(result, options.out)
    columns = {"tokens": "tokens", "text on": "storage"}
    columns |= {f"{what}, GB": (f"{what}_bytes", 1e-9) for what in ("projected", "measured")}
    show(f"Calibration's memory on a GPU, {name}", columns, rows)
    for row in rows:
        terms = ", ".join(f"{where} {size / 1e9:.3g}" for where, size in row["at_peak"].items())
        print(f"{row['tokens']:,} tokens, text on the {row['storage']}: {terms}")


def write_text(file: Path, num_characters: int) -> None:
    draw = random.Random(0)
    documents = (
        "".join(draw.choices("abcdefgh ", k=1000)) for _ in range(2 * num_characters // 1000)
    )
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def measured(folder: Path, tokens: int, block: int, storage: str) -> dict:
    """A row; storage: where lies what a layer makes of the text."""
    row = {"tokens": 2 * tokens, "storage": storage}  # with repeated passages
    if DEVICE == "cuda":
        clear()
        torch.cuda.reset_peak_memory_stats()
        convert(folder, tokens, block, "cuda", storage)
        row["measured_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return row


def project(row: dict, folder: Path, tokens: int, block: int) -> None:
    """Add the projection to a row."""
    gpu = PretendedGpu()
    with gpu.pretended():
        convert(folder, tokens, block, "meta", row["storage"])
    row["projected_bytes"] = sum(gpu.at_peak.values())
    row["at_peak"] = {where: size for where, size in gpu.at_peak.most_common() if size}
    if "measured_bytes" in row:
        row["error"] = row["projected_bytes"] / row["measured_bytes"] - 1


def convert(folder: Path, tokens: int, block: int, device: str, storage: str) -> None:
    place = "cpu" if storage == "cpu" else device
    with patch.object(layer_pairs.LayerPairs, "storage", lambda *_: place):
        convert_checkpoint(
            folder / "source",
            folder / "coca",
            overwrite=True,
            calibrate_on=str(folder / "text.jsonl"),
            calibrate_tokens=tokens,
            calibrate_block=block,
            calibrate_passes=1,
            device=device,
        )


class PretendedGpu(TorchDispatchMode):
    """Lets the meta device stand for a GPU; at_peak: bytes by the function that made them."""

    def __init__(self):
        super().__init__()
        self.at_peak, self._now = Counter[str](), Counter[str]()
        self._known, self._counts = WeakIdKeyDictionary(), False

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        """Count from calibration's start, when its models without numbers are made, to its end."""

        def counted(*arguments, **options):
            self._counts = True
            try:
                return plain(*arguments, **options)
            finally:
                self._counts = False

        plain = calibration.CalibrationRun.fit_layers
        supported = "_get_fused_kernels_supported_devices"
        with (
            patch.object(calibration.CalibrationRun, "fit_layers", counted),
            # needs numbers, and less memory than a fit
            patch.object(calibration.Calibration, "_refit", lambda *_: ({}, 1.0)),
            # what torch chooses on a GPU for float32
            patch.object(layer_pairs, "scaled_dot_product_attention", memory_efficient_attention),
            patch(f"torch.optim.optimizer.{supported}", lambda: ["meta"]),
            self,
        ):
            yield

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if function is aten._to_copy.default and args[0].is_meta and _is_cpu(kwargs.get("device")):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if function is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        for storage in _meta_storages((args, kwargs)):
            self._known[storage] = True  # of a model that has no numbers, if it is new here
        result = function(*args, **kwargs)
        for storage in _meta_storages(result):
            if self._counts and storage not in self._known:
                self._count(storage, _maker())
        return result

    def _count(self, storage: torch.UntypedStorage, maker: str) -> None:
        self._known[storage] = True
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        weakref.finalize(storage, self._now.subtract, {maker: size})
        self._now[maker] += size
        if self._now.total() > self.at_peak.total():
            self.at_peak = self._now.copy()


def _meta_storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]
    return [tensor.untyped_storage() for tensor in tensors]


def _is_cpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def _maker() -> str:
    """The innermost function of coca_hf that is running."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if "coca_hf" in code.co_filename and not code.co_name.startswith("<"):
            return code.co_name
        frame = frame.f_back
    return "other"


def memory_efficient_attention(query, key, value, is_causal, scale):
    attend = aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, None, False, 0.0, is_causal, scale=scale)[0]


if __name__ == "__main__":
    main()
