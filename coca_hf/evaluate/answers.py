"""Prompts with a known answer: made to a length, scored without generation, and written as lines.

Every token of an answer is predicted from the prompt and the answer's tokens before it, in one
forward. Where each of them is the likeliest token, greedy decoding answers with exactly these
tokens, so the share of such cases is its exact match.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.loaded_model import LoadedModel, check_vocabulary
from coca_hf.evaluate.perplexity import keeps_logits
from coca_hf.tokens import around_text

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Case(NamedTuple):
    """A prompt, and the answer that it asks for.

    depth: share of the filler that stands before the answer, 0 to 1. distance: tokens from the
    first of the line with the answer to the end of the prompt. answer_ids: a space and the answer,
    after the prompt.
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


def fit_case(
    tokenizer: Any,
    length: int,
    prompt: Callable[[int], str],
    depth: Callable[[int], float],
    line: str,
    key: int,
    answer: int,
) -> Case:
    """The case whose prompt has at most `length` tokens, with no room for more filler.

    prompt, depth: by the amount of filler. line: holds the answer, in every prompt. Special tokens
    count. `length` must fit a prompt without filler: see `check_room`.
    """
    filler = most_that_fits(lambda amount: len(prompt_ids(tokenizer, prompt(amount))), length)
    text = prompt(filler)
    token_ids = prompt_ids(tokenizer, text)
    from_line = text[text.index(line) :]
    return Case(
        key=key,
        answer=answer,
        depth=depth(filler) if filler else 0.0,
        distance=len(tokenizer(from_line, add_special_tokens=False)["input_ids"]),
        token_ids=token_ids,
        answer_ids=prompt_ids(tokenizer, f"{text} {answer}")[len(token_ids) :],
    )


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that is to be continued: without those that the tokenizer puts after it."""
    token_ids = tokenizer(text)["input_ids"]
    return token_ids[: len(token_ids) - len(around_text(tokenizer)[1])]


def check_room(
    loaded: LoadedModel, length: int, shortest: list[str], longer: list[str], what: str, of: str
) -> None:
    """Raise CocaError where `length` does not fit prompts, or the vocabulary lacks their tokens.

    shortest: prompts without filler. longer: prompts with every token that may occur. what: names
    the prompts. of: ends the message about the length.
    """
    for prompt in longer:
        check_vocabulary(loaded, torch.tensor(prompt_ids(loaded.tokenizer, prompt)), what)
    least = max(len(prompt_ids(loaded.tokenizer, prompt)) for prompt in shortest)
    if length < least:
        raise CocaError(f"--lengths: got {length}, expected at least {least} tokens{of}")


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
    """The scores of the answers; raises NoValue as `Batches.compute` does.

    All cases are padded on the right to one width. Causal attention never looks at padding there,
    so a score does not depend on the batch.
    """
    width = max(len(case.token_ids) + len(case.answer_ids) for case in cases) - 1
    kept = width + 1 - min(len(case.token_ids) for case in cases)

    @torch.inference_mode()
    def compute(batch: list[Case]) -> list[Scored]:
        read = [case.token_ids + case.answer_ids[:-1] for case in batch]
        padded = [ids + [0] * (width - len(ids)) for ids in read]
        input_ids = torch.tensor(padded, device=model.device)
        only_kept = {"logits_to_keep": kept} if keeps_logits(model) else {}
        output = model(input_ids=input_ids, use_cache=False, **only_kept)
        scores = []
        for case, logits in zip(batch, output.logits[:, -kept:], strict=True):
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
    """A line of the raw table `cases` for each case. nlls: nats; empty where nothing was scored."""
    lines: list[dict] = [
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
        }
        for number, (case, output, found) in enumerate(zip(cases, outputs, correct, strict=True))
    ]
    for line, nll in zip(lines, nlls, strict=False):
        line["nll"] = nll
    return lines


def share_correct(lines: list[dict]) -> float | None:
    """The share of correct lines of a raw table `cases`; None for no lines."""
    return sum(line["correct"] for line in lines) / len(lines) if lines else None
