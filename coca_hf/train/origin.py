"""Where a recipe's model, teacher or tokenizer is: a directory, or `owner/name` on the hub, with `@revision` if wanted.

A revision is a branch, a tag or a commit. A run reads all at the commit that it is at when the run begins.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from huggingface_hub import snapshot_download

from coca_hf.errors import library_errors
from coca_hf.models.hub import CARD, LICENCE_FILES, RECORDS


def origin(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` that say where to load from."""
    path, _, revision = name.partition("@")
    if Path(name).exists() or not revision:
        return {"pretrained_model_name_or_path": name}
    return {"pretrained_model_name_or_path": path, "revision": revision}


def located(name: str) -> tuple[str, Path]:
    """`name` at the commit that it is at now, and its directory: of the hub, config, card, records and licence alone.

    Raises CocaError where there is no such model.
    """
    if Path(name).exists():
        return name, Path(name)
    path, _, revision = name.partition("@")
    files = ["config.json", "tokenizer_config.json", CARD, *RECORDS, *LICENCE_FILES]
    with loading(name):
        directory = Path(snapshot_download(path, revision=revision or None, allow_patterns=files))
    return f"{path}@{directory.name}", directory


def loading(name: str) -> AbstractContextManager[None]:
    """Turns what the libraries make of a model's files into one line: a CocaError."""
    return library_errors(f"{name}: cannot be loaded, expected a model directory or hub id")
