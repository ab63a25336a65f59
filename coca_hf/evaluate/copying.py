"""Loss on the second copy of a sequence: whether attention can look something up.

A case is a sequence of tokens, twice in a row, after the token for the beginning where the tokenizer sets one: ordinary
tokens drawn uniformly from the vocabulary or, with a `Sample`, a passage of its documents, drawn uniformly in each of
them in turn. Nothing but the first copy predicts the second one of random tokens: a model that cannot look back is as
bad at both, one with induction heads (Olsson et al., arXiv 2209.11895) is nearly certain of the second. A passage that
is read again is the same question in text as models know it. The first token of either copy is not scored, as nothing
predicts it.

A row, task `copying`, has besides what `rows.py` lists: `value`, nats per token of the second copies; `nll_first`, the
same of the first ones; `cases`; `seed`; with passages what `Sample.describe` says. Its raw table `copies`: case, tokens
(scored of each copy), nll_first and nll_second (their sums in nats).
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject
from coca_hf.evaluate.perplexity import compute_windows, failed, token_losses
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.variants import Window


def copying_rows(
    subject: Subject,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 16,
    seed: int = 0,
    batch_size: int | None = None,
    sample: Sample | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length, which is that of both copies together, at most.

    sample: documents whose passages are copied; random tokens, by default. Rows that `store` already has are not
    measured again. Raises CocaError for lengths with less than two tokens a copy.
    """
    if min(lengths) < 5:
        raise CocaError(
            f"--lengths: got {min(lengths)}, expected at least 5: two copies of two tokens, and a beginning"
        )
    settings = {
        "task": "copying",
        "stride": None,
        **(sample.describe() if sample else {}),
        "cases": num_cases,
        "seed": seed,
        **subject_settings(subject),
        "batch_size": batch_size,
    }
    return rows_over(
        ropes,
        lengths,
        store,
        lambda length: settings,
        lambda rope, settings: _measure(subject, sample, rope, settings, track),
        track,
    )


def repeated_sequences(
    subject: Subject, length: int, num_cases: int, seed: int, sample: Sample | None = None
) -> tuple[list[Tensor], int]:
    """The token ids of every case, each at most (length,), and how many of them are one copy."""
    begin, tokenizer = _beginning(subject.tokenizer), subject.tokenizer
    copy_len = (length - len(begin)) // 2
    if sample is None:
        known = min(len(tokenizer), subject.model.get_input_embeddings().weight.shape[0])
        ordinary = torch.tensor(sorted(set(range(known)) - set(tokenizer.all_special_ids)))
        generator = torch.Generator().manual_seed(seed)
        copies = list(ordinary[torch.randint(len(ordinary), (num_cases, copy_len), generator=generator)])
    else:
        copies = [_passage(sample, copy_len, seed, number) for number in range(num_cases)]
    return [torch.cat((copy.new_tensor(begin), copy, copy)) for copy in copies], copy_len


def passages(subject: Subject, length: int, num_cases: int, seed: int, sample: Sample) -> list[Tensor]:
    """The token ids of passages, each (length,), after the token for the beginning where the tokenizer sets one."""
    begin = _beginning(subject.tokenizer)
    found = [_passage(sample, length - len(begin), seed, number) for number in range(num_cases)]
    return [torch.cat((ids.new_tensor(begin), ids)) for ids in found]


def _beginning(tokenizer: Any) -> list[int]:
    return [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []


def _passage(sample: Sample, copy_len: int, seed: int, case_number: int) -> Tensor:
    document = sample.token_ids[case_number % len(sample.token_ids)]
    rng = random.Random(f"passage {seed} {copy_len} {case_number}")
    first = rng.randrange(len(document) - copy_len + 1)
    return document[first : first + copy_len]


def _measure(subject: Subject, sample: Sample | None, rope: Rope, settings: dict, track: Track) -> tuple[dict, Raw]:
    length = settings["length"]
    cases, copy_len = repeated_sequences(subject, length, settings["cases"], settings["seed"], sample)
    use_rope_(subject.model, rope, length)

    def compute(batch: list[Window]) -> list[list[float]]:
        losses = token_losses(subject.model, cases, batch)[:, 1 - 2 * copy_len :].double()
        return [[row[: copy_len - 1].sum().item(), row[copy_len:].sum().item()] for row in losses]

    windows, sums, error, batch_size = compute_windows(
        [Window(case, 0, len(ids) - 1, len(ids) - 1) for case, ids in enumerate(cases)],
        compute,
        settings["batch_size"],
        lambda batches: track(batches, f"copying  {rope}  {length}"),
    )
    lines = [
        {"case": window.document, "tokens": copy_len - 1, "nll_first": first, "nll_second": second}
        for window, (first, second) in zip(windows, sums, strict=False)
    ]
    tokens = sum(line["tokens"] for line in lines)
    first, second = (math.fsum(line[name] for line in lines) for name in ("nll_first", "nll_second"))
    if error is None and not math.isfinite(first + second):
        error = f"the model's loss is {first + second}"
    elif error:
        error = failed(error, length)
    results = {
        "value": None if error else second / tokens,
        "nll_first": None if error else first / tokens,
        "tokens": tokens,
        "error": error,
        "batch_size": batch_size,
    }
    return results, {"copies": lines if error is None else []}
