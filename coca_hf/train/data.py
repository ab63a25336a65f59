"""The training data: blocks of `seq_len` tokens, mixed from weighted sources, and those that are held out.

The stream is one infinite sequence of blocks, fixed by the sources, the tokenizer, `seq_len`, the seed and the number
of held-out blocks. It does not depend on the number of processes: accelerate reads an IterableDataset in process 0 and
deals each global batch out. Tokenised on the way, a later start costs the tokenising of everything before it; from
prepared blocks (see `prepared.py`) it costs nothing.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from coca_hf.convert.calibration_text import skipped_positions
from coca_hf.documents import commit_of, is_on_hub
from coca_hf.errors import CocaError
from coca_hf.held_out import HeldOut, hold_out, shares
from coca_hf.tokens import Encoder
from coca_hf.train.lookups import Lookups
from coca_hf.train.prepared import Prepared, describe_stream, open_prepared, write_prepared
from coca_hf.train.recipe import Recipe, Source
from coca_hf.train.stop import leave_signals_to_parent
from coca_hf.train.stream import ANSWER, PackedPass, TokenStream, draw_of_sources, too_short


def blocks_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, start_block: int = 0) -> "PackedBlocks":
    """The training blocks of a recipe, from `start_block` on."""
    data = recipe.data
    return PackedBlocks(
        data.sources,
        tokenizer,
        data.seq_len,
        data.seed,
        start_block,
        data.held_out_blocks,
        data.prepared,
        data.skip_positions,
    )


class PackedBlocks(IterableDataset):
    """Blocks `start_block`, `start_block + 1`, … of the stream, as `{"input_ids": (seq_len,), "labels": (seq_len,)}`.

    Both are int64 and hold the same tokens; the model shifts the labels. With a synthetic source, `answers` (seq_len,)
    says which tokens are answers; with `skip_positions`, `position_ids` rise to at most so many, and `attention_mask`,
    of ones, says that what follows a gap is no other document. Every document is tokenised with the
    tokenizer's own special tokens and ended with its eos token. How blocks are packed, shuffled and mixed: see
    `stream.py`; which documents are held out: see `held_out.py`. The stream does not end.

    prepared_dir: where prepared blocks are looked for. Those that are there are read, later ones are tokenised; the
    stream is the same.

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
        prepared_dir: str | Path | None = None,
        skip_positions: int | None = None,
    ):
        self.sources = list(sources)
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.seq_len = seq_len
        self.seed = seed
        self.start_block = start_block
        self.held_out_blocks = held_out_blocks
        self.prepared_dir = prepared_dir and Path(prepared_dir)
        self.skip_positions = skip_positions

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1, "several workers would each read the whole stream"
        if worker:
            leave_signals_to_parent()
        for number, block in enumerate(self._blocks(), self.start_block):
            yield self._example(number, block)

    def pin_(self, commits: Sequence[str | None] | None = None) -> list[str | None]:
        """Read the data sets on the hub at these commits, by default those that they have now; returns them.

        Raises CocaError where the hub does not say.
        """
        if commits is None:
            commits = [commit_of(source.path, source.commit) if source.path else None for source in self.sources]
        for source, commit in zip(self.sources, commits, strict=True):
            source.pin_(commit)
        return list(commits)

    def check(self) -> None:
        """Read the first block of every source, to find now what would otherwise stop the training later."""
        for source in self._texts:
            given = {"split": source.split != "train", "subset": source.subset, "revision": source.revision}
            if any(given.values()) and not is_on_hub(source.path):
                names = ", ".join(name for name, value in given.items() if value)
                raise CocaError(f"{source.path}: got {names}, which only data sets on the hub have; leave it out")
            if next(PackedPass(source, self.encoder, self.seq_len, HeldOut()), None) is None:
                raise too_short(source, self.seq_len)
        if len(self._texts) < len(self.sources):
            Lookups(self.tokenizer)

    def sources_of(self, start_block: int, count: int) -> list[Source]:
        """The source of each of `count` blocks of the stream; nothing is read."""
        draw, weights = draw_of_sources(self.seed), [source.weight for source in self.sources]
        drawn = draw.choices(self.sources, weights, k=start_block + count)
        return drawn[start_block:]

    def prepared(self) -> Prepared | None:
        """The blocks of this stream that lie in `prepared_dir`, or None."""
        return open_prepared(self.prepared_dir, self._description()) if self.prepared_dir else None

    def prepare(self, num_blocks: int, progress: Callable[[int], None] = lambda done: None) -> Prepared:
        """Write the first `num_blocks` blocks to `prepared_dir`, or what is missing of them.

        progress: called with the number of blocks that are there. Raises CocaError as iterating does, and where another
        process prepares the same blocks, or the disk is full.
        """
        assert self.prepared_dir, "needs a directory"
        return write_prepared(self.prepared_dir, self._description(), self._stream_at, num_blocks, progress)

    def held_out(self) -> list[Tensor]:
        """The held-out blocks, each (seq_len,), int64: of every source its share, as far as it can spare them."""
        prepared = self.prepared()
        blocks = prepared.state["held_out"].long() if prepared else self._hold_out()[1]
        return list(blocks)

    @property
    def _texts(self) -> list[Source]:
        return [source for source in self.sources if source.path]

    def _example(self, number: int, block: Tensor) -> dict[str, Tensor]:
        ids = block % ANSWER
        example = {"input_ids": ids, "labels": ids.clone()}
        if len(self._texts) < len(self.sources):
            example["answers"] = block >= ANSWER
        if self.skip_positions:
            seed = random.Random(f"{self.seed} positions {number}").getrandbits(63)
            [positions] = skipped_positions(1, self.seq_len, self.skip_positions, seed)
            example |= {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        return example

    def _blocks(self) -> Iterator[Tensor]:
        prepared = self.prepared()
        if prepared:
            for block in prepared.blocks(self.start_block):
                yield torch.from_numpy(block.astype("int64"))
        stream, _ = self._stream_at(prepared.state if prepared else None)
        first = max(self.start_block, stream.next_block)
        yield from itertools.islice(stream, first - stream.next_block, None)

    def _stream_at(self, state: dict[str, Any] | None) -> tuple[TokenStream, dict[str, Any]]:
        """The stream where `state` has it, or at its begin; and what a state keeps of the held-out blocks."""
        commits = self.pin_(state["commits"] if state else None)
        if state:
            kept = {key: state[key] for key in ("rules", "held_out")}
        else:
            rules, blocks = self._hold_out()
            kept = {"rules": [tuple(rule) for rule in rules], "held_out": blocks.int()}
        rules = [HeldOut(*rule) for rule in kept["rules"]]
        stream = TokenStream(self.sources, self.encoder, self.seq_len, self.seed, rules)
        if state:
            stream.restore_(state["stream"])
        return stream, kept | {"commits": commits}

    def _hold_out(self) -> tuple[list[HeldOut], Tensor]:
        """What is held out of every source, and all their held-out blocks, (blocks, seq_len)."""
        counts = shares([source.weight if source.path else 0 for source in self.sources], self.held_out_blocks)
        chosen = [
            hold_out(source.place, self.encoder, self.seq_len, count)
            for source, count in zip(self.sources, counts, strict=True)
        ]
        return [rule for rule, _ in chosen], torch.cat([blocks for _, blocks in chosen])

    def _description(self) -> dict[str, Any]:
        return describe_stream(self.sources, self.tokenizer, self.seq_len, self.seed, self.held_out_blocks)
