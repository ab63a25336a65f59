"""Convert a checkpoint on disk, a block at a time: `convert_checkpoint`."""

import contextlib
import json
import math
import os
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerBase

from coca_hf.card import CARD, write_card
from coca_hf.checkout import now, versions
from coca_hf.convert.adapter import Adapter
from coca_hf.convert.calibrate import Report
from coca_hf.convert.calibration import Calibration
from coca_hf.convert.config import check_kept_window, coca_class
from coca_hf.convert.initialise import RULE
from coca_hf.convert.layout import Form, Layout
from coca_hf.convert.preflight import (
    check_device,
    check_kept_layers,
    check_kept_number,
    check_numbers,
    check_options,
    check_paths,
    check_repository,
    check_room,
    check_staging,
    check_target,
    free_bytes,
)
from coca_hf.convert.source import has_numbers, open_source
from coca_hf.convert.staging import (
    FinishedShard,
    Staging,
    contents_of,
    locked_staging,
    staging_directory,
)
from coca_hf.convert.tensors import source_shapes
from coca_hf.convert.writer import Progress, WeightsWriter
from coca_hf.documents import check_text_options, commit_of, local_files
from coca_hf.errors import CocaError, library_errors
from coca_hf.models.hub import without_paths
from coca_hf.weights import HEADS, parse_size

RECORD, TRAINING_RECORD = "conversion.json", "training.json"
# What coca-train holds weights and config against, which conversion changes
HASHES = ("weights_xxh3_128", "config_xxh3_128")


def convert_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    constraint: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_size: str = "1GB",
    ntk_length: int | None = None,
    ntk_factor: float | None = None,
    released: bool = False,
    calibrate_on: str | None = None,
    calibrate_tokens: int = 32768,
    calibrate_block: int = 2048,
    calibrate_passes: int | None = None,
    column: str = "text",
    split: str = "train",
    subset: str | None = None,
    device: str | None = None,
    seed: int = 0,
    calibrate_progress: Report | None = None,
    keep_layers: Sequence[int] | int | str | None = None,
    partial_rotary: Collection[int] = (),
    keep_window: int | None = None,
    revision: str | None = None,
    ignore_fields: Collection[str] = (),
    dry_run: bool = False,
    push_to_hub: str | None = None,
    private: bool = True,
    allow_pickle: bool = False,
    adapter: str | os.PathLike | None = None,
) -> dict:
    """Convert the checkpoint `src` to CoCA in the directory `dst`; returns its record.

    The record is also in `dst/conversion.json`. An interrupted run leaves what is finished in a
    hidden directory beside `dst`, and the same call continues from there. Safetensors are read in
    blocks, a few shards of `dst` at a time; memory holds the projections of one layer for each.

    src: a directory (safetensors, also of the released code; pickles; or GGUF), a .gguf file, or a
        hub id; of a CoCA checkpoint, the layers that it keeps are converted
    constraint: `slack`, the default, or `strict`
    dtype: `auto`, the source's, or a name in `DTYPES`
    overwrite: replace a checkpoint at `dst`
    progress: called with bytes written and bytes in all, by one thread at a time
    max_shard_size: of a file of weights, as in `500MB`; a larger tensor has a file to itself
    ntk_length: tokens for which dynamic NTK's base is written (`bake_ntk_`); a CoCA `src` keeps
        its layers then
    ntk_factor: dynamic NTK's factor
    released: `src` is a GPT-NeoX checkpoint of the authors' code, which none of its files says
    calibrate_on: text to fit W_Q and W_T to the original's attention on (`calibrate.py`)
    calibrate_tokens: tokens of that text; as many of repeated passages are added
    calibrate_block, calibrate_passes: tokens in a block, and passes over the blocks
    column, split, subset: of the text, as `read_documents` takes them
    device, seed: where layers are fitted, and what draws the text
    calibrate_progress: called with a `CalibrationProgress` before the first layer and after each
    keep_layers: numbers, from 0, of the layers that keep the original's attention; or, with
        calibrate_on, how many, or `auto`: those whose conversion harms most (`harm.py`)
    partial_rotary: numbers of the layers in which every second rotary pair stands still and matches
        contents at any distance (`CocaConfig`); of those that calibration finds to keep, none does
    keep_window: tokens that kept layers attend to, the query's own included; all by default
    revision: branch, tag or commit of a hub id
    ignore_fields: fields of config.json that we do not know and you call inert
    dry_run: make every check that comes before the first weight, write nothing, download no
        weights, and return what would be read and written (`_plan`) in place of the record
    push_to_hub: a repository to create and to upload `dst` to, as in `owner/name`
    private: whether nobody else sees that repository
    allow_pickle: read pickled weights, as tensors alone, where `src` has no safetensors
    adapter: a directory of peft with plain LoRA on linear layers, to merge into `src`

    Raises CocaError for input that is not understood, and leaves `dst` as it was; and, with `dst`
    complete, where the upload fails.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = calibrate_progress or (lambda progress: None)

    # What can be refused is refused before the first number is written, the cheapest first.
    shard_bytes = parse_size(max_shard_size, "--max-shard-size")
    ntk = ntk_length, ntk_factor
    form = Form(
        src,
        constraint,
        dtype,
        shard_bytes,
        *ntk,
        released,
        ignore_fields,
        partial_rotary,
        keep_window,
    )
    sources = [src] if adapter is None else [src, os.fspath(adapter)]
    check_paths(sources, dst)
    check_options(form)
    check_kept_layers(keep_layers, calibrate_on)
    check_kept_window(keep_window, keep_layers, calibrate_block if calibrate_on else 1)
    if calibrate_on:
        check_device(device)
        of_hub = {"--split": split != "train", "--subset": subset}
        check_text_options(calibrate_on, of_hub, {"--column": column != "text"})
    if push_to_hub is not None:
        check_repository(push_to_hub)
    with _os_errors(target), contextlib.ExitStack() as stack:
        scratch = None
        if dry_run:
            check_staging(target)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        staging = stack.enter_context(locked_staging(scratch / "dst" if scratch else target))
        texts = map(os.fspath, local_files(calibrate_on) if calibrate_on else ())
        check_target([*sources, *texts], target, overwrite)
        staging.former = contents_of(target)
        lora = None
        if adapter is not None:
            lora = stack.enter_context(contextlib.closing(Adapter(Path(adapter))))
        source = open_source(src, revision, allow_pickle, lora, scratch)
        stack.enter_context(contextlib.closing(source))
        named = None if isinstance(keep_layers, (int, str)) else keep_layers
        ranks_layers = keep_layers is not named
        layout, calibration = Layout(source, form, named), None
        check_kept_number(keep_layers, layout)
        if calibrate_on and layout.from_coca:  # its kept layers are what is fitted to
            own, name = source.config.get("coca_kept_window"), f"{src}: coca_kept_window"
            check_kept_window(own, layout.converted, calibrate_block, name)
        if calibrate_on:
            place = calibrate_on, column, split, subset, commit_of(calibrate_on), True
            amounts = calibrate_tokens, calibrate_block, calibrate_passes
            calibration = Calibration(layout, place, *amounts, device, seed, ranks_layers)
        disk = calibration.needs[1:] if calibration else ()
        check_room(layout, target, *disk)
        tokenizer = _begin(staging, layout, calibration)
        numbers_are_here = has_numbers(source, scratch)
        if (calibration or dry_run) and numbers_are_here:
            check_numbers(layout)
            if ranks_layers:  # any of them may be kept
                every_layer = range(layout.config.num_hidden_layers)
                check_numbers(
                    Layout(source, form.keeping(every_layer), every_layer), known=layout.targets
                )
        if dry_run:
            plan = _plan(layout, calibration, target, numbers_are_here)
            if ranks_layers:
                plan["kept_layers"] = keep_layers
            if keep_window:
                plan["kept_window"] = keep_window
            return plan
        if calibration:
            if isinstance(keep_layers, (int, str)):
                kept = calibration.most_harmful(layout, keep_layers, staging, report)
                layout = Layout(source, form.keeping(kept), kept)
                tokenizer = _begin(staging, layout, calibration)
            calibration.run(layout, staging, report)
        WeightsWriter(layout, staging, progress or (lambda done, total: None)).write()
        layout.calibrated = {}  # NFS removes no directory whose files are mapped
        source.check_unchanged()
        record = without_paths(_record(layout, staging.finished.values(), tokenizer, calibration))
        (staging.checkpoint / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        if training := layout.records.get(TRAINING_RECORD):  # older ones have paths
            kept_facts = {name: training[name] for name in training if name not in HASHES}
            text = json.dumps(without_paths(kept_facts), indent=2)
            (staging.checkpoint / TRAINING_RECORD).write_text(text + "\n", encoding="utf-8")
        write_card(staging.checkpoint)
        staging.publish()
    if push_to_hub is not None:
        _upload(target, push_to_hub, private)
    return record


def _begin(
    staging: Staging, layout: Layout, calibration: Calibration | None
) -> PreTrainedTokenizerBase | None:
    """Write all but weights, record and card; returns the source's tokenizer, where one loads."""
    layout.calibrated_from = calibration.settings if calibration else None
    staging.begin(layout.made_from(), layout.shards)
    layout.config.save_pretrained(staging.checkpoint)  # also copies the modelling files
    return layout.source.save_companions(staging.checkpoint, layout.form.ntk_length)


def _plan(
    layout: Layout, calibration: Calibration | None, target: Path, numbers_are_here: bool
) -> dict:
    """What a conversion of `layout` would read and write, in files and bytes of weights.

    Without numbers it is open whether a head that is stored is the embedding, as the config says.
    """
    sizes = layout.source.sizes().values()
    is_open = layout.config.tie_word_embeddings and not numbers_are_here
    stored = layout.source.shapes() if is_open else {}
    return _facts(layout) | {
        "read": {"files": len(sizes), "bytes": sum(sizes)},
        "written": {"files": len(layout.shards), "bytes": layout.num_bytes(*layout.shards)},
        "free_bytes": free_bytes(target),
        "numbers_checked": numbers_are_here,
        "undecided_heads": [head for head in HEADS if head in stored],
        **({"calibration": calibration.plan()} if calibration else {}),
    }


def _record(
    layout: Layout,
    finished: Collection[FinishedShard],
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration | None,
) -> dict:
    """The content of `conversion.json`, when all shards are `finished`."""
    record = _facts(layout) | {
        "source_xxh3_128": _source_hash(finished),
        "ignored_fields": list(layout.form.ignored_fields) or None,
        "adapter": layout.source.adapter.record if layout.source.adapter else None,
        "base": layout.base,
        "architecture": coca_class(layout.config).__name__,
        "start": _initialisation(layout, finished),
        "rope": layout.ntk,
        "fix_mistral_regex": False if _needs_its_regex_mended(tokenizer) else None,
        "versions": versions("coca-hf", "transformers", "torch", "safetensors"),
        "date": now(),
        "calibration": calibration.record if calibration else None,
        **(_history(layout.records) if layout.from_coca else {}),
    }
    return {name: value for name, value in record.items() if value is not None}


def _history(records: Mapping[str, dict]) -> dict:
    """What was done before to a CoCA source: its conversions, the first one first, and stages."""
    last = dict(records.get(RECORD, {}))
    earlier = last.pop("earlier", [])
    stages = records.get(TRAINING_RECORD, {}).get("stages", [])
    return {"earlier": [*earlier, last] if last else [], "stages_before": len(stages)}


def _facts(layout: Layout) -> dict:
    """What the plan of a conversion and its record have in common."""
    kind = ", released CoCA layout" if layout.released else ", CoCA" if layout.from_coca else ""
    return {
        "source": layout.form.src,
        "source_format": layout.source.kind + kind,
        **({"source_commit": layout.source.commit} if layout.source.commit else {}),
        "constraint": layout.config.coca_constraint,
        **({"converted_layers": layout.converted} if layout.from_coca else {}),
        "kept_layers": layout.config.coca_kept_layers,
        **({"kept_window": window} if (window := layout.config.coca_kept_window) else {}),
        "partial_rotary_layers": layout.config.coca_partial_rotary_layers,
        "dtype": str(layout.config.dtype).removeprefix("torch."),
        **_summary(layout),
    }


def _needs_its_regex_mended(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether transformers notes on its backend to load it with `fix_mistral_regex`."""
    return (
        getattr(getattr(tokenizer, "backend_tokenizer", None), "fix_mistral_regex", None) is False
    )


def _source_hash(finished: Collection[FinishedShard]) -> str:
    """The xxh3_128 of the names and xxh3_128 of all tensors read, in the order of their names."""
    read = {name: digest for facts in finished for name, digest in facts.read.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode())


def _initialisation(layout: Layout, finished: Collection[FinishedShard]) -> dict:
    if layout.released:
        return {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
    if layout.from_coca and not layout.converted:
        return {"rule": "none: all weights are those of the source, which is a CoCA checkpoint"}
    scales = {layer: of_heads for facts in finished for layer, of_heads in facts.scales.items()}
    return {
        "rule": RULE,
        "scales": [scales.get(layer) for layer in range(layout.config.num_hidden_layers)],
    }


def _summary(layout: Layout) -> dict:
    """Parameters, the fraction that each of the paper's stages trains, and cache bytes per token.

    The cache is the half-width one of `models/cache.py`; a CoCA source has it before as well as
    after.
    """
    before = {
        name: math.prod(shape)
        for name, shape in source_shapes(layout.targets, layout.config).items()
    }
    after = {target.name: math.prod(target.shape) for target in layout.targets}
    total = sum(after.values())

    def fraction(*modules: str) -> float:
        return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

    d, itemsize = layout.config.head_dim, layout.config.dtype.itemsize
    layers, width = layout.config.num_hidden_layers, layout.config.num_key_value_heads * d

    def cache(kept: int) -> int:
        """Keys, of which CoCA's layers hold half, values, and the angles that all layers share."""
        return ((3 * layers + kept) * width // 2 + d) * itemsize

    kept = len(layout.config.coca_kept_layers)
    return {
        "parameters": {"before": sum(before.values()), "after": total},
        "trainable_fraction": {
            "k": fraction("t_proj"),
            "qkv": fraction("q_proj", "k_proj", "t_proj", "v_proj"),
            "full": 1.0,
        },
        "kv_cache_bytes_per_token": {
            "before": cache(kept + len(layout.converted))
            if layout.from_coca
            else 2 * layers * width * itemsize,
            "after": cache(kept),
        },
    }


def _upload(directory: Path, repository: str, private: bool) -> None:
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


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    """Raise CocaError, one line, for a full or read-only disk and the like.

    Writers in Rust have errors of their own.
    """
    try:
        yield
    except CocaError:
        raise
    except Exception as error:
        full = "No space left on device" in str(error)
        no_locks = isinstance(error, NotImplementedError)  # on that disk
        if not full and not no_locks and not isinstance(error, OSError):
            raise
        reason = "disk full while writing; free some space" if full else str(error)
        staging = staging_directory(target)
        if staging.exists():
            reason += f"; what is finished is kept in {staging}, and the same command continues"
        raise CocaError(f"{target}: not written: {reason}") from error
