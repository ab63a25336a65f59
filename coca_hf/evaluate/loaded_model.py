"""Any causal language model, CoCA or not, with its tokenizer and what a row must say about it."""

import ast
import hashlib
import itertools
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.logging import disable_progress_bar

from coca_hf.errors import CocaError, first_line
from coca_hf.evaluate.batches import processes
from coca_hf.weights import is_derived, read_json

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class LoadedModel:
    """A model under measurement.

    path: as the user gave it. fingerprint: changes when the model's files do. tokens_seen: in CoCA
    training; None for a model that coca_hf did not make. trained_seq_len: the positions that the
    last stage of that training reached. commit: of a model on the hub.
    """

    model: Any
    tokenizer: Any
    name: str
    path: str
    fingerprint: str
    tokens_seen: int | None = None
    trained_seq_len: int | None = None
    commit: str | None = None


def load_model(
    path: str,
    dtype: str = "auto",
    name: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load the causal language model and the tokenizer of a directory or hub id.

    The model is on the GPU where there is one.

    dtype: one of `DTYPES`; `auto` is the checkpoint's own. name: how rows call it, by default the
    directory's name. revision: of a hub id, a commit, branch or tag, by default the main branch.
    trust_remote_code: run the code that it carries, where neither transformers nor coca_hf has the
    model.

    Raises CocaError where there is no model, or a directory where `revision` is given, it is no
    causal language model, it needs code of its own that is not trusted, its weights are unreadable
    or not those of its config, or it has no tokenizer.
    """
    if dtype not in DTYPES:
        raise CocaError(f"--dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    if revision and Path(path).exists():
        raise CocaError(
            f"--revision: got {revision!r} for the directory {path}, expected it for a hub id; "
            f"leave it out"
        )
    disable_progress_bar()
    config, commit = _load_config(path, revision or "main", trust_remote_code)
    at = commit or revision or "main"  # a branch may move meanwhile
    model = _load_weights(path, config, dtype, at, trust_remote_code)
    tokens_seen, trained_seq_len = _training(Path(path))
    return LoadedModel(
        model=model.eval().to(processes().device),
        tokenizer=_load_tokenizer(path, at, trust_remote_code),
        name=name or Path(path).resolve().name + (f"@{revision}" if revision else ""),
        path=str(Path(path)) if Path(path).is_dir() else path,  # without a slash at its end
        fingerprint=fingerprint(path, commit, trust_remote_code),
        tokens_seen=tokens_seen,
        trained_seq_len=trained_seq_len,
        commit=commit,
    )


def check_vocabulary(loaded: LoadedModel, token_ids: torch.Tensor, where: str) -> None:
    """Raise CocaError where `token_ids` (any shape) holds an id that the model does not embed.

    where: what the ids were made from.
    """
    vocab_size = loaded.model.get_input_embeddings().weight.shape[0]
    largest = int(token_ids.max())
    if largest >= vocab_size:
        raise CocaError(
            f"{where}: got token id {largest} from the tokenizer of {loaded.path}, expected ids "
            f"below the model's vocabulary of {vocab_size}; the tokenizer belongs to another model"
        )


def warn_small_tokenizer(loaded: LoadedModel) -> str | None:
    """One line where the tokenizer has too few tokens for the model's embedding; None otherwise.

    Embeddings are padded to multiples of up to 1,024 rows; of published models the most is 905 of
    phi-2's 51,200. So a warning is for more than that, and more than a tenth of the rows.
    """
    rows, tokens = loaded.model.get_input_embeddings().weight.shape[0], len(loaded.tokenizer)
    if rows - tokens <= max(1024, rows // 10):
        return None
    return (
        f"{loaded.path}: got a tokenizer of {tokens:,} tokens for an embedding of {rows:,} rows; "
        f"is it this model's? with another's every number is wrong"
    )


def _load_config(path: str, revision: str, trust_remote_code: bool) -> tuple[Any, str | None]:
    """The config, and the commit on the hub that it is of."""
    directory, hub_id = Path(path), "a model directory or a hub id as owner/name"
    if not path.strip():
        raise CocaError(f"got an empty name of a model, expected {hub_id}")
    if directory.exists() and not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise CocaError(
                f"{path}: got an adapter of peft, expected a whole model; merge it into its base "
                f"model (merge_and_unload) and save that with the tokenizer"
            )
        expected = "a model directory as save_pretrained writes it"
        raise CocaError(f"{path}: got no config.json there, expected {expected}")
    if not directory.exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise CocaError(f"{path}: no such directory, expected {hub_id}")
    absent = "no such directory here, and as a hub id it"
    found = "its config.json" if directory.exists() else absent
    with _own_code_checked(path, f"{found} cannot be read"):
        config = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
        file = cached_file(path, "config.json", revision=revision)
        return config, extract_commit_hash(file, None)


@contextmanager
def _own_code_checked(
    path: str, problem: str, remedy: str = "", of_config: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn what transformers and its readers raise into CocaError: `problem`, unless it comes from
    the code that the model carries or, being one of the errors `of_config`, from its config.
    """
    try:
        yield
    except Exception as error:
        _check_own_code(path, error)
        if isinstance(error, of_config):
            problem, remedy = "transformers makes no model of its config.json", ""
        raise CocaError(f"{path}: {problem} ({first_line(error)}){remedy}") from error


def _check_own_code(path: str, error: Exception) -> None:
    """Raise CocaError where the code that a model carries is not trusted, or is broken."""
    if "trust_remote_code=True" in str(error):
        raise CocaError(f"{path}: {_OWN_CODE}") from None
    frames = traceback.extract_tb(error.__traceback__)
    cache = dynamic_module_utils.HF_MODULES_CACHE  # that code runs from there
    ran = [frame for frame in frames if cache in frame.filename]
    if ran:
        where = f"{Path(ran[-1].filename).name}, line {ran[-1].lineno}: {first_line(error)}"
    elif any(frame.filename == dynamic_module_utils.__file__ for frame in frames):
        where = _syntax_error(Path(path)) or first_line(error)
    else:
        return
    raise CocaError(
        f"{path}: the code that it carries cannot be run ({where}); repair that code, or ask who "
        f"wrote it"
    ) from error


def _syntax_error(directory: Path) -> str | None:
    """The first in the code of a directory; transformers' own error does not say the file."""
    for file in sorted(directory.glob("*.py")):
        try:
            ast.parse(file.read_bytes(), file.name)
        except (SyntaxError, ValueError) as error:
            return f"{file.name}: {first_line(error)}"
    return None


_NOT_OF_FILES = (ArithmeticError, AttributeError, KeyError, TypeError)  # never from reading
_OWN_CODE = (
    "got a model that needs the code it carries; read that code, and if you trust it, add "
    "--trust-remote-code"
)


def _load_weights(
    path: str, config: Any, dtype: str, revision: str, trust_remote_code: bool
) -> Any:
    expected = AutoModelForCausalLM._model_mapping.get(type(config), None)
    found = getattr(config, "architectures", None) or []
    is_classifier = any(str(name).endswith("Classification") for name in found)
    own_classes = getattr(config, "auto_map", None) or {}
    carries_code = not is_classifier and "AutoModelForCausalLM" in own_classes
    is_known = expected is not None and (not found or expected.__name__ in found)
    if not is_known and not (carries_code and trust_remote_code):
        if carries_code:
            raise CocaError(f"{path}: {_OWN_CODE}")
        wanted = f" ({expected.__name__})" if expected else ""
        names = ", ".join(found) or config.model_type
        raise CocaError(f"{path}: got {names}, expected a causal language model{wanted}")
    again = "; save or convert it again"
    with _own_code_checked(path, "its weights cannot be loaded", again, _NOT_OF_FILES):
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CocaError(
            f"{path}: got weights without {missing[0]} ({len(missing)} missing in all), expected "
            f"every tensor of {type(model).__name__}{again}"
        )
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise CocaError(
            f"{path}: got {name} of shape {list(stored)}, expected {list(wanted)} by its "
            f"config.json; are they of one model?"
        )
    unused = sorted(name for name in info["unexpected_keys"] if not is_derived(name, config))
    if unused:
        raise CocaError(
            f"{path}: got weights with {unused[0]} ({len(unused)} such in all), which "
            f"{type(model).__name__} with this config.json does not use; are they of one model?"
        )
    return model


def _load_tokenizer(path: str, revision: str, trust_remote_code: bool) -> Any:
    expected = (
        "got no tokenizer that can be loaded, expected one beside the model; copy tokenizer.json "
        "and tokenizer_config.json of the original model there"
    )
    with _own_code_checked(path, expected):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    # Texts may be longer than those that the model was trained on
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def fingerprint(path: str, commit: str | None, trust_remote_code: bool) -> str:
    """Sixteen hex digits of names, sizes and times of files, or of a hub id and its commit.

    Those of an adapter's base are among them.
    """
    directory = Path(path)
    if directory.is_dir():
        patterns = ["config.json", "adapter_config.json", "*.safetensors", "*.bin", "tokenizer*"]
        patterns += ["*.py"] * trust_remote_code
        directories = [directory]
        adapter = directory / "adapter_config.json"
        base = adapter.is_file() and read_json(adapter).get("base_model_name_or_path")
        if base:
            directories.append(Path(base))  # on the hub, it has no files here
        files = [sorted(one.glob(pattern)) for one in directories for pattern in patterns]
        stats = [(file.name, file.stat()) for file in sorted({*itertools.chain(*files)})]
        text = json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    else:
        text = f"{path}@{commit}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _training(directory: Path) -> tuple[int | None, int | None]:
    """Tokens seen in all stages, those of earlier runs included, and the positions that the last
    stage reached: its block length, or further with `skip_positions`. 0 tokens if only converted.
    """
    record = directory / "training.json"
    if not record.is_file():
        return (0 if (directory / "conversion.json").is_file() else None), None
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
        stages = [int(stage["tokens"]) for stage in facts.get("stages", [])]
        tokens_seen = sum(stages) if stages else int(facts["tokens_seen"])
        data = facts.get("recipe", {}).get("data", {})
        return tokens_seen, data.get("skip_positions") or data.get("seq_len")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CocaError(
            f"{record}: got no whole number under 'tokens_seen', expected one; delete or repair it"
        ) from None
