"""Models under measurement: any causal language model, CoCA or not, and its RoPE settings.

RoPE settings are `default`, `linear:8` (position interpolation), `dynamic:4` and `yarn:8`
(transformers' YaRN for a model trained at its own length). YaRN multiplies cosine and sine by a
factor, so CoCA's scores contain its square, as a plain model's do. Dynamic NTK is made stateless:
its base is computed once, for the length under evaluation, so no row depends on the rows before it
and decoding with a cache equals the full forward.
"""

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.logging import disable_progress_bar

from coca_hf.errors import CocaError, one_line
from coca_hf.models.hub import RECORDS
from coca_hf.models.rotary import ntk_base, unscaled_len
from coca_hf.tokens import NO_TOKENIZER
from coca_hf.weights import is_derived, read_json

OF_CHECKPOINT = "transformers_modules."  # where transformers imports a checkpoint's own code
OWN_CODE = (
    "got a model that needs the code it carries; read that code, and if you trust it, add "
    "--trust-remote-code"
)


@dataclass
class LoadedModel:
    """A model under measurement, with its tokenizer and what its rows say about it.

    path: as the user gave it. fingerprint: changes with the model's files. tokens_seen: in CoCA
    training; None for a model that coca_hf did not make. trained_seq_len: the positions that the
    last stage of that training reached. commit: on the hub.
    """

    model: Any
    tokenizer: Any
    name: str
    path: str
    fingerprint: str
    tokens_seen: int | None = None
    trained_seq_len: int | None = None
    commit: str | None = None


def processes() -> PartialState:
    """The processes of `accelerate launch`, on GPUs if there are any; without it, the only one."""
    return PartialState(cpu=not torch.cuda.is_available())


def load_model(
    path: str,
    dtype: str = "auto",
    name: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load the causal language model and the tokenizer of a directory or hub id, onto the GPU if
    there is one.

    dtype: of the weights; `auto` is the checkpoint's. name: of the model in its rows, by default
    that of its directory. revision: commit, branch or tag of a hub id, by default the main branch.
    trust_remote_code: run the checkpoint's own code if neither transformers nor coca_hf knows the
    model.

    Raises CocaError if there is no model, `revision` is given for a directory, the model is not a
    causal language model or needs code of its own that is not trusted, its weights are unreadable
    or do not match its config, or it has no tokenizer.
    """
    if revision and Path(path).exists():
        problem = f"got {revision!r} for the directory {path}, expected it for a hub id"
        raise CocaError(f"--revision: {problem}; leave it out")
    disable_progress_bar()
    config, commit = _load_config(path, revision or "main", trust_remote_code)
    at = commit or revision or "main"  # a branch may move in the meantime
    before = [fingerprint(path, commit, own_code) for own_code in (False, True)]
    model = _load_weights(path, config, dtype, at, trust_remote_code)
    tokenizer = _load_tokenizer(path, at, trust_remote_code)
    own_code = any(type(one).__module__.startswith(OF_CHECKPOINT) for one in (model, tokenizer))
    if fingerprint(path, commit, own_code) != before[own_code]:
        raise CocaError(f"{path}: changed while it was loaded; run the same command again")
    tokens_seen, trained_seq_len = _training(path, at)
    return LoadedModel(
        model=model.eval().to(processes().device),
        tokenizer=tokenizer,
        name=name or Path(path).resolve().name + (f"@{revision}" if revision else ""),
        path=str(Path(path)) if Path(path).is_dir() else path,  # without a trailing slash
        fingerprint=before[own_code],
        tokens_seen=tokens_seen,
        trained_seq_len=trained_seq_len,
        commit=commit,
    )


def check_vocabulary(loaded: LoadedModel, token_ids: torch.Tensor, where: str) -> None:
    """Raise CocaError if `token_ids` (any shape) has an id without an embedding in the model.

    where: what the ids were made from.
    """
    vocab_size = loaded.model.get_input_embeddings().weight.shape[0]
    largest = int(token_ids.max())
    if largest >= vocab_size:
        raise CocaError(
            f"{where}: got token id {largest} from the tokenizer of {loaded.path}, expected ids "
            f"below the model's vocabulary of {vocab_size}; the tokenizer belongs to another model"
        )


def check_same_dtype(loaded: LoadedModel, baseline: LoadedModel) -> None:
    """Raise CocaError if the weights of two models that are compared have different types."""
    ours, theirs = (str(one.model.dtype).removeprefix("torch.") for one in (loaded, baseline))
    if ours != theirs:
        raise CocaError(
            f"--baseline {baseline.path}: got {theirs}, and {ours} of {loaded.path}, expected one "
            f"dtype, so that only the models differ; add --dtype float32, or bfloat16"
        )


def small_tokenizer_warning(loaded: LoadedModel) -> str | None:
    """One line if the tokenizer has too few tokens for the model's embedding, otherwise None.

    Embeddings are padded to multiples of up to 1,024 rows; the most that published models pad is
    905 rows, phi-2's 51,200. More than that, and more than a tenth of the rows, is too much.
    """
    rows, tokens = loaded.model.get_input_embeddings().weight.shape[0], len(loaded.tokenizer)
    if rows - tokens <= max(1024, rows // 10):
        return None
    return (
        f"{loaded.path}: got a tokenizer of {tokens:,} tokens for an embedding of {rows:,} rows; "
        f"is it this model's? with another's every number is wrong"
    )


def _load_config(path: str, revision: str, trust_remote_code: bool) -> tuple[Any, str | None]:
    """The config, and its commit on the hub."""
    directory = Path(path)
    is_hub_id = not path.startswith((".", "/", "~")) and path.count("/") == 1
    if not path.strip() or not (directory.exists() or is_hub_id):
        expected = "a model directory or a hub id as owner/name"
        raise CocaError(f"{path!r}: no such directory, expected {expected}")
    if directory.exists() and not (directory / "config.json").is_file():
        if (directory / ADAPTER_CONFIG_NAME).is_file():
            raise CocaError(
                f"{path}: got an adapter of peft, expected a whole model; merge it into its base "
                f"model (merge_and_unload) and save that with the tokenizer"
            )
        expected = "a model directory as save_pretrained writes it"
        raise CocaError(f"{path}: got no config.json there, expected {expected}")
    absent = "no such directory here, and as a hub id it"
    found = "its config.json or its own code" if directory.exists() else absent
    with _transformers_errors(path, f"{found} cannot be read"):
        config = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
        file = cached_file(path, "config.json", revision=revision)
        return config, extract_commit_hash(file, None)


@contextmanager
def _transformers_errors(path: str, problem: str) -> Iterator[None]:
    """Turn whatever transformers raises into a CocaError that says `problem`, or that the model
    needs its own code.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code=True" in str(error):
            raise CocaError(f"{path}: {OWN_CODE}") from None
        reason = f"{type(error).__name__}: {one_line(error)}"  # the hub's is in a later line
        raise CocaError(f"{path}: {problem} ({reason})") from error


def _load_weights(
    path: str, config: Any, dtype: str, revision: str, trust_remote_code: bool
) -> Any:
    expected = AutoModelForCausalLM._model_mapping.get(type(config), None)
    found = getattr(config, "architectures", None) or []
    is_classifier = any(str(name).endswith("Classification") for name in found)
    own_classes = getattr(config, "auto_map", None) or {}
    carries_code = not is_classifier and "AutoModelForCausalLM" in own_classes
    is_known = expected is not None and (not found or expected.__name__ in found)
    if not is_known and carries_code and not trust_remote_code:
        raise CocaError(f"{path}: {OWN_CODE}")
    if not is_known and not carries_code:
        wanted = f" ({expected.__name__})" if expected else ""
        names = ", ".join(found) or config.model_type
        raise CocaError(f"{path}: got {names}, expected a causal language model{wanted}")
    with _transformers_errors(path, "transformers cannot load it; save or convert it again"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    differ = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    differ += [
        f"{name} has the shape {list(stored)}, not {list(wanted)}"
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    unexpected = sorted(info["unexpected_keys"])
    differ += [f"{name} is not used" for name in unexpected if not is_derived(name, config)]
    if differ:
        raise CocaError(
            f"{path}: got weights that are not those of {type(model).__name__} with its "
            f"config.json ({differ[0]}; {len(differ)} such in all); are they of one model?"
        )
    return model


def _load_tokenizer(path: str, revision: str, trust_remote_code: bool) -> Any:
    with _transformers_errors(path, NO_TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    tokenizer.model_max_length = int(1e30)  # texts may be longer than those of the training
    return tokenizer


def fingerprint(path: str, commit: str | None, own_code: bool) -> str:
    """Sixteen hex digits that change with the files of a model, or with its commit on the hub and
    whether the code that it carries runs.

    They are of the files' names, sizes, times and some of their bytes, including those of an
    adapter's base: weights, configurations, whatever a tokenizer may be made from, and, if it runs,
    the checkpoint's own code.
    """
    directory = Path(path)
    if directory.is_dir():
        patterns = ["*config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab.*", "merges.txt"]
        patterns += ["*.model", "*tokens*.json", "chat_template.*", *["*.py"] * own_code]
        directories = [directory]
        adapter = directory / ADAPTER_CONFIG_NAME
        base = adapter.is_file() and read_json(adapter).get("base_model_name_or_path")
        if base:
            directories.append(Path(base))  # a base on the hub has no files here
        files = [sorted(one.glob(pattern)) for one in directories for pattern in patterns]
        found = sorted({*itertools.chain(*files)})
        # no dangling links
        text = json.dumps([(file.name, *state_of(file)) for file in found if file.exists()])
    else:
        text = f"{path}@{commit}" + " with its own code" * own_code
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def state_of(file: Path) -> tuple[int, int, str]:
    """Size, time, and a hash of bytes from all over a file, because archives and images set times."""
    stat = file.stat()
    sample = hashlib.sha256()
    with file.open("rb") as stream:
        for place in range(0, stat.st_size, max(4096, stat.st_size // 64)):
            stream.seek(place)
            sample.update(stream.read(4096))
    return stat.st_size, stat.st_mtime_ns, sample.hexdigest()


def _training(path: str, revision: str) -> tuple[int | None, int | None]:
    """Tokens seen in all stages, including those of earlier runs, and the positions that the last
    stage reached: its block length, or more with `skip_positions`. 0 tokens if only converted.
    """
    conversion, record = (
        cached_file(
            path,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in RECORDS
    )
    if record is None:
        return (0 if conversion else None), None
    try:
        facts = json.loads(Path(record).read_text(encoding="utf-8"))
        tokens_seen = sum(int(stage["tokens"]) for stage in facts["stages"])
        data = facts["recipe"]["data"]
        return tokens_seen, data.get("skip_positions") or data["seq_len"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CocaError(
            f"{record}: got no stages and tokens of coca-train, expected its record; delete or "
            "repair it"
        ) from None


KINDS = ("linear", "dynamic", "yarn")
FORMS = f"default, {', '.join(f'{kind}:FACTOR' for kind in KINDS)}"


class Rope(NamedTuple):
    """A RoPE setting. kind: default, or one of `KINDS`."""

    kind: str
    factor: float = 1.0

    def __str__(self) -> str:
        if self.kind == "default":
            return self.kind
        short = f"{self.factor:g}"
        return f"{self.kind}:{short if float(short) == self.factor else repr(self.factor)}"


def parse_ropes(text: str) -> list[Rope]:
    """`"default,dynamic:4"` as settings, in order, each once.

    Raises CocaError for a part that is not one of `FORMS`.
    """
    return list(dict.fromkeys(_parse_rope(part.strip()) for part in text.split(",")))


def _parse_rope(text: str) -> Rope:
    if text == "default":
        return Rope("default")
    kind, _, number = text.partition(":")
    with suppress(ValueError):
        if kind in KINDS and 1 <= float(number) < math.inf:
            return Rope(kind, float(number))
    expected = f"{FORMS} (a factor of at least 1, as in dynamic:4)"
    raise CocaError(
        f"--rope: got {text!r}, expected {expected}, or several with commas between them"
    )


def check_rope(model: PreTrainedModel, rope: Rope) -> None:
    """Raise CocaError if `model` has no rotary embedding, or one that is already scaled."""
    if rope.kind == "default":
        return
    config = _text_config(model)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or not rotary_modules(model):
        raise CocaError(
            f"--rope {rope}: got {type(model).__name__}, which has no rotary embedding that can be "
            f"changed; use --rope default"
        )
    if parameters["rope_type"] != "default":
        already = f"already has the RoPE setting {parameters['rope_type']}"
    elif "original_max_position_embeddings" in parameters:
        already = f"has a RoPE base made for {config.max_position_embeddings} tokens already"
    else:
        return
    remedy = "expected an unscaled one; use --rope default to evaluate it as it is"
    raise CocaError(f"--rope {rope}: the checkpoint {already}, {remedy}")


def use_rope_(model: PreTrainedModel, rope: Rope, total_len: int) -> None:
    """Rebuild the rotary embeddings of `model` in place, from the checkpoint's unchanged config.

    total_len: tokens of the longest sequence to come, prompt and new tokens together. It fixes the
    base of dynamic NTK (the paper's table 1, "employed without fine-tuning"), also if the
    checkpoint itself asks for dynamic NTK and `rope` is `default`.

    Raises CocaError as `check_rope` does.
    """
    check_rope(model, rope)
    for parent, name, rotary in rotary_modules(model):
        config = copy.deepcopy(_text_config(model))
        parameters = config.rope_parameters
        kind, factor = rope
        if kind == "default" and parameters["rope_type"] == "dynamic":
            kind, factor = "dynamic", parameters["factor"]
        trained_len = unscaled_len(config)
        if kind == "linear":
            parameters.update(rope_type="linear", factor=factor)
        elif kind == "yarn":
            parameters.update(
                rope_type="yarn", factor=factor, original_max_position_embeddings=trained_len
            )
        elif kind == "dynamic":
            rotary_dim = 2 * rotary.inv_freq.numel()
            seq_len = torch.tensor(total_len, dtype=torch.float64)  # may overflow: angles of zero
            base = ntk_base(parameters["rope_theta"], factor, seq_len, trained_len, rotary_dim)
            parameters.update(rope_type="default", rope_theta=base.item())
        setattr(parent, name, type(rotary)(config=config).to(rotary.inv_freq.device))


def trained_length(config: PreTrainedConfig) -> int | None:
    """Tokens that the config says the model was trained on; None if it does not say.

    `coca-convert --ntk-length` extends a model without training and keeps its trained length.
    """
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    trained_len = None
    if rope.get("rope_type") in ("default", "dynamic"):  # these extend the length without training
        trained_len = rope.get("original_max_position_embeddings")
    return trained_len or getattr(config, "max_position_embeddings", None)


def beyond_trained_warning(
    model: PreTrainedModel, ropes: list[Rope], lengths: list[int], new_tokens: int = 0
) -> str | None:
    """One line about lengths beyond what a static RoPE setting was made for, or None.

    `default` is made for the config's `max_position_embeddings`, or what the config's own YaRN
    reaches; `linear` and `yarn` for that times their factor. Dynamic NTK has no such length.
    """
    config = _text_config(model)
    made_for = getattr(config, "max_position_embeddings", None)
    own = getattr(config, "rope_parameters", None) or {}
    if made_for and own.get("rope_type") == "yarn":
        made_for = max(made_for, (own.get("factor") or 1) * unscaled_len(config))
    parts = []
    for rope in ropes:
        if not made_for or "dynamic" in (rope.kind, own.get("rope_type")):
            continue
        reach = made_for * rope.factor
        if beyond := [str(length) for length in lengths if length + new_tokens > reach]:
            new = f" and {new_tokens} new tokens" if new_tokens else ""
            tokens = f"the {int(reach)} tokens that --rope {rope} reaches"
            parts.append(f"lengths {', '.join(beyond)}{new} are beyond {tokens}")
    remedy = ""
    with suppress(CocaError):
        check_rope(model, Rope("dynamic", 4.0))
        remedy = "; --rope dynamic:4 reaches further"
    return f"{'; '.join(parts)}{remedy}" if parts else None


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def rotary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str, Any]]:
    """Parent, name and module of every rotary embedding.

    The list is empty if the config has no `rope_parameters`, or one set for each kind of layer.
    """
    config = _text_config(model)
    if "rope_type" not in (getattr(config, "rope_parameters", None) or {}):
        return []
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
        and hasattr(child, "inv_freq")
        and isinstance(getattr(child, "config", None), type(config))
    ]
