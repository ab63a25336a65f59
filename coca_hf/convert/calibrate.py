"""A start from activations: W_Q and W_T that give every layer the attention of the original (`--calibrate`, issue 7).

Layer by layer, on the hidden states that the original has there, Adam minimises over W_Q and W_T (and their biases)

    mean over queries m of  w_m KL(original's map || CoCA's map),      w_m proportional to (m + 1)^(-1/2)

Fitting the outputs instead leaves most of the error (LoLCATs, arXiv 2410.10254, starts linear attention so). The
weights guard the first few tokens: a CoCA score is largest at distance 0, and a second token that attends to itself
looks like the first one, which some MLP then makes another attention sink of. A step sees a few queries of one block:
many small steps come further in the same time than few large ones. All else stays as it is, and no gradient passes from
layer to layer: the layers see what the original's see, so that none has to make up for the others, and one layer is on
the GPU at a time.

Two things decide whether heads that look something up come back (previous-token and induction heads, docs/guide.md).
With the gradient of ReLU half of the coefficients soon are negative for every token, and stay so: `NonNegative`. And
text alone seldom asks for them: as many blocks again are passages that repeat (`repeated_blocks`).

Blocks are short and stand for long texts: between their pieces positions are left out, up to as many as the original
was trained on (`skipped_positions`). Without it the model knows the distances within a block, and no others.

Letters: see `models/attention.py`; n_b blocks of text. Memory is n_b (m * hidden + h * m * m) * 4 bytes and a layer.
"""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from coca_hf.convert.staging import sync
from coca_hf.documents import read_documents
from coca_hf.errors import CocaError
from coca_hf.models.attention import CocaAttention, coca_query, turn, turns
from coca_hf.models.decoder import CocaForCausalLM
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES

PASSES = 10  # over the blocks, for every layer
QUERIES = 48  # of a block in one pass, drawn at random
RELATIVE_RATE = 0.03  # the learning rate, over the root mean square of W_Q
BETAS = (0.8, 0.95)
WARMUP_STEPS = 10
LEAK = 0.1  # of the gradient that reaches a coefficient below zero
BLOCK_TOKENS = 256
SHORTEST_PERIOD = 16  # of a repeated passage
TOKENS_A_SKIP = 32  # positions are left out at one place for every so many tokens of a block
BATCH_TOKENS = 1024  # of a forward
HELD_OUT_BLOCKS = 8
CANDIDATES = 64  # blocks read for every one that is taken

Report = Callable[[int, int], None]  # layers done, layers in all


class LayerFit(NamedTuple):
    """What a layer came to: KL(original's map || CoCA's), nats, mean over heads and held-out queries."""

    kl_start: float
    kl_fitted: float


class Calibration(NamedTuple):
    """The fitted tensors by name in the CoCA model, float32, and what they are worth on held-out text."""

    tensors: dict[str, Tensor]
    layers: list[LayerFit]
    perplexity: dict[str, float]  # of `original`, `start`, `calibrated`


def calibration_blocks(
    text: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, num_tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Blocks of the documents of `text`, drawn at random: (n_b, m) to fit on, and (n, m) held out, token ids.

    text: what `read_documents` reads. num_tokens: to fit on, in blocks of `BLOCK_TOKENS`, or less where the model is
    for less; blocks are cut within documents, of which the last tokens are left out.

    Raises CocaError where there are too few, or the tokenizer has words that the model does not know.
    """
    length = min(BLOCK_TOKENS, reach(config))
    wanted = max(1, num_tokens // length) + HELD_OUT_BLOCKS
    blocks: list[Tensor] = []
    for document in read_documents(text, skip_empty=True):
        ids = torch.tensor(tokenizer(document.text, verbose=False)["input_ids"])
        blocks += ids[: len(ids) // length * length].view(-1, length)
        if len(blocks) >= CANDIDATES * wanted:
            break
    if len(blocks) < wanted:
        raise CocaError(
            f"--calibrate {text}: got {len(blocks)} blocks of {length} tokens, expected at least {wanted}, of which "
            f"{HELD_OUT_BLOCKS} are held out; give more text, or a smaller --calibrate-tokens"
        )
    chosen = torch.stack(random.Random(seed).sample(blocks, wanted))
    if chosen.max() >= config.vocab_size:
        raise CocaError(
            f"--calibrate {text}: got token id {chosen.max()} from the tokenizer, expected ids below the model's "
            f"vocabulary of {config.vocab_size}; the tokenizer belongs to another model"
        )
    return chosen[HELD_OUT_BLOCKS:], chosen[:HELD_OUT_BLOCKS]


def repeated_blocks(
    blocks: Tensor, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, seed: int = 0
) -> Tensor:
    """As many blocks, (n_b, m), of a passage that repeats until the block is full, in turn from `blocks` and random.

    A passage has 16 tokens to half a block, and a random one is drawn from all tokens but the special ones.
    """
    rng = random.Random(f"repeated {seed}")
    tokens, length = blocks.flatten(), blocks.shape[1]
    known = min(len(tokenizer), config.vocab_size)
    ordinary = torch.tensor(sorted(set(range(known)) - set(tokenizer.all_special_ids)))
    repeated = []
    for number in range(len(blocks)):
        period = rng.randint(min(SHORTEST_PERIOD, length // 2), length // 2)
        if number % 2:
            passage = ordinary[[rng.randrange(len(ordinary)) for _ in range(period)]]
        else:
            start = rng.randrange(len(tokens) - period)
            passage = tokens[start : start + period]
        repeated.append(passage.repeat(-(-length // period))[:length])
    return torch.stack(repeated)


def reach(config: PreTrainedConfig) -> int:
    """How many positions every layer of the original attends over, with the angles of its trained length."""
    rope = config.rope_parameters
    reached = [config.max_position_embeddings]
    if rope["rope_type"] in ("default", *LENGTH_DEPENDENT_ROPE_TYPES):  # default: an NTK base is baked in
        reached.append(rope.get("original_max_position_embeddings"))
    if "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        reached.append(getattr(config, "sliding_window", None))
    return min(int(length) for length in reached if length)


def skipped_positions(num_blocks: int, length: int, reach: int, seed: int = 0) -> Tensor:
    """Positions of the tokens of every block, (n_b, m): at a few random places of a block some are left out.

    As PoSE has it (arXiv 2309.10400), except that how many are left out is log-uniform, up to an equal share each of
    what a block is shorter than `reach`: most distances in a text are small.
    """
    draw = torch.Generator().manual_seed(seed)
    skips = length // TOKENS_A_SKIP
    places = torch.randint(1, length, (num_blocks, skips), generator=draw)
    most = max(0, reach - length) // max(1, skips)
    left_out = ((most + 1) ** torch.rand(num_blocks, skips, generator=draw)).long() - 1
    steps = torch.ones(num_blocks, length, dtype=torch.long).scatter_add_(1, places, left_out)
    return steps.cumsum(1) - 1


def calibrate(
    original: PreTrainedModel,
    coca: CocaForCausalLM,
    blocks: Tensor,
    held_out: Tensor,
    finished: Path,
    seed: int = 0,
    passes: int = PASSES,
    report: Report = lambda done, total: None,
) -> Calibration:
    """Fit the queries and coefficients of `coca`, which `patch_` or a conversion made of `original`, layer by layer.

    blocks: (n_b, m) token ids to fit on; held_out: (n, m) others, to measure on. finished: a directory where every
    layer's tensors are kept when it is done, and taken from if they are there. seed: of the order of the blocks.
    Neither model is changed; on one machine and number of threads the same arguments give the same bits.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base: Any = original.base_model
    angles = Angles(base, coca, device)
    positions = skipped_positions(len(blocks), blocks.shape[1], reach(coca.config), seed)
    in_order = torch.arange(held_out.shape[1]).expand(held_out.shape)
    embed: Any = original.get_input_embeddings()
    with torch.no_grad():
        states = embed(blocks.to(embed.weight.device)).float()
        embedded = embed(held_out.to(embed.weight.device)).float()
    streams = dict.fromkeys(("original", "start", "calibrated"), embedded)
    tensors: dict[str, Tensor] = {}
    layers: list[LayerFit] = []
    finished.mkdir(exist_ok=True)
    for number, (theirs, ours) in enumerate(zip(base.layers, coca.model.layers, strict=True)):
        start: Any
        theirs, start = (copy.deepcopy(layer).to(device, torch.float32).eval() for layer in (theirs, ours))
        seen, after = run_original(theirs, states, positions, angles)
        seen_held_out, streams["original"] = run_original(theirs, streams["original"], in_order, angles)
        fitted = copy.deepcopy(start)
        attention: CocaAttention = fitted.self_attn
        file = finished / f"layer-{number:05}.safetensors"
        if file.exists():
            attention.load_state_dict(load_file(file), strict=False)
        else:
            fit(attention, seen, angles, passes, seed + number)
            _save(_fitted_tensors(attention), file)
        layers.append(
            LayerFit(*(divergences(one, seen_held_out, angles).mean().item() for one in (start.self_attn, attention)))
        )
        for name, layer in (("start", start), ("calibrated", fitted)):
            streams[name] = _run_coca(layer, streams[name], in_order, angles)
        prefix = f"model.layers.{number}.self_attn."
        tensors |= {prefix + name: tensor.cpu() for name, tensor in _fitted_tensors(attention).items()}
        states = after
        report(number + 1, len(base.layers))
    perplexity = {name: _perplexity(coca, stream, held_out) for name, stream in streams.items()}
    return Calibration(tensors, layers, perplexity)


class Seen(NamedTuple):
    """What the original's attention of one layer does: on the CPU, float32."""

    inputs: Tensor  # (n_b, m, hidden)
    maps: Tensor  # (n_b, h, m, n)
    positions: Tensor  # (n_b, m), rising


class Angles:
    """cos and sin of positions (b, m), as both models have them."""

    def __init__(self, base: nn.Module, coca: CocaForCausalLM, device: str):
        self.device = device
        rotary: list[Any] = [copy.deepcopy(module).to(device) for module in (base.rotary_emb, coca.model.rotary_emb)]
        self.original, self.coca = (functools.partial(module, torch.zeros(1, device=device)) for module in rotary)


def causal(length: int, device: str | torch.device) -> Tensor:
    """Which keys, (m, n), a query sees."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _mask(states: Tensor) -> Tensor:
    minimum = torch.finfo().min
    return torch.zeros((), device=states.device).where(causal(states.shape[1], states.device), minimum)[None, None]


def _batches(states: Tensor, positions: Tensor, angles: Angles) -> Iterator[tuple[Tensor, Tensor]]:
    at_once = max(1, BATCH_TOKENS // states.shape[1])
    for batch in zip(states.split(at_once), positions.split(at_once), strict=True):
        yield batch[0].to(angles.device), batch[1].to(angles.device)


@torch.no_grad()
def run_original(layer: Any, states: Tensor, positions: Tensor, angles: Angles) -> tuple[Seen, Tensor]:
    """What the attention of `layer` did on the way, and the hidden states after it. positions: (n_b, m)."""
    attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
    seen: list[tuple[Tensor, ...]] = []
    after = []
    with _watching(attention, seen):
        for batch, at in _batches(states, positions, angles):
            output = layer(batch, attention_mask=_mask(batch), position_ids=at, position_embeddings=angles.original(at))
            after.append(output.cpu())
    inputs, maps = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return Seen(inputs, maps, positions), torch.cat(after)


@contextmanager
def _watching(attention: nn.Module, seen: list[tuple[Tensor, ...]]) -> Iterator[None]:
    def note(module: nn.Module, args: tuple, kwargs: dict, result: tuple) -> None:
        inputs = args[0] if args else kwargs["hidden_states"]
        seen.append((inputs.cpu(), result[1].cpu()))

    hook = attention.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def _run_coca(layer: nn.Module, states: Tensor, positions: Tensor, angles: Angles) -> Tensor:
    after = [
        layer(batch, attention_mask=_mask(batch), position_embeddings=angles.coca(at)).cpu()
        for batch, at in _batches(states, positions, angles)
    ]
    return torch.cat(after)


def query_weights(length: int) -> Tensor:
    """What a query of a block counts in the loss, (m,): w_m, of mean 1."""
    weights = torch.arange(1, length + 1) ** -0.5
    return weights / weights.mean()


def fit(attention: CocaAttention, seen: Seen, angles: Angles, passes: int, seed: int) -> None:
    """Train W_Q and W_T of `attention`, in place."""
    num_blocks, length = seen.positions.shape
    steps = passes * num_blocks
    weights = query_weights(length).to(angles.device)
    attention.requires_grad_(False)
    parameters = [*attention.q_proj.parameters(), *attention.t_proj.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    rate = RELATIVE_RATE * attention.q_proj.weight.square().mean().sqrt().item()
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / steps)
    )
    draw = torch.Generator().manual_seed(seed)
    for block in torch.cat([torch.randperm(num_blocks, generator=draw) for _ in range(passes)]):
        rows = torch.randperm(length, generator=draw)[:QUERIES]
        inputs, positions = seen.inputs[block, None].to(angles.device), seen.positions[block, None].to(angles.device)
        maps, rows = seen.maps[block, None, :, rows].to(angles.device), rows.to(angles.device)
        ours = log_maps(attention, inputs, angles.coca(positions), rows)
        divergence = -(maps * ours).sum(-1).mean((0, 1))  # up to the entropy of maps
        (divergence * weights[rows]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    attention.requires_grad_(False)


def log_maps(attention: CocaAttention, inputs: Tensor, angles: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    """The logarithm of the attention map, (b, h, len(rows), n), of the queries in rows `rows`.

    angles: cos and sin, (b, n, j).
    """
    return log_attention(attention, attention.queries(inputs[:, rows]), attention.coefficients(inputs), angles, rows)


def log_attention(
    attention: CocaAttention, q: Tensor, t: Tensor, angles: tuple[Tensor, Tensor], rows: Tensor
) -> Tensor:
    """The same, of queries (b, h, len(rows), d) and coefficients (b, g, n, j)."""
    constraint = attention.config.coca_constraint
    cos, sin = (part.unsqueeze(1) for part in angles)
    query = coca_query(q, cos[:, :, rows], sin[:, :, rows], constraint)
    key = turn(NonNegative.apply(t), turns(cos, sin, constraint))
    scores = query @ key.repeat_interleave(attention.num_key_value_groups, 1).mT * attention.scaling
    return scores.masked_fill(~causal(t.shape[2], t.device)[rows], torch.finfo().min).log_softmax(-1)


class NonNegative(torch.autograd.Function):
    """ReLU, except that a value below zero has a gradient too, a tenth of it, where the loss wants the value larger."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t.relu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return torch.where(t > 0, gradient, LEAK * gradient.clamp(max=0))


@torch.no_grad()
def divergences(attention: CocaAttention, seen: Seen, angles: Angles) -> Tensor:
    """`divergence_of_heads` of `attention` on what was seen, (h,): a block at a time."""
    found = []
    for block in zip(*(part.split(1) for part in seen), strict=True):
        inputs, maps, positions = (part.to(angles.device) for part in block)
        all_rows = torch.arange(inputs.shape[1], device=angles.device)
        found.append(divergence_of_heads(log_maps(attention, inputs, angles.coca(positions), all_rows), maps))
    return torch.stack(found).mean(0)


def divergence_of_heads(log_maps: Tensor, maps: Tensor) -> Tensor:
    """KL(original's map || CoCA's) in nats, mean over blocks and queries: (b, h, m, n) to (h,)."""
    return (torch.xlogy(maps, maps) - maps * log_maps).sum(-1).mean((0, 2))


def _fitted_tensors(attention: CocaAttention) -> dict[str, Tensor]:
    tensors = attention.state_dict()
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("q_proj.", "t_proj."))}


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Under another name first, so that a file that is there is whole."""
    partial = file.with_suffix(".part")
    save_file(tensors, partial)
    sync(partial)
    partial.rename(file)


@torch.no_grad()
def _perplexity(coca: CocaForCausalLM, states: Tensor, token_ids: Tensor) -> float:
    """Of hidden states after the last layer, (n, m, hidden): the norm and the head are the same in both models."""
    norm, head = coca.model.norm, coca.get_output_embeddings()
    weight = head.weight
    losses = [
        cross_entropy(head(norm(row.to(weight.device, weight.dtype)))[:-1].float(), ids[1:].to(weight.device)).item()
        for row, ids in zip(states, token_ids, strict=True)
    ]
    return math.exp(sum(losses) / len(losses))
