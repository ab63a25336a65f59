"""The blocks of tokens that calibration fits on, and their positions.

Text alone seldom asks heads to look something up (previous-token and induction heads: see
docs/results/attention-limits.md), so half of the blocks repeat passages (`repeated_blocks`). Blocks
stand for longer texts: between their pieces positions are skipped, up to as many as the original
was trained on (`skipped_positions`), or the model would know no longer distances.
"""

import itertools
import math
import random
import re
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from coca_hf.documents import Document, is_on_hub, read_documents
from coca_hf.errors import CocaError
from coca_hf.held_out import TOKEN_CHARACTERS, Place, hold_out, tokens_per_character
from coca_hf.models.rotary import LENGTH_DEPENDENT_ROPE_TYPES
from coca_hf.tokens import Encoder, Piece

SHORTEST_BLOCK = 4  # in tokens: its queries are taken in as many parts
SHORTEST_PERIOD = 16  # of a repeated passage
SHORT_PERIOD = 128  # of half of them at most
SKIPS = 8  # places of a block where positions are left out, at most,
TOKENS_A_SKIP = 32  # and tokens of a block for every such place, at least
HELD_OUT_TOKENS = 8192
HELD_OUT_BLOCKS = 8  # at most
HUB_CHARACTERS = 2**28  # of a data set on the hub
SPACE = re.compile(r"\s")


def calibration_blocks(
    place: Place,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    num_tokens: int,
    block_tokens: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Blocks to fit on, (n_b, m), and (n, m) of the documents that coca-train holds out, both from
    all over the text: token ids.

    place: the arguments of `read_documents`; of a data set on the hub the first `HUB_CHARACTERS`
    are read. num_tokens: to fit on, in blocks of `block_tokens`, or fewer where the model is for
    fewer. A block that reaches the end of a document continues with the next one.

    Raises CocaError where there is too little text, blocks are too short, or the tokenizer has
    words that the model does not know.
    """
    length = min(block_tokens, reach(config))
    if length < SHORTEST_BLOCK:
        raise CocaError(
            f"--calibrate: got blocks of {length} tokens, expected at least {SHORTEST_BLOCK}: the least "
            "of --calibrate-block, the trained length and the attention window"
        )
    wanted = max(1, num_tokens // length)
    encoder = Encoder(tokenizer)
    most = max(1, min(HELD_OUT_BLOCKS, HELD_OUT_TOKENS // length))

    def read() -> Iterator[Document]:
        return _documents(place)

    def texts() -> Iterator[str]:  # what is not held out
        return filter(None, (rule.split(document.text)[0] for document in read()))

    rule, held_out = hold_out(read, encoder, length, most, from_all=True)
    characters = sum(map(len, texts()))
    tokens = int(characters * tokens_per_character(read, encoder)) if characters else 0
    if not len(held_out) or tokens < wanted * length:
        raise CocaError(
            f"--calibrate {place[0]}: got {len(held_out)} blocks of {length} tokens to hold out, "
            f"and about {tokens:,} tokens to fit on, expected at least 1 and {wanted * length:,}; "
            "give more text, or a smaller --calibrate-tokens or --calibrate-block"
        )
    draw = random.Random(seed)
    starts = [int((number + draw.random()) / wanted * characters) for number in range(wanted)]
    # the last block may continue at the beginning
    twice = itertools.chain(texts(), texts())
    blocks = torch.stack(list(_blocks(twice, starts, encoder, length)))
    if (largest := max(blocks.max(), held_out.max())) >= config.vocab_size:
        raise CocaError(
            f"--calibrate {place[0]}: got token id {largest} from the tokenizer, expected ids "
            f"below the model's "
            f"vocabulary of {config.vocab_size}; the tokenizer belongs to another model"
        )
    return blocks, held_out


def _documents(place: Place) -> Iterator[Document]:
    left = HUB_CHARACTERS if is_on_hub(place[0]) else math.inf
    for document in read_documents(*place):
        yield document
        left -= len(document.text)
        if left <= 0:
            return


def _blocks(
    texts: Iterator[str], starts: list[int], encoder: Encoder, length: int
) -> Iterator[Tensor]:
    """The next `length` tokens, in whole words, from each of `starts`, rising character places."""
    ahead, before = deque(starts), 0
    open_blocks: list[Tensor] = []
    for text in texts:
        beginnings = [0] * len(open_blocks)
        while ahead and ahead[0] < before + len(text):
            open_blocks.append(torch.empty(0, dtype=torch.long))
            beginnings.append(_next_word(text, ahead.popleft() - before))
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


def _next_word(text: str, start: int) -> int:
    space = SPACE.search(text, start)
    return space.start() if start and space else start


def repeated_blocks(
    blocks: Tensor, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, seed: int = 0
) -> Tensor:
    """As many blocks, (n_b, m), with a passage that repeats, in turn from `blocks` and random.

    A passage has 16 tokens to half a block, and every other one at most 128; a random one is drawn
    from all tokens but the special ones. Two blocks in four it fills; in the others it stands
    twice, in a block of text.
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
    """How many positions every layer of the original attends over, with its trained angles."""
    rope = config.rope_parameters
    reached = [config.max_position_embeddings]
    # default: an NTK base is baked in
    if rope["rope_type"] in ("default", *LENGTH_DEPENDENT_ROPE_TYPES):
        reached.append(rope.get("original_max_position_embeddings"))
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    is_of_original = getattr(config, "coca_kept_window", None) is None
    if is_of_original and "sliding_attention" in types:
        reached.append(getattr(config, "sliding_window", None))
    return min(int(length) for length in reached if length)


def skipped_positions(num_blocks: int, length: int, reach: int, seed: int = 0) -> Tensor:
    """Positions of the tokens of every block, (n_b, m): at a few random places of a block some are
    left out.

    As in PoSE (arXiv 2309.10400). How many are left out at a place is uniform, up to an equal share
    of what a block is shorter than `reach`; with mostly small numbers, maps are 1.5 to 2 times as
    far from the original's at distances that no block has.
    """
    draw = torch.Generator().manual_seed(seed)
    skips = min(SKIPS, length // TOKENS_A_SKIP)
    places = torch.randint(1, length, (num_blocks, skips), generator=draw)
    most = max(0, reach - length) // max(1, skips)
    left_out = ((most + 1) * torch.rand(num_blocks, skips, generator=draw)).long()
    steps = torch.ones(num_blocks, length, dtype=torch.long).scatter_add_(1, places, left_out)
    return steps.cumsum(1) - 1
