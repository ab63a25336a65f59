"""`--calibrate`: fit the attention of all layers, and find the layers whose conversion harms most.

The layers are fitted one at a time (`layer_fit.py`), on the hidden states that the original has
there; then W_O of all of them is fitted on those of the converted model (`refit.py`). Memory holds
a pair of layers (`LayerPairs`) and what the original's attention sees there (`AttentionInputs`);
hidden states are in files. A run that is killed continues with the layer it was at.

The harm of converting a layer is how much lookups suffer if this layer alone has CoCA's attention,
calibrated: on what is read a second time (`copies`), the mean over tokens, in nats, of

    KL(original's prediction || prediction with this layer converted)

less the same mean on what is read there for the first time. Without that subtraction the first
layers come first, whose conversion changes all predictions, and lookups lose more
(docs/results/kept-layers). `coca-eval layers` measures more: each layer also as the last one to
be converted.
"""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from coca_hf.convert.calibration_text import (
    calibration_blocks,
    copies,
    crowd_size,
    reach,
    repeated_blocks,
)
from coca_hf.convert.config import head_of
from coca_hf.convert.layer_fit import (
    STEPS,
    FitTask,
    divergences,
    expected_seconds,
    fit,
    is_nearer_as_content_layer,
    make_content_layer_,
    run_original,
)
from coca_hf.convert.layer_pairs import (
    BATCH_TOKENS,
    FITTED,
    HiddenStates,
    LayerPairs,
    batches,
    run_layer,
)
from coca_hf.convert.layout import Layout, code_hashes
from coca_hf.convert.refit import blocks_to_refit_on, refit_outputs
from coca_hf.convert.writer import PROCESS_BYTES, bytes_of
from coca_hf.documents import TextSource
from coca_hf.errors import CocaError
from coca_hf.files import file_hash, replace_text, replacing, size_in_words
from coca_hf.precision import matrix_dtype, precision
from coca_hf.provenance import versions
from coca_hf.tokens import skipped_positions

AUTO_SHARE = 0.5  # `auto` keeps the fewest layers that cause this share of the summed harm
CHUNK = 512  # tokens whose predictions are in memory at once


class LayerFit(NamedTuple):
    """KL(original's map || CoCA's) in nats, the mean over heads and held-out queries; 0 if the layer
    keeps the original's attention."""

    kl_start: float
    kl_fitted: float


class FittedLayers(NamedTuple):
    """The fitted tensors by name in the CoCA model, in float32, and their quality on held-out text.

    tensors: mapped from their files. content_layers: the fitted layers with content pairs in every
    second of the other pairs. perplexity: of `original` and `start`.
    """

    tensors: dict[str, Tensor]
    content_layers: list[int]
    layers: list[LayerFit]
    perplexity: dict[str, float]


class CalibrationProgress(NamedTuple):
    """divergence: the mean `kl_fitted` so far, nats. notice: a line to show."""

    layers_done: int
    num_layers: int
    divergence: float | None
    notice: str | None


Report = Callable[[CalibrationProgress], None]


class Needs(NamedTuple):
    """Bytes that calibration takes on a CPU: memory; hidden states and fitted layers on disk."""

    memory: int
    disk_states: int
    disk_layers: int


class Calibration:
    """The calibration of the source of `layout` on the documents of `text`.

    ranked: how many layers to keep, those whose conversion harms most, or `auto`; None if they are
    named. chooses_content: whether the fit decides which layers are content layers.
    reads_source: whether fitted layers are for the source's very numbers; not in a plan.
    """

    def __init__(
        self,
        layout: Layout,
        text: TextSource,
        num_tokens: int,
        block_tokens: int,
        passes: int | None,
        device: str,
        seed: int,
        ranked: int | str | None,
        chooses_content: bool,
        reads_source: bool,
    ):
        if layout.from_coca or layout.released:
            raise CocaError(
                "--calibrate: got a CoCA checkpoint, expected an original, whose attention can be "
                "imitated"
            )
        if head_of(layout.config.architectures) != "ForCausalLM":
            raise CocaError(
                f"--calibrate: got {layout.source.config['architectures'][0]}, expected a causal "
                "language model, whose predictions it measures; leave --calibrate out, or "
                "calibrate the model that the classifier was trained from"
            )
        # tokenizing turns off its truncation and padding, which the checkpoint's must keep
        tokenizer = copy.deepcopy(layout.source.tokenizer)
        text_blocks, held_out = calibration_blocks(
            text, tokenizer, layout.config, num_tokens, block_tokens, seed
        )
        repeated = repeated_blocks(text_blocks, tokenizer, layout.config, seed)
        blocks = torch.cat((text_blocks, repeated))
        # layers are ranked on half of the held-out text
        ranked_on = held_out[: max(1, len(held_out) // 2)]
        self.ranking_blocks = copies(ranked_on, tokenizer, layout.config, seed)
        passes = passes or math.ceil(STEPS / len(blocks))
        self.text, self.ranked, self.device = text, ranked, device
        self.dtype = matrix_dtype(device)
        self.blocks_hash = xxhash.xxh3_128_hexdigest(bytes_of(blocks))
        others = ("coca_kept_layers", "coca_kept_window", "dtype")
        settings = {
            "numbers": layout.source.content_hash() if reads_source else None,
            "blocks": [blocks.shape, self.blocks_hash],
            "held out": xxhash.xxh3_128_hexdigest(bytes_of(held_out)),
            "fit": [layout.config.coca_constraint, seed, passes, device, self.dtype],
            "chooses content": chooses_content,
            "code": code_hashes(),
            # fitted tensors are float32, and do not depend on which other layers are kept
            "config": layout.config.to_dict() | dict.fromkeys(others),
            "versions": versions("torch", "transformers"),
        }
        self.task = FitTask(
            blocks,
            held_out,
            passes,
            seed,
            chooses_content,
            ranked_tokens=self.ranking_blocks.numel() if ranked else 0,
            settings=json.dumps(settings, default=str),
        )
        self.needs = needs(layout, self.task, self.dtype)
        self.harms: list[float] | None = None
        # by part; of fitting, also those of runs that were killed
        self.seconds: dict[str, float] = {}

    def plan(self, layout: Layout, has_numbers: bool) -> dict:
        """What calibration from `layout` on would take; the time is known if the weights are here to
        time a step, and there is a layer to fit.
        """
        seconds = None
        if has_numbers and layout.converted:
            pairs = LayerPairs(layout, self.device, self.dtype)
            seconds = expected_seconds(pairs, self.task, layout.converted)
        return {
            "tokens": self.task.blocks.numel(),
            "passes": self.task.passes,
            "device": self.device,
            "memory_bytes": self.needs.memory,
            "disk_bytes": self.needs.disk_states + self.needs.disk_layers,
            "seconds": seconds,
        }

    def chosen(self, layout: Layout, named: Sequence[int], folder: Path, report: Report) -> Layout:
        """`layout` with the content layers and the kept layers that fits of all layers choose.

        named: the kept layers, unless they are ranked.
        """
        if self.task.chooses_content:
            found = self._fit(layout, folder, report).content_layers
            form = dataclasses.replace(layout.form, content_layers=found)
            layout = Layout(layout.source, form, named)
        if self.ranked:
            fitted = self._fit(layout, folder, report).tensors
            pairs, began = LayerPairs(layout, self.device), time.perf_counter()
            number = len(pairs)
            notice = f"measuring the harm of converting each of {number} layers alone"
            report(CalibrationProgress(number, number, None, notice))
            self.harms = layer_harms(pairs, fitted, self.ranking_blocks, folder)
            wanted = None if self.ranked == "auto" else int(self.ranked)
            kept = most_harmful(self.harms, layout.converted, wanted)
            named_kept = ", ".join(map(str, kept))
            notice = f"keeping layers {named_kept}; measuring the fits of the others beside them"
            report(CalibrationProgress(0, number, None, notice))
            self.seconds["harm"] = time.perf_counter() - began
            layout = Layout(layout.source, layout.form, kept)
        return layout

    def run(
        self, layout: Layout, folder: Path, report: Report
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Fit the layers of `layout`; returns their tensors, and the record of what was done."""
        done, task = self._fit(layout, folder, report), self.task
        number = layout.config.num_hidden_layers
        report(CalibrationProgress(number, number, None, "fitting W_O to the residual stream"))
        began = time.perf_counter()
        outputs, perplexity = self._refit(layout, done.tensors, folder)
        self.seconds["outputs"] = time.perf_counter() - began
        half = task.blocks.numel() // 2  # the other half has repeated passages
        record = {
            "text": self.text.source,
            "text_commit": self.text.revision,
            "blocks_xxh3_128": self.blocks_hash,
            "tokens": half,
            "repeated_tokens": half,
            "block_tokens": task.blocks.shape[1],
            "reach": reach(layout.config),
            "held_out_tokens": task.held_out.numel(),
            "seed": task.seed,
            "passes": task.passes,
            "device": self.device,
            "perplexity": done.perplexity | {"calibrated": perplexity},
            "attention_kl": [layer._asdict() for layer in done.layers],
            "layer_harm": self.harms,
            "seconds": round(sum(self.seconds.values()), 1),
            "seconds_by_part": {name: round(s, 1) for name, s in self.seconds.items()},
        }
        known = {name: value for name, value in record.items() if value is not None}
        return done.tensors | outputs, known

    def _refit(
        self, layout: Layout, fitted: Mapping[str, Tensor], folder: Path
    ) -> tuple[dict[str, Tensor], float]:
        """W_O of the converted layers, and the perplexity of held-out text with it."""
        task, pairs = self.task, LayerPairs(layout, self.device, self.dtype)
        blocks = task.blocks[blocks_to_refit_on(pairs.config, task.blocks, task.seed)]
        try:
            with precision(pairs.dtype):
                outputs, states = refit_outputs(pairs, fitted, blocks, task.held_out, folder)
                return outputs, perplexity(pairs, states, task.held_out)
        finally:
            remove_states(folder)

    def _fit(self, layout: Layout, folder: Path, report: Report) -> FittedLayers:
        """All layers to convert; those that an earlier call or a killed run fitted come from `folder`."""
        run = CalibrationRun(LayerPairs(layout, self.device, self.dtype), self.task, folder)
        done = run.fit_layers(report)
        self.seconds |= run.seconds
        return done


def needs(layout: Layout, task: FitTask, dtype: torch.dtype) -> Needs:
    config, tokens = layout.config, task.blocks.numel() + task.held_out.numel()
    first = f"model.layers.{min(layout.converted, default=0)}."
    layer = [target for target in layout.targets if target.name.startswith(first)]
    fitted = sum(math.prod(target.shape) for target in layer if target.module in FITTED)
    weights = sum(math.prod(target.shape) for target in layer) * dtype.itemsize
    heads = config.num_attention_heads + config.num_key_value_heads
    seen = tokens * (config.hidden_size + heads * config.head_dim) * dtype.itemsize
    batch = max(BATCH_TOKENS, task.blocks.shape[1])
    activations = batch * (3 * config.intermediate_size * dtype.itemsize + 32 * config.hidden_size)
    head = 6 * config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    moments, outputs = 4 * 8 * width**2, 4 * width * config.hidden_size  # of refitting W_O
    fit_states = 2 * (tokens + task.held_out.numel())
    # a model per layer, and the original
    rank_states = task.ranked_tokens * (config.num_hidden_layers + 1)
    return Needs(
        # fitted weights also have a gradient and Adam's two moments
        PROCESS_BYTES
        + max(weights + 16 * fitted + seen + activations, weights + moments + activations, head),
        max(fit_states, rank_states) * config.hidden_size * 4,
        len(layout.converted) * (fitted * 4 + outputs),
    )


def in_words(seconds: float) -> str:
    """`45 s`, `31 min` or `2 h 5 min`."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes >= 2 else f"{math.ceil(seconds)} s"


class CalibrationRun:
    """Fits the queries and coefficients of the CoCA layers of `pairs`, layer by layer.

    Fitted layers in `folder` are reused if they were made with the same `task.settings`. Layers that
    keep the original's attention do not change. On one machine and number of threads, the same
    arguments give the same bits. seconds: by part, with those of runs that were killed. In `folder` are

    seconds.json         these seconds, with the settings
    layer-N.safetensors  the fitted tensors of layer N, with the settings and a hash
    states-0, states-1   the hidden states before a layer of even and of odd number: of the blocks,
                         and of the held-out ones in the original and the start
    states.json          the layer that comes next, and the hash of the states before it
    """

    def __init__(self, pairs: LayerPairs, task: FitTask, folder: Path):
        self.pairs, self.task, self.folder = pairs, task, folder
        self.record_file, self.seconds_file = folder / "states.json", folder / "seconds.json"
        self.seconds = self._earlier_seconds()
        folder.mkdir(exist_ok=True)
        num_blocks = len(task.blocks) + 2 * len(task.held_out)
        shape = num_blocks, task.blocks.shape[1], pairs.config.hidden_size
        self.states = [HiddenStates(folder / f"states-{side}", shape) for side in (0, 1)]
        converted = pairs.layout.converted
        self.files = {number: folder / f"layer-{number:05}.safetensors" for number in converted}
        self.missing = {n for n, file in self.files.items() if not _is_whole(file, task.settings)}

    def fit_layers(self, report: Report) -> FittedLayers:
        pairs, task, layers = self.pairs, self.task, self._finished_layers()
        first = len(layers)
        if first == 0:
            self._embed()
        self._report(report, layers, self._notice(first) if self.missing else None)
        num_blocks, length = task.blocks.shape
        positions = skipped_positions(num_blocks, length, reach(pairs.config), task.seed)
        positions = positions.to(pairs.device)
        with precision(pairs.dtype):
            for number in range(first, len(pairs)):
                layers.append(self._fit_layer(number, positions))
                self._record(layers)
                self._report(report, layers)
            with self._timed("measure"):
                _, original, start = self._parts(len(pairs))
                perplexities = {
                    "original": perplexity(pairs, original, task.held_out),
                    "start": perplexity(pairs, start, task.held_out),
                }
        remove_states(self.folder)
        tensors, content_layers = dict[str, Tensor](), list[int]()
        for number, file in self.files.items():
            fitted, facts = _load(file)
            tensors |= {f"model.layers.{number}.self_attn.{name}": fitted[name] for name in fitted}
            if facts["is content layer"] == "True":
                content_layers.append(number)
        return FittedLayers(tensors, content_layers, layers, perplexities)

    def _notice(self, first: int) -> str:
        needed = needs(self.pairs.layout, self.task, self.pairs.dtype)
        seconds = expected_seconds(self.pairs, self.task, self.missing, first)
        return (
            f"calibrating {len(self.missing)} of {len(self.pairs)} layers: about "
            f"{in_words(seconds)}, {size_in_words(needed.memory)} of memory and "
            f"{size_in_words(needed.disk_states + needed.disk_layers)} of disk in {self.folder}"
        )

    def _fit_layer(self, number: int, positions: Tensor) -> LayerFit:
        """Fit a layer, and run all states through it."""
        pairs, task, angles = self.pairs, self.task, self.pairs.angles
        text, original, start = zip(self._parts(number), self._parts(number + 1), strict=True)
        in_order = torch.arange(task.held_out.shape[1], device=pairs.device)
        in_order = in_order.expand(task.held_out.shape)
        with self._timed("read"):
            theirs, ours = pairs.load(number)
        attention, is_converted, text_seen = ours.self_attn, number in self.files, None
        if self._carries_text(number):
            with self._timed("forward"):
                storage = pairs.storage(task.blocks)
                text_seen = run_original(theirs, *text, positions, angles, storage)
        with self._timed("measure"):
            seen = run_original(theirs, *original, in_order, angles)
            run_layer(ours, *start, in_order, angles.coca)
            kl_start = divergences(attention, seen).mean().item() if is_converted else 0.0
        if number in self.missing:
            assert text_seen is not None
            seed, crowd = task.seed + number, crowd_size(pairs.config, task.blocks.shape[1])
            with self._timed("steps"):
                if task.chooses_content:
                    is_nearer = is_nearer_as_content_layer(attention, text_seen, seen, seed, crowd)
                    make_content_layer_(attention, is_nearer)
                fit(attention, text_seen, task.passes, seed, crowd)
            tensors = attention.state_dict()
            fitted = {name: tensors[name] for name in tensors if name.startswith(FITTED)}
            _save(fitted, attention.content.every_second, self.files[number], task.settings)
        elif is_converted:
            fitted, facts = _load(self.files[number])
            attention.load_state_dict(fitted, strict=False)
            make_content_layer_(attention, facts["is content layer"] == "True")
        with self._timed("measure"):
            kl_fitted = divergences(attention, seen).mean().item() if is_converted else 0.0
        return LayerFit(kl_start, kl_fitted)

    def _parts(self, number: int) -> Iterator[HiddenStates]:
        """The states before layer `number`: of the text, and of held-out text in each model."""
        blocks, held_out = len(self.task.blocks), len(self.task.held_out)
        return self.states[number % 2].split(blocks, *[held_out] * 2)

    def _carries_text(self, number: int) -> bool:
        """Whether the states of the text are needed before layer `number`."""
        return any(missing >= number for missing in self.missing)

    @torch.no_grad()
    def _embed(self) -> None:
        embeddings, states = self.pairs.embeddings(), self.states[0]
        remove_states(self.folder)
        ids = torch.cat((self.task.blocks, *[self.task.held_out] * 2))
        for some in batches(states):
            states[some] = embeddings[ids[some]]

    def _record(self, layers: list[LayerFit]) -> None:
        """Note that `layers` are done, so a run that is killed continues after them."""
        with self._timed("states"):
            record = {
                "settings": self.task.settings,
                "kept": list(self.pairs.config.coca_kept_layers),
                "carries_text": self._carries_text(len(layers)),
                "hash": file_hash(self.states[len(layers) % 2].file),
                "layers": layers,
            }
            replace_text(self.record_file, json.dumps(record))
        record = {"settings": self.task.settings, "seconds": self.seconds}
        replace_text(self.seconds_file, json.dumps(record))

    def _earlier_seconds(self) -> defaultdict[str, float]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            record = json.loads(self.seconds_file.read_text())
            if record["settings"] == self.task.settings:
                seconds = record["seconds"].items()
                return defaultdict(float, {part: float(value) for part, value in seconds})
        return defaultdict(float)

    def _finished_layers(self) -> list[LayerFit]:
        """The finished layers, if the states after the last of them are here and undamaged."""
        try:
            record = json.loads(self.record_file.read_text())
            layers = [LayerFit(*map(float, layer)) for layer in record["layers"]]
            kept, number = list(self.pairs.config.coca_kept_layers), len(layers)
            is_same = (record["settings"], record["kept"]) == (self.task.settings, kept)
            has_all = self._carries_text(number) <= record["carries_text"]
            is_whole = file_hash(self.states[number % 2].file) == record["hash"]
        except (OSError, ValueError, LookupError, TypeError):
            return []
        all_fitted = all(missing >= number for missing in self.missing)
        return layers if is_same and has_all and is_whole and all_fitted else []

    def _report(self, report: Report, layers: list[LayerFit], notice: str | None = None) -> None:
        found = [layer.kl_fitted for number, layer in enumerate(layers) if number in self.files]
        divergence = sum(found) / len(found) if found else None
        report(CalibrationProgress(len(layers), len(self.pairs), divergence, notice))

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def perplexity(pairs: LayerPairs, states: HiddenStates, blocks: Tensor) -> float:
    """Perplexity of `blocks`, (n, m) token ids, from the states after the last layer. The norm and
    the head are the same in both models.
    """
    norm, head = pairs.norm_and_head()
    following = blocks[:, 1:].flatten().to(head.device).split(CHUNK)
    rows = states[:][:, :-1].flatten(0, 1).to(head.device).split(CHUNK)
    losses = [
        cross_entropy(linear(norm(row), head), ids, reduction="sum").item()
        for row, ids in zip(rows, following, strict=True)
    ]
    return math.exp(min(sum(losses) / blocks[:, 1:].numel(), 700))


def remove_states(folder: Path) -> None:
    for path in folder.glob("states*"):
        path.unlink()


def _save(tensors: dict[str, Tensor], is_content_layer: bool, file: Path, settings: str) -> None:
    facts = {"settings": settings, "is content layer": str(is_content_layer)}
    with replacing(file) as partial:
        save_file(tensors, partial, metadata=facts | {"hash": _hash(tensors)})


def _load(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `_save` wrote: the tensors, mapped into memory, and the facts beside them."""
    with safe_open(file, "pt") as stream:
        return stream.get_tensors(), stream.metadata() or {}


def _is_whole(file: Path, settings: str) -> bool:
    """Whether `file` is there, undamaged, and from a calibration with these `settings`."""
    try:
        tensors, facts = _load(file)
    except (SafetensorError, FileNotFoundError):
        return False
    return (facts.get("settings"), facts.get("hash")) == (settings, _hash(tensors))


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(bytes_of(tensors[name].cpu()))
    return digest.hexdigest()


@torch.no_grad()
def layer_harms(
    pairs: LayerPairs, fitted: Mapping[str, Tensor], blocks: Tensor, folder: Path
) -> list[float]:
    """The harm of converting each layer of `pairs`, on `blocks`, (n, m) token ids: `copies`.

    fitted: the calibrated tensors by name in the CoCA model. folder: gets a file of hidden states
    while this runs; memory holds a pair of layers and a batch.
    """
    number_of_blocks, length = blocks.shape
    file, models_run = folder / "states-harm", len(pairs) + 1
    states = HiddenStates(file, (number_of_blocks * models_run, length, pairs.config.hidden_size))
    # of the original, then of the original with layer 0 converted, …
    streams = list(states.split(*[number_of_blocks] * models_run))
    positions = torch.arange(length, device=pairs.device).expand(blocks.shape)
    angles = pairs.angles
    try:
        streams[0][:] = pairs.embeddings()[blocks]
        for number in range(len(pairs)):
            theirs, ours = pairs.load(number, fitted)
            run_layer(ours, streams[0], streams[number + 1], positions, angles.coca)
            for stream in streams[: number + 1]:
                run_layer(theirs, stream, stream, positions, angles.original)
        divergences = _prediction_divergences(pairs, streams)
    finally:
        file.unlink(missing_ok=True)
    first, second = divergences[: length // 2], divergences[length // 2 :]
    return (second.mean(0) - first.mean(0)).tolist()


def _prediction_divergences(pairs: LayerPairs, streams: list[HiddenStates]) -> Tensor:
    """KL in nats of the first stream's predictions to those of each other stream, the mean over
    blocks: (m, streams - 1), float64.
    """
    norm, head = pairs.norm_and_head()
    blocks, length, _ = streams[0].shape
    sums = torch.zeros(length, len(streams) - 1, dtype=torch.float64)
    chunks = [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]
    for block, rows in itertools.product(range(blocks), chunks):
        chosen = (stream[block : block + 1][0, rows].to(pairs.device) for stream in streams)
        log_predictions = (linear(norm(states), head).log_softmax(-1) for states in chosen)
        reference = next(log_predictions)
        for layer, prediction in enumerate(log_predictions):
            sums[rows, layer] += (reference.exp() * (reference - prediction)).sum(-1).double().cpu()
    return sums / blocks


def most_harmful(harms: list[float], converted: Collection[int], number: int | None) -> list[int]:
    """The `number` layers of greatest harm out of `converted`, those that are not kept anyway, which
    have a harm of 0; None: the fewest with `AUTO_SHARE` of the sum.
    """
    order = sorted(converted, key=lambda layer: -harms[layer])
    if number is None:
        done = torch.tensor([max(harms[layer], 0.0) for layer in order]).cumsum(0)
        number = int((done < AUTO_SHARE * done[-1:]).sum()) + 1
    return sorted(order[:number])
