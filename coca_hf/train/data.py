"""The training stream: documents from weighted sources, tokenised and packed into blocks of `seq_len` tokens.

The stream is one infinite sequence of blocks, fixed by the sources, the tokenizer, `seq_len` and the seed. It does not
depend on the number of processes: accelerate reads an IterableDataset in process 0 and deals each global batch out.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from coca_hf.documents import read_documents
from coca_hf.errors import CocaError
from coca_hf.train.recipe import Source

SHUFFLE_TOKENS = 2**21  # of a source, that wait to be drawn: 16 MB, and 1024 blocks of 2048 tokens


class PackedBlocks(IterableDataset):
    """Blocks `start_block`, `start_block + 1`, … of the stream, as `{"input_ids": (seq_len,), "labels": (seq_len,)}`.

    Both are int64 and hold the same tokens; the model shifts the labels. Within a source, every document is tokenised
    with the tokenizer's own special tokens and ended with its eos token, the documents follow one another without
    padding, and the blocks are drawn from a buffer of `SHUFFLE_TOKENS`. A source that is exhausted starts again, in
    another order, after every one of its blocks was drawn; the tokens after its last whole block are left out. The
    source of each block is drawn in proportion to `weight`, so that weights are shares of tokens. The stream
    does not end, and a later start costs the tokenising of everything before it.

    Raises CocaError, while iterating, for a source that cannot be read or has no whole block, and on construction for a
    tokenizer without an eos token.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        seq_len: int,
        seed: int = 0,
        start_block: int = 0,
        held_out_blocks: int = 0,
    ):
        if tokenizer.eos_token_id is None:
            raise CocaError(f"{tokenizer.name_or_path}: the tokenizer has no eos token, expected one to end documents")
        self.sources = list(sources)
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.start_block = start_block
        self.held_out_blocks = held_out_blocks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1, "several workers would each read the whole stream"
        for block in itertools.islice(self._mixed(), self.start_block, None):
            yield {"input_ids": block.clone(), "labels": block.clone()}

    def check(self) -> None:
        """Read the first block of every source, to find now what would otherwise stop the training later."""
        for source in self.sources:
            if next(self._packed(source), None) is None:
                raise self._too_short(source)

    def _too_short(self, source: Source) -> CocaError:
        return CocaError(
            f"{source.path}: got fewer than {self.seq_len} tokens in all its documents together, expected a block or "
            f"more; add text or lower data.seq_len"
        )

    def sources_of(self, start_block: int, count: int) -> list[Source]:
        """The source of each of `count` blocks of the stream; nothing is read."""
        return [self.sources[number] for number in itertools.islice(self._numbers(), start_block, start_block + count)]

    def _numbers(self) -> Iterator[int]:
        draw = random.Random(f"{self.seed} sources")
        weights = [source.weight for source in self.sources]
        while True:
            yield draw.choices(range(len(weights)), weights)[0]

    def _mixed(self) -> Iterator[Tensor]:
        streams = [self._repeated(number) for number in range(len(self.sources))]
        for number in self._numbers():
            yield next(streams[number])

    def _repeated(self, number: int) -> Iterator[Tensor]:
        for pass_number in itertools.count():
            draw = random.Random(f"{self.seed} source {number} pass {pass_number}")
            block = None
            for block in _shuffled(self._packed(self.sources[number]), self.seq_len, draw):
                yield block
            if block is None:
                raise self._too_short(self.sources[number])

    def _packed(self, source: Source) -> Iterator[Tensor]:
        rest = torch.empty(0, dtype=torch.int64)
        for document in read_documents(source.path, source.column, source.split):
            if self.held_out_blocks and _is_held_out(document.text):
                continue
            tokens = torch.cat((rest, torch.tensor(self._tokens(document.text))))
            whole = len(tokens) // self.seq_len * self.seq_len
            yield from tokens[:whole].view(-1, self.seq_len)
            rest = tokens[whole:]

    def _tokens(self, text: str) -> list[int]:
        tokens = self.tokenizer(text, verbose=False)["input_ids"]
        eos = self.tokenizer.eos_token_id
        return tokens if tokens[-1:] == [eos] else [*tokens, eos]


def _shuffled(blocks: Iterator[Tensor], seq_len: int, draw: random.Random) -> Iterator[Tensor]:
    """Every block once, drawn from a buffer of `SHUFFLE_TOKENS` that is refilled in order."""
    buffer = list(itertools.islice(blocks, max(SHUFFLE_TOKENS // seq_len, 1)))
    for block in blocks:
        place = draw.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = block
    draw.shuffle(buffer)
    yield from buffer


def held_out_blocks(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int, held_out_blocks: int, seed: int
) -> list[Tensor]:
    """Up to `held_out_blocks` blocks (seq_len,) of the documents that `PackedBlocks` leaves out."""
    reader = PackedBlocks(sources, tokenizer, seq_len, seed)
    rest = torch.empty(0, dtype=torch.int64)
    for source in sources:
        for document in read_documents(source.path, source.column, source.split):
            if len(rest) >= held_out_blocks * seq_len:
                break
            if _is_held_out(document.text):
                rest = torch.cat((rest, torch.tensor(reader._tokens(document.text))))
    whole = min(len(rest) // seq_len, held_out_blocks)
    return list(rest[: whole * seq_len].view(-1, seq_len))


def _is_held_out(text: str) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode()) % 16 == 0
