"""Whether OUT is free, or holds a run that this recipe may continue: the same recipe and inputs."""

import json
from pathlib import Path
from typing import Any

import yaml

from coca_hf.errors import CocaError, short
from coca_hf.files import remove_unfinished, replace_text
from coca_hf.train.recipe import Recipe
from coca_hf.train.recipe_file import read_tree
from coca_hf.train.run_directory import INPUTS, RECIPE, STOPPED, saving_to
from coca_hf.weights import read_json

MOST_CHANGES = 8  # that a message lists
LAYOUT = (  # keys that --resume may change: how steps are computed, and which are skipped
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("activation_checkpointing", "torch_compile", "attn_implementation", "fused_cross_entropy"),
    *("report_to", "disable_tqdm", "save_steps", "save_total_limit", "dataloader_num_workers"),
    *("context_parallel_size", "max_bad_steps", "spike_factor", "prepared"),
    *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
)


def check_out(recipe: Recipe, out_dir: Path, resume: bool) -> None:
    """Refuse a directory that this recipe must not write to.

    Raises CocaError for a file, for a directory that is not empty without `resume`, and with it for
    one that coca-train did not make, or made by another recipe (naming what differs).
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise CocaError(
            f"{out_dir}: got a file, expected a directory or nothing; choose another --out"
        )
    if not _is_used(out_dir):
        return
    if not resume:
        raise CocaError(
            f"{out_dir}: not empty; continue what is there with --resume, or choose another --out"
        )
    if not (out_dir / RECIPE).exists():
        raise CocaError(
            f"{out_dir}: got a directory without {RECIPE}, expected one that coca-train made"
        )
    before, now = _flat(read_tree(out_dir / RECIPE)), _flat(recipe.to_dict())
    for tree in (before, now):
        for key in [key for key in tree if key.rpartition(".")[2] in LAYOUT]:
            del tree[key]
    if changes := _changes(before, now):
        raise CocaError(
            f"{out_dir}: cannot --resume with another recipe: {changes}; give the one it was "
            f"started with ({out_dir / RECIPE}), or choose another --out"
        )


def noted_commits(
    out_dir: Path, num_sources: int
) -> tuple[list[str | None] | None, dict[str, str]]:
    """The commits at which the run in `out_dir` reads data sets on the hub, one for each source, or
    None for a new run; and its models on the hub with theirs.

    Raises CocaError where the file is damaged.
    """
    path = out_dir / INPUTS
    inputs = read_json(path) if path.exists() and _is_used(out_dir) else {}
    commits, hub = inputs.get("commits"), inputs.get("hub", {})
    remedy = "restore the file, or choose another --out"
    if not (isinstance(hub, dict) and all(isinstance(name, str) for name in hub.values())):
        raise CocaError(f"{path}: got hub {short(hub)}, expected names of models; {remedy}")
    if commits is not None and not (isinstance(commits, list) and len(commits) == num_sources):
        raise CocaError(
            f"{path}: got commits {short(commits)}, expected one for each of {num_sources} "
            f"sources; {remedy}"
        )
    return commits, hub


def check_inputs(out_dir: Path, inputs: dict[str, Any]) -> None:
    """Compare what the recipe's paths hold, and how large a step is, with what the run noted.

    Raises CocaError where it differs: the stages would not be of one training.
    """
    path = out_dir / INPUTS
    if not (path.exists() and _is_used(out_dir)):
        return
    if changes := _changes(_flat(read_json(path)), _flat(inputs)):
        raise CocaError(
            f"{out_dir}: cannot --resume on other inputs: {changes}; restore them, keep the "
            f"product of processes, per_device_train_batch_size and gradient_accumulation_steps, "
            f"or choose another --out"
        )


def begin_out(out_dir: Path, recipe: Recipe, inputs: dict[str, Any]) -> None:
    """Make the directory with its recipe and inputs in it, unless a run has begun there.

    Raises CocaError where it cannot be written.
    """
    with saving_to(out_dir):
        if not _is_used(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            (out_dir / INPUTS).unlink(missing_ok=True)
            replace_text(out_dir / RECIPE, yaml.safe_dump(recipe.to_dict(), sort_keys=False))
        if not (out_dir / INPUTS).exists():
            replace_text(out_dir / INPUTS, json.dumps(inputs, indent=2) + "\n")
        remove_unfinished(out_dir)
        (out_dir / STOPPED).unlink(missing_ok=True)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    def said(tree: dict[str, Any], key: str) -> str:
        value = tree.get(key, "absent")
        return value if isinstance(value, str) and len(value) < MOST_CHANGES * 20 else short(value)

    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    listed = [
        f"{key} was {said(before, key)}, now {said(now, key)}" for key in changed[:MOST_CHANGES]
    ]
    more = len(changed) - MOST_CHANGES
    return "; ".join(listed + [f"and {more:,} more"] * (more > 0))


def _is_used(out_dir: Path) -> bool:
    """Whether a run has begun there, or the directory holds other files."""
    files = (path for path in out_dir.rglob("*") if not path.is_dir())
    return any(path.name not in (RECIPE, INPUTS) and path.suffix != ".partial" for path in files)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """A tree's values by their dotted paths, stages by name: what two recipes are compared by."""
    if isinstance(tree, dict):
        items = {str(key): value for key, value in tree.items()}
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        items = {str(item.get("name", number)): item for number, item in enumerate(tree)}
    else:
        return {path: tree}
    return {
        key: value
        for name, item in items.items()
        for key, value in _flat(item, f"{path}.{name}".strip(".")).items()
    }
