"""Key-value recall: which value in a long list belongs to a key ("Lost in the Middle",
arXiv 2307.03172).

A case is a list of a few lines `key: value` with random numbers, spread over as much of the
passkey's filler as fits `length` tokens. The prompt ends with one of the keys, to be continued with
its value. Unlike a passkey, the line stands among others of its kind; unlike in a second copy, only
a match of the whole key finds it. A case depends on the seed, the length, the number of pairs and
its own number only. Nothing is generated: see `answers.py`.
"""

import math
import random
from collections.abc import Iterator
from functools import partial

from coca_hf.evaluate.answers import (
    FILLER,
    Drawn,
    case_lines,
    check_lengths,
    fit_case,
    score_answers,
    share_correct,
)
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import Rope, use_rope_
from coca_hf.evaluate.perplexity import check_loss
from coca_hf.evaluate.rows import Beside, Count, Identity, Raw, Row, Run, Setting, Share
from coca_hf.evaluate.tables import NBSP, Measurement, against_length, each_table

TITLE = "A list of keys and their values."
QUESTION = "One line of the list again:"


class RecallRow(Row):
    """The raw table `cases` has the lines of `answers.case_lines`."""

    length: Identity[Count]
    value: Share  # of cases in which every token of the value is the likeliest
    nll: Beside[float | None]  # nats per token of the values, each with the space before it
    cases: Setting[int]
    pairs: Setting[int]  # lines in a list
    seed: Setting[int]


def recall_rows(run: Run, num_cases: int = 100, pairs: int = 8, seed: int = 0) -> Iterator[dict]:
    """Yield the rows of a run.

    Raises CocaError before any work if a length is too short for the list.
    """
    model, tokenizer = run.loaded.model, run.loaded.tokenizer
    drawn = {n: [draw(n, seed, number, pairs) for number in range(num_cases)] for n in run.lengths}
    check_lengths(run.loaded, drawn, "list of keys and values", f" for a list of {pairs} lines")

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        cases = [fit_case(tokenizer, length, one) for one in drawn[length]]
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


def draw(length: int, seed: int, case_number: int, pairs: int) -> Drawn:
    """Draw a case, the same for every tokenizer."""
    rng = random.Random(f"recall {seed} {length} {pairs} {case_number}")
    keys = rng.sample(range(1000, 10_000), pairs)
    values = [rng.randint(10_000, 99_999) for _ in keys]
    shares = sorted(rng.random() for _ in keys)  # of the filler before each line
    key, value, share = [*zip(keys, values, shares, strict=True)][rng.randrange(pairs)]

    def fill(filler: int) -> tuple[str, int]:
        lines = [FILLER] * filler
        for one, its_value, its_share in [*zip(keys, values, shares, strict=True)][::-1]:
            lines.insert(int(its_share * (filler + 1)), f"{one}: {its_value}")
        listed = "\n".join(lines)
        return f"{TITLE}\n\n{listed}\n\n{QUESTION}\n{key}:", int(share * (filler + 1))

    return Drawn(key, value, f"{key}: {value}\n", fill)


def _settings(row: dict) -> str:
    lists = f"lists of {row['pairs']} lines"
    return f"{lists}, {row['cases']} cases per length, seed {row['seed']}"


MEASUREMENT = Measurement(
    task="recall",
    title="Key-value recall",
    explanation="Share of lists of keys and values in which the value of the key that is asked "
    "for is found; greedy; higher is better. In brackets: nats per token of the value and the space "
    "before it; lower is better.",
    row=RecallRow,
    settings=_settings,
    cell=lambda row: f"{row['value']:.2f}{NBSP}({row['nll']:.2f})",
    parts=each_table(partial(against_length, y_label="share found", y_scale="share")),
)
