"""Batches of a row, on all processes of `accelerate launch`, and smaller if memory runs out."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from coca_hf.errors import one_line
from coca_hf.evaluate.loaded_model import processes

Item = TypeVar("Item")
Result = TypeVar("Result")
Watch = Callable[[list], Iterable]  # yields the items of a list, and shows how far the loop is

# Errors outside PyTorch's allocator, which accelerate does not know
FULL = ("_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
AUTO_SEQUENCES = 64  # halved as long as memory runs out
AUTO_TOKENS_ON_CPU = 1024  # of a batch


class NoValue(Exception):
    """Why a row has no value."""


def check_logits(logits: Tensor) -> None:
    """Raise NoValue for NaN, and for infinity, of which a softmax makes NaN: a token would be
    chosen, or a score compared, all the same. Minus infinity only rules a token out.
    """
    largest = logits.max().item()  # NaN if there is one
    if not largest < math.inf:
        kind = "NaN" if math.isnan(largest) else "infinite"
        raise NoValue(f"the model's logits are {kind}")


def auto_batch_size(tokens: int) -> int:
    """The number of sequences of `tokens` tokens to begin with.

    On a GPU it is 64: `Batches` finds what fits by trying. On a CPU, where running out of memory
    kills the process without an error, a batch has at most 1,024 tokens: only short sequences gain
    from batching there.
    """
    if processes().device.type != "cpu":
        return AUTO_SEQUENCES
    # 0 tokens: a window that has only what is put before every window
    return min(max(AUTO_TOKENS_ON_CPU // max(tokens, 1), 1), AUTO_SEQUENCES)


@dataclass
class Batches:
    """The batches of one row.

    Items are dealt to the processes one by one, and each process batches its own, so none waits for
    another longer than an item takes. Results of one process and of many agree up to rounding.

    size: sequences at a time; None for `auto_batch_size`. watch: shows how far the loop is. length:
    of the sequences in tokens, for errors. used: the size that fitted, once something is computed.
    """

    size: int | None = None
    watch: Watch = iter
    length: int | str = "too many"
    used: int | None = None

    def compute(
        self, groups: list[tuple[list[Item], int]], compute: Callable[[list[Item]], list[Result]]
    ) -> list[Result]:
        """A result for every item, in order and on every process.

        groups: items that may share a batch, and the tokens of each. compute: turns a batch into
        one result for each item. If memory runs out, it gets the batch in halves, and later batches
        in pieces of the size that fitted.

        Raises NoValue on every process if one item alone does not fit into memory on any ("OOM:
        ..."), or is longer than a model has positions, such as GPT-2 (`failed_on`).
        """
        sized = [(items, self.size or auto_batch_size(tokens)) for items, tokens in groups]
        results, used = self._on_all_processes(sized, compute)
        self.used = max(used, self.used or 0)
        return results

    def each(self, items: list[Item], compute: Callable[[Item], Result]) -> list[Result]:
        """The result of every item, computed alone; otherwise as `compute`."""
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
        except NoValue as failure:
            error = failure
        except IndexError as failure:
            error = NoValue(failed_on(self.length, failure))
        all_results, errors, sizes, halved = zip(
            *gather_object([(results, error, size, size < largest)]), strict=True
        )
        if failed := next(filter(None, errors), None):
            raise failed
        in_order = [
            all_results[number % state.num_processes][number // state.num_processes]
            for number in range(sum(len(items) for items, _ in groups))
        ]
        return in_order, min(itertools.compress(sizes, halved), default=max(sizes))


def _share(
    groups: list[tuple[list[Item], int]], process: int, num_processes: int
) -> list[list[Item]]:
    """The batches of one process. Items are dealt one by one, so shares differ by one at most."""
    batches: list[list[Item]] = []
    dealt = 0
    for items, batch_size in groups:
        own = items[(process - dealt) % num_processes :: num_processes]
        batches += [own[first : first + batch_size] for first in range(0, len(own), batch_size)]
        dealt += len(items)
    return batches


def is_out_of_memory(failure: Exception) -> bool:
    """Whether memory ran out, of a GPU or of the machine, also within cuBLAS and cuDNN."""
    if isinstance(failure, MemoryError) or should_reduce_batch_size(failure):
        return True
    return isinstance(failure, RuntimeError) and any(words in str(failure) for words in FULL)


def failed_on(length: int | str, failure: IndexError) -> str:
    """The error of a row whose sequences, of `length` tokens, are beyond the positions that a model
    has an embedding for.
    """
    return f"the model failed on {length} tokens (IndexError: {one_line(failure)})"


def _in_pieces(
    batch: list[Item], compute: Callable[[list[Item]], list[Result]], size: int
) -> tuple[list[Result], int]:
    """The results of a batch, and the size of the pieces it was computed in.

    Raises NoValue if one item alone does not fit.
    """
    results: list[Result] = []
    while batch:
        piece = batch[:size]
        try:
            results += compute(piece)
        except (RuntimeError, MemoryError) as failure:
            if not is_out_of_memory(failure):
                raise
            reason = one_line(failure)
        else:
            batch = batch[size:]
            continue
        # Outside the handler, which holds the failed call's tensors
        clear_device_cache(garbage_collection=True)
        if len(piece) == 1:
            raise NoValue(f"OOM: one sequence alone does not fit ({reason})")
        size = math.ceil(len(piece) / 2)
    return results, size
