"""The stream of training blocks, as an iterator whose place can be kept on disk and taken up again.

Within a source, documents follow one another without padding, and the blocks are drawn from a buffer of
`SHUFFLE_TOKENS`. A source that is exhausted starts again, in another order, after every one of its blocks was drawn;
the tokens after its last whole block are left out. The source of each block is drawn in proportion to `weight`, so that
weights are shares of tokens. A synthetic block takes one block of text, which is then drawn nowhere else; its answers
have the bit `ANSWER` beside their token.
"""

import functools
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from coca_hf.documents import read_documents
from coca_hf.errors import CocaError
from coca_hf.held_out import HeldOut
from coca_hf.tokens import Encoder, Piece, batches, pieces_of
from coca_hf.train.lookups import Lookups
from coca_hf.train.recipe import Source

LARGE_DOCUMENT = 10_000_000  # characters: a dozen novels
ANSWER = 2**31  # more than any token
SHUFFLE_TOKENS = 2**21  # of a source, that wait to be drawn: 16 MB, and 1024 blocks of 2048 tokens


class TokenStream:
    """Blocks 0, 1, … of the stream, (seq_len,), int64, without end; `next_block` is the number of the next one.

    held_out: of every source, what is left out. Raises CocaError, while iterating, for a source that cannot be read or
    has no whole block.
    """

    def __init__(
        self, sources: Sequence[Source], encoder: Encoder, seq_len: int, seed: int, held_out: Sequence[HeldOut]
    ):
        self.next_block = 0
        self._draw = draw_of_sources(seed)
        self._weights = [source.weight for source in sources]
        texts = {
            number: _SourceStream(source, encoder, seq_len, f"{seed} source {number}", rule)
            for number, (source, rule) in enumerate(zip(sources, held_out, strict=True))
            if source.path
        }
        shares = [sources[number].weight for number in texts]
        self._sources = [
            texts[number]
            if number in texts
            else _LookupStream([*texts.values()], shares, Lookups(encoder.tokenizer), f"{seed} source {number}")
            for number in range(len(sources))
        ]

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        block = next(self._draw.choices(self._sources, self._weights)[0])
        self.next_block += 1
        return block

    def state(self) -> dict[str, Any]:
        """Where the stream is, in tensors, numbers and tuples."""
        sources = [source.state() for source in self._sources]
        return {"next_block": self.next_block, "draw": self._draw.getstate(), "sources": sources}

    def restore_(self, state: dict[str, Any]) -> None:
        """Go to where a stream over the same sources was; costs reading, not tokenising, what comes before."""
        self.next_block = state["next_block"]
        self._draw.setstate(state["draw"])
        for source, kept in zip(self._sources, state["sources"], strict=True):
            source.restore_(kept)


def draw_of_sources(seed: int) -> random.Random:
    """What chooses the source of every block."""
    return random.Random(f"{seed} sources")


class _SourceStream:
    """The blocks of one source in the order of training: pass after pass, each through a buffer that shuffles."""

    def __init__(self, source: Source, encoder: Encoder, seq_len: int, name: str, held_out: HeldOut):
        self._start_packing = lambda *place: PackedPass(source, encoder, seq_len, held_out, *place)
        self._source = source
        self._seq_len = seq_len
        self._name = name
        self._pass_number = -1
        self._buffer: list[Tensor] = []
        self._is_read = True  # to its end, so that the buffer is only emptied

    def __next__(self) -> Tensor:
        if not self._buffer:
            self._start_pass(self._pass_number + 1)
        if not self._is_read:
            block = next(self._packed, None)
            if block is not None:
                place = self._draw.randrange(len(self._buffer))
                drawn, self._buffer[place] = self._buffer[place], block
                return drawn
            self._draw.shuffle(self._buffer)
            self._buffer.reverse()  # it is emptied from its end
            self._is_read = True
        return self._buffer.pop()

    def _start_pass(self, number: int) -> None:
        self._pass_number = number
        self._draw = random.Random(f"{self._name} pass {number}")
        self._packed = self._start_packing()
        self._buffer = list(itertools.islice(self._packed, max(SHUFFLE_TOKENS // self._seq_len, 1)))
        self._is_read = False
        if not self._buffer:
            raise too_short(self._source, self._seq_len)

    def state(self) -> dict[str, Any] | None:
        if self._pass_number < 0:
            return None
        return {
            "pass": self._pass_number,
            "is_read": self._is_read,
            "draw": self._draw.getstate(),
            "buffer": torch.stack(self._buffer).int() if self._buffer else None,
            "packed": self._packed.state(),
        }

    def restore_(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self._pass_number, self._is_read = state["pass"], state["is_read"]
        self._draw = random.Random()
        self._draw.setstate(state["draw"])
        self._buffer = [] if state["buffer"] is None else list(state["buffer"].long())
        self._packed = self._start_packing(*state["packed"])


class _LookupStream:
    """Blocks of lookups, each in a block of text, and fixed by that and its own number."""

    def __init__(self, texts: list[_SourceStream], shares: list[float], lookups: Lookups, name: str):
        self._texts, self._shares, self._lookups, self._name = texts, shares, lookups, name
        self._number = 0

    def __next__(self) -> Tensor:
        draw = random.Random(f"{self._name} block {self._number}")
        self._number += 1
        text = next(draw.choices(self._texts, self._shares)[0])
        ids, answers = self._lookups.block(text.tolist(), draw)
        return torch.tensor(ids) + ANSWER * torch.tensor(answers)

    def state(self) -> int:
        return self._number

    def restore_(self, state: int) -> None:
        self._number = state


class PackedPass:
    """The blocks of one pass over a source, in the order of its documents, from any place on."""

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        seq_len: int,
        held_out: HeldOut,
        document: int = 0,
        character: int = 0,
        waiting: Tensor | None = None,
    ):
        self._batches = batches(_pieces(source, held_out, document, character))
        self._encoder = encoder
        self._seq_len = seq_len
        self._place = (document, character)
        self._waiting = torch.empty(0, dtype=torch.int64) if waiting is None else waiting.long()

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        while len(self._waiting) < self._seq_len:
            batch = next(self._batches)
            self._waiting = torch.cat((self._waiting, self._encoder(batch)))
            self._place = (batch[-1].document, batch[-1].character)
        block, self._waiting = self._waiting[: self._seq_len].clone(), self._waiting[self._seq_len :]
        return block

    def state(self) -> tuple[int, int, Tensor]:
        """Documents read, characters of the next one, and the tokens that wait for their block."""
        return (*self._place, self._waiting.int())


def _pieces(source: Source, held_out: HeldOut, document: int, character: int) -> Iterator[Piece]:
    documents = enumerate(read_documents(*source.place))
    for number, content in itertools.islice(documents, document, None):
        if len(content.text) > LARGE_DOCUMENT:
            _name_large(content.where, len(content.text))
        text, _ = held_out.split(content.text)
        yield from pieces_of(text, number, character if number == document else 0)


@functools.cache
def _name_large(where: str, characters: int) -> None:
    """Once, however often it is read: it may be a corpus in one file, or a row that is no text."""
    print(
        f"{where}: got a document of {characters:,} characters; it is trained on; if it is no text, remove it",
        file=sys.stderr,
        flush=True,
    )


def too_short(source: Source, seq_len: int) -> CocaError:
    return CocaError(
        f"{source.path}: got fewer than {seq_len} tokens in all its documents together, expected a block or more; add "
        f"text or lower data.seq_len"
    )
