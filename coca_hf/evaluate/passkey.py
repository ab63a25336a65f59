"""Passkey retrieval: a number hidden in irrelevant text, asked for at the end (section 4.2 of the
paper and its appendix B.1).

The prompt has at most `length` tokens, with as much filler as fits. The share of it before the
passkey is drawn uniformly or, with `depths`, lies on a grid from 0 to 1. A case depends on the
seed, the length and its own number only, so it is the same whichever cases run beside it. Variants:

    paper      the paper's listing, word for word, "Remeber" included: paragraphs are separated by a
               blank line, and every repeat of the filler is a line. Found if the answer, 64 tokens,
               contains the five digits
    yarn       eval/passkey.py of jquesnelle/yarn: keys of 1 to 50000, filler cut anywhere, to be
               continued after "The pass key is". Found if the first number of the answer, 10
               tokens, is the key
    longlora   passkey_retrivial.py of dvlab-research/LongLoRA: the same prompt. Found if the
               answer's first tokens are the key's. The key follows a space, as LLaMA's tokenizers,
               for which the script was written, put one there
    landmark   the same prompt, keys of five digits, and nothing is generated: found if every token
               of the key is the likeliest after those before it, as in greedy decoding (see
               `answers.py`). It takes one forward a case, and base models continue "The pass key
               is" although they do not answer the paper's question. Shares jump from 0 to 1 while a
               model learns; the nats per digit show its progress

Both scripts set the characters of filler and take whatever tokens these make; here tokens are set.
"""

import math
import random
import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor

from coca_hf.errors import CocaError, short
from coca_hf.evaluate.answers import (
    FILLER,
    Case,
    Drawn,
    case_lines,
    check_lengths,
    fit_case,
    score_answers,
    share_correct,
)
from coca_hf.evaluate.batches import Batches, check_logits
from coca_hf.evaluate.loaded_model import LoadedModel, Rope, use_rope_
from coca_hf.evaluate.perplexity import check_loss
from coca_hf.evaluate.rows import (
    Count,
    Identity,
    Raw,
    Row,
    Run,
    Setting,
    Share,
    last_trained_length,
)
from coca_hf.evaluate.tables import NBSP, Measurement, Table, against_length, grid_of
from coca_hf.page import Bullets, Figure, Heat, Part, Text

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)


class PasskeyRow(Row):
    """The raw table `cases` has the lines of `answers.case_lines`."""

    length: Identity[Count]
    value: Share  # of cases found
    variant: Setting[str]
    cases: Setting[int]
    depths: Setting[Count | None]  # points of the grid; null if depth is uniform
    new_tokens: Setting[int]  # 0 if nothing is generated
    seed: Setting[int]
    # of the keys, each with the space before it; of variants that generate nothing
    nats_per_digit: float | None


class Variant(NamedTuple):
    """keys: first and last. sentence: holds the key. prompt: from the sentence, the filler before
    it and all filler. found: in the text and tokens of the answer. new_tokens: 0 if the key's own
    tokens are scored and nothing is generated."""

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
    return number is not None and number.group().lstrip("0") == str(case.key)


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


def passkey_rows(
    run: Run,
    num_cases: int = 100,
    new_tokens: int | None = None,
    seed: int = 0,
    variant: str = "paper",
    depths: int | None = None,
) -> Iterator[dict]:
    """Yield the rows of a run.

    new_tokens: by default the variant's. Dynamic NTK is fixed for `length` and the longest answer.

    Raises CocaError before any work if a length is too short for the prompt, naming the shortest
    that fits; for `new_tokens` of a variant that generates nothing; and for fewer than a key has, if
    the variant compares tokens.
    """
    kind, loaded = VARIANTS[variant], run.loaded
    if new_tokens and not kind.new_tokens:
        problem = f"--variant {variant} generates nothing; leave it out"
        raise CocaError(f"--new-tokens: got {new_tokens}, but {problem}")
    drawn = {
        length: [draw(length, seed, number, variant, depths) for number in range(num_cases)]
        for length in run.lengths
    }
    ending = ": the passkey prompt without any filler"
    least = check_lengths(loaded, drawn, "passkey prompt", ending)
    if new_tokens and new_tokens < least and kind.found is _begins_with_key:
        raise CocaError(
            f"--new-tokens: got {new_tokens}, expected at least {least}, the tokens of a key"
        )
    most_tokens = new_tokens or kind.new_tokens

    def measure(rope: Rope, length: int, batches: Batches) -> tuple[dict, Raw]:
        cases = [fit_case(loaded.tokenizer, length, one) for one in drawn[length]]
        longest_answer = most_tokens or max(len(case.answer_ids) for case in cases)
        use_rope_(loaded.model, rope, length + longest_answer)
        nlls: list[float] = []
        if most_tokens:
            outputs = answers(loaded, cases, most_tokens, batches)
        else:
            scores = score_answers(loaded.model, cases, batches)
            outputs, nlls = [score.likeliest for score in scores], [score.nll for score in scores]
            check_loss(math.fsum(nlls))
        texts = loaded.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        answered = zip(cases, texts, outputs, strict=True)
        lines = case_lines(cases, texts, [kind.found(*one) for one in answered], nlls)
        results = {
            "value": share_correct(lines),
            "tokens": sum(len(case.token_ids) for case in cases),
        }
        if nlls:
            results["nats_per_digit"] = math.fsum(nlls) / sum(len(str(c.key)) for c in cases)
        return results, {"cases": lines}

    settings = {"task": "passkey", "variant": variant, "seed": seed, "cases": num_cases}
    settings |= {"depths": depths, "new_tokens": most_tokens}
    return run.rows(PasskeyRow, settings, measure)


def draw(length: int, seed: int, case_number: int, variant: str, depths: int | None) -> Drawn:
    """Draw a case, the same for every tokenizer.

    depths: the number of depths from 0 to 1 that cases take in turn; None draws a depth.
    """
    kind = VARIANTS[variant]
    rng = random.Random(f"passkey {seed} {length} {case_number}")
    key, share = rng.randint(*kind.keys), rng.random()
    sentence = kind.sentence.format(key=key)

    def fill(filler: int) -> tuple[str, int]:
        before = int(share * (filler + 1))
        if depths is not None:
            before = round(filler * (case_number % depths) / max(depths - 1, 1))
        return kind.prompt(sentence, before, filler), before

    return Drawn(key, key, sentence, fill)


def answers(
    loaded: LoadedModel, cases: list[Case], new_tokens: int, batches: Batches
) -> list[list[int]]:
    """At most `new_tokens` greedily decoded tokens for every case.

    Batches are padded on the left and masked, so answers do not depend on their size. Raises
    NoValue as `Batches.compute` does, and if a logit is NaN or infinite, and CocaError if the
    checkpoint's end of a text is no token.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    eos = model.generation_config.eos_token_id
    if not all(
        isinstance(token, int | None) for token in (eos if isinstance(eos, list) else [eos])
    ):
        raise CocaError(
            f"{loaded.path}: got eos_token_id {short(eos)} for generation, expected token ids or "
            "null; correct its generation_config.json"
        )
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    # generate() takes settings that are not set from the checkpoint: sampling, penalties
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)

    def compute(batch: list[Case]) -> list[list[int]]:
        longest = max(len(case.token_ids) for case in batch)
        padding = [longest - len(case.token_ids) for case in batch]
        ids = [[pad] * n + case.token_ids for n, case in zip(padding, batch, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        output = model.generate(
            input_ids=torch.tensor(ids).to(model.device),
            attention_mask=torch.tensor(mask).to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=[_Finite()],
        )
        return output[:, longest:].tolist()

    longest = max(len(case.token_ids) for case in cases)
    return batches.compute([(cases, longest + new_tokens)], compute)


class _Finite(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_logits(scores)
        return scores


# The page: against length, where in the prompt, and how far from its end (figures 4 and 5)

Columns = dict[str, dict[Any, list[dict]]]  # cases by line of the table and column
GRID = "; as asked for, which short prompts meet as nearly as their filler allows"
FIFTHS = [f"{20 * fifth}-{20 * fifth + 20}%" for fifth in range(5)]


def _settings(row: dict) -> str:
    depths = "uniform depth"
    if row["depths"]:
        depths = f"{row['depths']} depth{'s' * (row['depths'] > 1)}"
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
        cases = [
            case | {"line": name, "length": row["length"], "trained": last_trained_length(row)}
            for name, rows in table.series.items()
            for row in rows
            for case in table.read_raw(row, "cases") or []
        ]
        if cases:
            # Captions below do not say what their table measured
            parts += [Text(f"Where, of {table.settings}:")] if len(tables) > 1 else []
            parts += [*_heat_maps(table, cases), *_sides(table, cases), *_by_distance(table, cases)]
    return parts


def _by_column(cases: list[dict], column: Callable[[dict], Any]) -> Columns:
    found: Columns = {}
    for case in cases:
        found.setdefault(case["line"], {}).setdefault(column(case), []).append(case)
    return found


def _heat_maps(table: Table, cases: list[dict]) -> Iterator[Part]:
    """Share found by length and depth; a sentence if it is the same everywhere.

    The lines of a heat map are the points of the grid of depths, which cases take in turn, or
    fifths of uniform depths.
    """
    grid = table.rows[0]["depths"]

    def line_of(case: dict) -> int:
        return case["case"] % grid if grid else min(int(case["depth"] * 5), 4)

    depths = dict(enumerate(FIFTHS))
    if grid:
        points = sorted(set(map(line_of, cases)))
        depths = {point: f"{100 * point / max(grid - 1, 1):.0f}%" for point in points}
    same, panel = [], 0
    for name, cells in _by_column(cases, lambda case: (line_of(case), case["length"])).items():
        shares = [
            [share_correct(cells.get((depth, length), [])) for length in table.lengths]
            for depth in depths
        ]
        of_lengths = [{*column} - {None} for column in zip(*shares, strict=True)]
        values = set().union(*of_lengths)
        if len(values) == 1 and all(of_lengths):  # a length may have no value
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
            f"down (0% is its beginning{GRID * bool(grid)}).",
            drawing=Heat(name, columns, [*depths.values()], shares, *axes),
            height=0.9 + 0.28 * min(len(depths), 20),
        )
    if same:
        yield Bullets(same)


def _sides(table: Table, cases: list[dict]) -> list[Part]:
    """Share found of passkeys within the trained length of the end, and beyond it (figure 4).

    Nothing if no passkey lies beyond the trained length of its model.
    """
    known = [case for case in cases if case["trained"]]
    inside = [case for case in known if case["distance"] <= case["trained"]]
    beyond = [case for case in known if case["distance"] > case["trained"]]
    parts: list[Part] = []
    for side, words, some in (("inside", "at most", inside), ("beyond", "more than", beyond)):
        if beyond and some:
            parts += _shares(
                table,
                f"passkey-{side}",
                f"Share found against context length, of passkeys {side} the trained length: the "
                f"table beside it.",
                f"Share found of the passkeys that stand {words} the trained length of their model "
                f"from the end of the prompt, against context length.",
                _by_column(some, itemgetter("length")),
                f"{side} the trained length",
                {length: str(length) for length in table.lengths},
                counted=True,
            )
    return parts


def _by_distance(table: Table, cases: list[dict]) -> list[Part]:
    """Share found by the octave of the distance from the end of the prompt (figure 5), over the
    lengths that all lines have.
    """
    lengths = set.intersection(*map(set, _by_column(cases, itemgetter("length")).values()))
    if not lengths:
        return [Text("No length is common to all lines, so no share against the distance.")]
    cases = [case for case in cases if case["length"] in lengths]

    def octave(case: dict) -> int:
        """The least power of two that is not below the distance."""
        return 1 << max(case["distance"] - 1, 0).bit_length()

    return _shares(
        table,
        "passkey-distance",
        "Share found against the distance from the passkey to the end of the prompt: the table "
        "beside it.",
        "Share found against the distance from the passkey to the end of the prompt, in tokens, "
        f"over context lengths {', '.join(map(str, sorted(lengths)))}: each point is the octave up "
        "to its distance.",
        _by_column(cases, octave),
        "distance",
        {edge: f"≤{NBSP}{edge}" for edge in sorted(set(map(octave, cases)))},
        x_label="distance (tokens)",
    )


def _shares(
    table: Table,
    name: str,
    alt: str,
    caption: str,
    found: Columns,
    corner: str,
    columns: dict[int, str],
    counted: bool = False,
    **options: Any,
) -> list[Part]:
    """Figure and grid of the share found in each column. counted: with the number of cases."""
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


MEASUREMENT = Measurement(
    task="passkey",
    title="Passkey retrieval",
    explanation="Share of prompts in whose answer the hidden number is found; greedy; higher is "
    "better. In brackets, where the number was scored without generation: nats per digit, those of "
    "the space before it included; lower is better.",
    row=PasskeyRow,
    settings=_settings,
    cell=_cell,
    parts=_parts,
    raw={"cases": {"case": int, "depth": float, "distance": int, "correct": bool}},
)
