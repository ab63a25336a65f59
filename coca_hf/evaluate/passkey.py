"""Passkey retrieval: a number hidden in irrelevant text, asked for at the end (section 4.3 of the
paper and its appendix).

As much filler as fits makes the prompt at most `length` tokens long. The passkey stands after a
share of it that is drawn uniformly, or lies on a grid from 0 to 1 with `depths`. The draws of a
case depend on the seed, the length and the case's number only, so a case is the same whichever
others run beside it. Variants:

    paper      the paper's listing, word for word, "Remeber" included: its paragraphs stand apart by
               a blank line, and every repeat of the filler is a line. Found where the answer, 64
               tokens, holds the five digits
    yarn       eval/passkey.py of jquesnelle/yarn: keys of 1 to 50000, filler cut anywhere, to be
               continued after "The pass key is". Found where the first number of the answer, 10
               tokens, is the key
    longlora   passkey_retrivial.py of dvlab-research/LongLoRA: the same prompt. Found where the
               answer's first tokens are the key's. The key follows a space, as LLaMA's tokenizers,
               for which it was written, put one there
    landmark   the same prompt, keys of five digits, and nothing is generated: found where every
               token of the key is the likeliest after those before it, as in greedy decoding (see
               `answers.py`). It takes one forward a case, and a base model continues "The pass key
               is" where it has nothing to say to the paper's question. Shares jump from 0 to 1
               while a model learns; the nats of a digit show how far it is

Both scripts set the characters of filler and take the tokens as they come; here tokens are set.
"""

import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor
from typing_extensions import NotRequired

from coca_hf.errors import CocaError
from coca_hf.evaluate.answers import (
    FILLER,
    Case,
    case_lines,
    check_room,
    fit_case,
    score_answers,
    share_correct,
)
from coca_hf.evaluate.batches import Batches, NoValue
from coca_hf.evaluate.loaded_model import LoadedModel
from coca_hf.evaluate.rope import Rope, use_rope_
from coca_hf.evaluate.rows import (
    Count,
    Identity,
    Measurement,
    Raw,
    Row,
    Run,
    Setting,
    Share,
    last_trained_length,
)
from coca_hf.evaluate.tables import NBSP, Table, against_length, grid_of
from coca_hf.page import Bullets, Figure, Heat, Part

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NAN = "the model's logits are NaN"


class PasskeyRow(Row):
    """Cases are counted by the distance of their key from the end: at most, or more than, the
    tokens of the model's last training (the paper's figure 4).

    The raw table `cases` has the lines of `answers.case_lines`.
    """

    length: Identity[Count]
    value: Share  # of cases found
    variant: Setting[str]
    cases: Setting[int]
    depths: Setting[Count | None]  # points of the grid; null where depth is uniform
    new_tokens: Setting[int]  # 0 where nothing is generated
    seed: Setting[int]
    cases_inside: NotRequired[int]
    correct_inside: NotRequired[int]
    cases_beyond: NotRequired[int]
    correct_beyond: NotRequired[int]
    nats_per_digit: NotRequired[float | None]  # of variants that generate nothing


class Variant(NamedTuple):
    """keys: first and last. sentence: holds the key. prompt: from the sentence, and the filler
    before it and in all. found: in the text and tokens of the answer. new_tokens: 0 where nothing
    is generated and the key's own tokens are scored."""

    keys: tuple[int, int]
    sentence: str
    prompt: Callable[[str, int, int], str]
    found: Callable[[Case, str, list[int]], bool]
    new_tokens: int


def _paper_prompt(sentence: str, before: int, filler: int) -> str:
    """Filler is counted in sentences of it."""
    lines = ["\n".join([FILLER] * before), sentence, "\n".join([FILLER] * (filler - before))]
    return "\n\n".join(part for part in (INSTRUCTION, *lines, "What is the passkey?") if part)


def _landmark_prompt(sentence: str, before: int, filler: int) -> str:
    """Filler is counted in characters."""
    text = " ".join([FILLER] * (filler // len(FILLER) + 1))
    question = "What is the pass key? The pass key is"
    return "\n".join((INSTRUCTION, text[:before], sentence, text[: filler - before], question))


def _holds_key(case: Case, text: str, token_ids: list[int]) -> bool:
    return str(case.key) in text


def _first_number(case: Case, text: str, token_ids: list[int]) -> bool:
    number = re.search(r"\d+", text)
    return number is not None and int(number.group()) == case.key


def _begins_with_key(case: Case, text: str, token_ids: list[int]) -> bool:
    return token_ids[: len(case.answer_ids)] == case.answer_ids


_PAPER = "The passkey is {key}. Remeber it. {key} is the passkey."
_LANDMARK = "The pass key is {key}. Remember it. {key} is the pass key."
VARIANTS = {
    "paper": Variant((10_000, 99_999), _PAPER, _paper_prompt, _holds_key, 64),
    "yarn": Variant((1, 50_000), _LANDMARK, _landmark_prompt, _first_number, 10),
    "longlora": Variant((1, 50_000), _LANDMARK, _landmark_prompt, _begins_with_key, 10),
    "landmark": Variant((10_000, 99_999), _LANDMARK, _landmark_prompt, _begins_with_key, 0),
}


def check_variant(name: str) -> Variant:
    """Raises CocaError for a name that is none of `VARIANTS`."""
    if name not in VARIANTS:
        raise CocaError(f"--variant: got {name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def passkey_rows(
    run: Run,
    num_cases: int = 100,
    new_tokens: int | None = None,
    seed: int = 0,
    variant: str = "paper",
    depths: int | None = None,
) -> Iterator[dict]:
    """Yield the rows of a run.

    new_tokens: the variant's, by default. Dynamic NTK is fixed for `length` and the longest answer.

    Raises CocaError before any work where a length is too short for the prompt, naming the shortest
    that fits, and for `new_tokens` of a variant that generates none.
    """
    kind, loaded = VARIANTS[variant], run.loaded
    if new_tokens and not kind.new_tokens:
        problem = f"--variant {variant} generates nothing; leave it out"
        raise CocaError(f"--new-tokens: got {new_tokens}, but {problem}")
    check_lengths(loaded, run.lengths, seed, num_cases, variant)
    most_tokens = new_tokens or kind.new_tokens

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        numbers = range(num_cases)
        cases = [make_case(loaded.tokenizer, length, seed, n, variant, depths) for n in numbers]
        longest_answer = most_tokens or max(len(case.answer_ids) for case in cases)
        use_rope_(loaded.model, rope, length + longest_answer)
        nlls: list[float] = []
        if most_tokens:
            outputs = answers(loaded, cases, most_tokens, batches)
        else:
            scores = score_answers(loaded.model, cases, batches)
            outputs, nlls = [score.likeliest for score in scores], [score.nll for score in scores]
            if any(map(math.isnan, nlls)):
                raise NoValue(NAN)
        texts = loaded.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        answered = zip(cases, texts, outputs, strict=True)
        lines = case_lines(cases, texts, [kind.found(*one) for one in answered], nlls)
        results = {
            "value": share_correct(lines),
            **count_by_distance(lines, last_trained_length(run.about)),
            "tokens": sum(len(case.token_ids) for case in cases),
        }
        if nlls:
            results["nats_per_digit"] = math.fsum(nlls) / sum(len(str(c.key)) for c in cases)
        return results, {"cases": lines}

    settings = {"task": "passkey", "variant": variant, "seed": seed, "cases": num_cases}
    settings |= {"depths": depths, "new_tokens": most_tokens}
    return run.rows(PasskeyRow, settings, measure)


def make_case(
    tokenizer: Any,
    length: int,
    seed: int,
    case_number: int,
    variant: str = "paper",
    depths: int | None = None,
) -> Case:
    """Draw a case and fill its prompt: see `fit_case`.

    depths: the number of depths from 0 to 1 that cases take in turn; None draws them.
    """
    kind = VARIANTS[variant]
    key, share = _draw(kind, length, seed, case_number)
    sentence = kind.sentence.format(key=key)

    def before(filler: int) -> int:
        if depths is None:
            return int(share * (filler + 1))
        return round(filler * (case_number % depths) / max(depths - 1, 1))

    return fit_case(
        tokenizer,
        length,
        prompt=lambda filler: kind.prompt(sentence, before(filler), filler),
        depth=lambda filler: before(filler) / filler,
        line=sentence,
        key=key,
        answer=key,
    )


def check_lengths(
    loaded: LoadedModel, lengths: list[int], seed: int, num_cases: int, variant: str = "paper"
) -> None:
    """Raise CocaError where a length does not fit a prompt without filler, as `check_room` does."""
    kind = VARIANTS[variant]
    for length in lengths:
        keys = [_draw(kind, length, seed, number)[0] for number in range(num_cases)]
        sentences = [kind.sentence.format(key=key) for key in keys]
        shortest = [kind.prompt(sentence, 0, 0) for sentence in sentences]
        longer = [kind.prompt(sentence, 0, len(FILLER)) for sentence in sentences]
        of = ": the passkey prompt without any filler"
        check_room(loaded, length, shortest, longer, "passkey prompt", of)


def answers(
    loaded: LoadedModel, cases: list[Case], new_tokens: int, batches: Batches
) -> list[list[int]]:
    """At most `new_tokens` greedily decoded tokens for every case.

    Batches are padded on the left and masked, so answers do not depend on their size. Raises
    NoValue as `Batches.compute` does, and where a logit was NaN.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    eos = model.generation_config.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    # generate() fills what is unset from the checkpoint: sampling, penalties
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)

    def compute(batch: list[Case]) -> list[tuple[list[int], bool]]:
        longest = max(len(case.token_ids) for case in batch)
        padding = [longest - len(case.token_ids) for case in batch]
        ids = [[pad] * n + case.token_ids for n, case in zip(padding, batch, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        watch_nan = _NanWatch()
        output = model.generate(
            input_ids=torch.tensor(ids).to(model.device),
            attention_mask=torch.tensor(mask).to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=[watch_nan],
        )
        return [(ids, watch_nan.saw_nan) for ids in output[:, longest:].tolist()]

    longest = max(len(case.token_ids) for case in cases)
    results = batches.compute([(cases, longest + new_tokens)], compute)
    if any(saw_nan for _, saw_nan in results):
        raise NoValue(NAN)
    return [ids for ids, _ in results]


def count_by_distance(lines: list[dict], trained: int | None) -> dict[str, int]:
    """Cases, and those found, whose key is within the trained length of the end, and further."""
    sides: dict[str, list[bool]] = {"inside": [], "beyond": []}
    for line in lines:
        is_inside = trained is None or line["distance"] <= trained
        sides["inside" if is_inside else "beyond"].append(line["correct"])
    return {
        f"{what}_{side}": count(correct)
        for side, correct in sides.items()
        for what, count in (("cases", len), ("correct", sum))
    }


def _draw(variant: Variant, length: int, seed: int, case_number: int) -> tuple[int, float]:
    """Key and share of the filler before it, the same for every tokenizer."""
    rng = random.Random(f"passkey {seed} {length} {case_number}")
    return rng.randint(*variant.keys), rng.random()


class _NanWatch(LogitsProcessor):
    saw_nan = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.saw_nan = self.saw_nan or bool(scores.isnan().any())
        return scores


# On the page: against length, where in the prompt, and how far from its end (figures 4 and 5)

Found = dict[str, dict[int, list[dict]]]  # cases by line of the table and length
GRID = "; as asked for, which short prompts meet as nearly as their filler allows"
FIFTHS = [f"{20 * fifth}-{20 * fifth + 20}%" for fifth in range(5)]


def _settings(row: dict) -> str:
    depths = (
        f"{row['depths']} depth{'s' * (row['depths'] > 1)}" if row["depths"] else "uniform depth"
    )
    tokens = row["new_tokens"]
    answer = f"{tokens} new tokens" if tokens else "keys scored without generation"
    variant = "" if row["variant"] == "paper" else f", {row['variant']}'s prompt and scoring"
    return f"{row['cases']} cases per length, {depths}, {answer}, seed {row['seed']}{variant}"


def _cell(row: dict) -> str:
    nats = row.get("nats_per_digit")
    return f"{row['value']:.2f}" + ("" if nats is None else f"{NBSP}({nats:.2f})")


def _parts(tables: list[Table]) -> list[Part]:
    parts: list[Part] = []
    for table in tables:
        parts += against_length(table, "share found", "share")
    for table in tables:
        if found := _cases_found(table):
            parts += [*_heat_maps(table, found), *_sides(table, found), *_by_distance(table, found)]
    return parts


def _cases_found(table: Table) -> Found:
    found: Found = {}
    for name, rows in table.series.items():
        for row in rows:
            if cases := table.read_raw(row, "cases"):
                found.setdefault(name, {})[row["length"]] = cases
    return found


def _heat_maps(table: Table, found: Found) -> Iterator[Part]:
    """Share found by length and depth; a sentence where it is the same everywhere."""
    depths, same, panel = _depths(table, found), [], 0
    for name, by_length in found.items():
        shares = []
        for depth in depths:
            at_depth = (
                [case for case in by_length.get(length, []) if _depth(case, table) == depth]
                for length in table.lengths
            )
            shares.append([share_correct(cases) for cases in at_depth])
        values = {share for line in shares for share in line if share is not None}
        if len(values) == 1:
            everywhere = "at every context length and depth, so no heat map."
            same.append(f"{name}: {values.pop():.2f} {everywhere}")
            continue
        panel += 1
        columns, axes = [*map(str, table.lengths)], ("context length (tokens)", "depth")
        yield Figure(
            name=f"{table.named('passkey-depth')}-of-{panel}",
            alt=f"Share of passkeys that {name} finds, by context length and depth in the prompt; "
            f"a number a cell.",
            caption=f"Where {name} finds the passkey: context length across, depth in the prompt "
            f"down (0% is its beginning{GRID * bool(table.rows[0]['depths'])}).",
            drawing=Heat(name, columns, [*depths.values()], shares, *axes),
            height=0.9 + 0.28 * min(len(depths), 20),
        )
    if same:
        yield Bullets(same)


def _depths(table: Table, found: Found) -> dict[int, str]:
    """The lines of heat maps and their names: the points of the grid of depths, or fifths."""
    if not (grid := table.rows[0]["depths"]):
        return dict(enumerate(FIFTHS))
    cases = (case for by_length in found.values() for some in by_length.values() for case in some)
    points = sorted({_depth(case, table) for case in cases})
    return {point: f"{100 * point / max(grid - 1, 1):.0f}%" for point in points}


def _depth(case: dict, table: Table) -> int:
    """The line of a case in a heat map. Cases take the points of a grid in turn."""
    if grid := table.rows[0]["depths"]:
        return case["case"] % grid
    return min(int(case["depth"] * len(FIFTHS)), len(FIFTHS) - 1)


def _sides(table: Table, found: Found) -> list[Part]:
    """Share found of passkeys within the trained length of the end, and beyond it (figure 4).

    Nothing where no passkey lies beyond the trained length of its model.
    """
    sides: dict[str, Found] = {"inside": {}, "beyond": {}}
    for name, rows in table.series.items():
        for row in rows:
            if trained := last_trained_length(row):
                for case in found.get(name, {}).get(row["length"], []):
                    own = sides["beyond" if case["distance"] > trained else "inside"]
                    own.setdefault(name, {}).setdefault(row["length"], []).append(case)
    parts: list[Part] = []
    for side, words in (("inside", "at most"), ("beyond", "more than")):
        if not sides["beyond"] or not sides[side]:
            continue
        parts += _shares(
            table,
            f"passkey-{side}",
            f"Share found against context length, of passkeys {side} the trained length: the "
            f"table beside it.",
            f"Share found of the passkeys that stand {words} the trained length of their model "
            f"from the end of the prompt, against context length.",
            sides[side],
            f"{side} the trained length",
            {length: str(length) for length in table.lengths},
            counted=True,
        )
    return parts


def _by_distance(table: Table, found: Found) -> list[Part]:
    """Share found by the octave of the distance from the end of the prompt (figure 5)."""
    by_octave: Found = {}
    for name, by_length in found.items():
        for case in (case for cases in by_length.values() for case in cases):
            by_octave.setdefault(name, {}).setdefault(_octave(case["distance"]), []).append(case)
    edges = sorted({edge for octaves in by_octave.values() for edge in octaves})
    return _shares(
        table,
        "passkey-distance",
        "Share found against the distance from the passkey to the end of the prompt: the table "
        "beside it.",
        "Share found against the distance from the passkey to the end of the prompt, in tokens, "
        "over all context lengths: each point is the octave up to its distance.",
        by_octave,
        "distance",
        {edge: f"≤{NBSP}{edge}" for edge in edges},
        x_label="distance (tokens)",
    )


def _shares(
    table: Table,
    name: str,
    alt: str,
    caption: str,
    found: Found,
    corner: str,
    columns: dict[int, str],
    counted: bool = False,
    **options: Any,
) -> list[Part]:
    """Figure and grid of the share found of the cases of each column. counted: with their number."""
    points, lines = {}, {}
    for line, by_column in found.items():
        shares = {x: share_correct(by_column[x]) for x in columns if x in by_column}
        points[line] = shares.items()
        lines[line] = {
            x: f"{share:.2f}" + (f"{NBSP}of{NBSP}{len(by_column[x])}" if counted else "")
            for x, share in shares.items()
        }
    options |= {"y_scale": "share", "trained_lengths": table.trained_lengths}
    figure = table.figure(name, alt, caption, points, "share found", **options)
    return [figure, grid_of(corner, lines, columns)]


def _octave(distance: int) -> int:
    """The least power of two that is not below `distance`."""
    return 1 << max(distance - 1, 0).bit_length()


MEASUREMENT = Measurement(
    task="passkey",
    title="Passkey retrieval",
    explanation="Share of prompts whose answer holds the five-digit number hidden in them; "
    "greedy; higher is better. In brackets, where the number was scored without generation: nats "
    "per digit; lower is better.",
    row=PasskeyRow,
    settings=_settings,
    cell=_cell,
    parts=_parts,
    raw={"cases": {"case": int, "depth": float, "distance": int, "correct": bool}},
)
