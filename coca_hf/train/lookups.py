"""Training text that only a lookup predicts: the source `{synthetic: lookups, weight: 0.5}`.

Ordinary text seldom asks for what stood a thousand tokens before, so training on it brings back
perplexity but not retrieval. A block of this source asks often, amid the text of the others:

    copies   a passage, of the text or of tokens from the whole vocabulary, stands again: later on, or back to back
    facts    are stated once and asked for later, in the same or other words, among facts that differ in one word
    lists    of random keys and values, some of which are asked for, within the list or after it

The tokens that a lookup predicts, the answers, are marked; a stage's `answer_weight` counts them
again. A block depends on nothing but its text and its random generator.
"""

import random
import string
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from coca_hf.errors import CocaError
from coca_hf.train.wordings import (
    ENDINGS,
    FIRST_NAMES,
    FORMS,
    QUESTIONS,
    RELATIONS,
    SPOTS,
    SURNAMES,
)

SHORTEST_PASSAGE = 8  # tokens
MOST_PASSAGES = 16
FACT_TOKENS = 48  # what a fact and its questions take, roughly
LINE_TOKENS = 12  # the least that a line of a list takes, roughly
# at the beginning of tokens that begin a word: byte-level BPE, SentencePiece
WORD_MARKS = ("Ġ", "▁")


class MarkedTokens(NamedTuple):
    """Tokens that stand together, and which of them are answers."""

    ids: list[int]
    answers: list[bool]


class Lookup(NamedTuple):
    """What is said, and what asks for it anywhere after it."""

    said: MarkedTokens
    asked: list[MarkedTokens]

    @property
    def length(self) -> int:
        return sum(len(piece.ids) for piece in (self.said, *self.asked))


class Wording(NamedTuple):
    before: str
    answer: str = ""
    after: str = ""


class Lookups:
    """Makes blocks of lookups for one tokenizer.

    Raises CocaError for a tokenizer that does not say which characters its tokens stand for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not getattr(tokenizer, "is_fast", False):
            raise CocaError(
                f"synthetic lookups: got {type(tokenizer).__name__}, expected a tokenizer with "
                "tokenizer.json, which says where its tokens lie in the text; leave the source out"
            )
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._ordinary = sorted(set(vocabulary.values()) - set(tokenizer.all_special_ids))
        words = {token[1:] for token in vocabulary if token.startswith(WORD_MARKS)}
        self._words = sorted(word for word in words if _is_word(word)) or list(FIRST_NAMES)

    def block(self, text: Sequence[int], draw: random.Random) -> MarkedTokens:
        """A block of `len(text)` tokens: lookups, and as much of the text as there is room for."""
        # passages are taken from its end, and what stands between lookups from its start
        spare = list(text)
        makers = [self._copies, self._facts, self._list]
        makers = [draw.choice(makers)] if draw.random() < 0.75 else makers
        room = int(len(text) * draw.uniform(0.3, 1) / len(makers))
        lookups = [lookup for make in makers for lookup in make(room, spare, draw)]
        return _laid_out(lookups, text, draw)

    def _copies(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """Passages and their copies, of `room` tokens together, about."""
        lookups: list[Lookup] = []
        while room >= 2 * SHORTEST_PASSAGE and len(lookups) < MOST_PASSAGES:
            length = _log_uniform(SHORTEST_PASSAGE, room // 2, draw)
            if draw.random() < 0.5:
                passage = draw.choices(self._ordinary, k=length)
            else:
                passage = spare[-length:]
                del spare[-length:]
            copies = min(room // length, draw.choice((2, 2, 3, 16)))
            room -= copies * length
            said = MarkedTokens(passage, [False] * length)
            again = [MarkedTokens(passage, [False] + [True] * (length - 1))] * (copies - 1)
            if draw.random() < 0.4:  # back to back
                said, again = _joined([said, *again]), []
            lookups.append(Lookup(said, again))
        return lookups

    def _facts(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """Facts of one relation and their questions; no two facts are of the same noun and owner."""
        relation = draw.choice(RELATIONS)
        most = max(1, room // FACT_TOKENS)
        count = _log_uniform(1, most, draw) if draw.random() < 0.7 else most
        nouns = draw.sample(relation.nouns, min(len(relation.nouns), draw.choice((2, 5, count))))
        owners = draw.sample(relation.owners, min(len(relation.owners), draw.choice((3, 8, count))))
        pairs = [(noun, owner) for noun in nouns for owner in owners]
        statements = draw.sample(relation.said, draw.choice((1, len(relation.said))))
        wordings: list[list[Wording]] = []
        for noun, owner in draw.sample(pairs, min(count, len(pairs))):
            value = self._value(draw.choice(relation.values), draw)
            statement = draw.choice(statements)
            asked = draw.sample(relation.asked, draw.choice((1, 1, 2, 3)))
            again = statement.partition("{value}")[0] + "{value}"  # small models answer little else
            if "{noun}" in again and "{owner}" in again and draw.random() < 0.6:
                asked[0] = again
            forms = [(statement, ""), *((form, draw.choice(ENDINGS)) for form in asked)]
            names = {"noun": noun, "owner": owner}
            wordings.append([_wording(form, end, value, **names) for form, end in forms])
        pieces = iter(self._encode([wording for of_fact in wordings for wording in of_fact]))
        lookups = []
        for of_fact in wordings:
            said, *questions = (next(pieces) for _ in of_fact)
            lookups.append(Lookup(_unmarked(said), questions))
        return lookups[: _fitting((lookup.length for lookup in lookups), room)]

    def _list(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """A list, at most half of `room` without its repeated lines, and questions about it."""
        form, of_keys, of_values = draw.choice(FORMS), draw.choice(KEYS), draw.choice(VALUES)
        count = _log_uniform(4, max(4, room // LINE_TOKENS), draw)
        values = {self._value(of_keys, draw): self._value(of_values, draw) for _ in range(count)}
        lines = [_wording(form.line, "", value, key=key) for key, value in values.items()]
        head, foot, *encoded = self._encode([Wording(form.head), Wording(form.foot), *lines])
        encoded = encoded[: _fitting((len(line.ids) for line in encoded), room // 2)]
        if not encoded:
            return []
        body: list[MarkedTokens] = []
        repeats = draw.choice((0, 0, 0.2, 0.4))  # of an earlier line, after every line
        for number, line in enumerate(encoded, 1):
            body.append(_unmarked(line))
            if draw.random() < repeats:
                body.append(draw.choice(encoded[:number]))
        said = _joined([head, *body, foot])
        most = min(len(encoded), draw.choice((4, 16, 64)))
        keys = draw.sample(list(values)[: len(encoded)], most)
        forms = [form.line, *draw.sample(QUESTIONS, 3)]
        questions = [
            _wording(draw.choice(forms), draw.choice(ENDINGS), values[key], key=key) for key in keys
        ]
        asked = self._encode(questions)
        fitting = _fitting((len(piece.ids) for piece in asked), room - len(said.ids))
        return [Lookup(said, asked[:fitting])]

    def _value(self, kind: str, draw: random.Random) -> str:
        return KINDS_OF_VALUE[kind](draw, self._words)

    def _encode(self, wordings: list[Wording]) -> list[MarkedTokens]:
        """Each as it is tokenised after a word: the letter "a" before it is cut off again."""
        encoded = self._tokenizer(
            ["a" + "".join(wording) for wording in wordings],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        pieces, found = [], (encoded["input_ids"], encoded["offset_mapping"])
        for wording, ids, spans in zip(wordings, *found, strict=True):
            begin = 1 + len(wording.before)
            end = begin + len(wording.answer)
            cut = sum(last <= 1 for _, last in spans)
            answers = [first < end and last > begin for first, last in spans[cut:]]
            pieces.append(MarkedTokens(ids[cut:], answers))
        return pieces


def _laid_out(lookups: list[Lookup], text: Sequence[int], draw: random.Random) -> MarkedTokens:
    """All that is said and asked at random places of the text, no question before what it asks for."""
    placed: list[tuple[float, MarkedTokens]] = []
    for lookup in lookups:
        place = draw.random() ** 2  # early, because most distances in a block are small
        placed.append((place, lookup.said))
        placed += [(draw.uniform(place, 1), piece) for piece in lookup.asked]
    pieces = [piece for _, piece in sorted(placed, key=lambda pair: pair[0])]
    between = len(text) - sum(len(piece.ids) for piece in pieces)
    cuts = sorted(draw.randint(0, between) for _ in pieces)
    if cuts and draw.random() < 0.5:  # the block ends with an answer
        cuts[-1] = between
    # a phrase again and again, amid which everything is easy to see and hard to place
    if draw.random() < 0.25:
        phrase = list(text[: draw.randint(8, 32)])
        text = phrase * (len(text) // len(phrase) + 1)
    ends = pairwise([0, *cuts, between])
    runs = [MarkedTokens(list(text[a:b]), [False] * (b - a)) for a, b in ends]
    pairs = zip(runs, [*pieces, MarkedTokens([], [])], strict=True)
    return _joined(piece for pair in pairs for piece in pair)


def _wording(form: str, end: str, value: str, **names: str) -> Wording:
    before, _, after = form.partition("{value}")
    return Wording(before.format(**names), value, after.format(**names) + end)


def _joined(pieces: Iterable[MarkedTokens]) -> MarkedTokens:
    joined = MarkedTokens([], [])
    for piece in pieces:
        joined.ids.extend(piece.ids)
        joined.answers.extend(piece.answers)
    return joined


def _unmarked(piece: MarkedTokens) -> MarkedTokens:
    return MarkedTokens(piece.ids, [False] * len(piece.ids))


def _fitting(lengths: Iterable[int], room: int) -> int:
    """How many of them, from the first on, fit in `room` together."""
    return bisect_right(list(accumulate(lengths)), room)


def _log_uniform(least: int, most: int, draw: random.Random) -> int:
    return min(most, int(least * ((most + 1) / least) ** draw.random()))


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower() and 3 <= len(text) <= 12


def _letters(count: int, draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_letters, k=count))


KINDS_OF_VALUE = {
    "number": lambda draw, words: "".join(draw.choices(string.digits, k=draw.randint(1, 6))),
    "word": lambda draw, words: draw.choice(words),
    "words": lambda draw, words: draw.choice("_- .").join(draw.choices(words, k=2)),
    "name": lambda draw, words: f"{draw.choice(FIRST_NAMES)} {draw.choice(SURNAMES)}",
    "code": lambda draw, words: (
        f"{_letters(2, draw).upper()}{draw.choice(('-', '', '/'))}{draw.randrange(10**4)}"
    ),
    "spot": lambda draw, words: f"{draw.choice(SPOTS)} {draw.randint(1, 999)}",
    "letters": lambda draw, words: _letters(draw.randint(3, 7), draw),
    "hex": lambda draw, words: f"{draw.getrandbits(32):08x}",
    "uuid": lambda draw, words: str(uuid.UUID(int=draw.getrandbits(128))),
}
KEYS = ("word", "word", "words", "number", "code", "letters", "hex", "uuid", "name")
VALUES = ("number", "number", "word", "words", "code", "letters", "hex", "uuid", "name")
