"""From a recipe's documents to its training blocks on disk, which `blocks.py` describes and reads.

Documents of a source follow one another without padding, each with its special and eos tokens, and
are cut into blocks of `seq_len` tokens; an incomplete block is left out. A source is read pass
after pass, each through a buffer of `SHUFFLE_TOKENS` from which blocks are drawn. The source of
every block is drawn by `weight`, a share of tokens. A synthetic block uses up a block of text.

So sources, tokenizer, `seq_len`, seed and number of held-out blocks fix the blocks and their order.
A preparation that continues draws everything again, and tokenises what is not on disk.

    PREPARED/KEY/…        the blocks
    PREPARED/files.json   of every local file, by path: size and times of change, xxh3_128
"""

import functools
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
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
from coca_hf.errors import CocaError
from coca_hf.files import replace_text, size_in_words
from coca_hf.held_out import HeldOut, hold_out, shares
from coca_hf.tokens import Encoder, Piece, batches, pieces_of
from coca_hf.train.blocks import ANSWER, Blocks, Damaged, GrowingRows, layouts, save_state
from coca_hf.train.lookups import Lookups
from coca_hf.train.processes import Stopped
from coca_hf.train.recipe import Data, Source
from coca_hf.train.run_directory import file_hash

LARGE_DOCUMENT = 10_000_000  # characters: a dozen novels
SHUFFLE_TOKENS = 2**21  # of a source, from which its next block is drawn: 1024 blocks of 2048
STATE_TOKENS = 2**25  # between two states: what a killed preparation draws and tokenises again
UNREAD = {"document": 0, "character": 0, "waiting": [], "is_read": False}  # see _PackedSource
LOCK_SECONDS = 0.5  # between two looks at whether a signal came
FRESH_SECONDS = 2.0  # within which a file may change again and have the same times
LARGE_FILE = 2**30  # bytes: reading them takes long enough to say so


class Corpus:
    """What makes the blocks of `data`, and where they lie: `data.prepared`/KEY.

    check_stop: called often while files are hashed and blocks prepared; what it raises ends that,
    and what is done is kept.

    Raises CocaError for a tokenizer without an eos token.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        check_stop: Callable[[], None] = lambda: None,
    ):
        self.data, self.tokenizer, self.encoder = data, tokenizer, Encoder(tokenizer)
        self._check_stop = check_stop

    @functools.cached_property
    def files(self) -> list[dict[str, str]]:
        """Size and hash of the local files of each source, by the names that their documents have.

        Raises CocaError for one that cannot be read, or with options that mean nothing to it.
        """
        return self._contents()

    def _contents(self) -> list[dict[str, str]]:
        kept_in, contents = Path(self.data.prepared) / "files.json", []
        kept = _kept_hashes(kept_in)
        known = dict(kept)
        try:
            for source in self.data.sources:
                of_hub = {"split": source.split != "train", "subset": source.subset}
                of_hub |= {"revision": source.revision}
                files = local_files(source.path) if source.path else []
                if files:
                    check_text_options(source.path, of_hub, {"column": source.column != "text"})
                described = [self._described(file, known) for file in files]
                contents.append(dict(zip(names_of(files), described, strict=True)))
        finally:
            if known != kept:
                with suppress(OSError):  # a cache
                    kept_in.parent.mkdir(parents=True, exist_ok=True)
                    replace_text(kept_in, json.dumps(known))
        return contents

    def _described(self, file: Path, known: dict[str, Any]) -> str:
        """Size and hash of a file, which is read unless `known` has its hash, and added there."""
        stat, name = file.stat(), str(file.absolute())
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        match known.get(name):
            case [before, str(digest)] if before == state:
                return f"{stat.st_size:,} bytes, xxh3_128 {digest}"
        is_fresh = time.time() - max(state[1:]) / 1e9 < FRESH_SECONDS
        if stat.st_size >= LARGE_FILE:
            print(f"{file}: reading {size_in_words(stat.st_size)} for their hash, once", flush=True)
        try:
            digest = file_hash(file, self._check_stop) or "of no file"
        except OSError as error:
            raise CocaError(
                f"{file}: cannot be read: {error.strerror}; mend or remove it"
            ) from None
        if not is_fresh:
            known[name] = [state, digest]
        return f"{stat.st_size:,} bytes, xxh3_128 {digest}"

    @functools.cached_property
    def made_of(self) -> dict[str, Any]:
        """Everything that decides the blocks.

        Local files count by name and content, wherever they lie; data sets on the hub by revision.
        """
        described = [source.model_dump() for source in self.data.sources]
        for source, files in zip(described, self.files, strict=True):
            if files:
                source |= {"path": None, "files": list(files.items())}
        small = "uint16" if max(self.tokenizer.get_vocab().values()) < 2**16 else "uint32"
        return {
            "format": 5,
            "sources": described,
            "tokenizer": tokenizer_hash(self.tokenizer),
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
        """The blocks that are prepared, perhaps none. Raises Damaged where their state is."""
        return Blocks(self.directory, self.data, self.made_of["dtypes"])

    def pin_(self, commits: Sequence[str | None] | None = None) -> list[str | None]:
        """Read the data sets on the hub at these commits, by default those that they have now;
        returns them.

        Blocks that are prepared, in part or all, have decided the commits.

        Raises CocaError where the hub does not say.
        """
        with suppress(Damaged):
            commits = self.blocks().state["commits"] or commits
        sources = self.data.sources
        if commits is None:
            commits = [source.path and commit_of(source.path, source.commit) for source in sources]
        commits = [commit or None for commit in commits]
        for source, commit in zip(sources, commits, strict=True):
            source.pin_(commit)
        return commits

    def has(self, num_blocks: int) -> bool:
        """Whether at least `num_blocks` blocks are prepared."""
        try:
            return len(self.blocks()) >= num_blocks
        except Damaged:
            return False

    def check(self) -> None:
        """Read the first block of every source, to refuse early what would stop a preparation.

        Raises CocaError.
        """
        for source in self._texts.values():
            tokens = 0
            for batch in batches(self._pieces(source, HeldOut(), 0, 0)):
                tokens += len(self.encoder(batch))
                if tokens >= self.data.seq_len:
                    break
            else:
                raise self._too_short(source)
        if self.data.has_answers:
            Lookups(self.tokenizer)

    def prepare(self, num_blocks: int) -> Blocks:
        """Write what is missing of the first `num_blocks` blocks; what is damaged is made again.

        Waits while another process prepares these blocks. Raises CocaError for a source that cannot
        be read or has no whole block, and for a disk that is full or read-only.
        """
        directory = self.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._write(num_blocks)
                self._check_unchanged()
        except OSError as error:
            size = num_blocks * self.data.seq_len * np.dtype(self.made_of["dtypes"][0]).itemsize
            raise CocaError(
                f"{directory}: cannot be written: {error}; all {num_blocks:,} blocks take up to "
                f"{size / 1e9:.1f} GB; make room and run the same command again, which continues, "
                "or choose another data.prepared"
            ) from error
        return self.blocks()

    def _check_unchanged(self) -> None:
        """Raises CocaError, and forgets the blocks, where a file is not what they are named by."""
        for before, now in zip(self.files, self._contents(), strict=True):
            if changed := [name for name in now | before if now.get(name) != before.get(name)]:
                (self.directory / "state.json").unlink()
                raise CocaError(
                    f"{changed[0]}: changed while its blocks were prepared; run the same command "
                    f"again, in another --out if this one has begun"
                )

    def _locked(self) -> AbstractContextManager:
        lock, timeout = FileLock(self.directory / "lock"), 0.0
        while True:
            try:
                return lock.acquire(timeout)
            except Timeout:
                self._check_stop()
                if not timeout:
                    waiting = "another process is preparing these blocks; waiting for it"
                    print(f"{self.directory}: {waiting}", flush=True)
                timeout = LOCK_SECONDS

    def _write(self, num_blocks: int) -> None:
        try:
            before = self.blocks()
            before.check()
            state = before.state
        except Damaged as damage:
            if (self.directory / "state.json").exists():
                print(f"{damage.args[0].partition(';')[0]}; all blocks are made again", flush=True)
            for file in self.directory.glob("*.bin"):
                file.unlink()  # not cut: a training may still read it
            state = self._first_state()
        order_parts = state["parts"].get("order")
        first = order_parts[-1][0] if order_parts else 0
        if first >= num_blocks:
            return
        layout = layouts(self.directory, self.data.seq_len, self.made_of["dtypes"], state["parts"])
        with ExitStack() as files:
            rows = {
                name: files.enter_context(GrowingRows(*of_file)) for name, of_file in layout.items()
            }
            if "held_out_blocks" in state:
                rows["held-out"].append(state.pop("held_out_blocks"))
            sources = self._packed(rows, state)
            drawn: list[tuple[int, int]] = []

            def save() -> None:
                rows["order"].append(np.array(drawn, dtype="uint32").reshape(-1, 2))
                drawn.clear()
                for of_file in rows.values():
                    of_file.end_part()
                state["parts"] = {name: of_file.parts for name, of_file in rows.items()}
                state["sources"] = {number: source.state for number, source in sources.items()}
                save_state(self.directory, state)

            order = enumerate(itertools.islice(self._order(sources, rows), num_blocks))
            # None: no bar where there is no terminal
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
                save()
                raise
            save()

    def _first_state(self) -> dict[str, Any]:
        commits = self.pin_()
        description = self.directory / "made-of.json"
        description.write_text(json.dumps(self.made_of, indent=2) + "\n", encoding="utf-8")
        weights = [source.weight if source.path else 0 for source in self.data.sources]
        counts = shares(weights, self.data.held_out_blocks)
        rules, blocks = [], []
        for source, count in zip(self.data.sources, counts, strict=True):
            read = functools.partial(self._documents, source)
            rule, of_source = hold_out(read, self.encoder, self.data.seq_len, count)
            rules.append(tuple(rule))
            blocks.append(of_source)
        chosen = {"rules": rules, "held_out_blocks": torch.cat(blocks).numpy()}
        return {"commits": commits, **chosen, "parts": {}, "sources": {}}

    @property
    def _texts(self) -> dict[str, Source]:
        """The sources that have documents, by their number in JSON."""
        return {
            str(number): source for number, source in enumerate(self.data.sources) if source.path
        }

    def _packed(
        self, rows: dict[str, GrowingRows], state: dict[str, Any]
    ) -> dict[str, "_PackedSource"]:
        self.pin_(state["commits"])
        packed = {}
        for number, source in self._texts.items():
            read = state["sources"].get(number, {**UNREAD})
            rule = HeldOut(*state["rules"][int(number)])
            pieces = self._pieces(source, rule, read["document"], read["character"])
            packed[number] = _PackedSource(
                read, batches(pieces), self.encoder, rows[f"source-{number}"]
            )
        return packed

    def _pieces(
        self, source: Source, held_out: HeldOut, document: int, character: int
    ) -> Iterator[Piece]:
        """The text to train on, from a place in the source on."""
        for number, content in enumerate(self._documents(source)):
            if number < document:
                continue
            if len(content.text) > LARGE_DOCUMENT:
                _name_large(content.where, len(content.text))
            text, _ = held_out.split(content.text)
            yield from pieces_of(text, number, character if number == document else 0)

    def _documents(self, source: Source) -> Iterator[Document]:
        for document in read_documents(*source.place):
            self._check_stop()
            yield document

    def _order(
        self, packed: dict[str, "_PackedSource"], rows: dict[str, GrowingRows]
    ) -> Iterator[tuple[int, int]]:
        """The source of block 0, 1, … and its number in that source's file, without end."""
        seed, sources = self.data.seed, self.data.sources
        names = [f"{seed} source {number}" for number in range(len(sources))]
        texts = {
            number: self._order_of_text(source, packed[number], names[int(number)])
            for number, source in self._texts.items()
        }
        streams = [
            texts[str(number)]
            if source.path
            else self._order_of_lookups(texts, rows, rows[f"source-{number}"], names[number])
            for number, source in enumerate(sources)
        ]
        draw, weights = random.Random(f"{seed} sources"), [source.weight for source in sources]
        while True:
            [number] = draw.choices(range(len(sources)), weights)
            yield number, next(streams[number])

    def _order_of_text(self, source: Source, packed: "_PackedSource", name: str) -> Iterator[int]:
        """The blocks of one source in the order of training, pass after pass."""
        for pass_number in itertools.count():
            draw = random.Random(f"{name} pass {pass_number}")
            unread = itertools.takewhile(packed.has, itertools.count())
            buffer = list(itertools.islice(unread, max(SHUFFLE_TOKENS // self.data.seq_len, 1)))
            if not buffer:
                raise self._too_short(source)
            for number in unread:
                place = draw.randrange(len(buffer))
                drawn, buffer[place] = buffer[place], number
                yield drawn
            draw.shuffle(buffer)
            yield from buffer

    def _order_of_lookups(
        self,
        texts: dict[str, Iterator[int]],
        rows: dict[str, GrowingRows],
        made: GrowingRows,
        name: str,
    ) -> Iterator[int]:
        """Makes blocks of lookups, each fixed by its number and the block of text that it takes."""
        lookups = Lookups(self.tokenizer)
        weights = [self.data.sources[int(number)].weight for number in texts]
        for number in itertools.count():
            draw = random.Random(f"{name} block {number}")
            [source] = draw.choices([*texts], weights)
            text = next(texts[source])
            if number >= made.written:
                ids, answers = lookups.block(rows[f"source-{source}"].read(text).tolist(), draw)
                made.append(np.array([ids]) + ANSWER * np.array([answers]))
            yield number

    def _too_short(self, source: Source) -> CocaError:
        return CocaError(
            f"{source.path}: got fewer than {self.data.seq_len} tokens in all its documents "
            "together, expected a block or more; add text or lower data.seq_len"
        )


class _PackedSource:
    """The blocks of a source in the order of its documents, tokenised when first asked for.

    state: how far the source is read: documents, characters of the next one, the tokens that wait
    for their block, and whether that was all.
    """

    def __init__(
        self,
        state: dict[str, Any],
        unread: Iterator[list[Piece]],
        encoder: Encoder,
        rows: GrowingRows,
    ):
        self.state, self._batches, self._encoder, self._rows = state, unread, encoder, rows

    def has(self, number: int) -> bool:
        while number >= self._rows.written and not self.state["is_read"]:
            batch = next(self._batches, None)
            if batch is None:
                self.state["is_read"] = True
            else:
                self._append(batch)
        return number < self._rows.written

    def _append(self, batch: list[Piece]) -> None:
        tokens = np.concatenate(
            (np.array(self.state["waiting"], dtype="int64"), self._encoder(batch).numpy())
        )
        whole = len(tokens) // self._rows.width * self._rows.width
        self._rows.append(tokens[:whole].reshape(-1, self._rows.width))
        place = {"document": batch[-1].document, "character": batch[-1].character}
        self.state |= place | {"waiting": tokens[whole:].tolist()}


def _kept_hashes(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept if isinstance(kept, dict) else {}
    return {}


@functools.cache
def _name_large(where: str, characters: int) -> None:
    """Once, however often it is read: it may be a corpus in one file, or a row that is no text."""
    print(
        f"{where}: got a document of {characters:,} characters; it is trained on; if it is no "
        f"text, remove it",
        file=sys.stderr,
        flush=True,
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of the vocabulary, the rules, and what surrounds a document; not of its path."""
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
