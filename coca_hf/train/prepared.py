"""The stream of blocks on disk: tokenised once by `coca-train RECIPE --prepare`, read in no time from any block on.

    DIR/KEY/stream.json    what the blocks are made of; KEY is its hash
    DIR/KEY/blocks.bin     block after block of the stream, 2 or 4 bytes a token
    DIR/KEY/state.pt       how many of them count, their hashes, part by part, and where the stream went on

Only what `state.pt` counts is read; it is replaced as a whole after the blocks are on disk. So a preparation can be
killed and continued, prolonged later, and used by a training that runs past its end. A part is hashed again before the
first of its blocks is used (xxh3: a part of 134 MB in a fraction of a second).
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from coca_hf.documents import local_files
from coca_hf.errors import CocaError
from coca_hf.train.recipe import Source

HASH_BYTES = 16  # at the end of state.pt, of what comes before
STATE_TOKENS = 2**25  # between two states: what a killed preparation does again
AGAIN = "`coca-train RECIPE --prepare` makes them again"


class Damaged(CocaError):
    """Prepared blocks that are not what was written."""


@dataclass(frozen=True)
class Prepared:
    """A directory of prepared blocks. `state`: of the stream after them."""

    directory: Path
    seq_len: int
    dtype: str
    state: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        return self.state["stream"]["next_block"]

    def blocks(self, start_block: int = 0) -> Iterator[np.ndarray]:
        """The blocks from `start_block` on, each (seq_len,).

        Raises CocaError where a file is not what was written; `coca-train RECIPE --prepare` then writes it again.
        """
        file = self.directory / "blocks.bin"
        expected = self.num_blocks * self.seq_len * np.dtype(self.dtype).itemsize
        found = file.stat().st_size if file.exists() else 0
        if found < expected:
            raise Damaged(f"{file}: got {found:,} bytes, expected the {expected:,} that were prepared; {AGAIN}")
        if self.num_blocks == 0:
            return
        blocks = np.memmap(file, self.dtype, "r", shape=(self.num_blocks, self.seq_len))
        first = 0
        for end, written in self.state["hashes"]:
            if start_block < end:
                part = blocks[first:end]
                if xxhash.xxh3_128_hexdigest(part.data) != written:
                    raise Damaged(
                        f"{file}: got another xxh3_128 of blocks {first} to {end - 1} than when they were prepared; "
                        f"the file was changed; {AGAIN}"
                    )
                yield from part[max(start_block - first, 0) :]
            first = end


def describe_stream(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int, held_out_blocks: int
) -> dict[str, Any]:
    """Everything that the stream depends on. Local files by name, size and time of change; the hub by revision."""
    described = []
    marked = any(source.synthetic for source in sources)  # by a bit beside the token's
    for source in sources:
        files = local_files(source.path) if source.path else []
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        given = source.model_dump(exclude=None if source.synthetic else {"synthetic"})
        described.append({**given, **({"path": None, "files": stats} if files else {})})
    return {
        "format": 3,
        "sources": described,
        "tokenizer": tokenizer_hash(tokenizer),
        "dtype": "uint16" if max(tokenizer.get_vocab().values()) < 2**16 and not marked else "uint32",
        "seq_len": seq_len,
        "seed": seed,
        "held_out_blocks": held_out_blocks,
    }


def directory_of(parent: Path, description: dict[str, Any]) -> Path:
    return parent / hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def open_prepared(parent: Path, description: dict[str, Any]) -> Prepared | None:
    """What is prepared of the stream, or None. Raises CocaError where it cannot be read."""
    directory = directory_of(parent, description)
    if not (directory / "state.pt").exists():
        return None
    try:
        content = (directory / "state.pt").read_bytes()
        kept, written = content[:-HASH_BYTES], content[-HASH_BYTES:]
        if xxhash.xxh3_128_digest(kept) != written:
            raise ValueError("another hash than when it was written")
        state = torch.load(io.BytesIO(kept), weights_only=True)
        state["stream"]["next_block"], state["rules"], state["held_out"], state["hashes"], state["commits"]
    except OSError as error:  # not damaged: nothing is to be made again because a disk did not answer
        raise CocaError(f"{directory / 'state.pt'}: cannot be read: {error.strerror}") from None
    except Exception as error:  # torch raises what pickle and zip readers raise
        raise Damaged(f"{directory / 'state.pt'}: cannot be read ({type(error).__name__}); {AGAIN}") from error
    return Prepared(directory, description["seq_len"], description["dtype"], state)


def write_prepared(
    parent: Path,
    description: dict[str, Any],
    stream_at: Callable[[dict[str, Any] | None], tuple[Any, dict[str, Any]]],
    num_blocks: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Prepared:
    """Continue the preparation until there are `num_blocks` blocks; what is damaged is made again.

    stream_at: makes, of the state of an earlier try, the stream and what the state keeps beside the stream's own.
    progress: called with the number of blocks that are written.

    Raises CocaError where another process is at it, and for a disk that is full or read-only.
    """
    directory = directory_of(parent, description)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock", timeout=0):
            _write_json(directory / "stream.json", description)
            before = _undamaged(parent, description)
            stream, kept = stream_at(before)
            hashes = before["hashes"] if before else []
            seq_len, dtype = description["seq_len"], np.dtype(description["dtype"])
            with open(directory / "blocks.bin", "ab") as file:
                file.truncate(stream.next_block * seq_len * dtype.itemsize)
                while stream.next_block < num_blocks:
                    part = xxhash.xxh3_128()
                    for _ in range(min(max(STATE_TOKENS // seq_len, 1), num_blocks - stream.next_block)):
                        content = next(stream).numpy().astype(dtype).tobytes()
                        part.update(content)
                        file.write(content)
                        progress(stream.next_block)
                    file.flush()
                    os.fsync(file.fileno())
                    hashes.append((stream.next_block, part.hexdigest()))
                    _save_state(directory, {"stream": stream.state(), "hashes": hashes, **kept})
    except Timeout:  # an OSError, too
        raise CocaError(f"{directory}: another process is preparing these blocks; wait for it") from None
    except OSError as error:
        size = num_blocks * description["seq_len"] * np.dtype(description["dtype"]).itemsize
        raise CocaError(
            f"{directory}: cannot be written: {error}; all {num_blocks:,} blocks take {size / 1e9:.1f} GB; make room "
            f"and --prepare again, which continues, or choose another data.prepared"
        ) from error
    prepared = open_prepared(parent, description)
    assert prepared is not None, "a preparation leaves a state"
    return prepared


def _undamaged(parent: Path, description: dict[str, Any]) -> dict[str, Any] | None:
    """The state of an earlier try, where all its blocks are what they were; else None."""
    try:
        before = open_prepared(parent, description)
        if before is None:
            return None
        for _ in before.blocks():
            pass
    except Damaged:
        return None
    return before.state


def _save_state(directory: Path, state: dict[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(state, content)
    with open(directory / "state.pt.partial", "wb") as file:
        file.write(content.getvalue() + xxhash.xxh3_128_digest(content.getvalue()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(directory / "state.pt.partial", directory / "state.pt")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".partial").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".partial"), path)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the vocabulary, the rules, and what goes around a document; not of where the tokenizer was loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else {"class": type(tokenizer).__name__}
    rules.pop("padding", None)  # set by the last call
    rules.pop("truncation", None)
    content = [rules, sorted(tokenizer.get_vocab().items()), tokenizer("a")["input_ids"], tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
