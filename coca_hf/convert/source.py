"""Checkpoints to convert from: safetensors (single or sharded) and GGUF, on disk or on the hub."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coca_hf.card import LICENCE_FILES
from coca_hf.convert.llama import Shape
from coca_hf.errors import CocaError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Copied as they are: what from_pretrained and the serving engines look for beside weights and config, and what licences
# ask to go along.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    *LICENCE_FILES,
)


class SafetensorsSource:
    """A directory with `config.json` and safetensors weights. Tensors are read one at a time, when they are asked for.

    Raises CocaError where a file is absent, outside the directory, truncated or corrupted.
    """

    kind = "safetensors"

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = _read_json(directory / "config.json")
        weight_map = self._read_index() if (directory / INDEX).exists() else None
        self.files = sorted({directory / name for name in weight_map.values()}) if weight_map else [directory / SINGLE]
        self._handles = {file.name: _open_weights(file) for file in self.files}
        self._file_of = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118
        for name, file in (weight_map or {}).items():
            if self._file_of.get(name) != file:
                raise CocaError(f"{directory / INDEX}: tensor {name} is not in {file}; download the checkpoint again")

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        weight_map = _read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(f, str) for f in weight_map.values())
        ):
            raise CocaError(f"{index}: got no weight_map, expected one from tensor names to file names")
        for file in set(weight_map.values()):
            if Path(file).name != file or file in (".", ".."):
                raise CocaError(f"{index}: got the file name {file!r}, expected a file in the directory itself")
            if not (self.directory / file).is_file():
                raise CocaError(f"{index}: names {file}, which is not in {self.directory}; download it")
        return weight_map

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    def dtype(self, name: str) -> torch.dtype:
        found = self._slice(name).get_dtype()
        if found not in DTYPES:
            raise CocaError(
                f"{self.directory / self._file_of[name]}: tensor {name} has dtype {found}, expected one of "
                f"{', '.join(DTYPES)}; quantized checkpoints must be dequantized first"
            )
        return DTYPES[found]

    def read(self, name: str) -> Tensor:
        try:
            return self._handles[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CocaError(f"{self.directory / self._file_of[name]}: tensor {name} cannot be read: {error}") from error

    def _slice(self, name: str):
        return self._handles[self._file_of[name]].get_slice(name)

    def save_companions(self, directory: Path) -> None:
        """Copy tokenizer, chat template and generation config."""
        for name in COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                (directory / name).write_bytes((self.directory / name).read_bytes())


class GgufSource:
    """A GGUF file, dequantized to float32 by transformers, which builds the model in memory to do so."""

    kind = "gguf"

    def __init__(self, file: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        self.files = [file]
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            self._tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except ImportError as error:
            raise CocaError(f"{file}: GGUF needs the gguf package; pip install 'coca-hf[gguf]'") from error
        except Exception as error:  # the readers of gguf and transformers raise many kinds
            raise CocaError(f"{file}: cannot be read as GGUF ({' '.join(str(error).split())[:200]})") from error
        self.config = {k: v for k, v in self._model.config.to_dict().items() if k != "quantization_config"}
        self._tensors = self._model.state_dict()

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def save_companions(self, directory: Path) -> None:
        """Write the tokenizer and the generation config that the file carries."""
        self._tokenizer.save_pretrained(directory)
        self._model.generation_config.save_pretrained(directory)


def open_source(source: str) -> SafetensorsSource | GgufSource:
    """Open a checkpoint: a directory, a .gguf file or a hub id.

    Raises CocaError where it is absent, has no weights that can be read safely, or is ambiguous.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufSource(path)
        raise CocaError(f"{source}: got a file, expected a checkpoint directory, a .gguf file or a hub id")
    directory = path if path.is_dir() else _download(source)
    if (directory / INDEX).exists() or (directory / SINGLE).exists():
        return SafetensorsSource(directory)
    gguf_files = sorted(directory.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GgufSource(gguf_files[0])
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise CocaError(f"{source}: got {len(gguf_files)} GGUF files ({names}), expected one; name the file itself")
    pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*")) + sorted(directory.glob("*.ckpt"))
    if pickles:
        raise CocaError(
            f"{source}: got only pickled weights ({pickles[0].name}), which can run code when read; expected "
            f"safetensors; load the model with transformers and save_pretrained it to a new directory"
        )
    raise CocaError(f"{source}: got no weights, expected {SINGLE}, {INDEX} or a .gguf file")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=["config.json", "*.safetensors", INDEX, "README.md", *COMPANIONS])
        )
    except HFValidationError:
        raise CocaError(f"{hub_id}: no such directory, and not the form of a hub id (owner/name)") from None
    except Exception as error:  # offline, unknown, gated: huggingface_hub has a class for each
        reason = str(error).strip().splitlines()[0]
        raise CocaError(f"{hub_id}: no such directory, and not on the hub within reach ({reason})") from error


def _open_weights(file: Path):
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CocaError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CocaError(f"{file}: truncated or corrupted ({error}); download it again") from error


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CocaError(f"{file}: no such file, expected a checkpoint with one") from None
    except (ValueError, RecursionError) as error:
        raise CocaError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, Mapping):
        raise CocaError(f"{file}: got a {type(content).__name__}, expected a JSON object")
    return dict(content)


def sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for chunk in _chunks(stream):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(stream, size: int = 1 << 22) -> Iterator[bytes]:
    while chunk := stream.read(size):
        yield chunk
