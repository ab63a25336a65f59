"""Key-value recall: which value in a long list belongs to a key ("Lost in the Middle",
arXiv 2307.03172).

A case is a list of a few lines `key: value`, keys and values being random numbers, spread over as
much of the passkey's filler as fits `length` tokens. At the end stands one of the keys, to be
continued with its value. Unlike a passkey, the line stands among others of its kind; unlike in a
second copy, only a match of the whole key finds it. The draws of a case depend on the seed, the
length, the number of pairs and the case's number only. Nothing is generated: see `answers.py`.
"""

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from coca_hf.evaluate.answers import (
    FILLER,
    Case,
    case_lines,
    check_room,
    fit_case,
    score_answers,
    share_correct,
)
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.perplexity import check_loss
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import (
    Beside,
    Count,
    Identity,
    Measurement,
    Raw,
    Row,
    Run,
    Setting,
    Share,
)
from coca_hf.evaluate.tables import NBSP, against_length, each_table

TITLE = "A list of keys and their values."
QUESTION = "One line of the list again:"


class RecallRow(Row):
    """The raw table `cases` has the lines of `answers.case_lines`."""

    length: Identity[Count]
    value: Share  # of cases whose every token of the value is the likeliest
    nll: Beside[float | None]  # nats per token of the values
    cases: Setting[int]
    pairs: Setting[int]  # lines in a list
    seed: Setting[int]


def recall_rows(run: Run, num_cases: int = 100, pairs: int = 8, seed: int = 0) -> Iterator[dict]:
    """Yield the rows of a run.

    Raises CocaError where a length is too short for the list, before any work.
    """
    model, tokenizer = run.loaded.model, run.loaded.tokenizer
    check_lengths(run.loaded, run.lengths, seed, num_cases, pairs)

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        cases = [make_case(tokenizer, length, seed, number, pairs) for number in range(num_cases)]
        use_rope_(model, rope, length + max(len(case.answer_ids) for case in cases))
        scores = score_answers(model, cases, batches)
        total = math.fsum(score.nll for score in scores)
        check_loss(total)
        outputs = [tokenizer.decode(score.likeliest) for score in scores]
        correct = [
            score.likeliest == case.answer_ids for score, case in zip(scores, cases, strict=True)
        ]
        lines = case_lines(cases, outputs, correct, [score.nll for score in scores])
        results = {
            "value": share_correct(lines),
            "nll": total / sum(line["answer_tokens"] for line in lines),
            "tokens": sum(len(case.token_ids) for case in cases),
        }
        return results, {"cases": lines}

    settings = {"task": "recall", "cases": num_cases, "pairs": pairs, "seed": seed}
    return run.rows(RecallRow, settings, measure)


def make_case(tokenizer: Any, length: int, seed: int, case_number: int, pairs: int) -> Case:
    """Draw a case and fill its prompt: see `fit_case`."""
    drawn = _draw(length, seed, case_number, pairs)
    key, value, share = drawn.lines[drawn.asked]
    return fit_case(
        tokenizer,
        length,
        prompt=lambda filler: _prompt(drawn, filler),
        depth=lambda filler: int(share * (filler + 1)) / filler,
        line=f"{key}: {value}\n",
        key=key,
        answer=value,
    )


def check_lengths(
    loaded: LoadedModel, lengths: list[int], seed: int, num_cases: int, pairs: int
) -> None:
    """Raise CocaError where a length does not fit a list without filler, as `check_room` does."""
    for length in lengths:
        drawn = [_draw(length, seed, number, pairs) for number in range(num_cases)]
        prompts = [_prompt(one, 0) for one in drawn]
        of = f" for a list of {pairs} lines"
        check_room(loaded, length, prompts, prompts[:1], "list of keys and values", of)


class _Drawn(NamedTuple):
    """lines: key, value, and the share of the filler before them, which rises. asked: an index."""

    lines: list[tuple[int, int, float]]
    asked: int


def _draw(length: int, seed: int, case_number: int, pairs: int) -> _Drawn:
    """The same for every tokenizer."""
    rng = random.Random(f"recall {seed} {length} {pairs} {case_number}")
    keys = rng.sample(range(1000, 10_000), pairs)
    values = [rng.randint(10_000, 99_999) for _ in keys]
    shares = sorted(rng.random() for _ in keys)
    return _Drawn(list(zip(keys, values, shares, strict=True)), rng.randrange(pairs))


def _prompt(drawn: _Drawn, filler: int) -> str:
    lines = [FILLER] * filler
    for key, value, share in reversed(drawn.lines):
        lines.insert(int(share * (filler + 1)), f"{key}: {value}")
    listed = "\n".join(lines)
    return f"{TITLE}\n\n{listed}\n\n{QUESTION}\n{drawn.lines[drawn.asked][0]}:"


def _settings(row: dict) -> str:
    lists = f"lists of {row['pairs']} lines"
    return f"{lists}, {row['cases']} cases per length, seed {row['seed']}"


MEASUREMENT = Measurement(
    task="recall",
    title="Key-value recall",
    explanation="Share of lists of keys and values in which the value of the key that is asked "
    "for is found; greedy; higher is better. In brackets: nats per token of the value; lower is "
    "better.",
    row=RecallRow,
    settings=_settings,
    cell=lambda row: f"{row['value']:.2f}{NBSP}({row['nll']:.2f})",
    parts=each_table(partial(against_length, y_label="share found", y_scale="share")),
)
