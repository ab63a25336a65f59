"""`--calibrate`: fit W_Q and W_T of every layer to the original's attention.

Layer by layer, on the hidden states that the original has there, Adam minimises over W_Q and W_T
(and their biases)

    mean over queries m of  w_m KL(original's map || CoCA's map),      w_m proportional to (m + 1)^(-1/2)

- Fitting the outputs instead leaves most of the error (LoLCATs, arXiv 2410.10254, starts linear
  attention so). No gradient passes from layer to layer: none has to make up for the others.
- The weights guard the first few tokens: a CoCA score is largest at distance 0, and a second token
  that attends to itself looks like the first one, which some MLP then makes an attention sink of.
- The competition of many keys is not learnt among few, so that blocks have thousands. A step makes
  the maps of a few queries, drawn in proportion to w_m (`Strata`), from the original's own queries
  and keys. The gradient of KL by CoCA's scores is the difference of the two maps.
- With the gradient of ReLU half of the coefficients soon are negative for every token, and stay so:
  `Keys`.
- Memory holds a pair of layers (`LayerPairs`) and what the original's attention sees there
  (`Seen`); hidden states lie in files. A run that is killed continues with the layer it was at.
- Matrices are multiplied in bfloat16 where the processor has AMX or AVX-512 BF16, also in the
  original; scores and their softmax, divergences, the residual stream and the fitted weights stay
  float32.

Letters: see `models/attention.py`; n_b blocks of text.
"""

import contextlib
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from coca_hf.convert.calibration_text import reach, skipped_positions
from coca_hf.convert.layer_pairs import (
    BATCH_TOKENS,
    FITTED,
    Angles,
    HiddenStates,
    LayerPairs,
    batches,
    run_layer,
)
from coca_hf.convert.layout import Layout
from coca_hf.files import replace_text, replacing, size_in_words
from coca_hf.models.attention import CocaAttention, coca_query, own_angles, scaled_key, unit_key

STEPS = 1280  # of every layer, at least
QUERIES = 48  # of a block in one step
PARTS = 4  # of those queries, on a CPU: the first parts see few keys, and cost less
RELATIVE_RATE = 0.03  # the learning rate, over the root mean square of W_Q
BETAS = (0.8, 0.95)
WARMUP_STEPS = 10
LEAK = 0.1  # of the gradient that reaches a coefficient below zero
MEASURED_QUERIES = 256  # of a held-out block
PROCESS_BYTES = 700_000_000  # of Python with torch and transformers


class LayerFit(NamedTuple):
    """KL(original's map || CoCA's) in nats, mean over heads and held-out queries; 0 where the
    attention stays that of the source."""

    kl_start: float
    kl_fitted: float


class FittedLayers(NamedTuple):
    """The fitted tensors by name in the CoCA model, float32, and what they are worth on held-out
    text.

    tensors: mapped from their files. seconds: of this run, by what they were spent on.
    """

    tensors: dict[str, Tensor]
    layers: list[LayerFit]
    perplexity: dict[str, float]  # of `original`, `start`, `calibrated`
    seconds: dict[str, float]


class CalibrationProgress(NamedTuple):
    """divergence: mean `kl_fitted` so far, nats. notice: a line for whoever waits."""

    layers_done: int
    num_layers: int
    divergence: float | None
    notice: str | None


Report = Callable[[CalibrationProgress], None]


class Seen(NamedTuple):
    """What the attention of one layer of the original sees and makes of it, and CoCA's angles."""

    inputs: Tensor  # (n_b, m, hidden)
    queries: Tensor  # (n_b, m, h, d), rotated and scaled
    keys: Tensor  # (n_b, g, m, d), rotated
    cos: Tensor  # (n_b, m, j)
    sin: Tensor


class Needs(NamedTuple):
    """Bytes that calibration takes on a CPU: memory; hidden states and fitted layers on disk."""

    memory: int
    disk_states: int
    disk_layers: int


def default_passes(num_blocks: int) -> int:
    """As many passes over the blocks as make at least `STEPS` steps of one block."""
    return math.ceil(STEPS / num_blocks)


def matrix_dtype(device: str) -> torch.dtype:
    """bfloat16 on a processor that multiplies it in hardware, float32 otherwise."""
    capabilities = torch.cpu.get_capabilities() if device == "cpu" else {}
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def needs(layout: Layout, blocks: Tensor, held_out: Tensor, dtype: torch.dtype) -> Needs:
    config, tokens = layout.config, blocks.numel() + held_out.numel()
    first = f"model.layers.{min(layout.converted, default=0)}."
    layer = [target for target in layout.targets if target.name.startswith(first)]
    fitted = sum(math.prod(target.shape) for target in layer if target.module in FITTED)
    weights = sum(math.prod(target.shape) for target in layer) * dtype.itemsize
    heads = config.num_attention_heads + config.num_key_value_heads
    seen = tokens * (config.hidden_size + heads * config.head_dim) * dtype.itemsize
    batch = max(BATCH_TOKENS, blocks.shape[1])
    activations = batch * (3 * config.intermediate_size * dtype.itemsize + 32 * config.hidden_size)
    head = 6 * config.vocab_size * config.hidden_size
    return Needs(
        # of fitted weights also the gradient and Adam's two moments
        PROCESS_BYTES + max(weights + 16 * fitted + seen + activations, head),
        2 * (tokens + 2 * held_out.numel()) * config.hidden_size * 4,
        len(layout.converted) * fitted * 4,
    )


def calibrate(
    pairs: LayerPairs,
    blocks: Tensor,
    held_out: Tensor,
    folder: Path,
    passes: int,
    seed: int = 0,
    settings: str = "",
    report: Report = lambda progress: None,
) -> FittedLayers:
    """Fit the queries and coefficients of the CoCA layers of `pairs`, layer by layer.

    blocks: (n_b, m) token ids to fit on; held_out: (n, m) others, to measure on. folder: where
    every layer's tensors are kept when it is done, and taken from if they were made with the same
    `settings`, and the hidden states meanwhile. passes: over the blocks. seed: of their order.
    Layers that keep the original's attention stay as they are; on one machine and number of threads
    the same arguments give the same bits.
    """
    with _precision(pairs.dtype):
        return _Run(pairs, blocks, held_out, folder, settings).fit_layers(seed, passes, report)


@contextlib.contextmanager
def _precision(dtype: torch.dtype) -> Iterator[None]:
    """Matrix products of GPUs in TF32, of CPUs in `dtype`."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    is_half = dtype == torch.bfloat16
    try:  # no cache: the weights change from step to step
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half, cache_enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class _Run:
    """A calibration in `folder`.

    layer-N.safetensors  the fitted tensors of layer N, with the settings and a hash
    states-0, states-1   the hidden states before a layer of even and of odd number: of the blocks,
                         and of the held-out ones in the original, the start and the calibrated model
    states.json          the layer that comes next, and the hash of the states before it
    """

    def __init__(
        self, pairs: LayerPairs, blocks: Tensor, held_out: Tensor, folder: Path, settings: str
    ):
        self.pairs, self.blocks, self.held_out = pairs, blocks, held_out
        self.settings, self.folder, self.record_file = settings, folder, folder / "states.json"
        self.seconds: defaultdict[str, float] = defaultdict(float)
        folder.mkdir(exist_ok=True)
        shape = len(blocks) + 3 * len(held_out), blocks.shape[1], pairs.config.hidden_size
        self.states = [HiddenStates(folder / f"states-{side}", shape) for side in (0, 1)]
        self.files = {
            number: folder / f"layer-{number:05}.safetensors"
            for number in range(len(pairs))
            if pairs.is_fitted(number)
        }
        self.missing = {n for n, file in self.files.items() if _load(file, settings) is None}

    def fit_layers(self, seed: int, passes: int, report: Report) -> FittedLayers:
        layers = self._finished_layers()
        first = len(layers)
        if first == 0:
            self._embed()
        needed = needs(self.pairs.layout, self.blocks, self.held_out, self.pairs.dtype)
        disk = size_in_words(needed.disk_states + needed.disk_layers)
        notice = (
            f"calibrating {len(self.missing)} of {len(self.pairs)} layers: about "
            f"{size_in_words(needed.memory)} of memory and {disk} of disk in {self.folder}"
        )
        self._report(report, layers, notice if self.missing else None)
        num_blocks, length = self.blocks.shape
        positions = skipped_positions(num_blocks, length, reach(self.pairs.config), seed)
        for number in range(first, len(self.pairs)):
            began = time.perf_counter()
            layers.append(self._fit_layer(number, positions.to(self.pairs.device), passes, seed))
            self._record(layers)
            seconds = time.perf_counter() - began
            in_all = in_words(seconds * len(self.missing))
            notice = f"layer {number} took {seconds:,.0f} s; calibration takes about {in_all}"
            is_first = number == min(self.missing, default=None)
            self._report(report, layers, notice if is_first else None)
        with self._timed("measure"):
            perplexity = self._perplexity()
        self._remove_states()
        return FittedLayers(self._fitted_tensors(), layers, perplexity, dict(self.seconds))

    def _fit_layer(self, number: int, positions: Tensor, passes: int, seed: int) -> LayerFit:
        """Fit a layer, and put all states through it."""
        pairs, angles = self.pairs, self.pairs.angles
        before, after = (
            dict(zip(("text", "original", "start", "calibrated"), parts, strict=True))
            for parts in (self._parts(number), self._parts(number + 1))
        )
        in_order = torch.arange(self.held_out.shape[1], device=pairs.device)
        in_order = in_order.expand(self.held_out.shape)
        with self._timed("read"):
            theirs, ours = pairs.load(number)
        attention, is_fitted, text = ours.self_attn, number in self.files, None
        if self._carries_text(number):
            with self._timed("forward"):
                places = before["text"], after["text"], positions
                text = run_original(theirs, *places, angles, _storage(pairs, self.blocks))
        with self._timed("measure"):
            seen = run_original(theirs, before["original"], after["original"], in_order, angles)
            run_layer(ours, before["start"], after["start"], in_order, angles.coca)
            kl_start = divergences(attention, seen).mean().item() if is_fitted else 0.0
        if number in self.missing:
            assert text is not None
            with self._timed("steps"):
                fit(attention, text, passes, seed + number)
            tensors = attention.state_dict()
            fitted = {name: tensors[name] for name in tensors if name.startswith(FITTED)}
            _save(fitted, self.files[number], self.settings)
        elif is_fitted:
            fitted = _load(self.files[number], self.settings) or {}
            attention.load_state_dict(fitted, strict=False)
        with self._timed("measure"):
            kl_fitted = divergences(attention, seen).mean().item() if is_fitted else 0.0
            run_layer(ours, before["calibrated"], after["calibrated"], in_order, angles.coca)
        return LayerFit(kl_start, kl_fitted)

    def _fitted_tensors(self) -> dict[str, Tensor]:
        return {
            f"model.layers.{number}.self_attn.{name}": tensor
            for number, file in self.files.items()
            for name, tensor in load_file(file).items()
        }

    def _parts(self, number: int) -> Iterator[HiddenStates]:
        """The states before layer `number`: of the text, and of what is held out in each model."""
        return self.states[number % 2].split(len(self.blocks), *[len(self.held_out)] * 3)

    def _carries_text(self, number: int) -> bool:
        """Whether the states of the text are needed before layer `number`."""
        return any(missing >= number for missing in self.missing)

    @torch.no_grad()
    def _embed(self) -> None:
        embeddings, states = self.pairs.embeddings(), self.states[0]
        self._remove_states()
        ids = torch.cat((self.blocks, *[self.held_out] * 3))
        for some in batches(states):
            states[some] = embeddings[ids[some]]

    def _remove_states(self) -> None:
        for path in self.folder.glob("states*"):
            path.unlink()

    def _record(self, layers: list[LayerFit]) -> None:
        """Note that `layers` are done: a run that is killed continues after them."""
        with self._timed("states"):
            record = {
                "settings": self.settings,
                "kept": list(self.pairs.config.coca_kept_layers),
                "carries_text": self._carries_text(len(layers)),
                "hash": self.states[len(layers) % 2].hash(),
                "layers": layers,
            }
            replace_text(self.record_file, json.dumps(record))

    def _finished_layers(self) -> list[LayerFit]:
        """The layers whose successor's states are here, whole."""
        try:
            record = json.loads(self.record_file.read_text())
            layers = [LayerFit(*map(float, layer)) for layer in record["layers"]]
            kept, number = list(self.pairs.config.coca_kept_layers), len(layers)
            is_same = (record["settings"], record["kept"]) == (self.settings, kept)
            has_all = self._carries_text(number) <= record["carries_text"]
            is_whole = self.states[number % 2].hash() == record["hash"]
        except (OSError, ValueError, LookupError, TypeError):
            return []
        all_fitted = all(missing >= number for missing in self.missing)
        return layers if is_same and has_all and is_whole and all_fitted else []

    def _report(self, report: Report, layers: list[LayerFit], notice: str | None) -> None:
        found = [layer.kl_fitted for number, layer in enumerate(layers) if number in self.files]
        divergence = sum(found) / len(found) if found else None
        report(CalibrationProgress(len(layers), len(self.pairs), divergence, notice))

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def _perplexity(self) -> dict[str, float]:
        """Perplexity of the held-out text from the states after the last layer.

        The norm and the head are the same in both models.
        """
        norm, head = self.pairs.norm_and_head()
        following = self.held_out[:, 1:].flatten().to(head.device).split(512)
        found = {}
        _, *streams = self._parts(len(self.pairs))
        for name, stream in zip(("original", "start", "calibrated"), streams, strict=True):
            rows = stream[:][:, :-1].flatten(0, 1).to(head.device).split(512)
            losses = [
                cross_entropy(linear(norm(row), head), ids, reduction="sum").item()
                for row, ids in zip(rows, following, strict=True)
            ]
            found[name] = math.exp(sum(losses) / self.held_out[:, 1:].numel())
        return found


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _storage(pairs: LayerPairs, blocks: Tensor) -> str:
    """Where what a layer makes of the text is kept: on the GPU if it takes at most half of it."""
    if not pairs.device.startswith("cuda"):
        return pairs.device
    config = pairs.config
    heads = config.num_attention_heads + config.num_key_value_heads
    needed = blocks.numel() * (config.hidden_size + heads * config.head_dim) * 4
    return pairs.device if needed < torch.cuda.mem_get_info(pairs.device)[0] / 2 else "cpu"


@torch.no_grad()
def run_original(
    layer: Any,
    states: Tensor | HiddenStates,
    after: Tensor | HiddenStates,
    positions: Tensor,
    angles: Angles,
    storage: str | None = None,
) -> Seen:
    """Put `states` through `layer`, as in `run_layer`.

    storage: the device of what is returned, by default that of `positions`.
    """
    device, kept = storage or positions.device, list[Tensor]()
    is_half = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_half else torch.float32

    def keep(some: slice, *seen: Tensor) -> None:
        if not kept:
            shapes = [(len(states), *part.shape[1:]) for part in seen]
            kept.extend(torch.empty(shape, device=device, dtype=dtype) for shape in shapes)
        for whole, part in zip(kept, seen, strict=True):
            whole[some] = part

    run_layer(layer, states, after, positions, angles.original, keep)
    return Seen(*kept, *(part.to(device) for part in angles.coca(positions)))


def fit(attention: CocaAttention, seen: Seen, passes: int, seed: int) -> None:
    """Train W_Q and W_T of `attention`, in place."""
    num_blocks, length = seen.inputs.shape[:2]
    draw = torch.Generator().manual_seed(seed)
    visits = torch.cat([torch.randperm(num_blocks, generator=draw) for _ in range(passes)])
    steps, blocks = len(visits), visits[:, None].to(seen.inputs.device)
    strata = Strata(length)
    rows = strata.draw(steps, 1, generator=draw).to(seen.inputs.device)
    parts = list(strata.parts(PARTS if attention.q_proj.weight.device.type == "cpu" else 1))
    attention.requires_grad_(False)
    parameters = [*attention.q_proj.parameters(), *attention.t_proj.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    rate = RELATIVE_RATE * attention.q_proj.weight.square().mean().sqrt().item()
    optimizer = torch.optim.Adam(parameters, betas=BETAS, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = (
            rate * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / steps)
        )
        backward(attention, seen, blocks[step], rows[step], parts)
        optimizer.step()
        optimizer.zero_grad()
    attention.requires_grad_(False)


class Strata:
    """A block's rows in strata of equal weight w_m; the first, which sees only itself, has none."""

    def __init__(self, length: int):
        self.number, self.length = min(QUERIES, length), length
        weights = torch.arange(1, length + 1) ** -0.5
        weights[0] = 0
        self._sums = weights.cumsum(0) / weights.sum()

    def draw(self, *visits: int, generator: torch.Generator) -> Tensor:
        """A row of every stratum, (*visits, r), rising."""
        return self._row(
            torch.arange(self.number) + torch.rand(*visits, self.number, generator=generator)
        )

    def parts(self, number: int) -> Iterator[tuple[slice, int]]:
        """The strata in `number` parts, each with how many keys its last row sees at most."""
        ends = [self.number * part // number for part in range(number + 1)]
        for start, end in itertools.pairwise(ends):
            yield slice(start, end), int(self._row(torch.tensor(float(end)))) + 1

    def _row(self, place: Tensor) -> Tensor:
        row = torch.searchsorted(self._sums, place / self.number, right=True)
        return row.clamp(max=self.length - 1)


def backward(
    attention: CocaAttention,
    seen: Seen,
    blocks: Tensor,
    rows: Tensor,
    parts: list[tuple[slice, int]],
) -> None:
    """Accumulate the gradients of the mean of KL(original's map || CoCA's).

    blocks: (b,); rows: of each, (b, r); parts: slices of r, each with how many keys its queries see
    at most.
    """
    device = attention.q_proj.weight.device
    their_query = seen.queries[blocks[:, None], rows].transpose(1, 2).to(device, torch.float32)
    inputs, their_key, cos, sin = (
        part.index_select(0, blocks).to(device)
        for part in (seen.inputs, seen.keys, seen.cos, seen.sin)
    )
    their_key, rows = their_key.float(), rows.to(device)
    query, key = fold(attention, inputs, (cos, sin), rows)
    to_query, to_key = torch.empty_like(query), torch.zeros_like(key)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for part, visible in parts:
            hidden = later_keys(rows[:, part], visible)
            some_query, some_key = query[:, :, part], key[:, :, :visible]
            gradient = scores(some_query, some_key).add_(hidden).softmax(-1)
            gradient -= (
                scores(their_query[:, :, part], their_key[:, :, :visible]).add_(hidden).softmax(-1)
            )
            gradient = by_group(gradient, key.shape[1])
            to_query[:, :, part] = (gradient @ some_key).view(some_query.shape)
            to_key[:, :, :visible] += gradient.mT @ by_group(some_query, key.shape[1])
    count = query.shape[:3].numel()
    torch.autograd.backward((query, key), (to_query / count, to_key / count))


def fold(
    attention: CocaAttention, inputs: Tensor, angles: tuple[Tensor, Tensor], rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Scaled query of rows (b, r), (b, h, r, d), and all keys, (b, g, n, d). angles: (b, n, j)."""
    return folded(
        attention,
        attention.queries(_take(inputs, rows)),
        attention.coefficients(inputs),
        angles,
        rows,
    )


def folded(
    attention: CocaAttention, q: Tensor, t: Tensor, angles: tuple[Tensor, Tensor], rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, of queries (b, h, r, d) and coefficients (b, g, n, j)."""
    constraint = attention.config.coca_constraint
    angles = own_angles(attention.config, attention.layer_idx, *angles)
    cos, sin = (part.unsqueeze(1) for part in angles)
    cos_of_rows, sin_of_rows = (_take(part, rows).unsqueeze(1) for part in angles)
    query = coca_query(q, cos_of_rows, sin_of_rows, constraint) * attention.scaling
    return query, Keys.apply(t, unit_key(cos, sin, constraint))


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (b, r) of (b, m, ...): (b, r, ...)."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def scores(query: Tensor, key: Tensor) -> Tensor:
    """(b, h, r, d) and (b, g, n, d) to (b, h, r, n)."""
    return (by_group(query, key.shape[1]) @ key.mT).view(*query.shape[:3], -1)


def by_group(x: Tensor, groups: int) -> Tensor:
    """(b, h, r, ...) as (b, g, h / g * r, ...), without copies of keys."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def later_keys(rows: Tensor, length: int) -> Tensor:
    """Added to scores, (b, 1, r, n), it hides the keys after the queries in rows (b, r)."""
    later = torch.arange(length, device=rows.device) > rows[:, None, :, None]
    return later * torch.finfo(torch.float32).min


class Keys(torch.autograd.Function):
    """`scaled_key(relu(t), unit_key)`, except that a coefficient below zero has a gradient, too.

    A tenth of it, where the loss wants the coefficient larger.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, unit: Tensor) -> Tensor:
        ctx.save_for_backward(t, unit)
        return scaled_key(t.relu(), unit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        t, unit = ctx.saved_tensors
        first, second = gradient.chunk(2, -1)
        to_t = (first * unit[..., 0, :]).addcmul_(second, unit[..., 1, :])
        return torch.where(t > 0, to_t, LEAK * to_t.clamp(max=0)), None


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def divergences(attention: CocaAttention, seen: Seen) -> Tensor:
    """KL(original's map || CoCA's) in nats of every head, (h,): mean over blocks and queries."""
    device, length = attention.q_proj.weight.device, seen.inputs.shape[1]
    rows = torch.arange(length - 1, -1, -math.ceil(length / MEASURED_QUERIES), device=device)[None]
    found = []
    for block in zip(*(part.split(1) for part in seen), strict=True):
        inputs, queries, keys, cos, sin = (part.to(device, torch.float32) for part in block)
        hidden = later_keys(rows, length)
        log_maps = scores(*fold(attention, inputs, (cos, sin), rows)).add_(hidden).log_softmax(-1)
        maps = scores(queries[:, rows[0]].transpose(1, 2), keys).add_(hidden).softmax(-1)
        found.append((torch.xlogy(maps, maps) - maps * log_maps).sum(-1).mean((0, 2)))
    return torch.stack(found).mean(0)


def _save(tensors: dict[str, Tensor], file: Path, settings: str) -> None:
    with replacing(file) as partial:
        save_file(tensors, partial, metadata={"settings": settings, "hash": _hash(tensors)})


def _load(file: Path, settings: str) -> dict[str, Tensor] | None:
    """What `_save` wrote, or None where that is another layer's, damaged or absent."""
    try:
        with safe_open(file, "pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            made = stream.metadata() == {"settings": settings, "hash": _hash(tensors)}
    except (SafetensorError, FileNotFoundError):
        return None
    return tensors if made else None


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().contiguous().numpy().data)
    return digest.hexdigest()
