"""Checkpoints to convert from: safetensors (single or sharded) and GGUF, on disk or on the hub."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_hf.convert.tensors import Shape
from coca_hf.errors import CocaError
from coca_hf.models.hub import LICENCE_FILES
from coca_hf.weights import FLOATS, INDEX, SINGLE, checkpoint_file, open_regular, open_weights, read_json

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
    """A directory with `config.json` and safetensors weights. Tensors are read when they are asked for, in blocks.

    Raises CocaError where a file is absent, outside the directory, truncated or corrupted.
    """

    kind = "safetensors"

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = read_json(checkpoint_file(directory, "config.json"))
        names = [name for name in COMPANIONS if os.path.lexists(directory / name)]
        self._companions = [checkpoint_file(directory, name) for name in names]
        for file in self._companions:
            open_regular(file).close()
        self._files, self._file_of = open_weights(directory)
        self.files = [weights.file for weights in self._files.values()]
        self._states = self._current_states()

    def shapes(self) -> dict[str, Shape]:
        return {name: weights.tensors[name].shape for name, weights in self._file_of.items()}

    def dtype(self, name: str) -> torch.dtype:
        found = self._file_of[name].tensors[name].dtype
        if found not in FLOATS:
            raise CocaError(
                f"{self._file_of[name].file}: tensor {name} has dtype {found}, expected one of "
                f"{', '.join(FLOATS)}; quantized checkpoints must be dequantized first"
            )
        return FLOATS[found]

    def read(self, name: str) -> Tensor:
        weights = self._file_of[name]
        return weights.read(name).view(self.dtype(name)).view(weights.tensors[name].shape)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The numbers of a tensor in order, as 1-d tensors over one buffer: use each before asking for the next."""
        dtype = self.dtype(name)
        for block in self._file_of[name].blocks(name):
            yield block.view(dtype)

    def check_unchanged(self) -> None:
        """Raise OSError where a file of weights was written to since it was opened."""
        for name, state in self._current_states().items():
            if state != self._states[name]:
                raise OSError(f"{self.directory / name} changed while it was converted")

    def save_companions(self, directory: Path) -> None:
        """Copy tokenizer, chat template and generation config."""
        for file in self._companions:
            self.copy_if_there(file.name, directory)

    def copy_if_there(self, name: str, directory: Path) -> None:
        if os.path.lexists(self.directory / name):
            with (
                open_regular(checkpoint_file(self.directory, name)) as stream,
                (directory / name).open("wb") as copy,
            ):
                shutil.copyfileobj(stream, copy)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.directory)
        except Exception as error:  # transformers raises what its readers raise
            reason = " ".join(str(error).split())[:200]
            raise CocaError(f"{self.directory}: got no tokenizer that can be read, expected one ({reason})") from error

    def load_model(self) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.directory, dtype="auto")

    def states(self) -> list[tuple[int, ...]]:
        """What changes whenever a file of weights is written to."""
        return sorted(self._current_states().values())

    def close(self) -> None:
        for weights in self._files.values():
            weights.close()

    def _current_states(self) -> dict[str, tuple[int, ...]]:
        return {name: weights.state() for name, weights in self._files.items()}


class GgufSource:
    """A GGUF file, dequantized to float32 by transformers, which builds the model in memory to do so."""

    kind = "gguf"

    def __init__(self, file: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        self.directory, self.files = file.parent, [file]
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            self._tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            passed_over = _passed_over(file)
        except ImportError as error:
            raise CocaError(f"{file}: GGUF needs the gguf package; pip install 'coca-hf[gguf]'") from error
        except Exception as error:  # the readers of gguf and transformers raise many kinds
            raise CocaError(f"{file}: cannot be read as GGUF ({' '.join(str(error).split())[:200]})") from error
        if passed_over:
            raise CocaError(
                f"{file}: got {passed_over}, which transformers' reader of GGUF passes over although it changes the "
                f"model; expected the original safetensors checkpoint"
            )
        self.config = {k: v for k, v in self._model.config.to_dict().items() if k != "quantization_config"}
        self._tensors = self._model.state_dict()

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def blocks(self, name: str) -> Iterator[Tensor]:
        yield self._tensors[name].flatten()

    def check_unchanged(self) -> None:
        """Nothing to check: the tensors are in memory since the file was read."""

    def close(self) -> None:
        """Nothing to close."""

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def load_model(self) -> PreTrainedModel:
        return self._model

    def states(self) -> list[tuple[int, ...]]:
        found = self.files[0].stat()
        return [(found.st_size, found.st_mtime_ns)]

    def save_companions(self, directory: Path) -> None:
        """Write the tokenizer and the generation config that the file carries."""
        self._tokenizer.save_pretrained(directory)
        self._model.generation_config.save_pretrained(directory)


def _passed_over(file: Path) -> str | None:
    """What a GGUF file says of positions in places that transformers does not look at: scaled RoPE, a window."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for tensor in reader.tensors:
        if tensor.name.startswith(("rope_freqs", "rope_factors")):  # LLaMA 3's scaling; longrope's
            return tensor.name
    for name, field in reader.fields.items():
        value = field.contents() if name.endswith((".rope.scaling.type", ".attention.sliding_window")) else None
        if value and value != "none":
            return f"{name}={value!r}"
    return None


Source = SafetensorsSource | GgufSource


def open_source(source: str) -> Source:
    """Open a checkpoint: a directory, a .gguf file or a hub id.

    Raises CocaError where it is absent, has no weights that can be read safely, or is ambiguous.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufSource(path)
        raise CocaError(f"{source}: got a file, expected a checkpoint directory, a .gguf file or a hub id")
    directory = path if path.is_dir() else _download(source)
    if os.path.lexists(directory / INDEX) or os.path.lexists(directory / SINGLE):
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
