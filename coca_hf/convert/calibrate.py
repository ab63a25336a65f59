"""A start from activations: fit W_Q and W_T of every layer to the original's attention
(`--calibrate`).

Layer by layer, on the hidden states that the original has there, Adam minimises over W_Q and W_T
(and their biases)

    mean over queries m of  w_m KL(original's map || CoCA's map),      w_m proportional to (m + 1)^(-1/2)

Fitting the outputs instead leaves most of the error (LoLCATs, arXiv 2410.10254, starts linear
attention so). The
weights guard the first few tokens: a CoCA score is largest at distance 0, and a second token that
attends to itself looks like the first one, which some MLP then makes another attention sink of. No
gradient passes from layer to layer: every layer sees what the original's sees, so that none has to
make up for the others.

Blocks have thousands of keys, because the competition of many keys is not learnt among few. Maps of
all their queries would not fit into memory. A step makes those of a few queries again, from the
original's own queries and keys, and draws the queries in proportion to w_m, so that none is
computed to count little (`Strata`). The gradient of KL by CoCA's scores is the difference of the
two maps: nothing else is differentiated through a map.

With the gradient of ReLU half of the coefficients soon are negative for every token, and stay so:
`Keys`.

Letters: see `models/attention.py`; n_b blocks of text. Memory is n_b m (2 hidden + (h + g) d) * 4
bytes and a layer.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_hf.convert.calibration_text import reach, skipped_positions
from coca_hf.files import replacing
from coca_hf.models.attention import CocaAttention, coca_query, turn, turns
from coca_hf.models.decoder import CocaForCausalLM

STEPS = 1280  # of every layer at least; more visits to blocks make larger steps
QUERIES = 48  # of a block in one step
PARTS = 4  # of those queries, on a CPU: the first parts see few keys, and cost less
RELATIVE_RATE = 0.03  # the learning rate, over the root mean square of W_Q
BETAS = (0.8, 0.95)
WARMUP_STEPS = 10
LEAK = 0.1  # of the gradient that reaches a coefficient below zero
BATCH_TOKENS = 4096  # of a forward
MEASURED_QUERIES = 256  # of a held-out block
# of transformers' attention functions, the one that notes queries and keys
ATTENTION = "coca_calibration"

Report = Callable[[int, int], None]  # layers done, layers in all


class LayerFit(NamedTuple):
    """What a layer came to: KL(original's map || CoCA's), nats, mean over heads and held-out
    queries.
    """

    kl_start: float
    kl_fitted: float


class Calibration(NamedTuple):
    """The fitted tensors by name in the CoCA model, float32, and what they are worth on held-out
    text.
    """

    tensors: dict[str, Tensor]
    layers: list[LayerFit]
    perplexity: dict[str, float]  # of `original`, `start`, `calibrated`


class Seen(NamedTuple):
    """What the attention of one layer of the original sees and makes of it, and CoCA's angles."""

    inputs: Tensor  # (n_b, m, hidden)
    queries: Tensor  # (n_b, m, h, d), rotated and scaled
    keys: Tensor  # (n_b, g, m, d), rotated
    cos: Tensor  # (n_b, m, j)
    sin: Tensor


@contextmanager
def _tf32() -> Iterator[None]:
    """Matrix products of GPUs in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_passes(num_blocks: int) -> int:
    """As many passes over the blocks as make `STEPS` steps of one block, but at least four."""
    return max(4, math.ceil(STEPS / num_blocks))


@_tf32()
def calibrate(
    original: PreTrainedModel,
    coca: CocaForCausalLM,
    blocks: Tensor,
    held_out: Tensor,
    finished: Path,
    settings: str = "",
    seed: int = 0,
    passes: int | None = None,
    device: str | None = None,
    report: Report = lambda done, total: None,
) -> Calibration:
    """Fit the queries and coefficients of `coca`, which `patch_` or a conversion made of
    `original`, layer by layer.

    blocks: (n_b, m) token ids to fit on; held_out: (n, m) others, to measure on. finished: a
    directory where every layer's tensors are kept when it is done, and taken from if they were made
    with the same `settings`. seed: of the order of the blocks. passes: over the blocks, by default
    `default_passes`. device: by default the GPU, where there is one. Layers that keep the
    original's attention stay as they are, and so do both models; on one machine and number of
    threads the same arguments give the same bits.
    """
    device = device or default_device()
    passes = passes or default_passes(len(blocks))
    base: Any = original.base_model
    angles = Angles(base, coca, device)
    positions = skipped_positions(len(blocks), blocks.shape[1], reach(coca.config), seed).to(device)
    in_order = torch.arange(held_out.shape[1], device=device).expand(held_out.shape)
    embed: Any = original.get_input_embeddings()
    with torch.no_grad():
        states = embed(blocks.to(embed.weight.device)).float().to(_storage(coca, blocks, device))
        embedded = embed(held_out.to(embed.weight.device)).float().to(device)
    streams = {name: embedded.clone() for name in ("original", "start", "calibrated")}
    tensors: dict[str, Tensor] = {}
    layers: list[LayerFit] = []
    finished.mkdir(exist_ok=True)
    for number, (theirs, ours) in enumerate(zip(base.layers, coca.model.layers, strict=True)):
        start: Any
        theirs, start = (
            copy.deepcopy(layer).to(device, torch.float32).eval() for layer in (theirs, ours)
        )
        fitted = copy.deepcopy(start)
        attention = fitted.self_attn
        seen = run_original_(theirs, states, positions, angles)
        seen_held_out = run_original_(theirs, streams["original"], in_order, angles)
        if hasattr(attention, "t_proj"):
            file = finished / f"layer-{number:05}.safetensors"
            if (kept := _load(file, settings)) is None:
                fit(attention, seen, passes, seed + number)
                _save(_fitted_tensors(attention), file, settings)
            else:
                attention.load_state_dict(kept, strict=False)
            prefix = f"model.layers.{number}.self_attn."
            tensors |= {
                prefix + name: tensor.cpu() for name, tensor in _fitted_tensors(attention).items()
            }
            before, after = (
                divergences(one, seen_held_out).mean() for one in (start.self_attn, attention)
            )
            layers.append(LayerFit(before.item(), after.item()))
        else:
            layers.append(LayerFit(0.0, 0.0))
        for name, layer in (("start", start), ("calibrated", fitted)):
            _run_coca_(layer, streams[name], in_order, angles)
        del seen
        report(number + 1, len(base.layers))
    perplexity = {
        name: _perplexity(coca, stream, held_out.to(device)) for name, stream in streams.items()
    }
    return Calibration(tensors, layers, perplexity)


class Angles:
    """cos and sin of positions (b, m), as both models have them."""

    def __init__(self, base: nn.Module, coca: CocaForCausalLM, device: str):
        rotary: list[Any] = [
            copy.deepcopy(module).to(device) for module in (base.rotary_emb, coca.model.rotary_emb)
        ]
        self.original, self.coca = (
            functools.partial(module, torch.zeros(1, device=device)) for module in rotary
        )


def attend_and_note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs
):
    """Causal attention; leaves the rotated queries and keys in `module.noted`. As transformers
    calls it.
    """
    module.noted = ((query * scaling).transpose(1, 2), key)
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling).transpose(
        1, 2
    ), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_and_note)


def _storage(coca: CocaForCausalLM, blocks: Tensor, device: str) -> str:
    """Where hidden states and what a layer makes of them are kept: on the GPU if they take at most
    half of it.
    """
    if not device.startswith("cuda"):
        return device
    config = coca.config
    heads = config.num_attention_heads + config.num_key_value_heads
    needed = blocks.numel() * (2 * config.hidden_size + heads * config.head_dim) * 4
    return device if needed < torch.cuda.mem_get_info(device)[0] / 2 else "cpu"


def _batches(states: Tensor) -> Iterator[slice]:
    at_once = max(1, BATCH_TOKENS // states.shape[1])
    return (slice(start, start + at_once) for start in range(0, len(states), at_once))


@torch.no_grad()
def run_original_(layer: Any, states: Tensor, positions: Tensor, angles: Angles) -> Seen:
    """Put `states`, (n_b, m, hidden), through `layer`, whose attention function is changed.
    positions: (n_b, m).
    """
    attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
    attention.config._attn_implementation = ATTENTION
    kept: list[Tensor] = []
    for some in _batches(states):
        batch, at = states[some].to(positions.device), positions[some]
        after = layer(
            batch, attention_mask=None, position_ids=at, position_embeddings=angles.original(at)
        )
        noted = layer.input_layernorm(batch), *attention.noted
        kept = kept or [
            torch.empty(len(states), *part.shape[1:], device=states.device) for part in noted
        ]
        for whole, part in zip(kept, noted, strict=True):
            whole[some] = part
        states[some] = after
    return Seen(*kept, *(part.to(states.device) for part in angles.coca(positions)))


@torch.no_grad()
def _run_coca_(layer: Any, states: Tensor, positions: Tensor, angles: Angles) -> None:
    layer.self_attn.config._attn_implementation = ATTENTION
    for some in _batches(states):
        states[some] = layer(
            states[some], attention_mask=None, position_embeddings=angles.coca(positions[some])
        )


def fit(attention: CocaAttention, seen: Seen, passes: int, seed: int) -> None:
    """Train W_Q and W_T of `attention`, in place."""
    num_blocks, length = seen.inputs.shape[:2]
    draw = torch.Generator().manual_seed(seed)
    visits = torch.cat([torch.randperm(num_blocks, generator=draw) for _ in range(passes)])
    at_once = max(1, len(visits) // STEPS)
    steps = len(visits) // at_once
    blocks = visits[: steps * at_once].view(steps, at_once).to(seen.inputs.device)
    strata = Strata(length)
    rows = strata.draw(steps, at_once, generator=draw).to(seen.inputs.device)
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
    """The rows of a block in strata of equal weight w_m. The first row, which has itself only, has
    none.
    """

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
        """The strata in so many parts, each with how many keys its last row sees at most."""
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
    their_query = seen.queries[blocks[:, None], rows].transpose(1, 2).to(device)
    inputs, their_key, cos, sin = (
        part.index_select(0, blocks).to(device)
        for part in (seen.inputs, seen.keys, seen.cos, seen.sin)
    )
    rows = rows.to(device)
    query, key = fold(attention, inputs, (cos, sin), rows)
    to_query, to_key = torch.empty_like(query), torch.zeros_like(key)
    with torch.no_grad():
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
    """CoCA's query of the rows (b, r), scaled, (b, h, r, d), and all keys, (b, g, n, d). angles:
    cos, sin (b, n, j).
    """
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
    cos, sin = (part.unsqueeze(1) for part in angles)
    cos_of_rows, sin_of_rows = (_take(part, rows).unsqueeze(1) for part in angles)
    query = coca_query(q, cos_of_rows, sin_of_rows, constraint) * attention.scaling
    return query, Keys.apply(t, turns(cos, sin, constraint))


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
    """What hides from the queries in rows (b, r) the keys after them, added to scores: (b, 1, r,
    n).
    """
    later = torch.arange(length, device=rows.device) > rows[:, None, :, None]
    return later * torch.finfo(torch.float32).min


class Keys(torch.autograd.Function):
    """`turn(relu(t), turns)`, except that a coefficient below zero has a gradient, too.

    A tenth of it, where the loss wants the coefficient larger.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(t, turns)
        return turn(t.relu(), turns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        t, turns = ctx.saved_tensors
        first, second = gradient.chunk(2, -1)
        to_t = (first * turns[..., 0, :]).addcmul_(second, turns[..., 1, :])
        return torch.where(t > 0, to_t, LEAK * to_t.clamp(max=0)), None


@torch.no_grad()
def divergences(attention: CocaAttention, seen: Seen) -> Tensor:
    """KL(original's map || CoCA's) in nats of every head, (h,): mean over blocks and queries,
    evenly chosen of many.
    """
    device, length = attention.q_proj.weight.device, seen.inputs.shape[1]
    rows = torch.arange(length - 1, -1, -math.ceil(length / MEASURED_QUERIES), device=device)[None]
    found = []
    for block in zip(*(part.split(1) for part in seen), strict=True):
        inputs, queries, keys, cos, sin = (part.to(device) for part in block)
        hidden = later_keys(rows, length)
        log_maps = scores(*fold(attention, inputs, (cos, sin), rows)).add_(hidden).log_softmax(-1)
        maps = scores(queries[:, rows[0]].transpose(1, 2), keys).add_(hidden).softmax(-1)
        found.append((torch.xlogy(maps, maps) - maps * log_maps).sum(-1).mean((0, 2)))
    return torch.stack(found).mean(0)


def _fitted_tensors(attention: CocaAttention) -> dict[str, Tensor]:
    tensors = attention.state_dict()
    return {
        name: tensor for name, tensor in tensors.items() if name.startswith(("q_proj.", "t_proj."))
    }


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


@torch.no_grad()
def _perplexity(coca: CocaForCausalLM, states: Tensor, token_ids: Tensor) -> float:
    """Perplexity of `token_ids` from states after the last layer, (n, m, hidden).

    The norm and the head are the same in both models.
    """
    norm, head = (
        copy.deepcopy(part).to(states.device, torch.float32)
        for part in (coca.model.norm, coca.get_output_embeddings())
    )
    pairs = zip(
        states[:, :-1].flatten(0, 1).split(512), token_ids[:, 1:].flatten().split(512), strict=True
    )
    losses = [cross_entropy(head(norm(row)), ids, reduction="sum").item() for row, ids in pairs]
    return math.exp(sum(losses) / token_ids[:, 1:].numel())
