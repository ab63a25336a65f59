"""Training text that only a lookup predicts: the source `{synthetic: lookups, weight: 0.5}`.

Ordinary text rarely asks for something a thousand tokens back, so training on it recovers
perplexity but not retrieval. A block of this source asks often, within text of the other sources:

    copies   a passage of the text, or random tokens of the whole vocabulary, is repeated, later or
             at once
    facts    are stated once and asked for later, in the same or other words, among facts that
             differ in one word
    lists    of random keys and values, some of which are asked for, in the list or after it

In one block of four the text is random tokens, too: otherwise a model may learn to look things up
within text only. The tokens that a lookup predicts, the answers, are marked; a stage's `answer_weight`
adds their loss once more. A block depends only on its text and its random generator.

No wording here is one that our measurements use (`tests/train/test_lookups.py` checks runs of five
words), so a model that is trained on these has not seen the questions that it is measured with. A
statement and a question begin with white space, and a question has no text after its {value}.
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

RANDOM_TEXT = 0.25  # share of blocks in which the text, too, is random tokens
RANDOM_PASSAGES = 0.35  # of all passages; the others are of the text
SHORTEST_PASSAGE = 8  # tokens
MOST_PASSAGES = 16
FACT_TOKENS = 48  # what a fact and its questions take, roughly
LINE_TOKENS = 12  # the least that a line of a list takes, roughly
WORD_MARKS = ("Ġ", "▁")  # of tokens that begin a word: byte-level BPE, SentencePiece


class MarkedTokens(NamedTuple):
    """Consecutive tokens, and which of them are answers."""

    ids: list[int]
    answers: list[bool]


class Lookup(NamedTuple):
    """What is said, and the questions about it, which may stand anywhere after it."""

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

    Raises CocaError for a tokenizer that does not give the offsets of its tokens in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not getattr(tokenizer, "is_fast", False):
            raise CocaError(
                f"synthetic lookups: got {type(tokenizer).__name__}, expected a tokenizer with "
                "tokenizer.json, which gives the offsets of its tokens; leave the source out"
            )
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        # added tokens are special, or may have no embedding
        added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._ordinary = sorted(set(vocabulary.values()) - added)
        words = {token[1:] for token in vocabulary if token.startswith(WORD_MARKS)}
        self._words = sorted(word for word in words if _is_word(word)) or list(FIRST_NAMES)

    def block(self, text: Sequence[int], draw: random.Random) -> MarkedTokens:
        """A block of `len(text)` tokens: lookups, and as much of the text as there is room for."""
        if draw.random() < RANDOM_TEXT:
            text = self._random_tokens(len(text), draw)
        # Passages come from the end of the text, and the text between lookups from its start
        spare = list(text)
        makers = [self._copies, self._facts, self._list]
        makers = [draw.choice(makers)] if draw.random() < 0.75 else makers
        room = int(len(text) * draw.uniform(0.3, 1) / len(makers))
        lookups = [lookup for make in makers for lookup in make(room, spare, draw)]
        return _laid_out(lookups, text, draw)

    def _copies(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """Passages and their copies, about `room` tokens together."""
        lookups: list[Lookup] = []
        while room >= 2 * SHORTEST_PASSAGE and len(lookups) < MOST_PASSAGES:
            # Reading a whole passage again is learnt from long ones
            least, most = SHORTEST_PASSAGE, room // 2
            is_short = draw.choice((True, False))
            length = _log_uniform(least, most, draw) if is_short else draw.randint(least, most)
            if draw.random() < RANDOM_PASSAGES:
                passage = self._random_tokens(length, draw)
            else:
                passage = spare[-length:]
                del spare[-length:]
            copies = min(room // length, draw.choice((2, 2, 3, 16)))
            room -= copies * length
            said = _unmarked(passage)
            again = [MarkedTokens(passage, [False] + [True] * (length - 1))] * (copies - 1)
            if draw.random() < 0.4:  # back to back
                said, again = _joined([said, *again]), []
            lookups.append(Lookup(said, again))
        return lookups

    def _random_tokens(self, count: int, draw: random.Random) -> list[int]:
        return draw.choices(self._ordinary, k=count)

    def _facts(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """Facts of one relation and their questions; no two facts have the same noun and owner."""
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
            again = statement.partition("{value}")[0] + "{value}"  # all that small models answer
            if "{noun}" in again and "{owner}" in again and draw.random() < 0.6:
                asked[0] = again
            forms = [(statement, ""), *((form, draw.choice(ENDINGS)) for form in asked)]
            names = {"noun": noun, "owner": owner}
            wordings.append([_wording(form, end, value, **names) for form, end in forms])
        pieces = iter(self._encode([wording for of_fact in wordings for wording in of_fact]))
        lookups = []
        for of_fact in wordings:
            said, *questions = (next(pieces) for _ in of_fact)
            lookups.append(Lookup(_unmarked(said.ids), questions))
        return lookups[: _fitting((lookup.length for lookup in lookups), room)]

    def _list(self, room: int, spare: list[int], draw: random.Random) -> list[Lookup]:
        """A list and questions about it; without repeated lines, at most half of `room`."""
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
            body.append(_unmarked(line.ids))
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
        """Each as it is tokenised after a word: an "a" is put before it, and cut off again."""
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
    """Statements and questions at random places of the text, no question before its statement.

    As many of the lookups as there is room for: a list in a short block may overrun its own.
    """
    lookups = lookups[: _fitting((lookup.length for lookup in lookups), len(text))]
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
    # A repeated phrase, in which everything is easy to see and hard to locate
    if draw.random() < 0.25:
        phrase = list(text[: draw.randint(8, 32)])
        text = phrase * (len(text) // len(phrase) + 1)
    ends = pairwise([0, *cuts, between])
    runs = [_unmarked(list(text[a:b])) for a, b in ends]
    pairs = zip(runs, [*pieces, _unmarked([])], strict=True)
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


def _unmarked(ids: list[int]) -> MarkedTokens:
    return MarkedTokens(ids, [False] * len(ids))


def _fitting(lengths: Iterable[int], room: int) -> int:
    """How many of them, from the first, fit in `room` together."""
    return bisect_right(list(accumulate(lengths)), room)


def _log_uniform(least: int, most: int, draw: random.Random) -> int:
    return min(most, int(least * ((most + 1) / least) ** draw.random()))


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower() and 3 <= len(text) <= 12


def _letters(count: int, draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_letters, k=count))


# The wordings: how facts are stated and asked for, and how lists of keys and values look


class Relation(NamedTuple):
    """Statements and questions about a {noun} of an {owner}, and the kinds of its value."""

    nouns: tuple[str, ...]
    owners: tuple[str, ...]
    values: tuple[str, ...]
    said: tuple[str, ...]
    asked: tuple[str, ...]


def _words(listed: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in listed.split(","))


FIRST_NAMES = _words(
    "Alice,Robert,Margaret,Ivan,Tom,Eleanor,Amara,Diego,Yuki,Fatima,Oscar,Priya,Lukas,Nadia,Samuel,Ingrid,Chen,Rosa,"
    "Walter,Leila,Hugo,Agnes,Kofi,Martha,Pavel,Sofia,George,Hana,Emil,Beatrice,Omar,Clara"
)
SURNAMES = _words(
    "Hale,Moreau,Novak,Silva,Tanaka,Okafor,Lindqvist,Marsh,Petrov,Rossi,Haddad,Keller,Brandt,Osei,Kowalski,Finch,"
    "Delgado,Iyer,Whitmore,Larsen,Castellano,Ng,Abbott,Sorensen,Volkov,Pereira,Quinn,Baptiste,Yilmaz,Thorne"
)
BODIES = _words(
    "the old mill,the red house,the station,the north depot,the harbour office,the museum,the "
    "bakery,the night train,room 14,the second unit,the observatory,the village school,the Blue "
    "Anchor,the council,the upper laboratory,the west gate,the printing house,the theatre,the farm "
    "by the river,the customs house,the orchestra,the archive"
)

PROPERTY = Relation(
    nouns=_words(
        "code,account number,price,password,address,birthday,weight,score,height,phone "
        "number,ticket,seat,locker,"
        "order number,room,badge,rank,size,temperature,membership,licence "
        "plate,combination,username,callsign,budget,"
        "reference,serial number,extension,deposit,distance,age,invoice,batch,postcode,shift,platform,fee,setting,"
        "bus line,frequency,channel,shelf mark,version,alias,nickname,token,dose,debt,salary,lot"
    ),
    owners=BODIES + FIRST_NAMES,
    values=("number", "number", "number", "code", "name"),
    said=(
        " Note that {owner}'s {noun} is {value}.",
        "\n{owner}: {noun} {value}.",
        "\nThe {noun} that {owner} was given is {value}; keep it in mind.\n",
        " ({noun}, {owner}: {value})",
        " By then {owner} had already changed the {noun} to {value}.",
        " According to the register, the {noun} belonging to {owner} equals {value}.",
        ' "Our {noun}," said someone from {owner}, "is {value}."',
        "\n* {value} is the {noun} of {owner}\n",
        " {value}, written in pencil, was {owner}'s {noun}.",
        " Everyone there knew {value} as the {noun} that {owner} used.",
        "\n[memo] {owner} / {noun} / {value}\n",
        " It turned out that {value} had been chosen by {owner} as {noun}.",
        " In the margin somebody had noted: {noun} ({owner}) = {value}.",
        "\nMessage from {owner}: we have set our {noun} to {value}. Do not lose it.\n",
        " For {owner} the clerk entered a {noun} of {value}.",
        "\n# {noun} of {owner}: {value}\n",
        " Whoever calls {owner} should mention {value}, its {noun}.",
        " They gave {owner} {value} as {noun}.",
    ),
    asked=(
        "\nQuestion: which {noun} does {owner} have?\nAnswer: {value}",
        "\nQ: {owner}'s {noun}?\nA: {value}",
        "\nThe {noun} of {owner} is {value}",
        " He asked for the {noun} of {owner}, which was {value}",
        "\n{owner}: {noun} {value}",
        " When they needed {owner}'s {noun}, they looked it up: {value}",
        " As stated above, {owner}'s {noun} is {value}",
        "\nUser: Please tell me {owner}'s {noun}.\nAssistant: It is {value}",
        " So on behalf of {owner} she typed in the {noun}, {value}",
        ' "And {owner}\'s {noun}?" "{value}',
        "\nrecall({owner}, {noun}) = {value}",
        " Once more, {noun} and {owner} belong together: {value}",
        "\n\nFill in the form.\nName: {owner}\n{noun}: {value}",
        " Nobody but {owner} remembered the {noun}; it was {value}",
        "\n> {noun} ({owner})\n{value}",
        ' The letter to {owner} began: "Your {noun} remains {value}',
        " To get it right, the {noun} of {owner} must be {value}",
        "\nRepeat what was said about the {noun} of {owner}. {value}",
    ),
)

PLACE = Relation(
    nouns=_words(
        "lantern,umbrella,ledger,violin,map,silver "
        "key,parcel,raincoat,telescope,toolbox,diary,compass,photograph,"
        "suitcase,manuscript,watch,coin,letter,ring,bicycle,globe,blanket,teapot,painting,knife,rope,basket,microscope"
    ),
    owners=FIRST_NAMES,
    values=("spot", "spot", "name", "code"),
    said=(
        " {owner} hid the {noun} next to {value}.",
        " The {noun} which {owner} lost had been left with {value}.",
        "\n{noun} ({owner}) -> {value}\n",
        " {value} is where {owner} keeps the {noun}.",
        ' "If you need my {noun}," {owner} said, "look near {value}."',
        " Since spring {owner} has stored the {noun} at {value}.",
        "\nInventory: {noun}; owner {owner}; location {value}.\n",
        " Behind {value}, wrapped in paper, lay the {noun} of {owner}.",
    ),
    asked=(
        "\nQ: Where can {owner}'s {noun} be found?\nA: {value}",
        " They went to fetch {owner}'s {noun}, which meant going to {value}",
        "\nlocation of {noun} ({owner}): {value}",
        ' "Has anyone seen {owner}\'s {noun}?" "Try {value}',
        " {owner} wanted the {noun} back, so they turned to {value}",
        "\n{noun} ({owner}) -> {value}",
        " Anyone looking for the {noun} of {owner} has to start from {value}",
        "\nFind: {noun}, {owner}\nFound: {value}",
    ),
)

ROLE = Relation(
    nouns=_words(
        "director,cook,night guard,treasurer,secretary,gardener,engineer,pilot,editor,captain,conductor,librarian,"
        "driver,accountant,porter,inspector,translator,surgeon,mechanic,teacher,referee,founder,owner,tenant"
    ),
    owners=BODIES,
    values=("name",),
    said=(
        " {value} works as {noun} at {owner}.",
        " At {owner} they call their {noun} {value}.",
        " Last year {owner} made {value} its {noun}.",
        "\n{owner}\n  {noun}: {value}\n",
        " Should you write to {owner}, ask for {value}, the {noun}.",
        ' "I am {value}," the {noun} from {owner} introduced herself.',
        " As {noun}, {owner} had hired a certain {value}.",
        " {value} ({noun}, {owner}) arrived late.",
    ),
    asked=(
        "\nQuestion: Who is {noun} at {owner}?\nAnswer: {value}",
        " The person who served {owner} as {noun} was called {value}",
        "\n{owner}\n  {noun}: {value}",
        " They telephoned {owner} and asked to speak with the {noun}, {value}",
        ' "Who is your {noun} at {owner}?" "That would be {value}',
        " Signed by the {noun} of {owner}, {value}",
        "\n{noun}, {owner} = {value}",
        " In the end {owner} thanked its {noun}, {value}",
    ),
)

SPOTS = _words("shelf,drawer,box,locker,crate,cabinet,cell,bench,gate,pier,bin,aisle")

RELATIONS = (PROPERTY, PROPERTY, PLACE, ROLE)

ENDINGS = (".", ".", ",", "\n", ";", " and")  # after an answer in running text


class Form(NamedTuple):
    """A list of keys and values: the text before it, each of its lines, the text after it."""

    head: str
    line: str
    foot: str


FORMS = (
    Form("\nNotes\n", "\n- {key}: {value}", "\n"),
    Form("\n", "\n{key} = {value}", "\n"),
    Form("\n", "\n{key}\t{value}", "\n"),
    Form("\n{", '\n  "{key}": "{value}",', "\n}\n"),
    Form(" {", ' "{key}": "{value}",', " }\n"),
    Form(" dict(", " {key}='{value}',", " )\n"),
    Form("\n| name | entry |\n|---|---|", "\n| {key} | {value} |", "\n"),
    Form("\nid,data", "\n{key},{value}", "\n"),
    Form("\n<table>", "\n<tr><td>{key}</td><td>{value}</td></tr>", "\n</table>\n"),
    Form("\n", "\n{key} -> {value}", "\n"),
    Form("\nentries:", "\n  {key}: '{value}'", "\n"),
    Form("\n", "\nexport {key}={value}", "\n"),
    Form(" Pairs:", " ({key}, {value})", "."),
    Form("\n", "\n<{key}> {value}", "\n"),
    Form("\nINSERT INTO pairs VALUES", "\n  ('{key}', '{value}'),", "\n;\n"),
)

QUESTIONS = (
    "\n>>> lookup('{key}')\n'{value}",
    "\nEntry {key}? {value}",
    " Under {key} the list gives {value}",
    " Going back to {key}, we read {value}",
    "\nQ: {key}\nA: {value}",
    "\nKey: {key}\nValue: {value}",
    "\n$ get {key}\n{value}",
    " Beside {key} stands {value}",
    '\nget("{key}") returns "{value}',
    " whereas {key} goes with {value}",
    "\nUser: {key}?\nAssistant: {value}",
    " ({key} was paired with {value}",
)

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
