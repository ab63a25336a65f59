"""Key-value recall: which value of a long list belongs to a key (after "Lost in the Middle", arXiv 2307.03172).

A case is a list with as many lines `key: value` as fit `length` tokens, keys and values being random
numbers, and at the end one of the keys, to be continued with its value. Unlike a passkey, the line
stands among lines of its own kind; unlike in a second copy, only a match of the whole key finds it.
Keys, values and the line that is asked for depend on the seed, the length and the case's number only.

Nothing is generated (see `answers.py`). A row, task `recall`, has besides what `rows.py` lists: `value`, the share of
cases whose every token of the value is the likeliest; `nll`, nats per token of the values; `cases`; `seed`. Its raw
table `cases`: case, key, answer, pairs (lines of the list), depth (0 to 1, of the line in the list), distance (tokens
from that line to the end of the prompt), prompt_tokens, answer_tokens, nll (their sum in nats), output, correct.
"""

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.answers import score_answers
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.passkey import most_that_fits
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings

LEAST_PAIRS = 2


class Case(NamedTuple):
    key: int
    value: int
    pairs: int
    depth: float
    distance: int
    token_ids: list[int]
    answer_ids: list[int]  # a space and the value, after the prompt


def make_case(tokenizer: Any, length: int, seed: int, case_number: int) -> Case:
    """Draw a case whose prompt has at most `length` tokens and no room for another line, special tokens included.

    Raises CocaError where not even `LEAST_PAIRS` lines fit.
    """
    rng = random.Random(f"recall {seed} {length} {case_number}")
    share, pairs = rng.random(), [(rng.randint(1000, 9999), rng.randint(10_000, 99_999))]
    seen = {pairs[0][0]}

    def lines(count: int) -> list[tuple[int, int]]:
        while len(pairs) < count:
            key = rng.randint(1000, 9999 if len(seen) < 5000 else 999_999)  # lists of 80,000 tokens need more keys
            if key not in seen:
                seen.add(key)
                pairs.append((key, rng.randint(10_000, 99_999)))
        return pairs[:count]

    def prompt(count: int) -> str:
        listed = lines(count + LEAST_PAIRS)
        return "\n".join(
            [
                *("A list of keys and their values.", ""),
                *(f"{key}: {value}" for key, value in listed),
                *("", "One line of the list again:", f"{listed[int(share * len(listed))][0]}:"),
            ]
        )

    def tokens_with(count: int) -> list[int]:
        return tokenizer(prompt(count))["input_ids"]

    if (shortest := len(tokens_with(0))) > length:
        raise CocaError(f"--lengths: got {length}, expected at least {shortest} tokens: a list of {LEAST_PAIRS} lines")
    more = most_that_fits(lambda count: len(tokens_with(count)), length)
    count = more + LEAST_PAIRS
    text, asked = prompt(more), int(share * count)
    key, value = pairs[asked]
    token_ids = tokens_with(more)
    from_line = text[text.index(f"\n{key}: {value}") + 1 :]
    return Case(
        key=key,
        value=value,
        pairs=count,
        depth=asked / (count - 1),
        distance=len(tokenizer(from_line, add_special_tokens=False)["input_ids"]),
        token_ids=token_ids,
        answer_ids=tokenizer(f"{text} {value}")["input_ids"][len(token_ids) :],
    )


def recall_rows(
    subject: Subject,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 100,
    seed: int = 0,
    batch_size: int | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    Raises CocaError where a length is too short for a list, before any work.
    """
    for length in lengths:
        ids = make_case(subject.tokenizer, length, seed, 0).token_ids
        check_vocabulary(subject, torch.tensor(ids), "list of keys and values")
    settings = {
        "task": "recall",
        "stride": None,
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
        lambda rope, settings: _measure(subject, rope, settings, track),
        track,
    )


def _measure(subject: Subject, rope: Rope, settings: dict, track: Track) -> tuple[dict, Raw]:
    length = settings["length"]
    cases = [make_case(subject.tokenizer, length, settings["seed"], number) for number in range(settings["cases"])]
    longest_answer = max(len(case.answer_ids) for case in cases)
    use_rope_(subject.model, rope, length + longest_answer)
    scores, error, batch_size = score_answers(
        subject,
        [(case.token_ids, case.answer_ids) for case in cases],
        settings["batch_size"],
        lambda batches: track(batches, f"recall  {rope}  {length}"),
    )
    lines = [
        {
            "case": number,
            "key": case.key,
            "answer": case.value,
            "pairs": case.pairs,
            "depth": case.depth,
            "distance": case.distance,
            "prompt_tokens": len(case.token_ids),
            "answer_tokens": len(case.answer_ids),
            "nll": score.nll,
            "output": subject.tokenizer.decode(score.likeliest),
            "correct": score.likeliest == case.answer_ids,
        }
        for number, (case, score) in enumerate(zip(cases, scores, strict=False))
    ]
    total = math.fsum(line["nll"] for line in lines)
    if error:
        error = failed(error, length)
    elif not math.isfinite(total):
        error = f"the model's loss is {total}"
    results = {
        "value": None if error else sum(line["correct"] for line in lines) / len(lines),
        "nll": None if error else total / sum(line["answer_tokens"] for line in lines),
        "tokens": sum(len(case.token_ids) for case in cases),
        "error": error,
        "batch_size": batch_size,
    }
    return results, {"cases": lines if error is None else []}
