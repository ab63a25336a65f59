"""From a recipe's documents to training blocks on disk, and from there to the trainer.

The documents of a source follow one another without padding, each with its special and eos tokens,
and are cut into blocks of `seq_len` tokens; an incomplete last block is left out. A source is read
pass after pass, each through a buffer of `SHUFFLE_TOKENS` from which blocks are drawn. The source
of every block is drawn by `weight`, a share of tokens. A synthetic block uses up a block of text.

The blocks and their order are therefore fixed by sources, tokenizer, `seq_len`, seed and number of
held-out blocks. A preparation that continues repeats all draws, and tokenises only what is not on
disk yet.

    PREPARED/coca-files.json      size, times of change and xxh3_128 of every local file, by path
    PREPARED/KEY/made-of.json     what the blocks are made of; KEY is its hash
    PREPARED/KEY/source-0.bin …   the blocks of each source in the order of its documents, 2 or 4
                                  bytes a token
    PREPARED/KEY/held-out.bin     the blocks that the loss is measured on
    PREPARED/KEY/order.bin        the source of every training block and its row in that source's
                                  file
    PREPARED/KEY/state.json       how many rows of these files count, the hash of every part of
                                  them, and how far every source is read

Readers use only what `state.json` counts, map it into memory and hash it before use. `state.json`
is replaced once those rows are on disk, so a preparation can be killed, continued and extended
while a training run reads.
"""

import errno
import functools
import hashlib
import itertools
import json
import os
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from coca_hf.documents import (
    Document,
    check_text_options,
    commit_of,
    local_files,
    names_of,
    read_documents,
)
from coca_hf.errors import CocaError, printable
from coca_hf.files import file_hash, locked, replace_text, size_in_words
from coca_hf.held_out import HeldOut, HeldOutTogether, hold_out, shares, together
from coca_hf.tokens import Encoder, Piece, batches, pieces_of, skipped_positions
from coca_hf.train.lookups import Lookups
from coca_hf.train.processes import Stopped
from coca_hf.train.recipe import Data, Source

ANSWER = 2**31  # added to a token that is an answer; larger than any token
SKIPPING = 0.5  # the share of blocks with skipped positions; docs/results/all-layers
AGAIN = "`coca-train RECIPE --prepare` makes them again"
LARGE_DOCUMENT = 10_000_000  # characters: a dozen novels
SHUFFLE_TOKENS = 2**21  # of a source, from which its next block is drawn: 1024 blocks of 2048
STATE_TOKENS = 2**25  # between two states: what a killed preparation draws and tokenises again
FRESH_SECONDS = 2.0  # within which a file may change again and keep its times
LARGE_FILE = 2**30  # bytes: hashing them takes long enough to say so
OF_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # or of a limit on what may be stored
UNREAD = {"document": 0, "character": 0, "waiting": [], "is_read": False}  # see _packed

Part = tuple[int, str]  # its end, in rows, and its xxh3_128


class Damaged(CocaError):
    """Prepared blocks are not what was written."""


class Rows:
    """An array (rows, width) in a file. A part is hashed before the first of its rows is read."""

    def __init__(self, path: Path, dtype: str, width: int, parts: Sequence[Part]):
        self.path, self.dtype, self.width = path, np.dtype(dtype), width
        self.parts = list(parts)
        self.row_bytes = width * self.dtype.itemsize
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return self.parts[-1][0] if self.parts else 0

    def __getitem__(self, number: int) -> np.ndarray:
        """Row `number`, (width,). Raises Damaged if its part is not what was written."""
        part = bisect_right(self.parts, number, key=lambda part: part[0])
        if part not in self._checked:
            self.check(part)
        return self._rows[number]

    def check(self, part: int) -> None:
        """Raises Damaged if a part is not what was written."""
        first = self.parts[part - 1][0] if part else 0
        end, written = self.parts[part]
        if xxhash.xxh3_128_hexdigest(self._rows[first:end].data) != written:
            raise Damaged(
                f"{self.path}: got another xxh3_128 of rows {first} to {end - 1} than when they "
                f"were prepared; the file was changed; {AGAIN}"
            )
        self._checked.add(part)

    @cached_property
    def _rows(self) -> np.ndarray:
        expected = len(self) * self.row_bytes
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < expected:
            raise Damaged(
                f"{self.path}: got {found:,} bytes, expected the {expected:,} that were prepared; "
                f"{AGAIN}"
            )
        return np.memmap(self.path, self.dtype, "r", shape=(len(self), self.width))


class GrowingRows(Rows):
    """Rows that can be appended. Opening the file cuts off what follows its last part."""

    def __enter__(self) -> "GrowingRows":
        self._file: BinaryIO = open(self.path, "a+b")
        self._file.truncate(len(self) * self.row_bytes)
        self._hash, self.written = xxhash.xxh3_128(), len(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def append(self, rows: np.ndarray) -> None:
        """rows: (rows, width). Raises OSError if they cannot be written."""
        content = rows.astype(self.dtype).tobytes()
        self._file.write(content)
        self._file.flush()
        self._hash.update(content)
        self.written += len(rows)

    def read(self, number: int) -> np.ndarray:
        """Row `number`, (width,), which need not be in a part yet."""
        self._file.seek(number * self.row_bytes)  # appending still writes to the end
        return np.frombuffer(self._file.read(self.row_bytes), self.dtype)

    def end_part(self) -> None:
        """Wait until all rows are on the disk, and end the part of those appended since the last."""
        os.fsync(self._file.fileno())
        if self.written > len(self):
            self.parts.append((self.written, self._hash.hexdigest()))
            self._hash = xxhash.xxh3_128()


def _files_of_rows(
    directory: Path, seq_len: int, dtypes: Sequence[str]
) -> dict[str, tuple[Path, str, int]]:
    """Path, dtype and width of every file of rows in a directory, by name."""
    sizes = {f"source-{number}": (dtype, seq_len) for number, dtype in enumerate(dtypes)}
    sizes |= {"held-out": ("uint32", seq_len), "order": ("uint32", 2)}
    return {name: (directory / f"{name}.bin", *size) for name, size in sizes.items()}


class Blocks:
    """The prepared blocks of `data` in a directory: `len` of them, each an example for the trainer.

    dtypes: those of the sources' files; a source with answers has uint32.

    Raises Damaged for a state that is not what was written, and CocaError if it cannot be read.
    """

    def __init__(self, directory: Path, data: Data, dtypes: Sequence[str]):
        self.directory, self._data = directory, data
        self.state = _read_state(directory)
        files, parts = _files_of_rows(directory, data.seq_len, dtypes), self.state["parts"]
        self._rows = {name: Rows(*file, parts[name]) for name, file in files.items()}
        self._order, self._held_out = self._rows["order"], self._rows["held-out"]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Block `number` as `input_ids` and `labels`, (seq_len,), int64, with the same tokens.

        The model shifts the labels. With a synthetic source, `answers` (seq_len,) says which tokens
        are answers. With `skip_positions`, half of the blocks, as the seed draws them, have
        `position_ids` in order, and those of the others rise to at most that many; an
        `attention_mask` of ones says that a gap does not begin another document.

        Raises Damaged if a file is not what was written.
        """
        source, row = self._order[number]
        marked = torch.from_numpy(self._rows[f"source-{source}"][row].astype("int64"))
        ids = marked % ANSWER
        example = {"input_ids": ids, "labels": ids.clone()}
        if self._data.has_answers:
            example["answers"] = marked >= ANSWER
        if reach := self._data.skip_positions:
            draw = random.Random(f"{self._data.seed} positions {number}")
            positions = torch.arange(len(ids))
            if draw.random() < SKIPPING:
                [positions] = skipped_positions(1, len(ids), reach, draw.getrandbits(63))
            example |= {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        return example

    @property
    def held_out(self) -> Tensor:
        """The held-out blocks, (blocks, seq_len), int64; every source gives its share if it can."""
        rows = [self._held_out[row] for row in range(len(self._held_out))]
        blocks = np.array(rows, dtype="int64").reshape(-1, self._data.seq_len)
        return torch.from_numpy(blocks)

    @property
    def num_bytes(self) -> int:
        return sum(len(rows) * rows.row_bytes for rows in self._rows.values())

    def sources_of(self, first: int, count: int) -> str:
        """The sources of a range of blocks, in words."""
        numbers = [self._order[number][0] for number in range(first, first + count)]
        names = [self._data.sources[number].name for number in numbers]
        return ", ".join(f"{names.count(name)} of {name}" for name in dict.fromkeys(names))

    def read_of_sources(self) -> list[str]:
        """How far each source of documents is read, in words."""
        lines = []
        for number, read in self.state["sources"].items():
            count = read["document"] + (read["character"] > 0)
            last = f" ({read['name']})" if "name" in read else ""  # blocks of de2ea7b lack it
            part = f"documents 1 to {count:,}{last}; what follows is not read"
            times = read.get("passes", 1)
            again = f", read up to {times:,} times" if times > 1 else ""
            part = f"all documents{again}" if read["is_read"] else part
            name = self._data.sources[int(number)].name
            lines.append(printable(f"data: {name}: blocks of {part}"))
        return lines

    def check(self) -> None:
        """Raises Damaged if any file is not what was written."""
        for rows in self._rows.values():
            for part in range(len(rows.parts)):
                rows.check(part)


class DealtBlocks(IterableDataset):
    """What one process reads of `blocks`, starting at block `first`: every `groups`-th batch.

    Processes that share their blocks (context parallelism) are one `group` and read the same. A
    step therefore takes consecutive blocks, in the same order on any number of processes.
    """

    def __init__(self, blocks: Blocks, first: int, batch_size: int, group: int, groups: int):
        self.blocks, self.first, self.batch_size = blocks, first, batch_size
        self.group, self.groups = group, groups

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        begin, stride = self.first + self.group * self.batch_size, self.groups * self.batch_size
        for batch in range(begin, len(self.blocks) - self.batch_size + 1, stride):
            for number in range(batch, batch + self.batch_size):
                yield self.blocks[number]


class Corpus:
    """What makes the blocks of `data`, and where they are: in `data.prepared`/KEY.

    vocab_size: of the model. check_stop: called often while files are hashed and blocks are
    prepared; an exception from it ends that, and what is done is kept.

    Raises CocaError for a tokenizer without an eos token.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        check_stop: Callable[[], None] = lambda: None,
    ):
        self.data, self.tokenizer = data, tokenizer
        self.encoder = Encoder(tokenizer, vocab_size)
        self._check_stop = check_stop
        self._hashed: dict[str, list[int]] = {}  # sizes and times of local files when hashed

    def _contents(self) -> list[dict[str, str]]:
        """Size and hash of the local files of each source, by the names that their documents have.

        Raises CocaError for a file that cannot be read, for options that do not apply to it, and if
        the blocks would become part of a source.
        """
        self._check_outside_sources()
        kept_in, contents = Path(self.data.prepared) / "coca-files.json", []
        kept = _kept_hashes(kept_in)
        known = dict(kept)
        self._hashed = {}
        try:
            for source in self.data.sources:
                files = local_files(source.path) if source.path else []
                if files:
                    of_hub = {"split": source.split != "train", "subset": source.subset}
                    of_hub |= {"revision": source.revision}
                    check_text_options(source.path, of_hub, {"column": source.column != "text"})
                described = [self._described(file, known) for file in files]
                contents.append(dict(zip(names_of(files), described, strict=True)))
        finally:
            if known != kept:
                with suppress(OSError):  # a cache
                    kept_in.parent.mkdir(parents=True, exist_ok=True)
                    replace_text(kept_in, json.dumps(known))
        return contents

    files = cached_property(_contents)  # as they are when the blocks get their name

    def _described(self, file: Path, known: dict[str, Any]) -> str:
        """Size and hash of a file; it is read unless `known` has its hash, and added there."""
        name = str(file.absolute())
        try:
            stat = file.stat()
            self._hashed[name] = state = _size_and_times(stat)
            match known.get(name):
                case [before, str(digest)] if before == state:
                    return f"{stat.st_size:,} bytes, xxh3_128 {digest}"
            is_fresh = time.time() - max(state[1:]) / 1e9 < FRESH_SECONDS
            if stat.st_size >= LARGE_FILE:
                size = size_in_words(stat.st_size)
                print(printable(f"{file}: hashing {size}, once"), flush=True)
            digest = file_hash(file, self._check_stop) or "of no file"
        except OSError as error:  # such as a link to a file that is gone
            raise CocaError(
                f"{file}: cannot be read: {error.strerror}; mend or remove it"
            ) from None
        if not is_fresh:
            known[name] = [state, digest]
        return f"{stat.st_size:,} bytes, xxh3_128 {digest}"

    @cached_property
    def made_of(self) -> dict[str, Any]:
        """Everything that decides the blocks.

        Local files count by name and content, wherever they are; data sets on the hub by revision.
        """
        described = [source.model_dump() for source in self.data.sources]
        for source, files in zip(described, self.files, strict=True):
            if files:
                source |= {"path": None, "files": list(files.items())}
        largest = max(self.tokenizer.get_vocab().values())
        small = "uint16" if largest < 2**16 else "uint32"
        return {
            "format": 15,
            "sources": described,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "tokens": min(largest + 1, self.encoder.vocab_size),
            "dtypes": ["uint32" if source.synthetic else small for source in self.data.sources],
            "seq_len": self.data.seq_len,
            "seed": self.data.seed,
            "held_out_blocks": self.data.held_out_blocks,
        }

    @property
    def directory(self) -> Path:
        key = hashlib.sha256(json.dumps(self.made_of, sort_keys=True).encode()).hexdigest()[:16]
        return Path(self.data.prepared) / key

    def blocks(self) -> Blocks:
        """The blocks that are prepared, perhaps none. Raises Damaged if their state is damaged."""
        return Blocks(self.directory, self.data, self.made_of["dtypes"])

    def has(self, num_blocks: int) -> bool:
        """Whether at least `num_blocks` blocks are prepared."""
        try:
            return len(self.blocks()) >= num_blocks
        except Damaged:
            return False

    def pin_(self, commits: list[str | None] | None = None) -> list[str | None]:
        """Read the data sets on the hub at these commits, by default their present ones; returns
        them.

        Blocks that are already prepared, even in part, decide the commits.

        Raises CocaError if the hub does not answer.
        """
        with suppress(Damaged):
            commits = self.blocks().state["commits"] or commits
        if commits is None:
            commits = [
                commit_of(source.path, source.commit) if source.path else None
                for source in self.data.sources
            ]
        self.data.pin_(commits)
        return commits

    def check_sources(self) -> None:
        """Read the first blocks of every source, and see whether blocks may be written, to refuse
        early what would stop a preparation.

        Raises CocaError.
        """
        place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise CocaError(f"{place}: cannot be written; choose another data.prepared")
        for number, source in self._texts.items():
            if not self._has_tokens(2 * self.data.seq_len, source, HeldOut()):
                # Small enough that holding out a tenth decides, and to be read several times
                rule, _ = self._held_out(number)
                if not self._has_tokens(self.data.seq_len, source, rule):
                    raise self._too_short(source)
        if self.data.has_answers:
            Lookups(self.tokenizer)

    def _has_tokens(self, count: int, source: Source, held_out: HeldOut) -> bool:
        tokens = 0
        for batch in batches(self._pieces(source, held_out, {**UNREAD})):
            tokens += len(self.encoder(batch))
            if tokens >= count:
                return True
        return False

    def _check_outside_sources(self) -> None:
        """Raises CocaError if the blocks would become part of a source."""
        prepared = Path(self.data.prepared).resolve()
        for source in self._texts.values():
            directory = Path(source.path)
            if directory.is_dir() and prepared.is_relative_to(directory.resolve()):
                raise CocaError(
                    f"data.prepared: got {self.data.prepared} inside the source {source.path}, which "
                    "would then have other files than text; choose another"
                )

    def prepare(self, num_blocks: int) -> Blocks:
        """Write what is missing of the first `num_blocks` blocks, all of them if any is damaged.

        Waits while another process prepares these blocks. Writes nothing, not even a lock, if there
        is nothing to do: the disk may be read-only. Raises CocaError for a source that cannot
        be read or does not fill a block, and for a disk that is full or read-only.
        """
        directory = self.directory
        with suppress(Damaged):
            blocks = self.blocks()
            if len(blocks) >= num_blocks:
                blocks.check()
                return blocks
        waiting = f"{directory}: another process is preparing these blocks; waiting for it"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory / "lock", waiting, self._check_stop):
                self._write(num_blocks)
                self._check_unchanged()
        except OSError as error:
            remedy = "choose another data.prepared"
            if error.errno in OF_FULL_DISK:
                size = num_blocks * self.data.seq_len * np.dtype(self.made_of["dtypes"][0]).itemsize
                remedy = (
                    f"all {num_blocks:,} blocks take up to {size_in_words(size)}; make room and run "
                    f"the same command again, which continues, or {remedy}"
                )
            raise CocaError(f"{directory}: cannot be written: {error}; {remedy}") from error
        return self.blocks()

    def _check_unchanged(self) -> None:
        """Raises CocaError, and drops the blocks, if a file has changed since it was hashed."""
        for before, now in zip(self.files, self._contents(), strict=True):
            if changed := [name for name in now | before if now.get(name) != before.get(name)]:
                (self.directory / "state.json").unlink(missing_ok=True)
                self._hashed = {}
                raise CocaError(
                    f"{changed[0]}: changed while its blocks were prepared; run the same command "
                    f"again, in another --out if this one has begun"
                )

    def _is_untouched(self) -> bool:
        """Whether the local files have the sizes and times that they had when they were hashed."""
        try:
            found = {
                str(file.absolute()): _size_and_times(file.stat())
                for source in self._texts.values()
                for file in local_files(source.path)
            }
        except (CocaError, OSError):
            return False
        return found == self._hashed

    def _write(self, num_blocks: int) -> None:
        commits = self.pin_()
        try:
            before = self.blocks()
            before.check()
            state, first = before.state, len(before)
        except Damaged as damage:
            if (self.directory / "state.json").exists():
                print(f"{damage.args[0].partition(';')[0]}; making all blocks again", flush=True)
            for file in self.directory.glob("*.bin"):
                file.unlink()  # not truncated: a training run may still read it
            state, first = self._first_state(commits), 0
        if first >= num_blocks:
            return
        files = _files_of_rows(self.directory, self.data.seq_len, self.made_of["dtypes"])
        with ExitStack() as opened:
            rows: dict[str, GrowingRows] = {}
            for name, place in files.items():
                growing = GrowingRows(*place, state["parts"].get(name, []))
                rows[name] = opened.enter_context(growing)
            if "held_out_blocks" in state:
                rows["held-out"].append(state.pop("held_out_blocks"))
            drawn: list[tuple[int, int]] = []

            def save() -> None:
                # A preparation that ends here, and continues once a file has its text again, would
                # go on from blocks of another text
                if not self._is_untouched():
                    self._check_unchanged()
                rows["order"].append(np.array(drawn, dtype="uint32").reshape(-1, 2))
                drawn.clear()
                for of_file in rows.values():
                    of_file.end_part()
                state["parts"] = {name: of_file.parts for name, of_file in rows.items()}
                kept = {"xxh3_128": _state_hash(state), "state": state}
                replace_text(self.directory / "state.json", json.dumps(kept))

            order = enumerate(itertools.islice(self._order(rows, state), num_blocks))
            # None: a bar only on a terminal
            bar = {"leave": False, "disable": None if PartialState().is_main_process else True}
            progress = tqdm(order, "preparing blocks", num_blocks, dynamic_ncols=True, **bar)
            try:
                for number, row in progress:
                    self._check_stop()
                    if number < first:
                        continue
                    drawn.append(row)
                    if len(drawn) * self.data.seq_len >= STATE_TOKENS:
                        save()
            except (CocaError, Stopped):
                if self._is_untouched():  # to hash files again takes too long after a signal
                    save()
                raise
            save()

    def _first_state(self, commits: list[str | None]) -> dict[str, Any]:
        description = self.directory / "made-of.json"
        description.write_text(json.dumps(self.made_of, indent=2) + "\n", encoding="utf-8")
        found = [self._held_out(number) for number in range(len(self.data.sources))]
        held_out = torch.cat([blocks for _, blocks in found]).numpy()
        read = {str(number): {**UNREAD} for number in self._texts}
        rules = [rule for rule, _ in found]
        state = {"commits": commits, "rules": rules, "parts": {}, "sources": read}
        return state | {"held_out_blocks": held_out}  # which `_write` moves into their file

    def _held_out(self, number: int) -> tuple[HeldOut, Tensor]:
        """What a source holds out on its own, as `hold_out` returns it."""
        weights = [source.weight if source.path else 0 for source in self.data.sources]
        count = shares(weights, self.data.held_out_blocks)[number]
        read = functools.partial(self._documents, self.data.sources[number])
        return hold_out(read, self.encoder, self.data.seq_len, count)

    @property
    def _texts(self) -> dict[int, Source]:
        """The sources that have documents, by their number."""
        return {number: source for number, source in enumerate(self.data.sources) if source.path}

    def _pieces(
        self, source: Source, held_out: HeldOut | HeldOutTogether, read: dict[str, Any]
    ) -> Iterator[Piece]:
        """The text to train on, from where `read` ends. Notes there the document's name."""
        document, character = read["document"], read["character"]
        for number, content in enumerate(self._documents(source)):
            if number < document:
                continue
            if len(content.text) > LARGE_DOCUMENT:
                _name_large(content.where, len(content.text))
            text, _ = held_out.split(content.text)
            read["name"] = content.name
            yield from pieces_of(text, number, character if number == document else 0)

    def _documents(self, source: Source) -> Iterator[Document]:
        for document in read_documents(*source.text):
            self._check_stop()
            yield document

    def _order(
        self, rows: dict[str, GrowingRows], state: dict[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """The source of block 0, 1, … and its row in that source's file, without end."""
        seed, sources = self.data.seed, self.data.sources
        rules = {number: HeldOut(*state["rules"][number]) for number in self._texts}
        reads = {
            number: functools.partial(self._documents, one) for number, one in self._texts.items()
        }
        held_out = together(rules, reads)
        names = [f"{seed} source {number}" for number in range(len(sources))]
        texts = {}
        for number, source in self._texts.items():
            read, made = state["sources"][str(number)], rows[f"source-{number}"]
            first_pass = self._packed(source, held_out[number], read, made)
            texts[number] = self._order_of_text(source, first_pass, made, names[number], read)
        streams = dict(texts)
        for number, source in enumerate(sources):
            if source.synthetic:
                streams[number] = self._order_of_lookups(texts, rows, number, names[number])
        draw, weights = random.Random(f"{seed} sources"), [source.weight for source in sources]
        while True:
            [number] = draw.choices(range(len(sources)), weights)
            yield number, next(streams[number])

    def _packed(
        self, source: Source, held_out: HeldOutTogether, read: dict[str, Any], rows: GrowingRows
    ) -> Iterator[int]:
        """The rows of a source in the order of its documents, tokenised unless they are on disk.

        read: how far the source is read, kept up to date: documents, characters of the next one,
        the tokens that wait for their block to fill, and whether everything is read.
        """
        yield from range(rows.written)
        if read["is_read"]:
            return
        for batch in batches(self._pieces(source, held_out, read)):
            waiting = np.array(read["waiting"], dtype="int64")
            tokens = np.concatenate((waiting, self.encoder(batch).numpy()))
            first, whole = rows.written, len(tokens) // rows.width * rows.width
            rows.append(tokens[:whole].reshape(-1, rows.width))
            place = {"document": batch[-1].document, "character": batch[-1].character}
            read |= place | {"waiting": tokens[whole:].tolist()}
            yield from range(first, rows.written)
        read["is_read"] = True

    def _order_of_text(
        self,
        source: Source,
        unread: Iterator[int],
        rows: GrowingRows,
        name: str,
        read: dict[str, Any],
    ) -> Iterator[int]:
        """The rows of one source in the order of training, pass after pass; `unread`: the first.

        Notes the passes in `read`.
        """
        for pass_number in itertools.count():
            read["passes"] = pass_number + 1
            draw = random.Random(f"{name} pass {pass_number}")
            buffer = list(itertools.islice(unread, max(SHUFFLE_TOKENS // self.data.seq_len, 1)))
            if not buffer:
                raise self._too_short(source)
            for number in unread:
                place = draw.randrange(len(buffer))
                drawn, buffer[place] = buffer[place], number
                yield drawn
            draw.shuffle(buffer)
            yield from buffer
            unread = iter(range(rows.written))

    def _order_of_lookups(
        self,
        texts: dict[int, Iterator[int]],
        rows: dict[str, GrowingRows],
        number: int,
        name: str,
    ) -> Iterator[int]:
        """Make blocks of lookups, each fixed by its row and the block of text that it uses."""
        lookups, made = Lookups(self.tokenizer), rows[f"source-{number}"]
        weights = [self.data.sources[text].weight for text in texts]
        for row in itertools.count():
            draw = random.Random(f"{name} block {row}")
            [text] = draw.choices([*texts], weights)
            used = next(texts[text])
            if row >= made.written:
                ids, answers = lookups.block(rows[f"source-{text}"].read(used).tolist(), draw)
                made.append(np.array([ids]) + ANSWER * np.array([answers]))
            yield row

    def _too_short(self, source: Source) -> CocaError:
        return CocaError(
            f"{source.path}: got fewer than {self.data.seq_len} tokens to train on in all its "
            "documents together, expected a block or more; add text or lower data.seq_len"
        )


def _size_and_times(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _kept_hashes(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept if isinstance(kept, dict) else {}
    return {}


def _read_state(directory: Path) -> dict[str, Any]:
    path = directory / "state.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if _state_hash(kept["state"]) != kept["xxh3_128"]:
            raise ValueError("another hash than when it was written")
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path}: got no such file; {AGAIN}") from None
    except OSError as error:  # a disk that does not answer is no reason to make the blocks again
        raise CocaError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: cannot be read ({type(error).__name__}); {AGAIN}") from error
    return kept["state"]


def _state_hash(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


@functools.cache
def _name_large(where: str, characters: int) -> None:
    """Name a large document once: it may be a whole corpus, or a row that is not text."""
    print(
        f"{where}: got a document of {characters:,} characters; it is trained on; if it is not "
        "text, remove it",
        file=sys.stderr,
        flush=True,
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of the vocabulary, the rules, and the tokens around a document; not of its path."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else {"class": type(tokenizer).__name__}
    rules.pop("padding", None)  # set by the last call
    rules.pop("truncation", None)
    content = [
        rules,
        sorted(tokenizer.get_vocab().items()),
        tokenizer("a")["input_ids"],
        tokenizer.eos_token_id,
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
