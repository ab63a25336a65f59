"""Prompts with a known answer: filled to a length, and scored without generation.

Every token of an answer is predicted from the prompt and the answer's tokens before it, in one
forward. If each of them is the likeliest token, greedy decoding gives exactly this answer, so the
share of such cases is the exact match of greedy decoding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import LoadedModel, check_vocabulary
from coca_hf.evaluate.perplexity import last_logits
from coca_hf.tokens import around_text

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Drawn(NamedTuple):
    """A case before its prompt is filled.

    line: holds the answer, in every prompt. fill: from an amount of filler, the prompt and the
    amount before the line.
    """

    key: int
    answer: int
    line: str
    fill: Callable[[int], tuple[str, int]]


class Case(NamedTuple):
    """A prompt, and the answer that it asks for.

    depth: share of the filler before the answer, 0 to 1. distance: tokens from the beginning of the
    line with the answer to the end of the prompt. answer_ids: a space and the answer.
    """

    key: int
    answer: int
    depth: float
    distance: int
    token_ids: list[int]
    answer_ids: list[int]


class Scored(NamedTuple):
    """nll: nats, summed over the answer's tokens. likeliest: the likeliest token for each."""

    nll: float
    likeliest: list[int]


def fit_case(tokenizer: Any, length: int, drawn: Drawn) -> Case:
    """The case whose prompt, special tokens included, has at most `length` tokens and no room for
    more filler. `length` must fit a prompt without filler: see `check_lengths`.

    Raises CocaError as `answer_ids` does.
    """

    def tokens_of(filler: int) -> int:
        return len(prompt_ids(tokenizer, drawn.fill(filler)[0]))

    filler = most_that_fits(tokens_of, length)
    text, before = drawn.fill(filler)
    token_ids = prompt_ids(tokenizer, text)
    from_line = text[text.index(drawn.line) :]
    return Case(
        key=drawn.key,
        answer=drawn.answer,
        depth=before / filler if filler else 0.0,
        distance=len(tokenizer(from_line, add_special_tokens=False)["input_ids"]),
        token_ids=token_ids,
        answer_ids=answer_ids(tokenizer, text, drawn.answer),
    )


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text to be continued: without those that the tokenizer appends to a text."""
    token_ids = tokenizer(text)["input_ids"]
    return token_ids[: len(token_ids) - len(around_text(tokenizer)[1])]


def answer_ids(tokenizer: Any, text: str, answer: int) -> list[int]:
    """The tokens of a space and the answer after those of `text`.

    Raises CocaError if the tokenizer merges the end of `text` with them: its answer has no tokens
    of its own that a model could be asked for.
    """
    asked, answered = prompt_ids(tokenizer, text), prompt_ids(tokenizer, f"{text} {answer}")
    if answered[: len(asked)] != asked:
        raise CocaError(
            f"got a tokenizer that merges the end of {text[-20:]!r} with the answer, {answer}, "
            "after it; expected one whose tokens end with words"
        )
    return answered[len(asked) :]


def check_lengths(
    loaded: LoadedModel, cases: dict[int, list[Drawn]], what: str, ending: str
) -> int:
    """Returns the number of tokens of the longest answer.

    cases: by length. what: names the prompts. ending: of the message about the length.

    Raises CocaError if a length does not fit its prompts, the vocabulary lacks their tokens, or
    their answers have no tokens of their own.
    """
    most = 0
    for length, drawn in cases.items():
        for one in drawn:
            text, _ = one.fill(len(FILLER))
            check_vocabulary(loaded, torch.tensor(prompt_ids(loaded.tokenizer, text)), what)
            most = max(most, len(answer_ids(loaded.tokenizer, text, one.answer)))
        least = max(len(prompt_ids(loaded.tokenizer, one.fill(0)[0])) for one in drawn)
        if length < least:
            raise CocaError(f"--lengths: got {length}, expected at least {least} tokens{ending}")
    return most


def most_that_fits(tokens_of: Callable[[int], int], length: int) -> int:
    """The amount of filler whose tokens fit `length` while those of one more do not; 0 fits."""
    shortest, too_much = tokens_of(0), 1
    while (tokens := tokens_of(too_much)) <= length:
        too_much *= 2
    fits = int(too_much * (length - shortest) / (tokens - shortest))
    step, does_not = 1, fits + 1
    while fits and tokens_of(fits) > length:
        does_not, fits, step = fits, max(fits - step, 0), 2 * step
    while tokens_of(does_not) <= length:
        fits, does_not, step = does_not, does_not + step, 2 * step
    while does_not - fits > 1:
        middle = (fits + does_not) // 2
        fits, does_not = (middle, does_not) if tokens_of(middle) <= length else (fits, middle)
    return fits


def score_answers(model: Any, cases: list[Case], batches: Batches) -> list[Scored]:
    """The scores of the answers. Raises NoValue as `Batches.compute` does.

    All cases are padded on the right to one width. Causal attention never looks at padding there,
    so a score does not depend on the batch.
    """
    width = max(len(case.token_ids) + len(case.answer_ids) for case in cases) - 1
    kept = width + 1 - min(len(case.token_ids) for case in cases)

    @torch.inference_mode()
    def compute(batch: list[Case]) -> list[Scored]:
        read = [case.token_ids + case.answer_ids[:-1] for case in batch]
        padded = [ids + [0] * (width - len(ids)) for ids in read]
        all_logits = last_logits(model, torch.tensor(padded, device=model.device), kept)
        scores = []
        for case, logits in zip(batch, all_logits, strict=True):
            first = len(case.token_ids) - 1 - (width - kept)
            log_probs = logits[first : first + len(case.answer_ids)].float().log_softmax(-1)
            targets = torch.tensor(case.answer_ids, device=model.device)[:, None]
            nll = -log_probs.double().gather(1, targets).sum()
            scores.append(Scored(nll.item(), log_probs.argmax(-1).tolist()))
        return scores

    return batches.compute([(cases, width)], compute)


def case_lines(
    cases: list[Case], outputs: list[str], correct: list[bool], nlls: list[float]
) -> list[dict]:
    """The raw table `cases`, with a line for each. nlls: in nats; empty if nothing was scored."""
    return [
        {
            "case": number,
            "key": case.key,
            "answer": case.answer,
            "depth": case.depth,
            "distance": case.distance,
            "prompt_tokens": len(case.token_ids),
            "answer_tokens": len(case.answer_ids),
            "output": output,
            "correct": found,
            **({"nll": nlls[number]} if nlls else {}),
        }
        for number, (case, output, found) in enumerate(zip(cases, outputs, correct, strict=True))
    ]


def share_correct(lines: list[dict]) -> float | None:
    """The share of correct lines of a raw table `cases`; None for no lines."""
    return sum(line["correct"] for line in lines) / len(lines) if lines else None
