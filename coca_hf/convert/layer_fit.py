"""Fit W_Q and W_T of one layer to the original's attention; `calibration.py` goes over the layers.

On the hidden states that the original has at the layer, Adam minimises over W_Q and W_T (and their
biases)

    mean over queries m of  w_m KL(original's map || CoCA's map),      w_m proportional to (m + 1)^(-1/2)

- Fitting the outputs instead leaves most of the error (LoLCATs, arXiv 2410.10254, starts linear
  attention that way). No gradient passes between layers, so none has to compensate for the others.
- The weights protect the first few tokens. A CoCA score is largest at distance 0, and a second token
  that attends to itself looks like the first one, which some MLP then makes an attention sink.
- Competition among many keys is not learnt from few keys, so a block of 1,024 keys stands for the
  8,192 or so that the original was trained on: in both maps, each key before the last place where
  positions are skipped counts for `crowd` keys (`earlier_keys`). Without that, far keys take too
  much in texts of thousands of tokens, the more the longer the text (docs/results/calibrate).
- A step computes the maps of a few queries, drawn in proportion to w_m (`Strata`), from the
  original's own queries and keys. The gradient of KL by CoCA's scores is the difference of the maps.
- With the gradient of ReLU, half of the coefficients would soon be negative for every token and
  never recover; see `Keys`.
- Matrices are multiplied in bfloat16 if the processor has AMX or AVX-512 BF16, also in the original.
  Scores and their softmax, divergences, the residual stream and the fitted weights stay float32.

Letters: see `models/attention.py`; n_b blocks of text.
"""

import copy
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coca_hf.convert.layer_pairs import Angles, HiddenStates, LayerPairs, batches, run_layer
from coca_hf.convert.refit import blocks_to_refit_on
from coca_hf.models.attention import (
    CocaAttention,
    ContentPairs,
    coca_query,
    own_angles,
    rectified,
    scaled_key,
    unit_key,
)
from coca_hf.precision import precision

STEPS = 1280  # of every layer, at least
QUERIES = 48  # of a block in one step
PARTS = 4  # of those queries, on a CPU: the first parts see few keys and cost less
RELATIVE_RATE = 0.03  # the learning rate, relative to the root mean square of W_Q
BETAS = (0.8, 0.95)
WARMUP_STEPS = 10
EAGER_STEPS = 3  # on a GPU, before the others are replayed as a graph
LEAK = 0.1  # of the gradient, for a coefficient below zero
MEASURED_QUERIES = 256  # of a held-out block
TRIAL_STEPS = 320  # of a fit that only tells whether a layer wants more content pairs
TRIAL_MARGIN = 1.05  # with more of them, a fit is slower at first and ends nearer
TIMED_STEPS = 200  # on a GPU, whose first ones are slower
TIMED = 5  # runs whose median counts, because other processes may disturb one


class AttentionInputs(NamedTuple):
    """What the attention of one layer of the original receives and computes, and CoCA's angles."""

    inputs: Tensor  # (n_b, m, hidden)
    queries: Tensor  # (n_b, m, h, d), rotated and scaled
    keys: Tensor  # (n_b, g, m, d), rotated
    cos: Tensor  # (n_b, m, j)
    sin: Tensor
    skipped: Tensor  # (n_b, m): how many positions are skipped before each token


@dataclasses.dataclass(frozen=True)
class FitTask:
    """What all layers are fitted and measured on, and how.

    blocks: (n_b, m) token ids to fit on; held_out: (n, m) others, to measure on. passes: over the
    blocks. seed: decides their order. chooses_content: whether trial fits choose the content pairs
    of every layer. ranked_tokens: how many tokens the layers are ranked on afterwards, perhaps none.
    settings: everything that decides the fitted tensors, as text.
    """

    blocks: Tensor
    held_out: Tensor
    passes: int
    seed: int = 0
    chooses_content: bool = False
    ranked_tokens: int = 0
    settings: str = ""


@torch.no_grad()
def run_original(
    layer: Any,
    states: Tensor | HiddenStates,
    after: Tensor | HiddenStates,
    positions: Tensor,
    angles: Angles,
    storage: str | None = None,
) -> AttentionInputs:
    """Run `states` through `layer`, as in `run_layer`, and return what its attention sees.

    storage: the device of the result, by default that of `positions`.
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
    skipped = positions - torch.arange(positions.shape[1], device=positions.device)
    return AttentionInputs(*kept, *(part.to(device) for part in (*angles.coca(positions), skipped)))


def fit(
    attention: CocaAttention, seen: AttentionInputs, passes: int, seed: int, crowd: float
) -> None:
    """Train W_Q and W_T of `attention`, in place. crowd: as in `earlier_keys`."""
    num_blocks, length = seen.inputs.shape[:2]
    weights, device = attention.q_proj.weight, seen.inputs.device
    draw = torch.Generator().manual_seed(seed)
    visits = torch.cat([torch.randperm(num_blocks, generator=draw) for _ in range(passes)])
    steps, strata = len(visits), Strata(length)
    blocks = visits[:, None].to(device)
    rows = strata.draw(steps, 1, generator=draw).to(device)
    parts = list(strata.parts(PARTS if weights.device.type == "cpu" else 1))
    number = torch.arange(steps)
    rates = ((number + 1) / WARMUP_STEPS).clamp(max=1) * (1 - number / steps)
    rates = (RELATIVE_RATE * weights.square().mean().sqrt().item() * rates).to(weights.device)
    attention.requires_grad_(False)
    parameters = [*attention.q_proj.parameters(), *attention.t_proj.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    rate, done = torch.zeros_like(rates[0]), torch.zeros(1, dtype=torch.int64, device=device)
    optimizer = torch.optim.Adam(parameters, rate, BETAS, fused=True, capturable=weights.is_cuda)

    def step() -> None:
        rate.copy_(rates[done][0])
        backward(attention, seen, blocks[done][0], rows[done][0], parts, crowd)
        optimizer.step()
        optimizer.zero_grad()
        done.add_(1)

    with torch.cuda.device_of(weights):
        repeat(step, steps, as_graph=weights.is_cuda and seen.inputs.is_cuda)
    attention.requires_grad_(False)


def repeat(step: Callable[[], None], times: int, as_graph: bool) -> None:
    """Call `step` this often. as_graph: replay it as a CUDA graph, because launching its many small
    kernels takes longer than running them; it then has to do the same to the same tensors each time.
    """
    if not as_graph:
        for _ in range(times):
            step()
        return
    side = torch.cuda.Stream()  # as torch.cuda.graph asks of what comes before a capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(min(times, EAGER_STEPS)):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if times > EAGER_STEPS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(times - EAGER_STEPS):
            graph.replay()
    torch.cuda.synchronize()  # before the graph and its memory are freed


def is_nearer_as_content_layer(
    attention: CocaAttention,
    text: AttentionInputs,
    held_out: AttentionInputs,
    seed: int,
    crowd: float,
) -> bool:
    """Whether content pairs in every second of the other pairs, too, bring the maps of `attention`
    nearer to the original's on held-out text, by short fits of copies.
    """
    text = AttentionInputs(*(part[:: _trial_stride(len(part))] for part in text))
    found = []
    for is_content_layer in (False, True):
        trial = copy.deepcopy(attention)
        make_content_layer_(trial, is_content_layer)
        fit(trial, text, math.ceil(TRIAL_STEPS / len(text.inputs)), seed, crowd)
        found.append(divergences(trial, held_out).mean().item())
    without, with_more = found
    return with_more < TRIAL_MARGIN * without


def make_content_layer_(attention: CocaAttention, is_content_layer: bool) -> None:
    """Let every second of the other pairs be a content pair, too, or not; in other layers nothing
    changes.
    """
    config, own = copy.copy(attention.config), {attention.layer_idx}
    others = {*config.coca_content_layers} - own
    config.coca_content_layers = sorted(others | own if is_content_layer else others)
    attention.config, attention.content = config, config.content_of(attention.layer_idx)


def _trial_stride(num_blocks: int) -> int:
    """Which blocks a trial sees, every n-th, because the last half of them has repeated passages; an
    odd n, because these are of four kinds in turn.
    """
    return math.ceil(num_blocks / TRIAL_STEPS) | 1


class Strata:
    """A block's rows in strata of equal weight w_m; row 0, which sees only itself, has weight 0."""

    def __init__(self, length: int):
        self.number, self.length = min(QUERIES, length), length
        weights = torch.arange(1, length + 1) ** -0.5
        weights[0] = 0
        self._sums = weights.cumsum(0) / weights.sum()

    def draw(self, *visits: int, generator: torch.Generator) -> Tensor:
        """A row of every stratum, (*visits, r), ascending."""
        places = torch.arange(self.number) + torch.rand(*visits, self.number, generator=generator)
        return self._row(places)

    def parts(self, number: int) -> Iterator[tuple[slice, int]]:
        """The strata in `number` parts, each with the most keys that its last row may see."""
        ends = [self.number * part // number for part in range(number + 1)]
        for start, end in itertools.pairwise(ends):
            yield slice(start, end), int(self._row(torch.tensor(float(end)))) + 1

    def _row(self, place: Tensor) -> Tensor:
        row = torch.searchsorted(self._sums, place / self.number, right=True)
        return row.clamp(max=self.length - 1)


def backward(
    attention: CocaAttention,
    seen: AttentionInputs,
    blocks: Tensor,
    rows: Tensor,
    parts: list[tuple[slice, int]],
    crowd: float,
) -> None:
    """Accumulate the gradients of the mean of KL(original's map || CoCA's).

    blocks: (b,); rows: of each, (b, r); parts: slices of r, each with the most keys that its
    queries may see. crowd: as in `earlier_keys`.
    """
    device = attention.q_proj.weight.device
    their_query = seen.queries[blocks[:, None], rows].transpose(1, 2).to(device, torch.float32)
    inputs, their_key, cos, sin, skipped = (
        part.index_select(0, blocks).to(device)
        for part in (seen.inputs, seen.keys, seen.cos, seen.sin, seen.skipped)
    )
    their_key, rows = their_key.float(), rows.to(device)
    query, key = fold(attention, inputs, (cos, sin), rows)
    to_query, to_key = torch.empty_like(query), torch.zeros_like(key)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for part, visible in parts:
            bias = later_keys(rows[:, part], visible)
            bias += earlier_keys(rows[:, part], skipped, visible, crowd)
            some_query, some_key = query[:, :, part], key[:, :, :visible]
            gradient = scores(some_query, some_key).add_(bias).softmax(-1)
            gradient -= (
                scores(their_query[:, :, part], their_key[:, :, :visible]).add_(bias).softmax(-1)
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
    q, t = attention.queries(_take(inputs, rows)), attention.coefficients(inputs)
    return folded(attention, q, t, angles, rows)


def folded(
    attention: CocaAttention, q: Tensor, t: Tensor, angles: tuple[Tensor, Tensor], rows: Tensor
) -> tuple[Tensor, Tensor]:
    """As `fold`, from queries (b, h, r, d) and coefficients (b, g, n, j)."""
    constraint, content = attention.config.coca_constraint, attention.content
    angles = own_angles(*angles, content)
    cos, sin = (part.unsqueeze(1) for part in angles)
    cos_of_rows, sin_of_rows = (_take(part, rows).unsqueeze(1) for part in angles)
    query = coca_query(q, cos_of_rows, sin_of_rows, constraint, content) * attention.scaling
    return query, Keys.apply(t, unit_key(cos, sin, constraint), content)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (b, r) of (b, m, ...): (b, r, ...)."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def scores(query: Tensor, key: Tensor) -> Tensor:
    """(b, h, r, d) and (b, g, n, d) to (b, h, r, n)."""
    return (by_group(query, key.shape[1]) @ key.mT).view(*query.shape[:3], -1)


def by_group(x: Tensor, groups: int) -> Tensor:
    """(b, h, r, ...) as (b, g, h / g * r, ...), so keys need no copies."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def later_keys(rows: Tensor, length: int) -> Tensor:
    """A mask to add to scores, (b, 1, r, n): it hides the keys after the queries in rows (b, r)."""
    later = torch.arange(length, device=rows.device) > rows[:, None, :, None]
    return later * torch.finfo(torch.float32).min


def earlier_keys(rows: Tensor, skipped: Tensor, length: int, crowd: float) -> Tensor:
    """What to add to scores, (b, 1, r, n), so that each key before the last positions that are skipped
    before its query counts as often as `crowd` equal ones; not the first key, which many heads attend
    to when there is nothing else. skipped: as in `AttentionInputs`, of the blocks.
    """
    is_earlier = skipped[:, None, None, :length] < _take(skipped, rows)[:, None, :, None]
    is_earlier[..., 0] = False
    return is_earlier * math.log(crowd)


class Keys(torch.autograd.Function):
    """`scaled_key(rectified(t), unit_key)`, except that coefficients below zero also have a gradient.

    It is `LEAK` times the usual one, where the loss wants the coefficient to grow.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, unit: Tensor, content: ContentPairs) -> Tensor:
        ctx.save_for_backward(t, unit)
        ctx.content = content
        return scaled_key(rectified(t, content), unit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        t, unit = ctx.saved_tensors
        first, second = gradient.chunk(2, -1)
        to_t = (first * unit[..., 0, :]).addcmul_(second, unit[..., 1, :])
        is_passed = (t > 0) | ctx.content.mask(t)
        return torch.where(is_passed, to_t, LEAK * to_t.clamp(max=0)), None, None


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def divergences(attention: CocaAttention, seen: AttentionInputs) -> Tensor:
    """KL(original's map || CoCA's) of every head in nats, (h,), the mean over blocks and queries."""
    device, length = attention.q_proj.weight.device, seen.inputs.shape[1]
    rows = torch.arange(length - 1, -1, -math.ceil(length / MEASURED_QUERIES), device=device)[None]
    found = []
    for block in zip(*(part.split(1) for part in seen), strict=True):
        inputs, queries, keys, cos, sin, _ = (part.to(device, torch.float32) for part in block)
        hidden = later_keys(rows, length)
        log_maps = scores(*fold(attention, inputs, (cos, sin), rows)).add_(hidden).log_softmax(-1)
        maps = scores(queries[:, rows[0]].transpose(1, 2), keys).add_(hidden).softmax(-1)
        found.append((torch.xlogy(maps, maps) - maps * log_maps).sum(-1).mean((0, 2)))
    return torch.stack(found).mean(0)


def expected_seconds(
    pairs: LayerPairs, task: FitTask, missing: Collection[int], first: int = 0
) -> float:
    """The seconds that calibration takes from layer `first` on, if it has to fit the `missing`.

    A batch is run through the first of these layers, and a few steps are made, on weights that are
    loaded only for this.
    """
    blocks, layers = task.blocks, len(pairs)
    with precision(pairs.dtype):
        began = time.perf_counter()
        theirs, ours = pairs.load(min(missing))
        read, attention = time.perf_counter() - began, ours.self_attn
        ids = blocks[next(batches(blocks))]
        states = pairs.embeddings()[ids].float()
        positions = torch.arange(ids.shape[1], device=pairs.device).expand(ids.shape)
        places, storage = (states, torch.empty_like(states), positions), pairs.storage(blocks)

        def run() -> AttentionInputs:
            return run_original(theirs, *places, pairs.angles, storage)

        # the first time of each allocates and compiles
        seen = AttentionInputs(*(part[:1] for part in run()))
        divergences(attention, seen)
        fit(attention, seen, 1, seed=0, crowd=1)
        forward = _seconds(run, pairs.device)
        measure = _seconds(lambda: divergences(attention, seen), pairs.device)
        steps = TIMED_STEPS if attention.q_proj.weight.is_cuda else 1
        step = _seconds(lambda: fit(attention, seen, steps, seed=0, crowd=1), pairs.device) / steps
    reads = layers - first
    tokens = blocks.numel() * (max(missing) + 1 - first) + 2 * task.held_out.numel() * reads
    # W_O: each layer of both models, and the attention of one again
    refitted_on = blocks[blocks_to_refit_on(pairs.config, blocks, task.seed)]
    tokens += layers * (3 * refitted_on.numel() + task.held_out.numel())
    reads += layers
    if task.ranked_tokens:  # a run per layer, and then another calibration with the kept layers
        tokens += task.ranked_tokens * layers * (layers + 3) // 2
        tokens += 2 * task.held_out.numel() * layers
        reads += 2 * layers
    trials, few = 2 if task.chooses_content else 0, len(blocks[:: _trial_stride(len(blocks))])
    fit_steps = task.passes * len(blocks) + trials * few * math.ceil(TRIAL_STEPS / few)
    fits = fit_steps * step + (2 + trials) * len(task.held_out) * measure
    return reads * read + tokens / ids.numel() * forward + len(missing) * fits


def _seconds(work: Callable[[], object], device: str) -> float:
    found = []
    for _ in range(TIMED):
        torch.zeros(1, device=device).item()  # waits for what the device still has to do
        began = time.perf_counter()
        work()
        torch.zeros(1, device=device).item()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
