"""Documents as tokens, in pieces, so that a document of any size needs little memory and progress
shows; and the positions of a block of tokens that stands for a longer text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coca_hf.errors import CocaError

SPACE = re.compile(r"\s")
LONGEST_WORD = 500  # characters to look ahead for white space
SKIPS = 8  # places in a block where positions are skipped, at most
TOKENS_A_SKIP = 32  # tokens in a block per such place, at least
NO_TOKENIZER = (
    "got no tokenizer that can be loaded, expected one beside the model; copy tokenizer.json and "
    "tokenizer_config.json of the original model there"
)
# files of tokenizers that transformers does not write but other engines read
FOREIGN_TOKENIZERS = (
    *("tokenizer.model*", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
    *("tekken.json", "tokenizer.tiktoken", "qwen.tiktoken"),
)
PIECE_CHARACTERS = 2**20  # a call of the tokenizer: about a second, and 250,000 tokens


class Piece(NamedTuple):
    """A part of a document's text. document, character: where the source continues after it."""

    text: str
    begins: bool
    ends: bool
    document: int
    character: int


class Encoder:
    """Pieces of documents as tokens, with the tokenizer's special tokens and eos at the end of each
    document.

    vocab_size: of the model. Raises CocaError for a tokenizer without an eos token, and, when called,
    for a token that the model does not have: a text may name one that was added to the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        if tokenizer.eos_token_id is None:
            raise CocaError(
                f"{tokenizer.name_or_path}: the tokenizer has no eos token, expected one to end "
                f"documents"
            )
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._before, after = around_text(tokenizer)
        self._after = (
            after if after[-1:] == [tokenizer.eos_token_id] else [*after, tokenizer.eos_token_id]
        )

    def __call__(self, pieces: list[Piece]) -> Tensor:
        """The tokens of `pieces`, one after the other, (tokens,), int64."""
        texts = [piece.text for piece in pieces]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        tokens: list[int] = []
        for piece, ids in zip(pieces, encoded["input_ids"], strict=True):
            tokens += begun(ids, self._before) if piece.begins else ids
            if piece.ends:
                tokens += self._after[1:] if self._is_ended(piece.text, ids) else self._after
        if (largest := max(tokens, default=0)) >= self.vocab_size:
            raise CocaError(
                f"{self.tokenizer.name_or_path}: got token {largest} "
                f"({self.tokenizer.decode([largest])!r}) in the text, expected ids below the model's "
                f"vocabulary of {self.vocab_size}; take it out of the text or of the tokenizer, "
                "unless the tokenizer belongs to another model"
            )
        return torch.tensor(tokens)

    def _is_ended(self, text: str, ids: list[int]) -> bool:
        """Whether a text itself ends with eos; chat templates often put a new line after it."""
        return ids[-1:] == self._after[:1] or text.rstrip().endswith(self.tokenizer.eos_token)

    def document(self, text: str) -> Tensor:
        """The tokens of a whole document, (tokens,), int64."""
        return torch.cat([self([piece]) for piece in pieces_of(text)])


def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before a text, and those after it.

    Raises CocaError if no text shows which are which.
    """
    for text in _probes(tokenizer):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        around = tokenizer(text)["input_ids"]
        starts = [i for i in range(len(around)) if around[i : i + len(ids)] == ids]
        if ids and len(starts) == 1:  # an unknown text may be a special token, or nothing
            return around[: starts[0]], around[starts[0] + len(ids) :]
    raise CocaError(
        f"{tokenizer.name_or_path}: got a tokenizer whose special tokens cannot be told from its "
        "text, expected them before and after a text; is its vocabulary whole?"
    )


def begun(ids: list[int], before: list[int]) -> list[int]:
    """`ids` of a text after the special tokens `before` it, unless the text begins with them, as
    one of `apply_chat_template` does.
    """
    return ids if ids[: len(before)] == before else before + ids


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor:
    """The ids below `vocab_size`, the rows of embeddings, that are no special tokens, ascending."""
    known = min(len(tokenizer), vocab_size)
    return torch.tensor(sorted(set(range(known)) - set(tokenizer.all_special_ids)))


def _probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Short texts; every tokenizer knows at least one of them."""
    yield "a"
    yield from tokenizer.get_vocab()


def pieces_of(text: str, document: int = 0, character: int = 0) -> Iterator[Piece]:
    """Cut a document, from `character` on, into pieces of at most `PIECE_CHARACTERS`; most
    documents are one piece.

    A cut comes after the last line break in the second half of a piece, otherwise before the last
    space there, otherwise where the piece is full. Tokenizers look at both sides of a place, so the
    tokens at a cut may differ from those of the whole document.
    """
    while character < len(text):
        end = _cut(text, character)
        is_last = end == len(text)
        after = (document + 1, 0) if is_last else (document, end)
        yield Piece(text[character:end], character == 0, is_last, *after)
        character = end


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Batches of pieces of `PIECE_CHARACTERS` or more, which fast tokenizers read in parallel."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= PIECE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cut(text: str, start: int) -> int:
    end = start + PIECE_CHARACTERS
    if end >= len(text):
        return len(text)
    middle = start + PIECE_CHARACTERS // 2
    after_line = text.rfind("\n", middle, end) + 1
    return after_line or (at if (at := text.rfind(" ", middle, end)) > 0 else end)


def split_at_space(text: str, share: float) -> tuple[str, str]:
    """Cut `text` in two near its first `1 - share`, at white space if there is some."""
    place = next_space(text, len(text) - int(len(text) * share))
    return text[:place], text[place:]


def next_space(text: str, place: int) -> int:
    """The first white space of `text` from `place` on, or `place` if none is near: Chinese has few."""
    space = SPACE.search(text, place, place + LONGEST_WORD)
    return space.start() if space else place


def skipped_positions(num_blocks: int, length: int, reach: int, seed: int = 0) -> Tensor:
    """Positions of the tokens of every block, (n_b, m), some skipped at a few random places.

    This is PoSE (arXiv 2309.10400). How many are skipped in all is uniform up to what `reach` exceeds
    a block by, and random shares of that are skipped at each place. Independent numbers would add up
    to half of it in nearly every block, and distances near `reach` would be rare.
    """
    draw = torch.Generator().manual_seed(seed)
    skips = min(SKIPS, length // TOKENS_A_SKIP)
    places = torch.randint(1, length, (num_blocks, skips), generator=draw)
    total = (max(0, reach - length) + 1) * torch.rand(num_blocks, 1, generator=draw)
    shares = torch.rand(num_blocks, skips, generator=draw)
    shares.clamp_(min=2**-24)  # a single one that is drawn as 0 would be divided by itself
    left_out = (total * shares / shares.sum(1, keepdim=True)).long()
    steps = torch.ones(num_blocks, length, dtype=torch.long).scatter_add_(1, places, left_out)
    return steps.cumsum(1) - 1
