"""What a conversion refuses before it writes: options, paths, destination, disk, numbers, upload.

`convert_checkpoint` calls these in the order of their cost. `Layout` refuses configurations and
tensors' shapes, `open_source` damaged files, and `Staging` foreign files from an earlier run.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

from coca_hf.convert.config import Form
from coca_hf.convert.layout import DTYPES, Layout
from coca_hf.convert.source import TEMPLATES, Source
from coca_hf.convert.writer import Staging, staging_directory
from coca_hf.errors import CocaError, library_errors
from coca_hf.files import size_in_words

CACHES = (".cache", "__pycache__")


def check_options(form: Form) -> None:
    if form.constraint not in (None, "slack", "strict"):
        raise CocaError(f"--constraint: got {form.constraint!r}, expected slack or strict")
    if form.dtype != "auto" and form.dtype not in DTYPES:
        raise CocaError(f"--dtype: got {form.dtype!r}, expected auto, {', '.join(DTYPES)}")
    if isinstance(form.content_pairs, str) and form.content_pairs != "auto":
        raise CocaError(
            f"--content-pairs: got {form.content_pairs!r}, expected how many of a head's pairs, or auto"
        )
    if form.ntk_length is not None and form.ntk_length < 1:
        raise CocaError(f"--ntk-length: got {form.ntk_length}, expected the total number of tokens")


def check_layers(
    named: Sequence[int],
    ranked: int | str | None,
    content: Collection[int] | str,
    calibrate_on: str | None,
) -> None:
    """named: the layers of --keep-layers; or ranked: how many, or `auto`; content: those of
    --content-layers, or `auto`.
    """
    if isinstance(content, str):
        if content != "auto" or calibrate_on is None:
            raise CocaError(
                f"--content-layers: got {content!r}, expected numbers of layers, or auto with "
                "--calibrate, which fits each layer in both ways"
            )
        content = ()
    for option, layers in (("--keep-layers", named), ("--content-layers", content)):
        if twice := sorted(layer for layer, count in Counter(layers).items() if count > 1):
            raise CocaError(
                f"{option}: got layer {twice[0]} more than once in {list(layers)}, expected each "
                "layer once"
            )
    if both := sorted({*named} & {*content}):
        raise CocaError(
            f"--content-layers: got layers {both}, which --keep-layers keeps; expected CoCA layers"
        )
    if ranked is None:
        return
    if ranked != "auto" and (isinstance(ranked, str) or ranked < 1):
        raise CocaError(
            f"--keep-layers: got {ranked!r}, expected auto, a number from 1, or a list of layers"
        )
    if calibrate_on is None:
        raise CocaError(
            f"--keep-layers: got {ranked} without --calibrate, which measures the harm of "
            "an original's layers; name the layers, as in 8,17 (one alone: '8,'), or convert "
            "the original with --calibrate TEXT"
        )


def check_kept_number(ranked: int | str | None, layout: Layout) -> None:
    most = layout.config.num_hidden_layers
    if isinstance(ranked, int) and ranked > most:
        raise CocaError(f"--keep-layers: got {ranked}, expected at most the model's {most} layers")


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CocaError(
            f"--device: got {device!r}, expected cpu, or cuda, cuda:1 or mps where this machine "
            "has it"
        ) from error


def check_paths(sources: Collection[str], dst: str | os.PathLike) -> None:
    """Raise CocaError for an empty name, and for a path that cannot be looked up or is not UTF-8."""
    if "" in sources:
        raise CocaError(
            "got an empty name of a checkpoint, expected a directory, a file or a hub id"
        )
    if Path(dst).name in ("", ".."):
        raise CocaError(f"DST: got {os.fspath(dst)!r}, expected the name of a directory to write")
    target = Path(dst).absolute()
    for path in (*(Path(src).absolute() for src in sources), target, staging_directory(target)):
        try:
            str(path).encode()  # JSON holds no other names
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        # too long, a circle of links, not permitted; not UTF-8, a null byte
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CocaError(f"{path}: cannot be used ({reason}); choose another path") from error


def check_target(sources: Collection[str], target: Path, overwrite: bool) -> None:
    found = [source for source in (Path(name).resolve() for name in sources) if source.exists()]
    within = {directory for source in found for directory in (source, *source.parents)}
    for directory in (target.resolve(), staging_directory(target).resolve()):
        if directory in within:
            raise CocaError(
                f"{directory}: is the source itself or holds it, or the text of --calibrate; "
                "choose another destination"
            )
    if not os.path.lexists(target):
        return
    problem = None
    if target.is_symlink():
        link = os.readlink(target)
        problem = f"is a link to {link}; name the directory itself, or remove the link"
    elif not overwrite:
        problem = (
            "exists and is left as it is; pass --overwrite to replace it, or choose another name"
        )
    elif _is_mount_point(target):
        problem = "a file system is mounted there, which cannot be replaced; choose a name below it"
    elif not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        problem = "--overwrite only replaces checkpoints, directories with a config.json"
    else:
        directories = sorted(entry for entry in target.iterdir() if entry.is_dir())
        foreign = [path for path in directories if path.name not in (TEMPLATES, *CACHES)]
        foreign += [path for path in (target / TEMPLATES).glob("*") if path.suffix != ".jinja"]
        if foreign:
            problem = (
                f"--overwrite would delete {foreign[0].relative_to(target)}, which is no part of a "
                "checkpoint; move it away, or choose another destination"
            )
    if problem:
        raise CocaError(f"{target}: {problem}")


def free_bytes(target: Path) -> int:
    """Free bytes on the disk of `target`, and what an earlier run wrote, which is kept or removed."""
    staging, directory = Staging(target), staging_directory(target)
    written = [*staging.checkpoint.glob("*.safetensors"), *staging.calibrated.glob("[lrs]*-*")]
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free + sum(file.stat().st_size for file in written)


def check_room(layout: Layout, target: Path, states: int = 0, layers: int = 0) -> None:
    """Raise OSError if the disk of `target` has too little room.

    states, layers: bytes of calibration's hidden states, which are removed before weights are
    written, and of its layers, which are not.
    """
    weights = layout.num_bytes(*layout.shards)
    needed, free = max(weights, states) + layers, free_bytes(target)
    if needed > free:
        remedy = ", or fewer --calibrate-tokens" if states > weights else ""
        raise OSError(
            f"disk full: {size_in_words(free)} free, expected {size_in_words(needed)}; free some "
            f"or choose another destination{remedy}"
        )


def check_numbers(layouts: Iterable[Layout], calibrates: bool) -> None:
    """Raise CocaError for what writing one of `layouts` would refuse, before layers are calibrated
    for hours.

    Only what calibration itself makes of W_Q, W_T and W_O is still unknown.
    """
    known = set[str]()
    for layout in layouts:
        initialiser = layout.initialiser(layout.source.read)
        for target in layout.targets:
            if target.name in known:
                continue
            known.add(target.name)
            if layout.is_copied(target):
                for block in layout.source.blocks(target.source):
                    layout.as_stored(target, block)
            else:
                made = initialiser.make(target)
                if not (calibrates and target.module == "t_proj"):  # which is fitted later
                    layout.as_stored(target, made)


def check_repository(repository: str) -> None:
    """Raise CocaError unless the login may create `repository` and it does not exist yet."""
    option, (owner, _, name) = f"--push-to-hub {repository}", repository.partition("/")
    with library_errors(f"{option}: expected OWNER/NAME, and a login that may write there"):
        validate_repo_id(f"{owner}/{name}")
        login = HfApi().whoami()
        owners = [login["name"], *(organisation["name"] for organisation in login.get("orgs", []))]
        exists = HfApi().repo_exists(repository)
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
    if exists:
        raise CocaError(
            f"{option}: is on the hub already, and is left as it is; choose another name, or "
            f"convert without --push-to-hub and run `hf upload {repository} DST`"
        )


def check_tokenizer_to_push(source: Source, repository: str) -> None:
    """Raise CocaError if a part of the tokenizer, which DST is without, would not be uploaded."""
    if missing := source.tokenizer_not_taken:
        raise CocaError(
            f"--push-to-hub {repository}: the tokenizer would be without {missing}; convert without "
            f"--push-to-hub, copy its files into DST, and run `hf upload {repository} DST`"
        )


def _is_mount_point(path: Path) -> bool:
    """Whether `path` is a mount point; on Linux also a bind mount, which `os.path.ismount` misses."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return os.path.ismount(path)
    points = (line.split(b" ")[4] for line in mounts.read_bytes().splitlines())
    octal = re.compile(rb"\\(\d{3})")  # blanks and backslashes are written so
    return os.fsencode(path.resolve()) in {
        octal.sub(lambda code: bytes([int(code[1], 8)]), point) for point in points
    }
