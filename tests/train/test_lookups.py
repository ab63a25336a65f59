"""Blocks of lookups: every marked answer stands somewhere before."""

import ast
import copy
import random
import re
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AddedToken

from coca_hf import CocaError, evaluate
from coca_hf.train import lookups
from coca_hf.train.lookups import Lookups

LENGTH = 1900


@pytest.fixture(scope="module")
def text(tiny_tokenizer) -> list[int]:
    draw = random.Random(7)
    words = ("".join(draw.choices("abcdefgh", k=4)) for _ in range(LENGTH))
    return tiny_tokenizer(" ".join(words))["input_ids"]


@pytest.fixture
def block(tiny_tokenizer, text):
    def make(seed: int, length: int = LENGTH):
        return Lookups(tiny_tokenizer).block(text[:length], random.Random(seed))

    return make


def marked(piece) -> list[tuple[str, str]]:
    """Every run of answers, and everything before it; a character for a token."""
    tokens, runs, place = "".join(map(chr, piece.ids)), [], 0
    for is_answer, run in groupby(piece.answers):
        end = place + len(list(run))
        runs += [(tokens[place:end], tokens[:place])] if is_answer else []
        place = end
    return runs


def test_every_answer_stands_somewhere_before_it(block):
    found = [pair for seed in range(60) for pair in marked(block(seed))]
    assert len(found) > 500
    assert [answer for answer, before in found if answer not in before] == []


def test_a_block_has_the_length_of_its_text_and_most_lengths_have_answers(block):
    for length in (13, 130, 901, LENGTH):
        pieces = [block(seed, length) for seed in range(40)]
        assert {len(part) for piece in pieces for part in piece} == {length}
        assert length == 13 or sum(any(piece.answers) for piece in pieces) > 20


@pytest.mark.parametrize(("seed", "length"), [(1202, 64), (1802, 64), (5608, 128)])
def test_lookups_for_which_a_short_block_has_no_room_are_left_out(block, text, seed, length):
    assert block(seed, length) == (text[:length], [False] * length)


def test_some_blocks_are_random_throughout_and_many_read_a_long_passage_again(block, text):
    blocks = [block(seed) for seed in range(200)]
    distinct = [len({*piece.ids}) for piece in blocks]
    assert 0.15 < sum(count > 200 for count in distinct) / 200 < 0.35
    of_text = "".join(map(chr, text))
    long = [any(len(run) > 200 and run in of_text for run, _ in marked(each)) for each in blocks]
    assert sum(long) / 200 > 0.1


def test_a_block_is_fixed_by_its_text_and_its_seed(block):
    assert block(3) == block(3)
    assert block(3) != block(4)
    assert block(3).ids != block(3, LENGTH - 1).ids[: LENGTH - 1]


def test_every_block_draws_its_passages_from_all_ordinary_tokens(block, text, tiny_tokenizer):
    foreign = [set(block(seed).ids) - set(text) for seed in range(60)]
    assert len(set().union(*foreign)) > 240  # of the 256 bytes, nearly all
    assert not set().union(*foreign) & set(tiny_tokenizer.all_special_ids)


def test_added_tokens_are_not_drawn(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<extra>", AddedToken("<reserved>", special=True)])
    added = tokenizer.convert_tokens_to_ids(["<extra>", "<reserved>"])
    drawn = Lookups(tokenizer)._random_tokens(20_000, random.Random(0))
    assert not {*added} & {*drawn}


def test_inserted_words_have_the_tokens_that_they_have_within_a_text(tiny_tokenizer):
    wordings = [lookups.Wording(" the code: ", "é47", ".\n"), lookups.Wording("\nx")]
    pieces = Lookups(tiny_tokenizer)._encode(wordings)
    answer = [number for number, marked in zip(*pieces[0], strict=True) if marked]
    assert tiny_tokenizer.decode(pieces[0].ids) == " the code: é47.\n"
    assert tiny_tokenizer.decode(answer) == "é47"
    assert tiny_tokenizer.decode(pieces[1].ids) == "\nx"


def test_no_two_facts_of_a_block_contradict_each_other(tiny_tokenizer, text):
    maker = Lookups(tiny_tokenizer)
    for seed in range(30):
        facts = maker._facts(LENGTH, text, random.Random(seed))
        said = [tiny_tokenizer.decode(fact.said.ids) for fact in facts]
        assert len(said) == len(set(said))


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    message = r"synthetic lookups: got Slow, expected a tokenizer with tokenizer\.json"
    with pytest.raises(CocaError, match=message):
        Lookups(Slow())


def phrases(text: str) -> set[tuple[str, ...]]:
    """Runs of five words, at least two of which are not placeholders."""
    words = re.findall(r"[a-z']+|_", re.sub(r"\{[^{}]*\}", " _ ", text).lower())
    runs = zip(*(words[start:] for start in range(5)), strict=False)
    return {run for run in runs if sum(word != "_" for word in run) >= 2}


def strings_of(directory: Path) -> set[str]:
    trees = (ast.parse(file.read_text()) for file in directory.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def own_wordings() -> list[str]:
    facts = [form for relation in lookups.RELATIONS for form in relation.said + relation.asked]
    return [*facts, *lookups.QUESTIONS, *("".join(form) for form in lookups.FORMS)]


def test_no_wording_shares_five_words_with_what_measures_lookups():
    measured = strings_of(Path(evaluate.__file__).parent)
    assert any("What is the pass key? The pass key is" in string for string in measured)
    lm_eval = pytest.importorskip("lm_eval")
    ruler = strings_of(Path(lm_eval.__file__).parent / "tasks/ruler")
    assert any("One of the special magic" in string for string in ruler)
    taken = set().union(*map(phrases, measured | ruler))
    nouns = r"pass ?key|(special )?magic \{\w+\}"  # what ours have placeholders for
    taken |= set().union(*(phrases(re.sub(nouns, "{noun}", string)) for string in measured | ruler))
    assert phrases(" What is the {noun}? The {noun} is {value}") & taken
    assert [form for form in own_wordings() if phrases(form) & taken] == []


def test_no_fact_is_about_what_measurements_ask_for():
    nouns = {noun for relation in lookups.RELATIONS for noun in relation.nouns}
    assert not {noun for noun in nouns if re.search("key|magic|needle", noun)} - {"silver key"}


def test_every_wording_has_its_placeholders():
    for relation in lookups.RELATIONS:
        for form in relation.said + relation.asked:
            assert all(form.count(f"{{{name}}}") >= 1 for name in ("noun", "owner"))
            assert form.count("{value}") == 1
            assert form[0].isspace()
        assert all(form.endswith("{value}") for form in relation.asked)
    assert all(form[0].isspace() and form.endswith("{value}") for form in lookups.QUESTIONS)
    # the list that recall measures
    assert all(form.line.strip() != "{key}: {value}" for form in lookups.FORMS)
    assert all("{key}" in form.line and form.line.count("{value}") == 1 for form in lookups.FORMS)
