"""What `push_to_hub` of a CoCA model sends besides the weights: card, records and licence."""

import glob
import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, file_exists, hf_hub_download
from transformers.utils.hub import PushToHubMixin

CARD = "README.md"
RECORDS = CONVERSION, TRAINING = "conversion.json", "training.json"
# these go wherever the weights go
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")


class PushesItsCard(PushToHubMixin):
    """A model whose repository gets card, records and licence of its checkpoint.

    A card that the repository already has stays. A pull request (`create_pr`) gets none of them,
    because the repository is somebody else's. A model that was not loaded from a local checkpoint
    has none.
    """

    def _upload_modified_files(
        self,
        working_dir,
        repo_id: str,
        *args,
        token=None,
        create_pr: bool = False,
        revision: str | None = None,
        **rest,
    ):
        """As in transformers, which has put the main branch's card, or an empty one, into
        `working_dir`.
        """
        staged = Path(working_dir)
        if not create_pr:
            checkpoint = self._checkpoint()
            if checkpoint:
                _add_records(checkpoint, staged)
            card = _card(repo_id, revision, token, checkpoint)
            if card:
                _add_card(card, staged / CARD)
        return super()._upload_modified_files(
            working_dir, repo_id, *args, token=token, create_pr=create_pr, revision=revision, **rest
        )

    def _checkpoint(self) -> Path | None:
        """The directory that the model was loaded from; None if it came from elsewhere."""
        config = Path(self.name_or_path, "config.json")
        if not self.name_or_path or not config.is_file():
            return None
        is_own = json.loads(config.read_text()).get("model_type") == self.config.model_type
        return config.parent if is_own else None


def _card(repo_id: str, revision: str | None, token, checkpoint: Path | None) -> Path | None:
    """The card for this upload; None if it is the one that transformers takes."""
    if revision and file_exists(repo_id, CARD, revision=revision, token=token):
        return Path(hf_hub_download(repo_id, CARD, revision=revision, token=token))
    if checkpoint and (checkpoint / CARD).is_file() and not file_exists(repo_id, CARD, token=token):
        return checkpoint / CARD
    return None


def _add_card(card_file: Path, place: Path) -> None:
    """Put the card at `place`, with the tags of the card there, which `push_to_hub` was given."""
    card, tags = ModelCard.load(card_file), ModelCard.load(place).data.tags
    if tags:
        card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    card.save(place)


def _add_records(checkpoint: Path, staged: Path) -> None:
    for name in RECORDS:
        if (checkpoint / name).is_file():
            record = without_paths(json.loads((checkpoint / name).read_text(encoding="utf-8")))
            (staged / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name in LICENCE_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, staged / name)


def without_paths(value: Any) -> Any:
    """A record without local paths, which may leave this machine: paths and globs of local files
    are cut to their last part.

    value: strings, numbers, lists and dicts. Hub ids stay: everything in a dict that is `on_hub`,
    and everything under `base`. A relative path is told from an id by the files that it matches, so
    call this in the directory that the path is relative to.
    """
    if isinstance(value, dict):
        if value.get("on_hub"):
            return value
        return {key: item if key == "base" else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    is_here = "/" in value and (os.path.exists(value) or glob.glob(value, recursive=True))
    if is_here or value.startswith(("/", "~", ".")):
        return os.path.basename(os.path.abspath(value))
    return value
