"""Passkey retrieval: a number hidden in irrelevant text, asked for at the end (the paper's section 4.3 and appendix).

As much filler as fits makes the prompt at most `length` tokens long; the passkey stands after a share of it that is
drawn uniformly, or, with `depths`, lies on a grid from 0 to 1. The draws of a case depend on the seed, the length and
the case's number only, so a case is the same whichever others run beside it. Variants:

    paper      the paper's listing, word for word, "Remeber" included: its paragraphs stand apart by a blank line, and
               every repeat of the filler is a line. Found where the answer, 64 tokens, holds the five digits
    yarn       eval/passkey.py of jquesnelle/yarn: keys of 1 to 50000, filler cut anywhere, "The pass key is" to go on
               from. Found where the first number of the answer, 10 tokens, is the key
    longlora   passkey_retrivial.py of dvlab-research/LongLoRA: the same prompt. Found where the answer's first tokens
               are the key's. Its key after a space, as LLaMA's tokenizers, for which it was written, put one there
    landmark   the same prompt, keys of five digits, and nothing is generated: found where every token of the key is
               the likeliest after those before it, as in greedy decoding (see `answers.py`). One forward a case, and a
               base model goes on from "The pass key is" where it has nothing to say to the paper's question. Shares
               jump from 0 to 1 while a model learns; the nats of a digit show how far it is

Both scripts set the characters of filler and take the tokens as they come; here the tokens are set.

A row, task `passkey`, has besides what `rows.py` lists: `value`, the share of cases found; `variant`, `cases`,
`new_tokens`, `depths` (null where depth is uniform); and of the cases whose key is at most, or more than, the tokens of
its last training from the end (the paper's figure 4): `cases_inside`, `correct_inside`, `cases_beyond`,
`correct_beyond`; of `landmark` also `nats_per_digit`, the loss on the keys over their digits. Its raw table `cases`:
case, key, depth (0 to 1), distance (tokens from the beginning of the passkey's sentence to the end), prompt_tokens,
output, correct, and of `landmark` nll (nats of the whole key).
"""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor

from coca_hf.errors import CocaError
from coca_hf.evaluate.answers import score_answers
from coca_hf.evaluate.batches import auto_batch_size, compute_all
from coca_hf.evaluate.load import Subject, check_vocabulary
from coca_hf.evaluate.perplexity import failed
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import UNSEEN, Raw, RowStore, Track, rows_over, subject_settings
from coca_hf.report.rows import trained_length

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Case(NamedTuple):
    key: int
    depth: float  # share of the filler that stands before the passkey, 0 to 1
    distance: int  # tokens from the first of the passkey's sentence to the end of the prompt
    token_ids: list[int]
    answer_ids: list[int]  # a space and the key, after the prompt


class Variant(NamedTuple):
    keys: tuple[int, int]  # first and last
    sentence: str  # that holds the key
    prompt: Callable[[str, int, int], str]  # of the sentence, and filler before it and in all
    found: Callable[[Case, str, list[int]], bool]  # in the text and tokens of the answer
    new_tokens: int  # 0: nothing is generated, the key's own tokens are scored


def _paper_prompt(sentence: str, before: int, filler: int) -> str:
    """Filler is counted in sentences of it."""
    lines = ["\n".join([FILLER] * before), sentence, "\n".join([FILLER] * (filler - before))]
    return "\n\n".join(part for part in (INSTRUCTION, *lines, "What is the passkey?") if part)


def _landmark_prompt(sentence: str, before: int, filler: int) -> str:
    """Filler is counted in characters."""
    text = " ".join([FILLER] * (filler // len(FILLER) + 1))
    question = "What is the pass key? The pass key is"
    return "\n".join((INSTRUCTION, text[:before], sentence, text[: filler - before], question))


def _first_number(case: Case, text: str, token_ids: list[int]) -> bool:
    number = re.search(r"\d+", text)
    return number is not None and int(number.group()) == case.key


_LANDMARK = "The pass key is {key}. Remember it. {key} is the pass key."
VARIANTS = {
    "paper": Variant(
        (10_000, 99_999),
        "The passkey is {key}. Remeber it. {key} is the passkey.",
        _paper_prompt,
        lambda case, text, token_ids: str(case.key) in text,
        64,
    ),
    "yarn": Variant((1, 50_000), _LANDMARK, _landmark_prompt, _first_number, 10),
    "longlora": Variant(
        (1, 50_000),
        _LANDMARK,
        _landmark_prompt,
        lambda case, text, token_ids: token_ids[: len(case.answer_ids)] == case.answer_ids,
        10,
    ),
    "landmark": Variant(
        (10_000, 99_999),
        _LANDMARK,
        _landmark_prompt,
        lambda case, text, token_ids: token_ids == case.answer_ids,
        0,
    ),
}


def check_variant(name: str) -> Variant:
    """Raises CocaError for a name that is none of `VARIANTS`."""
    if name not in VARIANTS:
        raise CocaError(f"--variant: got {name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def make_case(
    tokenizer: Any, length: int, seed: int, case_number: int, variant: str = "paper", depths: int | None = None
) -> Case:
    """Draw a case whose prompt has at most `length` tokens, special tokens included, and no room for more filler.

    depths: so many depths from 0 to 1, which cases take in turn; by default they are drawn. `length` must fit a prompt
    without filler: see `check_lengths`.
    """
    kind = VARIANTS[variant]
    key, share = _draw(kind, length, seed, case_number)
    sentence = kind.sentence.format(key=key)

    def before(filler: int) -> int:
        if depths is None:
            return int(share * (filler + 1))
        return round(filler * (case_number % depths) / max(depths - 1, 1))

    def tokens_with(filler: int) -> list[int]:
        return tokenizer(kind.prompt(sentence, before(filler), filler))["input_ids"]

    filler = most_that_fits(lambda filler: len(tokens_with(filler)), length)
    prompt = kind.prompt(sentence, before(filler), filler)
    from_passkey = prompt[prompt.index(sentence) :]
    token_ids = tokens_with(filler)
    return Case(
        key=key,
        depth=before(filler) / filler if filler else 0.0,
        distance=len(tokenizer(from_passkey, add_special_tokens=False)["input_ids"]),
        token_ids=token_ids,
        answer_ids=tokenizer(f"{prompt} {key}")["input_ids"][len(token_ids) :],
    )


def check_lengths(subject: Subject, lengths: list[int], seed: int, num_cases: int, variant: str = "paper") -> None:
    """Raise CocaError where a length does not fit the prompt without filler, or the vocabulary not the prompt."""
    kind = VARIANTS[variant]
    for length in lengths:
        sentences = [kind.sentence.format(key=_draw(kind, length, seed, number)[0]) for number in range(num_cases)]
        prompts = [subject.tokenizer(kind.prompt(sentence, 0, len(FILLER)))["input_ids"] for sentence in sentences]
        check_vocabulary(subject, torch.tensor(list(itertools.chain(*prompts))), "passkey prompt")
        shortest = max(len(subject.tokenizer(kind.prompt(sentence, 0, 0))["input_ids"]) for sentence in sentences)
        if length < shortest:
            raise CocaError(
                f"--lengths: got {length}, expected at least {shortest} tokens: the passkey prompt without any filler"
            )


def answers(
    subject: Subject,
    cases: list[Case],
    new_tokens: int,
    batch_size: int | None = None,
    track: Callable[[list], Iterable] = iter,
) -> tuple[list[list[int]], bool, str | None, int]:
    """At most `new_tokens` greedily decoded tokens for every case, whether any logit was NaN, and the rest.

    That is what else `compute_all` returns. batch_size: `auto_batch_size`, by default. Batches are padded on the left
    and masked, so the answers do not depend on it.
    """
    model, tokenizer = subject.model, subject.tokenizer
    eos = model.generation_config.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    # The checkpoint's own habits (sampling, penalties) must not leak in: generate() fills what is unset from there.
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)

    def compute(batch: list[Case]) -> list[tuple[list[int], bool]]:
        longest = max(len(case.token_ids) for case in batch)
        padding = [longest - len(case.token_ids) for case in batch]
        input_ids = torch.tensor([[pad] * n + case.token_ids for n, case in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        watch = _NanWatch()
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=[watch],
        )
        return [(ids, watch.saw_nan) for ids in output[:, longest:].tolist()]

    size = batch_size or auto_batch_size(max(len(case.token_ids) for case in cases) + new_tokens)
    results, error, size = compute_all([(cases, size)], compute, track)
    return [ids for ids, _ in results], any(nan for _, nan in results), error, size


def passkey_rows(
    subject: Subject,
    lengths: list[int],
    ropes: list[Rope],
    store: RowStore,
    num_cases: int = 100,
    new_tokens: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    variant: str = "paper",
    depths: int | None = None,
    track: Track = UNSEEN,
) -> Iterator[dict]:
    """Yield a row for every RoPE setting and length; those that `store` already has are not measured again.

    new_tokens: the variant's, by default. Dynamic NTK is fixed for `length` and the longest answer.

    Raises CocaError where a length is too short for the prompt, naming the shortest that does, before any work, and for
    `new_tokens` of a variant that generates none.
    """
    if new_tokens and not VARIANTS[variant].new_tokens:
        raise CocaError(f"--new-tokens: got {new_tokens}, but --variant {variant} generates nothing; leave it out")
    check_lengths(subject, lengths, seed, num_cases, variant)
    settings = {
        "task": "passkey",
        "variant": variant,
        "stride": None,
        "documents": None,
        "seed": seed,
        "cases": num_cases,
        "depths": depths,
        "new_tokens": new_tokens or VARIANTS[variant].new_tokens,
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
    """The results of a row, and a record for each of its cases."""
    length, new_tokens, variant = settings["length"], settings["new_tokens"], settings["variant"]
    cases = [
        make_case(subject.tokenizer, length, settings["seed"], number, variant, settings["depths"])
        for number in range(settings["cases"])
    ]
    longest_answer = new_tokens or max(len(case.answer_ids) for case in cases)
    use_rope_(subject.model, rope, length + longest_answer)

    def tracked(batches: list) -> Iterable:
        return track(batches, f"passkey  {rope}  {length}")

    losses: list[float] = []
    if new_tokens:
        outputs, saw_nan, error, batch_size = answers(subject, cases, new_tokens, settings["batch_size"], tracked)
    else:
        asked = [(case.token_ids, case.answer_ids) for case in cases]
        scores, error, batch_size = score_answers(subject, asked, settings["batch_size"], tracked)
        outputs, losses = [score.likeliest for score in scores], [score.nll for score in scores]
        saw_nan = any(map(math.isnan, losses))
    texts = subject.tokenizer.batch_decode(outputs, skip_special_tokens=True)
    records = [
        {
            "case": number,
            "key": case.key,
            "depth": case.depth,
            "distance": case.distance,
            "prompt_tokens": len(case.token_ids),
            "output": text,
            "correct": VARIANTS[variant].found(case, text, ids),
        }
        for number, (case, text, ids) in enumerate(zip(cases, texts, outputs, strict=False))
    ]
    for record, nll in zip(records, losses, strict=False):
        record["nll"] = nll
    if saw_nan:
        error = "the model's logits are NaN"
    elif error:
        error = failed(error, f"{length} + {new_tokens}")
    results = {
        "value": None if error else sum(record["correct"] for record in records) / len(records),
        **count_by_distance(records, trained_length(settings)),
        "tokens": sum(len(case.token_ids) for case in cases),
        "error": error,
        "batch_size": batch_size,
    }
    if not new_tokens:
        digits = sum(len(str(case.key)) for case in cases)
        results["nats_per_digit"] = None if error else math.fsum(losses) / digits
    return results, {"cases": records}


def count_by_distance(records: list[dict], trained_length: int | None) -> dict[str, int]:
    """Cases, and those that were found, whose key is within the trained length of the end, and further away."""
    inside = [trained_length is None or record["distance"] <= trained_length for record in records]
    return {
        "cases_inside": sum(inside),
        "correct_inside": sum(r["correct"] for r, near in zip(records, inside, strict=True) if near),
        "cases_beyond": len(records) - sum(inside),
        "correct_beyond": sum(r["correct"] for r, near in zip(records, inside, strict=True) if not near),
    }


def most_that_fits(tokens_of: Callable[[int], int], length: int) -> int:
    """An amount of filler whose tokens fit `length` while those of one more do not; 0 fits."""
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


def _draw(variant: Variant, length: int, seed: int, case_number: int) -> tuple[int, float]:
    """Key and share of the filler before it, the same for every tokenizer."""
    rng = random.Random(f"passkey {seed} {length} {case_number}")
    return rng.randint(*variant.keys), rng.random()


class _NanWatch(LogitsProcessor):
    saw_nan = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.saw_nan = self.saw_nan or bool(scores.isnan().any())
        return scores
