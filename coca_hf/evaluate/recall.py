"""Key-value recall: which value of a long list belongs to a key (after "Lost in the Middle", arXiv 2307.03172).

A case is a list of a few lines `key: value`, keys and values being random numbers, spread over as much
of the passkey's filler as fits `length` tokens, and at the end one of the keys, to be continued with its
value. Unlike a passkey, the line stands among others of its kind; unlike in a second copy, only a match
of the whole key finds it. The draws of a case depend on the seed, the length, the number of pairs and
the case's number only.

Nothing is generated (see `answers.py`). A row, task `recall`, has besides what `rows.py` lists: `value`, the share of
cases whose every token of the value is the likeliest; `nll`, nats per token of the values; `cases`; `pairs`; `seed`.
Its raw table `cases`: case, key, answer, depth (0 to 1), distance (tokens from the line that is asked for to the end of
the prompt), prompt_tokens, answer_tokens, nll (their sum in nats), output, correct.
"""

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.answers import score_answers
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.passkey import FILLER, most_that_fits
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings

TITLE = "A list of keys and their values."
QUESTION = "One line of the list again:"


class Case(NamedTuple):
    key: int
    value: int
    depth: float  # share of the filler that stands before the line that is asked for
    distance: int
    token_ids: list[int]
    answer_ids: list[int]  # a space and the value, after the prompt


def make_case(tokenizer: Any, length: int, seed: int, case_number: int, pairs: int) -> Case:
    """Draw a case whose prompt has at most `length` tokens, special tokens included, and no room for more filler.

    `length` must fit a prompt without filler: see `check_lengths`.
    """
    drawn = _draw(length, seed, case_number, pairs)

    def prompt(filler: int) -> str:
        return _prompt(drawn, filler)

    filler = most_that_fits(lambda filler: len(tokenizer(prompt(filler))["input_ids"]), length)
    text, (key, value, share) = prompt(filler), drawn.lines[drawn.asked]
    token_ids = tokenizer(text)["input_ids"]
    from_line = text[text.index(f"\n{key}: {value}\n") + 1 :]
    return Case(
        key=key,
        value=value,
        depth=int(share * (filler + 1)) / filler if filler else 0.0,
        distance=len(tokenizer(from_line, add_special_tokens=False)["input_ids"]),
        token_ids=token_ids,
        answer_ids=tokenizer(f"{text} {value}")["input_ids"][len(token_ids) :],
    )


def check_lengths(subject: Subject, lengths: list[int], seed: int, num_cases: int, pairs: int) -> None:
    """Raise CocaError where a length does not fit a list without filler, or the vocabulary not the prompt."""
    for length in lengths:
        prompts = [
            subject.tokenizer(_prompt(_draw(length, seed, number, pairs), 0))["input_ids"]
            for number in range(num_cases)
        ]
        check_vocabulary(subject, torch.tensor(prompts[0]), "list of keys and values")
        shortest = max(map(len, prompts))
        if length < shortest:
            raise CocaError(f"--lengths: got {length}, expected at least {shortest} tokens for a list of {pairs} lines")


def recall_rows(
    subject: Subject,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 100,
    pairs: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    Raises CocaError where a length is too short for the list, before any work.
    """
    check_lengths(subject, lengths, seed, num_cases, pairs)
    settings = {
        "task": "recall",
        "stride": None,
        "cases": num_cases,
        "pairs": pairs,
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
    cases = [
        make_case(subject.tokenizer, length, settings["seed"], number, settings["pairs"])
        for number in range(settings["cases"])
    ]
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


class _Drawn(NamedTuple):
    lines: list[tuple[int, int, float]]  # key, value, and the share of the filler before them, which rises
    asked: int  # the index of one of them


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
