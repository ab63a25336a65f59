"""A converted checkpoint on the hub: what is checked before the work, and the upload after it."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from coca_hf.card import CARD
from coca_hf.errors import CocaError, library_errors


def check_repository(repository: str) -> None:
    """Raise CocaError unless we are logged in and may create `repository`, which is not there."""
    option = f"--push-to-hub {repository}"
    owner, _, name = repository.partition("/")
    with library_errors(f"{option}: got no name of a repository, expected OWNER/NAME"):
        validate_repo_id(f"{owner}/{name}")
    with library_errors(f"{option}: the hub does not let us in"):
        try:
            login = HfApi().whoami()
        except LocalTokenNotFoundError as error:
            raise CocaError(
                f"{option}: got no login, expected one that may write; run `hf auth login`, or set "
                "HF_TOKEN"
            ) from error
    owners = [login["name"], *(organisation["name"] for organisation in login.get("orgs", []))]
    if owner.lower() not in map(str.lower, owners):
        raise CocaError(
            f"{option}: got the owner {owner}, expected one that this login writes for: "
            f"{', '.join(owners)}"
        )
    if login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise CocaError(
            f"{option}: got a token that only reads, expected one that may write; make one at "
            "https://huggingface.co/settings/tokens"
        )
    with library_errors(f"{option}: the hub does not say whether it is there"):
        exists = HfApi().repo_exists(repository)
    if exists:
        raise CocaError(
            f"{option}: is on the hub already, and is left as it is; choose another name, or "
            f"convert without --push-to-hub and run `hf upload {repository} DST`"
        )


def upload(directory: Path, repository: str, private: bool) -> None:
    """Create `repository` and send the checkpoint in `directory`: its card first, then the rest.

    Raises CocaError where that fails; `directory` stays as it is.
    """
    hub = HfApi()
    visibility = " --private" if private else ""
    command = f"hf upload {repository} {shlex.quote(str(directory))}{visibility}"
    with library_errors(
        f"{repository}: not uploaded; the checkpoint is complete in {directory}, and `{command}` "
        "continues"
    ):
        hub.create_repo(repository, private=private)
        hub.upload_file(path_or_fileobj=directory / CARD, path_in_repo=CARD, repo_id=repository)
        hub.upload_folder(repo_id=repository, folder_path=directory, ignore_patterns=[CARD])
