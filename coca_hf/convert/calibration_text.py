"""The blocks of tokens that calibration fits on, and their positions.

Plain text seldom makes heads look something up (previous-token and induction heads: see
docs/results/attention-limits.md), so half of the blocks repeat passages (`repeated_blocks`). Blocks
stand for longer texts: positions are skipped between their pieces, up to the number that the
original was trained on (`tokens.skipped_positions`), and far keys count for many
(`layer_fit.earlier_keys`). Otherwise the model would learn neither long distances nor many keys.
"""

import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from coca_hf.convert.config import angles_reach
from coca_hf.documents import Document, TextSource, is_on_hub, read_documents
from coca_hf.errors import CocaError
from coca_hf.held_out import (
    TOKEN_CHARACTERS,
    hold_out,
    most_held_out,
    tokens_per_character,
)
from coca_hf.models.attention import layer_types
from coca_hf.tokens import Encoder, Piece, next_space, ordinary_tokens

SHORTEST_BLOCK = 4  # tokens, one for each part that its queries are taken in
SHORTEST_PERIOD = 16  # of a repeated passage
SHORT_PERIOD = 128  # at most, for half of them
HELD_OUT_TOKENS = 8192
HELD_OUT_BLOCKS = 8  # at most
TRAINING_HELD_OUT_TOKENS = 2**18  # at most, by coca-train
MAX_CROWD = 16  # more cost short texts, and gain little in long ones
HUB_CHARACTERS = 2**28  # of a data set on the hub


def calibration_blocks(
    text: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    num_tokens: int,
    block_tokens: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Token ids from all over a text: blocks to fit on, (n_b, m), and held-out blocks, (n, m).

    Nothing is fitted on that coca-train holds out of this text as one source.

    text: only the first `HUB_CHARACTERS` of a data set on the hub are read. num_tokens: to fit on,
    in blocks of `block_tokens`, or shorter ones if the model does not reach as far. A block that
    reaches the end of a document continues with the next one.

    Raises CocaError if there is too little text, blocks are too short, or the tokenizer has token
    ids that the model does not have.
    """
    length = min(block_tokens, reach(config))
    if length < SHORTEST_BLOCK:
        raise CocaError(
            f"--calibrate: got blocks of {length} tokens, expected at least {SHORTEST_BLOCK}; they have "
            "the least of --calibrate-block, the trained length and the attention window"
        )
    wanted = max(1, num_tokens // length)
    encoder = Encoder(tokenizer, config.vocab_size)
    most = max(1, min(HELD_OUT_BLOCKS, HELD_OUT_TOKENS // length))

    read = functools.partial(_documents, text)

    def texts() -> Iterator[str]:  # what is never held out
        return filter(None, (rule.split(document.text)[0] for document in read()))

    rule = most_held_out(read, encoder, TRAINING_HELD_OUT_TOKENS)
    _, held_out = hold_out(read, encoder, length, most, from_all=True)
    characters = sum(map(len, texts()))
    tokens = int(characters * tokens_per_character(read, encoder)) if characters else 0
    if not len(held_out) or tokens < wanted * length:
        raise CocaError(
            f"--calibrate {text.source}: got {len(held_out)} blocks of {length} tokens to hold out, "
            f"and about {tokens:,} tokens to fit on, expected at least 1 and {wanted * length:,}; "
            "give more text, or a smaller --calibrate-tokens or --calibrate-block"
        )
    draw = random.Random(seed)
    starts = [int((number + draw.random()) / wanted * characters) for number in range(wanted)]
    # the last block may continue at the beginning
    twice = itertools.chain(texts(), texts())
    blocks = torch.stack(list(_blocks(twice, starts, encoder, length)))
    return blocks, held_out


def _documents(text: TextSource) -> Iterator[Document]:
    left = HUB_CHARACTERS if is_on_hub(text.source) else math.inf
    for document in read_documents(*text):
        yield document
        left -= len(document.text)
        if left <= 0:
            return


def _blocks(
    texts: Iterator[str], starts: list[int], encoder: Encoder, length: int
) -> Iterator[Tensor]:
    """The next `length` tokens, in whole words, from each of `starts`, ascending character places."""
    ahead, before = deque(starts), 0
    open_blocks: list[Tensor] = []
    for text in texts:
        beginnings = [0] * len(open_blocks)
        while ahead and ahead[0] < before + len(text):
            open_blocks.append(torch.empty(0, dtype=torch.long))
            start = ahead.popleft() - before
            beginnings.append(next_space(text, start) if start else start)
        before += len(text)
        filled = []
        for block, start in zip(open_blocks, beginnings, strict=True):
            end = start + length * TOKEN_CHARACTERS
            piece = Piece(text[start:end], start == 0, end >= len(text), 0, 0)
            filled.append(torch.cat((block, encoder([piece])))[:length])
        yield from (block for block in filled if len(block) == length)
        open_blocks = [block for block in filled if len(block) < length]
        if not ahead and not open_blocks:
            return


def repeated_blocks(
    blocks: Tensor, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, seed: int = 0
) -> Tensor:
    """As many blocks, (n_b, m), with a repeated passage, from `blocks` and random in turn.

    A passage has 16 tokens to half a block, and half of them at most 128. A random one is drawn from
    all tokens except special ones. In two blocks of four, the passage fills the block; in the
    others, a block of text has it twice.
    """
    rng = random.Random(f"repeated {seed}")
    tokens, length = blocks.flatten(), blocks.shape[1]
    ordinary = ordinary_tokens(tokenizer, config.vocab_size)
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


def copies(
    blocks: Tensor, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, seed: int = 0
) -> Tensor:
    """The first half of every block, read twice, and as many random halves: (2 n_b, m), or m - 1
    tokens if m is odd.
    """
    half = blocks[:, : blocks.shape[1] // 2]
    ordinary = ordinary_tokens(tokenizer, config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(ordinary), half.shape, generator=generator)
    return torch.cat((half, ordinary[drawn])).repeat(1, 2)


def reach(config: PreTrainedConfig) -> int:
    """Over how many positions every layer of the original attends with its trained angles."""
    reached = angles_reach(config)
    is_of_original = getattr(config, "coca_kept_window", None) is None
    if is_of_original and "sliding_attention" in layer_types(config):
        reached = min(reached, config.sliding_window or reached)
    return reached


def crowd_size(config: PreTrainedConfig, length: int) -> float:
    """How many keys of a text that fills `reach` one key of a block of `length` tokens stands for."""
    return min(MAX_CROWD, reach(config) / length)
