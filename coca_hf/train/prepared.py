"""The stream of blocks on disk: tokenised once by `coca-train RECIPE --prepare`, read in no time from any block on.

    DIR/KEY/stream.json    what the blocks are made of; KEY is its hash
    DIR/KEY/blocks.bin     block after block of the stream, 2 or 4 bytes a token
    DIR/KEY/state.pt       how many of them count, and where the stream went on

Only what `state.pt` counts is read; it is replaced as a whole after the blocks are on disk. So a preparation can be
killed and continued, prolonged later, and used by a training that runs past its end.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from coca_hf.documents import local_files
from coca_hf.errors import CocaError
from coca_hf.train.recipe import Source

STATE_TOKENS = 2**25  # between two states: what a killed preparation does again


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

    def blocks(self) -> np.ndarray:
        """All blocks, (blocks, seq_len), mapped into memory."""
        if self.num_blocks == 0:
            return np.empty((0, self.seq_len), self.dtype)
        file = self.directory / "blocks.bin"
        expected = self.num_blocks * self.seq_len * np.dtype(self.dtype).itemsize
        if not file.exists() or file.stat().st_size < expected:
            raise CocaError(
                f"{file}: got fewer than the {expected} bytes that were prepared; delete {self.directory} and prepare "
                f"again"
            )
        return np.memmap(file, self.dtype, "r", shape=(self.num_blocks, self.seq_len))


def describe_stream(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int, held_out_blocks: int
) -> dict[str, Any]:
    """Everything that the stream depends on. Local files by name, size and time of change; the hub by revision."""
    described = []
    for source in sources:
        files = local_files(source.path)
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        described.append({**source.model_dump(), **({"path": None, "files": stats} if files else {})})
    return {
        "format": 1,
        "sources": described,
        "tokenizer": tokenizer_hash(tokenizer),
        "dtype": "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32",
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
        state = torch.load(directory / "state.pt", weights_only=True)
        state["stream"]["next_block"], state["rules"], state["held_out"]
    except Exception as error:  # torch raises what pickle and zip readers raise
        raise CocaError(
            f"{directory / 'state.pt'}: cannot be read; delete {directory} and prepare again ({type(error).__name__})"
        ) from error
    return Prepared(directory, description["seq_len"], description["dtype"], state)


def write_prepared(
    parent: Path,
    description: dict[str, Any],
    stream_at: Callable[[dict[str, Any] | None], tuple[Any, dict[str, Any]]],
    num_blocks: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Prepared:
    """Continue the preparation until there are `num_blocks` blocks.

    stream_at: makes, of the state of an earlier try, the stream and what the state keeps beside the stream's own.
    progress: called with the number of blocks that are written.

    Raises CocaError where another process is at it, and for a disk that is full or read-only.
    """
    directory = directory_of(parent, description)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock", timeout=0):
            _write_json(directory / "stream.json", description)
            before = open_prepared(parent, description)
            if before:
                before.blocks()  # all there?
            stream, kept = stream_at(before.state if before else None)
            seq_len, dtype = description["seq_len"], np.dtype(description["dtype"])
            with open(directory / "blocks.bin", "ab") as file:
                file.truncate(stream.next_block * seq_len * dtype.itemsize)
                while stream.next_block < num_blocks:
                    for _ in range(min(max(STATE_TOKENS // seq_len, 1), num_blocks - stream.next_block)):
                        file.write(next(stream).numpy().astype(dtype).tobytes())
                        progress(stream.next_block)
                    file.flush()
                    os.fsync(file.fileno())
                    _save_state(directory, {"stream": stream.state(), **kept})
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


def _save_state(directory: Path, state: dict[str, Any]) -> None:
    with open(directory / "state.pt.partial", "wb") as file:
        torch.save(state, file)
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
