"""Convert a checkpoint on disk, a block at a time: `convert_checkpoint`."""

import contextlib
import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import xxhash
from huggingface_hub import HfApi

from coca_hf.card import base_metadata, make_card, write_card
from coca_hf.convert import preflight
from coca_hf.convert.adapter import Adapter
from coca_hf.convert.calibration import Calibration, Report
from coca_hf.convert.calibration_text import reach
from coca_hf.convert.config import Form, cache_numbers, check_kept_window, coca_class
from coca_hf.convert.initialise import RULE
from coca_hf.convert.layout import Layout, source_shapes
from coca_hf.convert.source import open_source
from coca_hf.convert.writer import (
    FinishedShard,
    Progress,
    Staging,
    WeightsWriter,
    contents_of,
    lock,
    locked_staging,
    memory_bytes,
    staging_directory,
)
from coca_hf.documents import TextSource, check_text_options, commit_of, local_files
from coca_hf.errors import CocaError, library_errors
from coca_hf.models.hub import CARD, CONVERSION, TRAINING, without_paths
from coca_hf.provenance import now, versions
from coca_hf.weights import HEADS, parse_size

# in training.json, for coca-train to compare weights and config with; conversion changes both
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
    content_pairs: int | Literal["auto"] | None = None,
    content_layers: Collection[int] | Literal["auto"] = (),
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

    The record is also in `dst/conversion.json`. If a run is interrupted, what is finished stays in
    a hidden directory beside `dst`, and the same call continues from there. Safetensors are read in
    blocks, for a few shards of `dst` at a time; memory holds one layer's projections for each.

    src: a directory (safetensors, also of the released code; pickles; or GGUF), a .gguf file, or a
        hub id; a CoCA checkpoint only with ntk_length, and its layers stay as they are
    constraint: `slack`, the default, or `strict`
    dtype: `auto`, the source's, or a name in `DTYPES`
    overwrite: replace a checkpoint at `dst`
    progress: called with bytes written and bytes in all, by one thread at a time
    max_shard_size: of a file of weights, as in `500MB`; a larger tensor has a file to itself
    ntk_length: tokens for which to write dynamic NTK's base (`bake_ntk_`)
    released: `src` is a GPT-NeoX checkpoint of the authors' code, which its files do not show
    calibrate_on: text to fit W_Q, W_T and W_O to the original's attention on (`calibration.py`)
    calibrate_tokens: tokens of that text; as many tokens of repeated passages are added
    calibrate_block, calibrate_passes: tokens in a block, and passes over the blocks
    column, split, subset: of the text, as in `read_documents`
    device, seed: where layers are fitted, and the seed for drawing the text
    calibrate_progress: called with a `CalibrationProgress` before the first layer and after each
    keep_layers: numbers, from 0, of the layers that keep the original's attention; or, with
        calibrate_on, how many, or `auto`: those whose conversion harms most (`calibration.py`)
    content_pairs: how many of a head's pairs, the slowest ones, are content pairs
        (`ContentPairs`): none by default; `auto`: those that do not complete a rotation within the
        trained length
    content_layers: numbers, from 0, of the layers in which every second of the other pairs is one,
        too; `auto`, with calibrate_on: those that a short fit with them brings nearer to the
        original
    keep_window: tokens that kept layers attend to, the query's own included; all by default
    revision: branch, tag or commit of a hub id
    ignore_fields: fields of config.json that are unknown here and that you declare inert
    dry_run: make every check that precedes the first weight, write nothing, download no weights,
        and return what would be read, written and needed (`_plan`) instead of the record
    push_to_hub: a repository to create and to upload `dst` to, as in `owner/name`
    private: whether that repository is private
    allow_pickle: read pickled weights, as tensors alone, if `src` has no safetensors
    adapter: a peft directory with plain LoRA on linear layers, to merge into `src`

    Raises CocaError for input that is not understood, and leaves `dst` as it was; or, if the upload
    fails, with `dst` complete.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = calibrate_progress or (lambda progress: None)
    ranked = keep_layers if isinstance(keep_layers, (int, str)) else None
    named = [] if isinstance(keep_layers, (int, str)) or keep_layers is None else list(keep_layers)
    content = content_layers if isinstance(content_layers, str) else list(content_layers)
    chooses_content = content == "auto"

    # everything that can be refused is refused before the first weight is written, cheapest first
    shard_bytes = parse_size(max_shard_size, "--max-shard-size")
    form = Form(
        src,
        constraint,
        dtype,
        shard_bytes,
        ntk_length,
        released,
        ignore_fields,
        content_pairs,
        [] if isinstance(content, str) else content,
        keep_window,
    )
    sources = [src] if adapter is None else [src, os.fspath(adapter)]
    preflight.check_paths(sources, dst)
    preflight.check_options(form)
    preflight.check_layers(named, ranked, content, calibrate_on)
    check_kept_window(keep_window, ranked or named)
    if calibrate_on is not None:
        preflight.check_device(device)
        of_hub = {"--split": split != "train", "--subset": subset}
        check_text_options(calibrate_on, of_hub, {"--column": column != "text"})
    if push_to_hub is not None:
        preflight.check_repository(push_to_hub)
    with _os_errors(target), contextlib.ExitStack() as stack:
        scratch = None
        if dry_run:
            with lock(target):  # raises what making the staging directory would raise
                pass
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        staging = stack.enter_context(locked_staging(scratch / "dst" if scratch else target))
        texts = map(os.fspath, local_files(calibrate_on) if calibrate_on is not None else ())
        preflight.check_target([*sources, *texts], target, overwrite)
        staging.former = contents_of(target)
        lora = None
        if adapter is not None:
            lora = stack.enter_context(contextlib.closing(Adapter(Path(adapter))))
        source = open_source(src, revision, allow_pickle, lora, scratch)
        stack.enter_context(contextlib.closing(source))
        preflight.check_target([str(source.directory)], target, overwrite)  # in the hub's cache
        if push_to_hub is not None:
            preflight.check_tokenizer_to_push(source, push_to_hub)
        layout = Layout(source, form, named)
        records = source.records() if layout.from_coca else {}
        last = records.get(CONVERSION)
        base = base_metadata(src, source.directory) if last is None else last.get("base", {})
        if records:  # the card is made from them when all weights are written
            problem = "its records are not what coca-convert and coca-train write; restore them"
            with library_errors(f"{source.directory}: {problem}"):
                made = _record(layout, [], None, base, records)
                make_card(made, records.get(TRAINING, {}))
        preflight.check_kept_number(ranked, layout)
        calibration = None
        # weights in `scratch` are headers alone
        numbers_are_here = scratch not in source.directory.parents
        if calibrate_on is not None:
            block = min(calibrate_block, reach(layout.config))
            check_kept_window(keep_window, ranked or named, block)
            calibration = Calibration(
                layout,
                TextSource(
                    calibrate_on, column, split, subset, commit_of(calibrate_on), skip_empty=True
                ),
                calibrate_tokens,
                calibrate_block,
                calibrate_passes,
                device,
                seed,
                ranked=ranked,
                chooses_content=chooses_content,
                reads_source=numbers_are_here and not dry_run,
            )

        expected, possible = layout, [layout]
        if ranked:  # which layers they are does not change the sizes
            some = layout.converted[: 0 if ranked == "auto" else int(ranked)]
            expected = Layout(source, form, some)
            possible.append(Layout(source, form, range(layout.config.num_hidden_layers)))
        preflight.check_room(expected, target, *(calibration.needs[1:] if calibration else ()))
        is_open = bool(chooses_content or ranked)
        _begin(staging, layout, calibration, is_open)
        began = time.perf_counter()
        if (calibration or dry_run) and numbers_are_here:
            preflight.check_numbers(possible, calibrates=calibration is not None)
        if dry_run:
            seconds = time.perf_counter() - began if numbers_are_here else None
            plan = _plan(expected, target, seconds)
            if calibration:
                plan["calibration"] = calibration.plan(layout, numbers_are_here)
            asked = {
                "kept_layers": ranked,
                "kept_window": keep_window if ranked else None,
                "content_layers": content if ranked or chooses_content else None,
            }
            return plan | {name: value for name, value in asked.items() if value}
        calibrated = None
        if calibration:
            if is_open:
                layout = calibration.chosen(layout, named, staging.calibrated, report)
                _begin(staging, layout, calibration)
            layout.calibrated, calibrated = calibration.run(layout, staging.calibrated, report)
        WeightsWriter(layout, staging, progress or (lambda done, total: None)).write()
        layout.calibrated = {}  # NFS removes no directory whose files are mapped
        source.check_unchanged()
        finished = staging.finished.values()
        record = without_paths(_record(layout, finished, calibrated, base, records))
        (staging.checkpoint / CONVERSION).write_text(json.dumps(record, indent=2) + "\n")
        if training := records.get(TRAINING):  # older ones have paths
            kept_facts = {name: training[name] for name in training if name not in HASHES}
            text = json.dumps(without_paths(kept_facts), indent=2)
            (staging.checkpoint / TRAINING).write_text(text + "\n", encoding="utf-8")
        write_card(staging.checkpoint)
        staging.publish()
    if push_to_hub is not None:
        _upload(target, push_to_hub, private)
    return record


def _begin(
    staging: Staging, layout: Layout, calibration: Calibration | None, is_open: bool = False
) -> None:
    """Write all but weights, record and card; `layout` notes what its calibration depends on.

    is_open: calibration has yet to choose layers, so all shards of an earlier run stay.
    """
    layout.calibrated_from = calibration.task.settings if calibration else None
    staging.begin(None if is_open else layout.made_from(), layout.shards)
    layout.config.save_pretrained(staging.checkpoint)  # also copies the modelling files
    layout.source.save_companions(staging.checkpoint, layout.form.ntk_length)


def _plan(layout: Layout, target: Path, seconds: float | None) -> dict:
    """What a conversion of `layout` would read, write and need.

    seconds: the time that reading the weights took, or None if they are not here. Writing a byte
    takes about as long. Without the weights, it is open whether a stored head is the embedding, as
    the config says.
    """
    sizes, has_numbers = layout.source.sizes().values(), seconds is not None
    num_bytes = layout.num_bytes(*layout.shards)
    is_open = layout.config.tie_word_embeddings and not has_numbers
    stored = layout.source.shapes() if is_open else {}
    return _facts(layout) | {
        "read": {"files": len(sizes), "bytes": sum(sizes)},
        "written": {"files": len(layout.shards), "bytes": num_bytes},
        "free_bytes": preflight.free_bytes(target),
        "memory_bytes": memory_bytes(layout),
        "seconds": seconds * (1 + num_bytes / sum(sizes)) if seconds is not None else None,
        "numbers_checked": has_numbers,
        "undecided_heads": [head for head in HEADS if head in stored],
    }


def _record(
    layout: Layout,
    finished: Collection[FinishedShard],
    calibrated: dict | None,
    base: dict,
    records: Mapping[str, dict],
) -> dict:
    """The content of `conversion.json`, when all shards are `finished`."""
    read = {name: digest for facts in finished for name, digest in facts.read.items()}
    record = _facts(layout) | {
        "source_xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode()),
        "ignored_fields": list(layout.form.ignored_fields) or None,
        "adapter": layout.source.adapter.record if layout.source.adapter else None,
        "base": base,
        "architecture": coca_class(layout.config).__name__,
        "start": _initialisation(layout, finished),
        "versions": versions("coca-hf", "transformers", "torch", "safetensors"),
        "date": now(),
        "calibration": calibrated,
    }
    if layout.from_coca:  # its conversions, the first one first
        last = dict(records.get(CONVERSION, {}))
        earlier = last.pop("earlier", [])
        record["earlier"] = [*earlier, last] if last else []
    return {name: value for name, value in record.items() if value is not None}


def _facts(layout: Layout) -> dict:
    """The facts that are in the plan of a conversion and in its record."""
    source, config = layout.source, layout.config
    kind = ", released CoCA layout" if layout.released else ", CoCA" if layout.from_coca else ""
    facts = {
        "source": layout.form.src,
        "source_format": source.kind + kind,
        "source_commit": source.commit,
        "constraint": config.coca_constraint,
        "kept_layers": config.coca_kept_layers,
        "kept_window": config.coca_kept_window,
        "windowed_layers": config.windowed_layers() or None,
        "content_pairs": config.coca_content_pairs or None,
        "content_layers": config.coca_content_layers or None,
        "rope": layout.ntk,
        "dtype": str(config.dtype).removeprefix("torch."),
        "tokenizer_not_taken": source.tokenizer_not_taken,
        **_summary(layout),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _initialisation(layout: Layout, finished: Collection[FinishedShard]) -> dict:
    if layout.released:
        return {"rule": "the released t_proj, mean over the two rows of every rotary pair"}
    if layout.from_coca:
        rule = "none: all weights are those of the source, which is a CoCA checkpoint"
        return {"rule": rule + ", with the adapter" * (layout.source.adapter is not None)}
    if not layout.converted:
        return {"rule": "none: all layers keep the original's attention"}
    content = layout.config.coca_content_pairs or layout.config.coca_content_layers
    scales = {layer: of_heads for facts in finished for layer, of_heads in facts.scales.items()}
    return {
        "rule": RULE + ("; content pairs have the same scale" if content else ""),
        "scales": [scales.get(layer) for layer in range(layout.config.num_hidden_layers)],
    }


def _summary(layout: Layout) -> dict:
    """Parameters, the fraction that each of the paper's stages trains, and bytes of the cache: per
    token before and after, and of the sliding windows that follow.
    """
    source = source_shapes(layout.targets, layout.config).values()
    after = {target.name: math.prod(target.shape) for target in layout.targets}
    total = sum(after.values())

    def fraction(*modules: str) -> float:
        return sum(count for name, count in after.items() if name.split(".")[-2] in modules) / total

    config, itemsize = layout.config, layout.config.dtype.itemsize
    cache = cache_numbers(config)
    unlimited = type(config).from_dict(config.to_dict() | {"coca_kept_window": None})
    before = cache["growing"] if layout.from_coca else cache_numbers(unlimited)["standard"]
    return {
        "parameters": {"before": sum(map(math.prod, source)), "after": total},
        "trainable_fraction": {
            "k": fraction("t_proj"),
            "qkv": fraction("q_proj", "k_proj", "t_proj", "v_proj"),
            "full": 1.0,
        },
        "kv_cache_bytes_per_token": {
            "before": before * itemsize,
            "after": cache["growing"] * itemsize,
        },
        "kv_cache_bytes_of_windows": cache["fixed"] * itemsize,
    }


def _upload(directory: Path, repository: str, private: bool) -> None:
    """Create `repository` and upload the checkpoint in `directory`: the card first, then the rest.

    Raises CocaError if that fails; `directory` stays as it is.
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

    Writers in Rust raise errors that are not OSErrors.
    """
    try:
        yield
    except CocaError:
        raise
    except Exception as error:
        full = "No space left on device" in str(error)
        # a disk without locks raises NotImplementedError
        if not full and not isinstance(error, (OSError, NotImplementedError)):
            raise
        reason = "disk full while writing; free some space" if full else str(error)
        staging = staging_directory(target)
        if staging.exists():
            reason += f"; what is finished is kept in {staging}, and the same command continues"
        raise CocaError(f"{target}: not written: {reason}") from error
