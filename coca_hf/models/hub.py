"""What `push_to_hub` of a CoCA model sends beside weights, config and code: its card, its records, its licence."""

from pathlib import Path

from huggingface_hub import create_repo, file_exists, upload_folder
from transformers.utils.hub import PushToHubMixin

CARD = "README.md"
RECORDS = ("conversion.json", "training.json")
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md", "NOTICE")  # they go where the weights go


class PushesItsCard(PushToHubMixin):
    """A model whose repository gets the card of the directory that it was loaded from, unless it has one already."""

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token=None, create_pr: bool = False, **kwargs):
        """As in transformers, which takes the card that is in the repository and else writes one that says nothing.

        A pull request (`create_pr`) gets no card of ours: the repository is somebody else's.
        """
        directory = Path(self.name_or_path)
        if (directory / CARD).is_file() and not create_pr:
            repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            if not file_exists(repo_id, CARD, token=token):
                upload_folder(
                    repo_id=repo_id,
                    folder_path=directory,
                    allow_patterns=[CARD, *RECORDS, *LICENCE_FILES],
                    commit_message="Upload model card, records and licence",
                    token=token,
                )
        return super().push_to_hub(repo_id, private=private, token=token, create_pr=create_pr, **kwargs)
