"""Batches, computed on all processes of `accelerate launch`, and smaller where memory runs out.

Items are dealt to the processes one by one, and each process batches its own. So none waits for
another longer than an item takes, however few there are; results of one process and of many agree
up to rounding.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

Item = TypeVar("Item")
Result = TypeVar("Result")
Watch = Callable[[list], Iterable]  # yields the items of a list, and shows how far the loop is

# Errors of libraries beside PyTorch's allocator, which accelerate does not know
FULL = ("_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
AUTO_SEQUENCES = 64  # halved as long as memory runs out
AUTO_TOKENS_ON_CPU = 1024  # of a batch


class NoValue(Exception):
    """Why a row has no value."""

    def explain(self, length: int | str) -> str:
        """The `error` of a row of `length` tokens."""
        return str(self)


class BeyondPositions(NoValue):
    """The sequence is longer than the positions that the model has learned."""

    def explain(self, length: int | str) -> str:
        return f"the model failed on {length} tokens ({self})"


def processes() -> PartialState:
    """The processes of `accelerate launch`, on GPUs or otherwise on CPUs, or the only one."""
    return PartialState(cpu=not torch.cuda.is_available())


def auto_batch_size(tokens: int) -> int:
    """The number of sequences of `tokens` tokens to begin with.

    On a GPU it is 64: `Batches` finds what fits by trying. On a CPU, where full memory kills
    the process without an error, a batch has at most 1,024 tokens: only short sequences gain from
    batching there.
    """
    if processes().device.type != "cpu":
        return AUTO_SEQUENCES
    return min(max(AUTO_TOKENS_ON_CPU // tokens, 1), AUTO_SEQUENCES)


class Batches:
    """The batches of one row, whose loop `watch` shows.

    size: sequences at a time, None for `auto_batch_size`. used: what fitted of it, afterwards.
    """

    used: int | None = None

    def __init__(self, size: int | None = None, watch: Watch = iter):
        self.size, self.watch = size, watch

    def compute(
        self, groups: list[tuple[list[Item], int]], compute: Callable[[list[Item]], list[Result]]
    ) -> list[Result]:
        """A result for every item, in order and on every process.

        groups: items that may share a batch, and the tokens of each. compute: turns a batch into
        one result for each item. Where memory runs out, it gets the batch in halves, and later
        batches in pieces of the size that fitted.

        Raises NoValue on every process where memory ends at one item on any ("OOM: ..."), and
        BeyondPositions for an IndexError. Other exceptions are passed on.
        """
        sized = [(items, self.size or auto_batch_size(tokens)) for items, tokens in groups]
        results, used = self._on_all_processes(sized, compute)
        self.used = max(used, self.used or 0)
        return results

    def each(self, items: list[Item], compute: Callable[[Item], Result]) -> list[Result]:
        """The result of every item, computed alone, as `compute` does."""
        return self._on_all_processes([(items, 1)], lambda batch: [compute(batch[0])])[0]

    def _on_all_processes(
        self, groups: list[tuple[list[Item], int]], compute: Callable[[list[Item]], list[Result]]
    ) -> tuple[list[Result], int]:
        """The results, and the largest batch's size. groups: items, and how many at a time."""
        state = processes()
        mine = _share(groups, state.process_index, state.num_processes)
        results: list[Result] = []
        largest = max(map(len, mine), default=1)
        size, error = largest, None
        try:
            for batch in self.watch(mine):
                done, size = _in_pieces(batch, compute, size)
                results += done
        except MemoryError as failure:
            error = NoValue(f"OOM: {failure}")
        except IndexError as failure:
            error = BeyondPositions(f"IndexError: {failure}")
        if state.num_processes > 1:
            gathered = gather_object([(results, error, size, size < largest)])
            error = next((one for _, one, _, _ in gathered if one), None)
            halved = [one for _, _, one, was_halved in gathered if was_halved]
            size = min(halved) if halved else max(one for _, _, one, _ in gathered)
        if error:
            raise error
        if state.num_processes > 1:
            results = [
                gathered[number % state.num_processes][0][number // state.num_processes]
                for number in range(sum(len(items) for items, _ in groups))
            ]
        return results, size


def _share(
    groups: list[tuple[list[Item], int]], process: int, num_processes: int
) -> list[list[Item]]:
    """The batches of one process. All items are dealt one by one, so no process has two more than
    another.
    """
    batches: list[list[Item]] = []
    dealt = 0
    for items, batch_size in groups:
        own = items[(process - dealt) % num_processes :: num_processes]
        batches += [own[first : first + batch_size] for first in range(0, len(own), batch_size)]
        dealt += len(items)
    return batches


def is_out_of_memory(failure: Exception) -> bool:
    """Whether memory ran out, of a GPU or of the machine; cuBLAS and cuDNN have errors of their own
    for it.
    """
    known = isinstance(failure, MemoryError) or should_reduce_batch_size(failure)
    return known or (
        isinstance(failure, RuntimeError) and any(words in str(failure) for words in FULL)
    )


def _in_pieces(
    batch: list[Item], compute: Callable[[list[Item]], list[Result]], size: int
) -> tuple[list[Result], int]:
    """The results of a batch, and the size of the pieces it was computed in."""
    results: list[Result] = []
    while batch:
        piece = batch[:size]
        try:
            results += compute(piece)
        except (RuntimeError, MemoryError) as failure:
            if not is_out_of_memory(failure):
                raise
            reason = " ".join(str(failure).split())[:200]
        else:
            batch = batch[size:]
            continue
        # Outside of the handler, which holds the failed call's tensors
        clear_device_cache(garbage_collection=True)
        if len(piece) == 1:
            raise MemoryError(f"one sequence alone does not fit ({reason})")
        size = math.ceil(len(piece) / 2)
    return results, size
