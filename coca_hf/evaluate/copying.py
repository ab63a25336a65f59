"""Loss on the second copy of a sequence: whether attention can look something up.

A case is a sequence of tokens twice in a row, after the token for the beginning if the tokenizer
sets one. The tokens are drawn uniformly from the vocabulary or, with a `Sample`, are a passage
drawn uniformly from each of its documents in turn. Only the first copy predicts the second copy of
random tokens: a model that cannot look back is equally bad at both, one with induction heads
(Olsson et al., arXiv 2209.11895) is nearly certain of the second. A passage that is read again asks
the same of ordinary text. The first token of each copy is not scored, as nothing predicts it.
"""

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, check_vocabulary, use_rope_
from coca_hf.evaluate.perplexity import Window, check_loss, token_losses, tokens_of
from coca_hf.evaluate.rows import Beside, Count, Identity, Raw, Row, Run, Setting, Shared
from coca_hf.evaluate.sample import Sample
from coca_hf.evaluate.tables import NBSP, Measurement, Table, each_table, text_settings
from coca_hf.page import Part, Text
from coca_hf.tokens import around_text, ordinary_tokens


class CopyingRow(Row):
    """With passages, also the fields of `Sample.describe`.

    The raw table `copies` has case, tokens (scored of each copy), nll_first and nll_second (their
    sums in nats).
    """

    length: Identity[Count]  # of both copies together, at most
    value: float | None  # nats per token of the second copies
    nll_first: Beside[float | None]  # nats per token of the first copies
    cases: Setting[int]
    seed: Setting[int]
    data: Shared[str | None]
    subset: Shared[str | None]
    data_revision: Shared[str | None]
    column: Shared[str | None]
    split: Shared[str | None]
    document_names: Shared[list[str] | None]
    max_tokens: Shared[int | None]
    data_hash: Identity[str | None]
    text_hash: str | None


def copying_rows(
    run: Run, num_cases: int = 16, seed: int = 0, sample: Sample | None = None
) -> Iterator[dict]:
    """Yield the rows of a run.

    sample: documents whose passages are copied; random tokens by default.

    Raises CocaError for lengths with less than two tokens in a copy.
    """
    check_copy_lengths(run.lengths)
    model = run.loaded.model

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        cases, copy_len = repeated_sequences(run.loaded, length, num_cases, seed, sample)
        use_rope_(model, rope, length)

        def compute(batch: list[Window]) -> list[list[float]]:
            losses = token_losses(model, cases, batch)[:, 1 - 2 * copy_len :].double()
            firsts, seconds = losses[:, : copy_len - 1], losses[:, copy_len:]
            return torch.stack([firsts.sum(1), seconds.sum(1)], 1).tolist()

        windows = [Window(case, 0, len(ids) - 1, len(ids) - 1) for case, ids in enumerate(cases)]
        sums = batches.compute([(windows, windows[0].input_len)], compute)
        lines = [
            {"case": case, "tokens": copy_len - 1, "nll_first": first, "nll_second": second}
            for case, (first, second) in enumerate(sums)
        ]
        tokens = tokens_of(lines)
        first, second = map(math.fsum, zip(*sums, strict=True))
        check_loss(first + second)
        results = {"value": second / tokens, "nll_first": first / tokens}
        return results | {"tokens": tokens}, {"copies": lines}

    settings = {"task": "copying", **(sample.describe() if sample else {})}
    return run.rows(CopyingRow, settings | {"cases": num_cases, "seed": seed}, measure)


def check_copy_lengths(lengths: list[int]) -> None:
    """Raise CocaError for lengths with less than two tokens in a copy."""
    if min(lengths) < 5:
        least = "at least 5: two copies of two tokens, and a beginning"
        raise CocaError(f"--lengths: got {min(lengths)}, expected {least}")


def repeated_sequences(
    loaded: LoadedModel, length: int, num_cases: int, seed: int, sample: Sample | None = None
) -> tuple[list[Tensor], int]:
    """The token ids of every case, all of one length up to `length`, and the tokens of a copy."""
    begin, tokenizer = _beginning(loaded), loaded.tokenizer
    copy_len = (length - len(begin)) // 2
    if sample is None:
        ordinary = ordinary_tokens(tokenizer, loaded.model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(ordinary), (num_cases, copy_len), generator=generator)
        copies = list(ordinary[drawn])
    else:
        copies = [_passage(sample, copy_len, seed, number) for number in range(num_cases)]
    return [torch.cat((copy.new_tensor(begin), copy, copy)) for copy in copies], copy_len


def passages(
    loaded: LoadedModel, length: int, num_cases: int, seed: int, sample: Sample
) -> list[Tensor]:
    """The token ids of passages, each (length,), with the token for the beginning, if any."""
    begin = _beginning(loaded)
    found = [_passage(sample, length - len(begin), seed, number) for number in range(num_cases)]
    return [torch.cat((ids.new_tensor(begin), ids)) for ids in found]


def _beginning(loaded: LoadedModel) -> list[int]:
    bos = loaded.tokenizer.bos_token_id
    if around_text(loaded.tokenizer)[0][:1] != [bos]:
        return []
    check_vocabulary(loaded, torch.tensor([bos]), "beginning of a text")
    return [bos]


def _passage(sample: Sample, copy_len: int, seed: int, case_number: int) -> Tensor:
    document = sample.token_ids[case_number % len(sample.token_ids)]
    rng = random.Random(f"passage {seed} {copy_len} {case_number}")
    first = rng.randrange(len(document) - copy_len + 1)
    return document[first : first + copy_len]


def _settings(row: dict) -> str:
    cases = f"{row['cases']} cases per length"
    if row["data"]:
        return f"passages of {text_settings(row)}, {cases}"
    return f"random tokens, {cases}, seed {row['seed']}"


def _parts(table: Table) -> list[Part]:
    return [Text(f"Copied: {table.settings}."), table.grid(), *table.missing()]


MEASUREMENT = Measurement(
    task="copying",
    title="Copying",
    explanation="Loss, in nats per token, on the second copy of a random sequence of the model's own "
    "tokens, which only attention to the first can predict, or of a passage of text that is read "
    "again; in brackets that of the first copy. Lower is better.",
    row=CopyingRow,
    settings=_settings,
    cell=lambda row: f"{row['value']:.2f}{NBSP}({row['nll_first']:.2f})",
    parts=each_table(_parts),
)
