"""Passkey retrieval: a number hidden in irrelevant text, asked for at the end (the paper's section 4.3 and appendix).

The prompt is the paper's listing, word for word, "Remeber" included: its paragraphs stand apart by a blank line, and
every repeat of the filler is a line. As many fillers as fit make the prompt at most `length` tokens long; the passkey
stands after a share of them that is drawn uniformly. The draws of a case depend on the seed, the length and the case's
number only, so a case is the same whichever others run beside it.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor

from coca_hf.errors import CocaError
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.perplexity import Track
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import RowStore, now, subject_settings

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASSKEY = "The passkey is {key}. Remeber it. {key} is the passkey."
QUESTION = "What is the passkey?"


class Case(NamedTuple):
    key: int  # five digits
    depth: float  # share of the fillers that stand before the passkey, 0 to 1
    distance: int  # tokens from the first of the passkey's sentence to the end of the prompt
    token_ids: list[int]


def make_case(tokenizer: Any, length: int, seed: int, case_number: int) -> Case:
    """Draw a case whose prompt has at most `length` tokens, special tokens included, and one filler more would not fit.

    `length` must fit a prompt without fillers: see `check_lengths`.
    """
    key, share = _draw(length, seed, case_number)

    def tokens_with(fillers: int) -> list[int]:
        return tokenizer(_prompt(key, int(share * (fillers + 1)), fillers))["input_ids"]

    shortest = len(tokens_with(0))
    filler_len = (len(tokens_with(64)) - shortest) / 64
    fillers = int((length - shortest) / filler_len)
    while len(tokens_with(fillers)) > length:
        fillers -= 1
    while len(tokens_with(fillers + 1)) <= length:
        fillers += 1

    before = int(share * (fillers + 1))
    prompt = _prompt(key, before, fillers)
    from_passkey = prompt[prompt.index(PASSKEY.format(key=key)) :]
    return Case(
        key=key,
        depth=before / fillers if fillers else 0.0,
        distance=len(tokenizer(from_passkey, add_special_tokens=False)["input_ids"]),
        token_ids=tokenizer(prompt)["input_ids"],
    )


def check_lengths(subject: Subject, lengths: list[int], seed: int, num_cases: int) -> None:
    """Raise CocaError where a length does not fit the prompt without fillers, or the vocabulary not the prompt."""
    for length in lengths:
        keys = [_draw(length, seed, number)[0] for number in range(num_cases)]
        prompts = [subject.tokenizer(_prompt(key, 0, 1))["input_ids"] for key in keys]
        check_vocabulary(subject, torch.tensor(list(itertools.chain(*prompts))), "passkey prompt")
        shortest = max(len(subject.tokenizer(_prompt(key, 0, 0))["input_ids"]) for key in keys)
        if length < shortest:
            raise CocaError(
                f"--lengths: got {length}, expected at least {shortest} tokens: the passkey prompt without any filler"
            )


def answers(
    subject: Subject,
    cases: list[Case],
    new_tokens: int,
    batch_size: int = 1,
    track: Callable[[list], Iterable] = iter,
) -> tuple[list[str], bool]:
    """The text of `new_tokens` greedily decoded tokens for every case, and whether any logit was NaN.

    Batches are padded on the left and masked, so the answers do not depend on `batch_size`.
    """
    model, tokenizer = subject.model, subject.tokenizer
    eos = model.generation_config.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    # The checkpoint's own habits (sampling, penalties) must not leak in: generate() fills what is unset from there.
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    watch, texts = _NanWatch(), []
    for batch in track([cases[first : first + batch_size] for first in range(0, len(cases), batch_size)]):
        longest = max(len(case.token_ids) for case in batch)
        padding = [longest - len(case.token_ids) for case in batch]
        input_ids = torch.tensor([[pad] * n + case.token_ids for n, case in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=[watch],
        )
        texts += tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
    return texts, watch.saw_nan


def passkey_rows(
    subject: Subject,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 100,
    new_tokens: int = 64,
    seed: int = 0,
    batch_size: int = 1,
    track: Track = lambda items, description: items,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    The value is the share of cases whose answer holds the key. Dynamic NTK is fixed for `length` + `new_tokens`.

    Raises CocaError where a length is too short for the prompt, naming the shortest that does, before any work.
    """
    check_lengths(subject, lengths, seed, num_cases)
    for rope, length in itertools.product(ropes, lengths):
        settings = {
            "task": "passkey",
            "rope": str(rope),
            "length": length,
            "stride": None,
            "documents": None,
            "seed": seed,
            "cases": num_cases,
            "new_tokens": new_tokens,
            **subject_settings(subject),
            "batch_size": batch_size,
        }
        row = store.find(settings)
        if row is None:
            results, records = _measure(subject, rope, settings, track)
            row = store.append(settings | results, records)
        yield row


def _measure(subject: Subject, rope: Rope, settings: dict, track: Track) -> tuple[dict, list[dict]]:
    """The results of a row, and a record for each of its cases."""
    length, new_tokens = settings["length"], settings["new_tokens"]
    description = f"passkey  {rope}  {length}"
    began, value, error, records = time.perf_counter(), None, None, []
    cases = [make_case(subject.tokenizer, length, settings["seed"], number) for number in range(settings["cases"])]
    use_rope_(subject.model, rope, length + new_tokens)
    try:
        texts, saw_nan = answers(
            subject, cases, new_tokens, settings["batch_size"], lambda batches: track(batches, description)
        )
        records = [_record(number, case, text) for number, (case, text) in enumerate(zip(cases, texts, strict=True))]
        value = sum(record["correct"] for record in records) / len(records)
        if saw_nan:
            value, error = None, "the model's logits are NaN"
    except IndexError as index_error:  # learned positions end where the model's training did
        error = f"the model failed on {length} + {new_tokens} tokens (IndexError: {index_error})"
    results = {
        "value": value,
        "tokens": sum(len(case.token_ids) for case in cases),
        "error": error,
        "seconds": round(time.perf_counter() - began, 3),
        "date": now(),
    }
    return results, records


def _record(number: int, case: Case, text: str) -> dict:
    return {
        "case": number,
        "key": case.key,
        "depth": case.depth,
        "distance": case.distance,
        "prompt_tokens": len(case.token_ids),
        "output": text,
        "correct": str(case.key) in text,
    }


def _draw(length: int, seed: int, case_number: int) -> tuple[int, float]:
    """Key and share of the fillers before it, the same for every tokenizer."""
    rng = random.Random(f"passkey {seed} {length} {case_number}")
    return rng.randint(10_000, 99_999), rng.random()


class _NanWatch(LogitsProcessor):
    saw_nan = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.saw_nan = self.saw_nan or bool(scores.isnan().any())
        return scores


def _prompt(key: int, before: int, fillers: int) -> str:
    parts = [
        INSTRUCTION,
        "\n".join([FILLER] * before),
        PASSKEY.format(key=key),
        "\n".join([FILLER] * (fillers - before)),
        QUESTION,
    ]
    return "\n\n".join(part for part in parts if part)
