"""The blocks of tokens that calibration fits on, and their positions.

Text alone seldom asks heads to look something up (previous-token and induction heads, docs/guide.md): as many blocks
again repeat passages (`repeated_blocks`). Blocks stand for longer texts: between their pieces positions are left out,
up to as many as the original was trained on (`skipped_positions`), or the model would know no longer distances.
"""

import random

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from coca_hf.documents import read_documents
from coca_hf.errors import CocaError
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES

SHORTEST_PERIOD = 16  # of a repeated passage
SHORT_PERIOD = 128  # of half of them at most
SKIPS = 8  # places of a block where positions are left out, at most,
TOKENS_A_SKIP = 32  # and tokens of a block for every such place, at least
HELD_OUT_TOKENS = 8192
HELD_OUT_BLOCKS = 8  # at most
CANDIDATES = 64  # blocks read for every one that is taken


def calibration_blocks(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    num_tokens: int,
    block_tokens: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    length = min(block_tokens, reach(config))
    held_out = max(1, min(HELD_OUT_BLOCKS, HELD_OUT_TOKENS // length))
    wanted = max(1, num_tokens // length) + held_out
    blocks: list[Tensor] = []
    for document in read_documents(text, skip_empty=True):
        ids = torch.tensor(tokenizer(document.text, verbose=False)["input_ids"])
        blocks += ids[: len(ids) // length * length].view(-1, length)
        if len(blocks) >= CANDIDATES * wanted:
            break
    if len(blocks) < wanted:
        raise CocaError(
            f"--calibrate {text}: got {len(blocks)} blocks of {length} tokens, expected at least {wanted}, of which "
            f"{held_out} are held out; give more text, or a smaller --calibrate-tokens"
        )
    chosen = torch.stack(random.Random(seed).sample(blocks, wanted))
    return chosen[held_out:], chosen[:held_out]


def repeated_blocks(
    blocks: Tensor, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, seed: int = 0
) -> Tensor:
    """As many blocks, (n_b, m), with a passage that repeats, in turn from `blocks` and random.

    A passage has 16 tokens to half a block, and every other one at most 128; a random one is drawn from all tokens but
    the special ones. Two blocks in four it fills; in the others it stands twice, in a block of text.
    """
    rng = random.Random(f"repeated {seed}")
    tokens, length = blocks.flatten(), blocks.shape[1]
    known = min(len(tokenizer), config.vocab_size)
    ordinary = torch.tensor(sorted(set(range(known)) - set(tokenizer.all_special_ids)))
    repeated = []
    for number in range(len(blocks)):
        longest = min(length // 2, rng.choice((SHORT_PERIOD, length)))
        period = rng.randint(min(SHORTEST_PERIOD, longest), longest)
        if number % 2:
            passage = ordinary[[rng.randrange(len(ordinary)) for _ in range(period)]]
        else:
            start = rng.randrange(len(tokens) - period + 1)
            passage = tokens[start : start + period]
        if number % 4 < 2:
            repeated.append(passage.repeat(-(-length // period))[:length])
        else:
            first = rng.randint(0, length - 2 * period)
            second = rng.randint(first + period, length - period)
            block = blocks[rng.randrange(len(blocks))].clone()
            block[first : first + period] = block[second : second + period] = passage
            repeated.append(block)
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
    skips = min(SKIPS, length // TOKENS_A_SKIP)
    places = torch.randint(1, length, (num_blocks, skips), generator=draw)
    most = max(0, reach - length) // max(1, skips)
    left_out = ((most + 1) ** torch.rand(num_blocks, skips, generator=draw)).long() - 1
    steps = torch.ones(num_blocks, length, dtype=torch.long).scatter_add_(1, places, left_out)
    return steps.cumsum(1) - 1
