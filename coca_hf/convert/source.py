"""Sources of a conversion: safetensors, pickles and GGUF, on disk or on the hub."""

import contextlib
import fnmatch
import functools
import glob
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import HFValidationError, filter_repo_objects
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME, GENERATION_CONFIG_NAME

from coca_hf.convert.adapter import Adapter
from coca_hf.convert.config import FAMILIES, check_generation_config, is_coca
from coca_hf.convert.initialise import Shape
from coca_hf.convert.quantized import FOUR_BITS, quantized_weights
from coca_hf.errors import CocaError, library_errors, short
from coca_hf.models.hub import CARD, CONVERSION, LICENCE_FILES, RECORDS
from coca_hf.tokens import FOREIGN_TOKENIZERS, around_text
from coca_hf.weights import (
    FLOATS,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    SINGLE,
    AnyFile,
    LoadedFile,
    checkpoint_file,
    file_within,
    open_regular,
    open_weights,
    read_index,
    read_json,
    read_record,
)

TOKENIZER = "tokenizer_config.json"
READING_GGUF = threading.Lock()  # for one thread at a time: it changes the module gguf
TEMPLATES = "additional_chat_templates"  # a directory of .jinja files
TOKENIZER_FILES = [
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *FOREIGN_TOKENIZERS,
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES}/*.jinja"),
]
# Files to copy as they are: those that from_pretrained and serving engines look for beside weights
# and config, and licences. These are patterns, here and on the hub. None begins with *, which on
# the hub would also match in other directories.
COMPANIONS = [*TOKENIZER_FILES, "generation_config.json", *LICENCE_FILES]
MAX_TOKEN_ID = 1 << 24
# `tokenizer.ggml.pre` of GGUF files whose texts begin with bos_token in llama.cpp without a flag,
# and whose words are a token of the vocabulary, if there is one, before they are merged
LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "midm-2.0", "pixtral", "tekken")
# files to download from the hub before the names of the files of weights are known
OTHER_FILES = ["config.json", INDEX, ADAPTER_CONFIG_NAME, CARD, *RECORDS, *COMPANIONS]
# What a directory without readable weights is, by its files, and the remedy; the first match counts.
FOREIGN = {
    ("params.json",): (
        "the layout of Meta's or Mistral's own code ({}), expected that of transformers; take the "
        "repository with -hf in its name, or convert it with transformers' "
        "convert_llama_weights_to_hf.py"
    ),
    ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt"): (
        "only pickled weights ({}), which can run code when read; expected safetensors; pass "
        f"--allow-pickle, which reads tensors alone, from {PICKLE} or the files of {PICKLE_INDEX}; "
        "or load the model with transformers and save_pretrained it to a new directory"
    ),
    ("*.h5", "*.msgpack", "*.onnx"): (
        "weights of another framework ({}), expected safetensors; load the model with a "
        "transformers that reads them and save_pretrained it to a new directory"
    ),
    ("*.safetensors",): (
        f"safetensors without {INDEX} ({{}}), expected it beside them; download the checkpoint "
        f"again"
    ),
}


class Source:
    """A checkpoint: its `config`, and its weights, which are read on demand.

    config_file: named in errors about `config`. kind: how the weights are stored. files: open files
    of weights by name; file_of: the file of each tensor. commit: that of the hub's repository, if
    `directory` is a snapshot of one. adapter: merged into the weights as they are read.

    Raises CocaError if tensors, or an adapter and its base, do not fit together, and closes the
    files.
    """

    def __init__(
        self,
        directory: Path,
        config_file: Path,
        config: dict,
        kind: str,
        files: Mapping[str, AnyFile],
        file_of: Mapping[str, AnyFile],
        commit: str | None = None,
        adapter: Adapter | None = None,
    ):
        self.directory, self.config_file, self.config = directory, config_file, config
        self.commit, self.adapter = commit, adapter
        self._file_of, self._files = file_of, dict(files)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            method, self._quantized = quantized_weights(config, file_of, config_file)
            if method:
                del self.config["quantization_config"]
            self.kind = f"{kind}, {method}" if method else kind
            self._beside = {name for weight in self._quantized.values() for name in weight.beside}
            if adapter:
                adapter.check(self.shapes(), self._ties_its_head(), is_coca(config))
                self._files[str(adapter.weights.file.absolute())] = adapter.weights
            self._states = self._current_states()
            on_error.pop_all()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of weights, by name."""
        return {name: weights.size for name, weights in self._files.items()}

    def shapes(self) -> dict[str, Shape]:
        stored = {name: file.tensors[name].shape for name, file in self._file_of.items()}
        dequantized = {name: weight.shape for name, weight in self._quantized.items()}
        return {n: shape for n, shape in (stored | dequantized).items() if n not in self._beside}

    def dtype(self, name: str) -> torch.dtype:
        found = self._file_of[name].tensors[name].dtype
        if name in self._quantized:
            stated = self.config.get("dtype") or self.config.get("torch_dtype")
            return getattr(torch, stated) if stated in ("float32", "float16") else torch.bfloat16
        if found not in FLOATS:
            raise CocaError(
                f"{self._file_of[name].file}: tensor {name} has dtype {found}, expected one of "
                f"{', '.join(FLOATS)}; quantized checkpoints must be dequantized first"
            )
        return FLOATS[found]

    def read(self, name: str) -> Tensor:
        if name in self._quantized:
            tensor = self._quantized[name].read().to(self.dtype(name))
        else:
            tensor = self._file_of[name].read(name)
        lora = self._lora_of(name)
        return lora.merged(name, tensor) if lora else tensor

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The numbers of a tensor in order, as 1-d tensors.

        They share a buffer, so use each one before you ask for the next.
        """
        if name in self._quantized or self._lora_of(name):
            yield self.read(name).flatten()
            return
        dtype = self.dtype(name)
        for block in self._file_of[name].blocks(name):
            yield block.view(dtype)

    def place_of(self, name: str) -> str:
        """The file that has a tensor, and the file of the adapter that is merged into it."""
        place, lora = str(self._file_of[name].file), self._lora_of(name)
        return f"{place} with {lora.weights.file}" if lora else place

    def check_unchanged(self) -> None:
        """Raise OSError if a file of weights was written to since it was opened."""
        for name, state in self._current_states().items():
            if state != self._states[name]:
                raise OSError(f"{self.directory / name} changed while it was converted")

    def records(self) -> dict[str, dict]:
        """The records of a CoCA checkpoint's conversion and training, by the names of the files.

        Raises CocaError for a file that coca_hf cannot have written.
        """
        names = [name for name in RECORDS if os.path.lexists(self.directory / name)]
        return {name: read_record(checkpoint_file(self.directory, name)) for name in names}

    def save_companions(self, directory: Path, ntk_length: int | None) -> None:
        """Copy the tokenizer, chat templates, generation config and licence to `directory`.

        directory: has its config.json already. ntk_length: the new longest text. Raises CocaError
        for a link that leads out of the checkpoint.
        """
        if ntk_length and os.path.lexists(self.directory / TOKENIZER):
            read_json(checkpoint_file(self.directory, TOKENIZER))  # errors name the source's file
        names, templates = os.listdir(self.directory), self.directory / TEMPLATES
        if templates.is_dir():
            names += [f"{TEMPLATES}/{name}" for name in os.listdir(templates)]
        names = sorted(filter_repo_objects(names, allow_patterns=COMPANIONS))
        for name in names:
            (directory / name).parent.mkdir(exist_ok=True)
            with (
                open_regular(file_within(self.directory, name)) as stream,
                (directory / name).open("wb") as copy,
            ):
                shutil.copyfileobj(stream, copy)
        tokenizer = None
        if list(filter_repo_objects(names, allow_patterns=TOKENIZER_FILES)):
            with contextlib.suppress(CocaError):  # one that cannot be loaded is copied as it is
                tokenizer = self.tokenizer
        if tokenizer:
            _drop_code_of_tokenizer(directory / TOKENIZER)
            _keep_tokenizer(tokenizer, directory)
        if GENERATION_CONFIG_NAME not in names:
            self._save_settings_of_generation(directory / GENERATION_CONFIG_NAME)
        if ntk_length:
            _raise_tokenizer_length(directory / TOKENIZER, ntk_length)

    def _save_settings_of_generation(self, file: Path) -> None:
        """Save those in config.json, where older checkpoints have them, if there are any:
        transformers reads them there, but its configs, and so ours, drop them.
        """
        known = GenerationConfig().to_dict().keys() - {"transformers_version"}
        given = {name: value for name, value in self.config.items() if name in known}
        given = {name: value for name, value in given.items() if value is not None}
        if given.keys() - CONFIG_MAPPING[self.config["model_type"]]().to_dict().keys():
            with library_errors(f"{self.config_file}: its settings of generation cannot be read"):
                GenerationConfig.from_dict(given).to_json_file(file)  # also those without effect

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.directory)

    @functools.cached_property
    def tokenizer_not_taken(self) -> str | None:
        """What DST's tokenizer is without, in words: that of the adapter, or code that SRC's needs."""
        if differences := self._differences_of_adapter():
            return f"the adapter's, which differs ({', '.join(differences)})"
        if code := _code_of_tokenizer(self.directory / TOKENIZER):
            try:
                self.tokenizer  # noqa: B018
            except CocaError:
                return f"SRC's own code ({short(code)}), without which it cannot be loaded"
        return None

    def _differences_of_adapter(self) -> list[str]:
        """In what the tokenizer beside the adapter differs from the source's."""
        if not self.adapter:
            return []
        beside = self.adapter.config_file.parent
        if not list(filter_repo_objects(os.listdir(beside), allow_patterns=TOKENIZER_FILES)):
            return []
        ours: dict[str, Any] = {}
        with contextlib.suppress(CocaError):
            ours = _traits(self.directory)
        try:
            theirs = _traits(beside)
        except CocaError:
            return ["it cannot be loaded"]
        return [name for name in ours | theirs if ours.get(name) != theirs.get(name)]

    def content_hash(self) -> str:
        """xxh3_128 of all tensors and their names, an adapter merged. Files may change and keep
        their size and times: copies and archives set them.
        """
        digest = xxhash.xxh3_128()
        for name in sorted(self.shapes()):
            digest.update(name.encode())
            for block in self.blocks(name):
                digest.update(block.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def close(self) -> None:
        for weights in self._files.values():
            weights.close()

    def _ties_its_head(self) -> bool:
        """Whether the config says so, or its family's default if it says nothing (SmolLM3)."""
        family = FAMILIES.get(str(self.config.get("model_type")).removeprefix("coca_"))
        default = family.config().tie_word_embeddings if family else False
        return bool(self.config.get("tie_word_embeddings", default))

    def _lora_of(self, name: str) -> Adapter | None:
        return self.adapter if self.adapter and name in self.adapter.targets else None

    def _current_states(self) -> dict[str, tuple[int, ...]]:
        return {name: weights.state() for name, weights in self._files.items()}


class GgufSource(Source):
    """A GGUF file; transformers builds its model in memory, dequantized to float32."""

    tokenizer_not_taken = None

    def __init__(self, file: Path, adapter: Adapter | None = None):
        import gguf  # transformers would name no extra
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if adapter:
            raise CocaError(
                f"{file}: --adapter: got a GGUF file, whose weights are quantized, expected the "
                "safetensors checkpoint that the adapter was trained on"
            )
        # transformers parses the header three times, and the names of tensors for every module
        names = ("GGUFReader", "get_tensor_name_map")
        remedy = "download it again, or convert the original safetensors checkpoint"
        problem = f"{file}: cannot be read as GGUF; {remedy}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(library_errors(problem))
            stack.enter_context(READING_GGUF)  # first, or we would wrap another thread's cache
            once: dict[str, Any] = {name: functools.cache(getattr(gguf, name)) for name in names}
            stack.enter_context(patch.multiple(gguf, **once))
            # alone, because transformers would read a tokenizer or an adapter that is beside it
            alone = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (alone / file.name).symlink_to(file.absolute())
            # first, because GGUFReader counts up to the lengths that the file claims
            self.tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
            reader = gguf.GGUFReader(str(alone / file.name))
            _check_readable(reader, file)
            _follow_llama_cpp(self.tokenizer, reader)
            self._model, loading = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file=file.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
        # transformers leaves out tensors that it does not know, and fills in those that are missing
        made_up, tensors = loading["missing_keys"], self._model.state_dict()
        parameters = {name for name, _ in self._model.named_parameters()}  # without a tied head
        found, read = len(reader.tensors), len(parameters - made_up)
        if found > read:
            raise CocaError(
                f"{file}: got {found} tensors, of which transformers reads {read}; expected a "
                f"plain {type(self._model).__name__}; convert the original safetensors checkpoint"
            )
        config = self._model.config.to_dict()
        config.pop("quantization_config", None)
        weights = LoadedFile(file, {n: tensors[n] for n in tensors if n not in made_up})
        file_of = dict.fromkeys(weights.tensors, weights)
        super().__init__(file.parent, file, config, "gguf", {file.name: weights}, file_of)

    def check_unchanged(self) -> None:
        """All tensors are in memory, so a change of the file has no effect."""

    def save_companions(self, directory: Path, ntk_length: int | None) -> None:
        """Write the tokenizer and the generation config that the file carries."""
        self.tokenizer.save_pretrained(directory)
        if _behaviour(load_tokenizer(directory)) != _behaviour(self.tokenizer):
            # its class, such as Qwen2's, splits words in a way of its own instead of the file's
            fields = read_json(directory / TOKENIZER) | {"tokenizer_class": "TokenizersBackend"}
            (directory / TOKENIZER).write_text(json.dumps(fields, indent=2) + "\n")
        self._model.generation_config.save_pretrained(directory)
        if ntk_length:
            _raise_tokenizer_length(directory / TOKENIZER, ntk_length)


def _check_readable(reader: Any, file: Path) -> None:
    """Raise CocaError for a GGUF file that transformers would not read as llama.cpp does, or whose
    layers it would count for hours.
    """
    if (number := _value(reader, "split.count", 1)) > 1:
        raise CocaError(
            f"{file}: got one of {number} shards, expected a whole model; merge them with "
            "llama.cpp (llama-gguf-split --merge FIRST_SHARD OUT.gguf)"
        )
    if assumed := _assumed(reader):
        raise CocaError(
            f"{file}: got no {assumed}, for which transformers' reader of GGUF assumes a value, "
            "or leaves rows in llama.cpp's order; expected the original safetensors checkpoint"
        )
    if passed_over := _passed_over(reader):
        raise CocaError(
            f"{file}: got {passed_over}, which transformers' reader of GGUF passes over "
            "although it changes the model or its tokens; expected the original safetensors "
            "checkpoint"
        )
    name = f"{_value(reader, 'general.architecture')}.block_count"
    if (layers := _value(reader, name, 0)) > (tensors := len(reader.tensors)):
        raise CocaError(
            f"{file}: got {name}={layers}, expected no more layers than its {tensors} tensors; "
            "download it again"
        )


def _value(reader: Any, name: str, default: Any = None) -> Any:
    """The value of a field of a GGUF file, or `default` if it has none of that name."""
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _assumed(reader: Any) -> str | None:
    """The field that the GGUF file of a family that coca-convert takes lacks, and that transformers
    needs to read it as llama.cpp does.

    llama.cpp takes as many key/value heads as heads if their number is absent, as it is in files
    made from older configs. transformers does, too, but leaves queries' and keys' rows in the order
    of llama.cpp's rotation.
    """
    family = _value(reader, "general.architecture")
    if family not in FAMILIES:
        return None  # refused later
    needed = ("head_count", "head_count_kv", "layer_norm_rms_epsilon")
    names = (f"{family}.context_length", *(f"{family}.attention.{name}" for name in needed))
    return next((name for name in names if name not in reader.fields), None)


def _passed_over(reader: Any) -> str | None:
    """The scaled or partial RoPE, the window, the attention to later tokens or the text without a
    space before it that a GGUF file has and transformers ignores.
    """
    for tensor in reader.tensors:
        if tensor.name.startswith(("rope_freqs", "rope_factors")):  # LLaMA 3's scaling; longrope's
            return tensor.name
    for name, field in reader.fields.items():
        if name.endswith((".rope.scaling.type", ".attention.sliding_window")):
            value = field.contents()
            if value and value != "none":
                return f"{name}={value!r}"
        # without a type, a factor is that of linear scaling
        scales = (
            *(".rope.scaling.factor", ".rope.scale_linear"),
            *(".rope.scaling.attn_factor", ".attention.scale"),
        )
        if name.endswith(scales) and (value := field.contents()) not in (0, 1):
            return f"{name}={value!r}"
        if name.endswith(".attention.causal") and not (value := field.contents()):
            return f"{name}={value!r}"
    name = "tokenizer.ggml.add_space_prefix"  # which byte-level tokenizers never have
    if _value(reader, "tokenizer.ggml.model") == "llama" and not _value(reader, name, True):
        return f"{name}=False"
    family = _value(reader, "general.architecture")
    sizes = "attention.head_count", "embedding_length", "attention.key_length"
    heads, width, head_dim = (_value(reader, f"{family}.{size}") for size in sizes)
    name = f"{family}.rope.dimension_count"
    rotated = _value(reader, name)
    if rotated and (head_dim or (heads and width)) and rotated < (head_dim or width // heads):
        return f"{name}={rotated}"
    return None


def _follow_llama_cpp(tokenizer: PreTrainedTokenizerBase, reader: Any) -> None:
    """Give `tokenizer` the special tokens of its GGUF file, begin and end a text and split words as
    llama.cpp does.

    transformers 5.17 makes the beginning of a text LLaMA's `eos_token`, too, and adds none to a
    text; later versions add one only where the file has a flag, which older files of LLaMA 3 lack.
    None takes LLaMA 3's words from the vocabulary before it merges letters.
    """
    prefix = "tokenizer.ggml"
    for name, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _value(reader, f"{prefix}.{theirs}_token_id")
        if number is None:
            continue
        token = reader.fields[f"{prefix}.tokens"].contents(number)
        if getattr(tokenizer, f"{name}_token") != token:
            setattr(tokenizer, f"{name}_token", token)
    is_llama = _value(reader, f"{prefix}.model") == "llama"
    is_like_llama3 = not is_llama and _value(reader, f"{prefix}.pre") in LIKE_LLAMA3
    if is_like_llama3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    begins = is_llama or is_like_llama3
    for name, default in (("add_bos_token", begins), ("add_eos_token", False)):
        adds = bool(_value(reader, f"{prefix}.{name}", default))
        if getattr(tokenizer, name) != adds:
            setattr(tokenizer, name, adds)


def open_source(
    source: str,
    revision: str | None = None,
    allow_pickle: bool = False,
    adapter: Adapter | None = None,
    scratch: Path | None = None,
) -> Source:
    """Open a checkpoint: a directory, a .gguf file or a hub id, at a `revision`.

    allow_pickle: read pickled weights if there are no safetensors. adapter: to merge into them.
    scratch: a directory, for a dry run, which gets the files that the hub's cache lacks: of the
    weights, only the headers.

    Raises CocaError if it is absent, has no weights that can be read safely, or is ambiguous.
    """
    path = Path(source)
    if revision and path.exists():
        raise CocaError(
            f"--revision: got {revision!r} for {source}, which is on this machine; expected a hub "
            "id"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufSource(path, adapter)
        raise CocaError(
            f"{source}: got a file, expected a checkpoint directory, a .gguf file or a hub id"
        )
    directory = path if path.is_dir() else _download(source, revision, allow_pickle, scratch)
    if os.path.lexists(directory / ADAPTER_CONFIG_NAME):
        adapter_config = read_json(checkpoint_file(directory, ADAPTER_CONFIG_NAME))
        base = adapter_config.get("base_model_name_or_path")
        raise CocaError(
            f"{source}: got an adapter of {base}, expected a whole model; pass its base as SRC and "
            f"its directory as --adapter, or remove {ADAPTER_CONFIG_NAME} if the weights beside it "
            "are already merged"
        )
    commit = None if path.is_dir() else directory.name
    has_safetensors = any(os.path.lexists(directory / name) for name in (SINGLE, INDEX))
    has_pickles = any(os.path.lexists(directory / name) for name in (PICKLE, PICKLE_INDEX))
    if has_safetensors or (allow_pickle and has_pickles):
        kind = "safetensors" if has_safetensors else "pickles"
        config_file = checkpoint_file(directory, "config.json")
        config = read_json(config_file)
        check_generation_config(directory)
        opened = open_weights(directory, pickled=not has_safetensors)
        return Source(directory, config_file, config, kind, *opened, commit, adapter)
    names = os.listdir(directory) if path.is_dir() else _names_on_hub(source, directory)
    gguf_files = sorted(name for name in names if name.endswith(".gguf"))
    if len(gguf_files) == 1 and path.is_dir():
        return GgufSource(directory / gguf_files[0], adapter)
    if gguf_files:
        raise CocaError(
            f"{source}: got GGUF files ({', '.join(gguf_files)}); name one of them as SRC, from the "
            f"hub after `hf download {source} {gguf_files[0]} --local-dir DIR`"
        )
    for patterns, what in FOREIGN.items():
        for pattern in patterns:
            if found := sorted(fnmatch.filter(names, pattern)):
                raise CocaError(f"{source}: got {what.format(found[0])}")
    raise CocaError(f"{source}: got no weights, expected {SINGLE}, {INDEX} or a .gguf file")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint as transformers loads it, without the checkpoint's own code."""
    from transformers import AutoTokenizer

    with library_errors(f"{directory}: got no tokenizer that can be read, expected one"):
        # loading and saving count up to the largest id
        if (directory / "tokenizer.json").is_file():
            vocab = json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"]
            largest = max(vocab.values(), default=0) if isinstance(vocab, dict) else 0
            if largest > MAX_TOKEN_ID:
                raise ValueError(f"got token id {largest}, expected at most {MAX_TOKEN_ID}")
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def _code_of_tokenizer(file: Path) -> Any:
    """What `file`, a tokenizer_config.json, names as the tokenizer's own code, if it does."""
    auto_map = None
    with contextlib.suppress(CocaError):  # one that cannot be read is copied as it is
        auto_map = read_json(file).get("auto_map") if file.is_file() else None
    return auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map


def _drop_code_of_tokenizer(file: Path) -> None:
    """Name no code, which is never copied, in the config of a tokenizer that loads without it."""
    if _code_of_tokenizer(file):
        fields = read_json(file)
        del fields["auto_map"]
        file.write_text(json.dumps(fields, indent=2) + "\n")


def _keep_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Make the files in `directory` load as `tokenizer`, the source's, if they do not.

    transformers chooses a tokenizer's class, and whether to correct its regular expression
    (`fix_mistral_regex`), also by the model type and version in config.json, which have changed.
    """
    for is_saved in (False, True):
        with contextlib.suppress(CocaError):
            if _behaviour(load_tokenizer(directory)) == _behaviour(tokenizer):
                return
        if not is_saved:
            tokenizer.save_pretrained(directory)
    raise CocaError(
        f"{tokenizer.name_or_path}: its {type(tokenizer).__name__} does not load as itself beside "
        "another config.json; expected one that does; load it with transformers and "
        "save_pretrained it to the source"
    )


def _behaviour(tokenizer: PreTrainedTokenizerBase) -> tuple:
    """Everything that decides the token ids of a text or a chat."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend else {"model": {}}
    if isinstance(steps["model"].get("vocab"), dict):
        del steps["model"]["vocab"]  # if two tokens share an id, it has one of them at random
    chat = tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side
    return type(tokenizer), steps, tokenizer.get_vocab(), chat


def _traits(directory: Path) -> dict[str, Any]:
    """What a training may change in the tokenizer of `directory`, by names to print."""
    tokenizer = load_tokenizer(directory)
    with library_errors(f"{directory}: got a tokenizer that reads no text"):
        around = around_text(tokenizer)
    return {
        "chat template": tokenizer.chat_template,
        **tokenizer.special_tokens_map,
        "vocabulary": tokenizer.get_vocab(),
        "special tokens around a text": around,
    }


def _raise_tokenizer_length(file: Path, length: int) -> None:
    """Raise the tokenizer's length: serving engines take the smaller of it and the model's."""
    tokenizer = read_json(file) if file.is_file() else {}
    stated = tokenizer.get("model_max_length")
    if isinstance(stated, int) and stated < length:
        file.write_text(json.dumps(tokenizer | {"model_max_length": length}, indent=2) + "\n")


def _download(hub_id: str, revision: str | None, allow_pickle: bool, scratch: Path | None) -> Path:
    """Download the files of `hub_id` that are read, and no others; returns their directory.

    With `scratch`, it is there, unless the cache has all files.
    """
    others = [*OTHER_FILES, PICKLE_INDEX] if allow_pickle else OTHER_FILES
    if scratch:
        with contextlib.suppress(Exception):  # offline, or a problem that `_snapshot` reports
            # by commit, because the cache would note which commit a branch stands for
            revision = HfApi().model_info(hub_id, revision=revision).sha
    cache = scratch if scratch and _is_to_download(hub_id, revision, others) else None
    directory = _snapshot(hub_id, revision, others, cache_dir=cache)
    if os.path.lexists(directory / ADAPTER_CONFIG_NAME):
        return directory
    commit, names = directory.name, set(_names_on_hub(hub_id, directory))
    pickled = allow_pickle and not names & {SINGLE, INDEX}
    single, index = (PICKLE, PICKLE_INDEX) if pickled else (SINGLE, INDEX)
    shards = set(read_index(directory, index).values()) if index in names else set()
    weights = [single, *map(glob.escape, sorted(shards))]
    if not scratch or not (cache or _is_to_download(hub_id, commit, weights)):
        return _snapshot(hub_id, commit, weights, local_files_only=bool(scratch))
    if pickled:
        raise CocaError(
            f"{hub_id}: --dry-run: got pickled weights, whose shapes are known once they are "
            f"downloaded; expected safetensors; run `hf download {hub_id}` first"
        )
    directory = _snapshot(hub_id, commit, others, cache_dir=scratch)
    for name in sorted(shards or {SINGLE} & names):
        _write_header(hub_id, commit, directory, name)
    return directory


def _is_to_download(hub_id: str, revision: str | None, patterns: list[str]) -> bool:
    try:
        found = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, dry_run=True)
    except Exception:  # `_snapshot` reports the problem, or finds the cache without the hub
        return False
    return any(file.will_download for file in found)


def _snapshot(hub_id: str, revision: str | None, patterns: list[str], **options) -> Path:
    # offline, unknown, gated: huggingface_hub has an error for each
    with library_errors(f"{hub_id}: no such directory, and not on the hub within reach"):
        try:
            found = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, **options)
        except HFValidationError:
            raise CocaError(
                f"{hub_id}: no such directory, and not the form of a hub id (owner/name)"
            ) from None
    return Path(found)


def _write_header(hub_id: str, commit: str, directory: Path, name: str) -> None:
    """Write a safetensors file with the header of a repository's, and a hole for the numbers."""
    with library_errors(f"{hub_id}: the header of {name} cannot be read"):
        tensors = HfApi().parse_safetensors_file_metadata(hub_id, name, revision=commit).tensors
    if any(FOUR_BITS in tensor for tensor in tensors):
        raise CocaError(
            f"{hub_id}: --dry-run: got weights of four bits, whose shapes are known once they are "
            f"downloaded; run `hf download {hub_id}` first"
        )
    entries = {
        tensor: {name: getattr(entry, name) for name in ("dtype", "shape", "data_offsets")}
        for tensor, entry in tensors.items()
    }
    text = json.dumps(entries).encode()
    end = max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    with checkpoint_file(directory, name).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def _names_on_hub(hub_id: str, directory: Path) -> list[str]:
    """The files of a repository; if the hub does not answer, those of its snapshot.

    Raises CocaError if the snapshot then lacks a tokenizer, or the record of a CoCA checkpoint:
    transformers downloads of a model what it needs, and the result would be without them.
    """
    try:
        return HfApi().list_repo_files(hub_id, revision=directory.name)
    except Exception:  # offline: huggingface_hub has many classes for it
        names = os.listdir(directory)
    lacks = [] if list(filter_repo_objects(names, allow_patterns=TOKENIZER_FILES)) else [TOKENIZER]
    is_ours = "config.json" in names and is_coca(
        read_json(checkpoint_file(directory, "config.json"))
    )
    lacks += [CONVERSION] * (is_ours and CONVERSION not in names)
    if lacks:
        raise CocaError(
            f"{hub_id}: got no {' and no '.join(lacks)} in its cache, and the hub does not answer; run "
            f"`hf download {hub_id}` where it does, or pass {directory} as SRC to convert what is there"
        )
    return names
