"""Convert a checkpoint on disk, a block at a time: `convert_checkpoint`. The destination is absent or complete."""

import contextlib
import copy
import json
import math
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_hf.card import write_card
from coca_hf import models
from coca_hf.convert.calibrate import Calibration, calibrate, default_device, default_passes
from coca_hf.convert.calibration_text import calibration_blocks, reach, repeated_blocks
from coca_hf.convert.harm import layer_harms, most_harmful
from coca_hf.convert.patch import patch_
from coca_hf.convert.plan import DTYPES, TOKENIZER, Plan
from coca_hf.convert.record import conversion_record
from coca_hf.convert.source import SafetensorsSource, load_tokenizer, open_source
from coca_hf.convert.staging import Staging, contents_of, locked_staging, staging_directory
from coca_hf.convert.writer import Progress, WeightsWriter, bytes_of
from coca_hf.errors import CocaError
from coca_hf.held_out import Place
from coca_hf.models.decoder import CocaForCausalLM
from coca_hf.weights import parse_size, read_json, size_in_words

RECORD = "conversion.json"
# Layers that other code fitted are not reused. All of it: initialisation, attention, rotary angles and the fit decide.
CODE = (Path(__file__).parent, Path(models.__file__).parent)


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
    calibrate_progress: Progress | None = None,
    keep_layers: Sequence[int] | int | str | None = None,
    revision: str | None = None,
    ignore_fields: Collection[str] = (),
) -> dict:
    """Write a CoCA checkpoint made from the checkpoint `src` to the directory `dst`; returns its record.

    src: a directory (safetensors, single or sharded, also the released full-width CoCA layout; or GGUF), a .gguf file,
    or a hub id. constraint: `slack` (by default) or `strict`. dtype: `auto` (the source's) or a name in `DTYPES`.
    overwrite: replace a checkpoint at `dst`. progress: called with bytes written and bytes in all, by one thread at a
    time. max_shard_size: of the files of weights, as in `500MB`; a tensor that is larger has a file to itself.
    ntk_length: total tokens for which the base of dynamic NTK is written into the configuration (`bake_ntk_`;
    ntk_factor: its factor); then `src` may also be a CoCA checkpoint, whose weights are copied. released: `src` is a
    GPT-NeoX checkpoint of the authors' released code, which no file of it says. calibrate_on: text, as `read_documents`
    takes it (`column`, `split`, `subset`): W_Q and W_T are fitted to the original's attention (`calibrate.py`) on
    `calibrate_tokens` of its tokens, and as many with repeated passages, in blocks of `calibrate_block` and
    `calibrate_passes` passes, drawn by `seed`, a layer at a time on `device`; the original is then loaded.
    calibrate_progress: called with layers done and in all. keep_layers: numbers, from 0, of the layers that keep the
    original's attention; or, with calibrate_on, how many: those whose conversion harms most (`harm.py`), or `auto`: as
    many as do half of the harm. revision: of a hub id, a branch, a tag or a commit. ignore_fields: fields of config.json that
    we do not know and you call inert. The record is also written to `dst/conversion.json`.

    Safetensors sources are read in blocks, a few shards of `dst` at a time; memory holds the projections of one layer
    for each, not a shard. An interrupted run leaves what is finished in a hidden directory beside `dst`, and the same
    call continues from there.

    Raises CocaError for input that is not understood, and leaves `dst` as it was.
    """
    src, target = os.fspath(src), Path(dst).absolute()
    if Path(dst).name in ("", ".."):
        raise CocaError(f"DST: got {os.fspath(dst)!r}, expected the name of a directory to write")
    _check_options(constraint, dtype, ntk_length, ntk_factor)
    _check_kept(keep_layers, calibrate_on)
    shard_bytes = parse_size(max_shard_size, "--max-shard-size")
    for path in (Path(src).absolute(), target, staging_directory(target)):
        _check_path(path)
    with _os_errors(target), locked_staging(target) as staging:
        _check_target(src, target, overwrite)
        staging.former = contents_of(target)
        with contextlib.closing(open_source(src, revision)) as source:

            def plan_with(kept: Sequence[int] | None) -> Plan:
                return Plan(
                    source, src, constraint, dtype, shard_bytes, ntk_length, ntk_factor, released, kept, ignore_fields
                )

            def prepare(plan: Plan) -> WeightsWriter:
                """Write all but weights, record and card."""
                plan.calibrated_from = fit.settings if fit else None
                staging.begin(plan.made_from(), plan.shards)
                _check_disk_space(plan, staging)
                _write_companions(plan, staging.checkpoint)
                return WeightsWriter(plan, staging, progress or (lambda done, total: None))

            fit, number = None, keep_layers if isinstance(keep_layers, (int, str)) else None
            plan = plan_with(() if isinstance(keep_layers, (int, str)) else keep_layers)
            if isinstance(number, int) and number > plan.config.num_hidden_layers:
                raise CocaError(
                    f"--keep-layers: got {number}, expected at most the model's {plan.config.num_hidden_layers} layers"
                )
            if calibrate_on:
                place = calibrate_on, column, split, subset, None, True
                fit = _Calibration(plan, place, calibrate_tokens, calibrate_block, calibrate_passes, device, seed)
            writer = prepare(plan)
            if fit:
                report = calibrate_progress or (lambda done, total: None)
                writer.check()
                if number:
                    every_layer = plan_with(range(plan.config.num_hidden_layers))  # any of them may be kept
                    WeightsWriter(every_layer, staging, writer.progress).check(known=plan.targets)
                    plan = plan_with(fit.most_harmful(plan, number, staging, report))
                    writer = prepare(plan)
                fit.run(plan, staging, report)
            record = _write(plan, staging, writer, fit.record if fit else None)
            staging.publish()
    return record


def _check_disk_space(plan: Plan, staging: Staging) -> None:
    needed = plan.num_bytes(*(shard for shard in plan.shards if shard not in staging.finished))
    free = shutil.disk_usage(staging.directory).free
    if needed > free:
        raise OSError(
            f"disk full: {size_in_words(free)} free, expected {size_in_words(needed)}; free some or choose another "
            f"destination"
        )


class _Calibration:
    """The calibration of the source of `plan` on the documents of `place`."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        num_tokens: int,
        block_tokens: int,
        passes: int | None,
        device: str | None,
        seed: int,
    ):
        if plan.from_coca or plan.released:
            raise CocaError("--calibrate: got a CoCA checkpoint, expected an original, whose attention it imitates")
        self.device = device or default_device()
        _check_device(self.device)
        self.text, self.seed = place[0], seed
        self.tokenizer = plan.source.load_tokenizer()
        text_blocks, self.held_out = calibration_blocks(
            place, self.tokenizer, plan.config, num_tokens, block_tokens, seed
        )
        self.blocks = torch.cat((text_blocks, repeated_blocks(text_blocks, self.tokenizer, plan.config, seed)))
        self.text_tokens = text_blocks.numel()
        self.passes = passes or default_passes(len(self.blocks))
        ids_hash = xxhash.xxh3_128_hexdigest(bytes_of(self.blocks))
        code = [xxhash.xxh3_128_hexdigest(file.read_bytes()) for folder in CODE for file in sorted(folder.glob("*.py"))]
        options = plan.config.coca_constraint, seed, self.passes
        self.settings = [plan.source.states(), self.blocks.shape, ids_hash, *options, code]
        self.harms: list[float] | None = None

    def run(self, plan: Plan, staging: Staging, progress: Progress) -> None:
        """Fit the layers of `plan`, and tell it; note what was done in `record`."""
        began = time.perf_counter()
        done, original, _ = self._fit(plan, staging, progress)
        plan.calibrated = done.tensors
        self.record = {
            "text": self.text,
            "tokens": self.text_tokens,
            "repeated_tokens": self.blocks.numel() - self.text_tokens,
            "block_tokens": self.blocks.shape[1],
            "reach": reach(original.config),
            "held_out_tokens": self.held_out.numel(),
            "seed": self.seed,
            "passes": self.passes,
            "device": self.device,
            "perplexity": done.perplexity,
            "attention_kl": [layer._asdict() for layer in done.layers],
            **({"layer_harm": self.harms} if self.harms else {}),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def most_harmful(self, plan: Plan, number: int | str, staging: Staging, progress: Progress) -> list[int]:
        """The `number` layers (or `auto`) whose conversion harms most, after all layers of `plan` were fitted."""
        done, original, coca = self._fit(plan, staging, progress)
        some = self.held_out[: max(1, len(self.held_out) // 2)]
        blocks = torch.cat((some, repeated_blocks(some, self.tokenizer, plan.config, self.seed)))
        self.harms = layer_harms(original, coca, done.tensors, blocks, self.device)
        return most_harmful(self.harms, None if number == "auto" else int(number))

    def _fit(
        self, plan: Plan, staging: Staging, progress: Progress
    ) -> tuple[Calibration, PreTrainedModel, CocaForCausalLM]:
        config = plan.config
        original = plan.source.load_model().eval()
        if original.dtype == torch.float16 != config.dtype:
            original.float()  # patch_ refuses what float16 cannot hold, although it is not to be written
        present = [field for field in plan.ignored_fields if hasattr(original.config, field)]
        coca = patch_(  # shares all weights but W_T
            copy.copy(original),
            config.coca_constraint,
            keep_layers=config.coca_kept_layers,
            ignore_fields=present,
        )
        done = calibrate(
            original,
            coca,
            self.blocks,
            self.held_out,
            staging.calibrated,
            json.dumps(self.settings, default=str),
            self.seed,
            self.passes,
            self.device,
            progress,
        )
        return done, original, coca


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CocaError(
            f"--device: got {device!r}, expected cpu, or cuda, cuda:1 or mps where this machine has it"
        ) from error


def _write(plan: Plan, staging: Staging, writer: WeightsWriter, calibration: dict | None) -> dict:
    """Write weights, record and card into `staging`; returns the record."""
    writer.write()
    plan.source.check_unchanged()
    record = conversion_record(plan, staging.finished.values())
    if calibration:
        record["calibration"] = calibration
    (staging.checkpoint / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    write_card(staging.checkpoint)
    return record


def _write_companions(plan: Plan, directory: Path) -> None:
    """Write all but weights, record and card. Before those, because what is refused here is refused at once."""
    plan.config.save_pretrained(directory)  # also copies the modelling files
    plan.source.save_companions(directory)
    if isinstance(plan.source, SafetensorsSource) and plan.source.has_tokenizer():  # GGUF's is one that was saved
        with contextlib.suppress(CocaError):  # one that cannot be loaded is copied as it is
            plan.tokenizer = plan.source.load_tokenizer()
    if plan.tokenizer:
        _keep_tokenizer(plan.tokenizer, directory)
    if plan.ntk:
        _raise_tokenizer_length(directory / TOKENIZER, plan.ntk["ntk_length"])


def _keep_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Make the files in `directory` load as `tokenizer`, the source's, if they do not.

    transformers chooses a tokenizer's class, and whether it mends its regular expression (`fix_mistral_regex`), by the
    model type and the version in config.json too, which are now others. What it made of the source is saved then.
    """
    for mended in (False, True):
        with contextlib.suppress(CocaError):
            if _behaviour(load_tokenizer(directory)) == _behaviour(tokenizer):
                return
        if not mended:
            tokenizer.save_pretrained(directory)
    raise CocaError(
        f"{tokenizer.name_or_path}: its {type(tokenizer).__name__} does not load as itself beside another config.json; "
        f"expected one that does; load it with transformers and save_pretrained it to the source"
    )


def _behaviour(tokenizer: PreTrainedTokenizerBase) -> tuple:
    """Whatever decides the token ids of a text or a chat."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend else {"model": {}}
    if isinstance(steps["model"].get("vocab"), dict):
        del steps["model"]["vocab"]  # where two tokens share an id, it has either
    chat = tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side
    return type(tokenizer), steps, tokenizer.get_vocab(), chat


def _raise_tokenizer_length(file: Path, length: int) -> None:
    """Serving engines take the smaller of the tokenizer's length and the model's."""
    tokenizer = read_json(file) if file.is_file() else {}
    if isinstance(tokenizer.get("model_max_length"), int) and tokenizer["model_max_length"] < length:
        file.write_text(json.dumps(tokenizer | {"model_max_length": length}, indent=2) + "\n")


def _check_options(constraint: str | None, dtype: str, ntk_length: int | None, ntk_factor: float | None) -> None:
    if constraint not in (None, "slack", "strict"):
        raise CocaError(f"--constraint: got {constraint!r}, expected slack or strict")
    if dtype != "auto" and dtype not in DTYPES:
        raise CocaError(f"--dtype: got {dtype!r}, expected auto, {', '.join(DTYPES)}")
    if ntk_length is not None and ntk_length < 1:
        raise CocaError(f"--ntk-length: got {ntk_length}, expected the total number of tokens")
    if ntk_factor is not None and not (ntk_length and 1 <= ntk_factor < math.inf):
        raise CocaError(f"--ntk-factor: got {ntk_factor}, expected at least 1, together with --ntk-length")


def _check_kept(keep_layers: Sequence[int] | int | str | None, calibrate_on: str | None) -> None:
    if not isinstance(keep_layers, (int, str)):
        return
    if keep_layers != "auto" and (isinstance(keep_layers, str) or keep_layers < 1):
        raise CocaError(f"--keep-layers: got {keep_layers!r}, expected auto, a number from 1, or a list of layers")
    if not calibrate_on:
        raise CocaError(
            f"--keep-layers: got {keep_layers} without --calibrate, which measures the harm of layers; pass --calibrate "
            f"TEXT, or name the layers, as in 8,17 (one alone: '8,')"
        )


def _check_path(path: Path) -> None:
    """Raise CocaError for a path that the system cannot look up, or that no file in UTF-8 can name."""
    try:
        str(path).encode()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UnicodeEncodeError:
        raise CocaError(f"{path}: got a name that is not UTF-8, which no JSON can hold; rename it") from None
    except (OSError, ValueError) as error:  # too long, a circle of links, not permitted; a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise CocaError(f"{path}: cannot be used ({reason}); choose another path") from error


def _check_target(src: str, target: Path, overwrite: bool) -> None:
    source = Path(src).absolute().resolve()
    for directory in (target.resolve(), staging_directory(target).resolve()):
        if source.exists() and directory in (source, *source.parents):
            raise CocaError(f"{directory}: is the source itself or holds it; choose another destination")
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        raise CocaError(f"{target}: is a link to {os.readlink(target)}; name the directory itself, or remove the link")
    if not overwrite:
        raise CocaError(
            f"{target}: exists and is left as it is; pass --overwrite to replace it, or choose another name"
        )
    if _is_mount_point(target):
        raise CocaError(f"{target}: a file system is mounted there, which cannot be replaced; choose a name below it")
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise CocaError(
            f"{target}: --overwrite replaces a checkpoint directory only, and there is no config.json in it"
        )


def _is_mount_point(path: Path) -> bool:
    """Also of a directory of the same file system, on Linux; `os.path.ismount` does not see those."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return os.path.ismount(path)
    points = (line.split(b" ")[4] for line in mounts.read_bytes().splitlines())
    octal = re.compile(rb"\\(\d{3})")  # of blanks and backslashes
    return os.fsencode(path.resolve()) in {octal.sub(lambda code: bytes([int(code[1], 8)]), point) for point in points}


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    """Disk full, read-only, not permitted: one line instead of a traceback. Rust writers have errors of their own."""
    try:
        yield
    except CocaError:
        raise
    except Exception as error:
        full = "No space left on device" in str(error)
        if not full and not isinstance(error, (OSError, NotImplementedError)):  # the latter: no locks on that disk
            raise
        reason = "disk full while writing; free some space" if full else str(error)
        staging = staging_directory(target)
        kept = f"; what is finished is kept in {staging}, and the same command continues" if staging.exists() else ""
        raise CocaError(f"{target}: not written: {reason}{kept}") from error
