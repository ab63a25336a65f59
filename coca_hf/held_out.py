"""Which part of a source is kept out of training and calibration, to measure the loss on it.

Documents are held out by a hash of their words, whatever the seed: every run on a source leaves out
the same ones, and copies of a document are treated alike, also in different sources of a run. From
a large source a hundredth is held out. From a small one, the documents of lowest hash are, as few
as suffice; if these are more than a tenth of its text, as with a single book, the end of every
document is held out instead. From other sources, a small source only holds out copies of its own
documents.

The blocks are passages of at least `DOCUMENTS` documents if the source can spare them: a single
document, which may be verse, another language or all tables, says little about the others.
"""

import itertools
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from coca_hf.documents import Document
from coca_hf.tokens import Encoder, split_at_space

HASHES = 2**64
LARGE = HASHES // 100
MOST = 0.1  # of a source's characters
DOCUMENTS = 16
TOKEN_CHARACTERS = 16  # far more than a token has on average

Read = Callable[[], Iterable[Document]]  # reads a source from its beginning


class HeldOut(NamedTuple):
    """Documents with a hash below `below` are held out, and the last `tail`, a share, of others."""

    below: int = 0
    tail: float = 0.0

    def split(self, text: str) -> tuple[str, str]:
        """The part of a document to train on, and the part that is held out."""
        if _hash(text) < self.below:
            return "", text
        return split_at_space(text, self.tail) if self.tail else (text, "")


class HeldOutTogether(NamedTuple):
    """What one of several sources leaves out.

    own: its rule. others: the rules of small sources, and the hashes of their documents.
    """

    own: HeldOut
    others: list[tuple[HeldOut, set[int]]]

    def split(self, text: str) -> tuple[str, str]:
        """As `HeldOut.split`, by the most that a source with this document holds out of it."""
        key = _hash(text)
        rules = [self.own, *(rule for rule, hashes in self.others if key in hashes)]
        return HeldOut(*map(max, zip(*rules, strict=True))).split(text)


def together(rules: Mapping[int, HeldOut], reads: Mapping[int, Read]) -> dict[int, HeldOutTogether]:
    """What sources leave out whose blocks were held out by `rules`; both by the sources' numbers.

    Small sources are read once more if there are others.
    """
    of_large = HeldOut(below=LARGE)
    small = {number: rule for number, rule in rules.items() if rule not in (HeldOut(), of_large)}
    hashes = {
        number: {_hash(document.text) for document in reads[number]()} if len(rules) > 1 else set()
        for number in small
    }
    below = LARGE if of_large in rules.values() else 0
    return {
        number: HeldOutTogether(
            HeldOut(max(rule.below, below), rule.tail),
            [(small[other], hashes[other]) for other in small if other != number],
        )
        for number, rule in rules.items()
    }


def hold_out(
    read: Read, encoder: Encoder, seq_len: int, num_blocks: int, from_all: bool = False
) -> tuple[HeldOut, Tensor]:
    """Choose what to hold out of a source, and pack it into blocks: (blocks, seq_len), int64.

    There are fewer than `num_blocks` blocks, perhaps none, if a tenth of the source has no more. A
    large source is read until its held-out documents fill them: about 1,600 documents, or a hundred
    times the blocks' tokens. With `from_all` it is read to its end, and the documents of lowest
    hash fill them.
    """
    rule = HeldOut(below=LARGE)
    if num_blocks == 0:
        return HeldOut(), torch.empty(0, seq_len, dtype=torch.int64)
    needed = num_blocks * seq_len
    passage = max(seq_len, math.ceil(needed / DOCUMENTS))
    chosen: list[tuple[int, Tensor]] = []  # with the documents' hashes
    count, below, taken = 0, rule.below, set[int]()
    held, characters = 0, 0
    for document in read():
        key = _hash(document.text)
        characters += len(document.text)
        held += len(document.text) if key < rule.below else 0
        if key < below and key not in taken:
            taken.add(key)
            found = key, _passage(document.text, encoder, passage)
            if from_all:
                insort(chosen, found, key=itemgetter(0))
            else:
                chosen.append(found)
            count += len(found[1])
            while count - len(chosen[-1][1]) >= needed:
                count -= len(chosen.pop()[1])
                below = chosen[-1][0]
        if count >= needed and held <= MOST * characters and not from_all:
            break
    if count >= needed and held <= MOST * characters:
        return rule, _pack([tokens for _, tokens in chosen], seq_len, num_blocks)
    seen: dict[int, list[int]] = defaultdict(list)  # characters of a text's copies, by hash
    for document in read():
        seen[_hash(document.text)].append(len(document.text))
    if not seen:
        return HeldOut(), torch.empty(0, seq_len, dtype=torch.int64)
    rule, passage = _rule_of_small(seen, needed, passage, tokens_per_character(read, encoder))
    passages: dict[int, Tensor] = {}
    for document in read():
        key, text = _hash(document.text), rule.split(document.text)[1]
        if key not in passages and text.strip():
            passages[key] = _passage(text, encoder, passage)
    return rule, _pack([*passages.values()], seq_len, num_blocks)


def most_held_out(read: Read, encoder: Encoder, tokens: int) -> HeldOut:
    """All that `hold_out` may hold out of a source for blocks of up to `tokens` tokens together."""
    sizes = sorted((_hash(document.text), len(document.text)) for document in read())
    most, spared, below = MOST * sum(characters for _, characters in sizes), 0, LARGE
    distinct = 0  # characters of those spared, whose copies count once
    for key, group in itertools.groupby(sizes, itemgetter(0)):
        copies = [characters for _, characters in group]
        spared += sum(copies)
        if spared > most:
            below = min(below, key)
            break
        distinct += copies[0]
        below = max(LARGE, key + 1)
    has_tail = sizes and distinct * tokens_per_character(read, encoder) < 1.1 * tokens
    return HeldOut(below, MOST if has_tail else 0.0)


def shares(weights: list[float], total: int) -> list[int]:
    """`total` dealt out in proportion to `weights`, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    dealt = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda place: dealt[place] - exact[place])
    for place in by_remainder[: total - sum(dealt)]:
        dealt[place] += 1
    return dealt


def _rule_of_small(
    seen: dict[int, list[int]], needed: int, passage: int, density: float
) -> tuple[HeldOut, int]:
    """The rule, and the tokens of a passage: more than `passage` if the source cannot spare that
    many documents.

    seen: characters of the copies of every document, by hash. needed: tokens that fill the blocks.
    density: tokens per character.
    """
    most = MOST * sum(map(sum, seen.values()))
    while passage < 2 * needed:
        held, found = 0, 0.0
        for key, copies in sorted(seen.items()):
            held += sum(copies)
            if held > most:
                break
            found += min(copies[0] * density, passage)
            # Some documents have fewer tokens than expected
            if found >= 1.1 * needed or (passage >= needed and found >= needed):
                return HeldOut(below=key + 1), passage
        passage *= 2
    distinct = sum(copies[0] for copies in seen.values())
    return HeldOut(tail=min(MOST, needed / density / distinct)), needed


def tokens_per_character(read: Read, encoder: Encoder) -> float:
    """Estimate from the first 100,000 characters, less a tenth: holding out too much is safer."""
    tokens, characters = 0, 0
    for document in read():
        text = document.text[: 100_000 - characters]
        tokens, characters = tokens + len(encoder.document(text)), characters + len(text)
        if characters == 100_000:
            break
    return 0.9 * tokens / characters


def _passage(text: str, encoder: Encoder, most: int) -> Tensor:
    """At most `most` tokens, from the middle of a long text."""
    characters = most * TOKEN_CHARACTERS
    start = max(0, len(text) - characters) // 2
    return encoder.document(text[start : start + characters])[:most]


def _pack(tokens: list[Tensor], seq_len: int, most: int) -> Tensor:
    stream = torch.cat([*tokens, torch.empty(0, dtype=torch.int64)])
    return stream[: min(len(stream) // seq_len, most) * seq_len].view(-1, seq_len)


def _hash(text: str) -> int:
    """A hash of the words, because files of different kinds differ in white space."""
    return xxhash.xxh3_64_intdigest(" ".join(text.split()).encode("utf-8"))
