"""Held-out blocks: every source gives its share, and no trace of them is trained on."""

import json
import random
import string

import pytest
import torch

from coca_hf import held_out
from coca_hf.documents import read_documents
from coca_hf.held_out import HASHES, LARGE, HeldOut, shares
from coca_hf.tokens import Encoder
from coca_hf.train.recipe import Source
from tests.train.corpora import make_corpus, tokens_of

SEQ_LEN = 20
GRAM = 8  # letters; two random sequences of them are almost never equal


def make_source(
    path, letters: str, lengths: list[int], weight: float = 1, copies: int = 1
) -> Source:
    draw = random.Random(letters)
    rows = ["".join(draw.choices(letters, k=length)) for length in lengths]
    path.write_text("".join(copies * (json.dumps({"text": row}) + "\n") for row in rows))
    return Source(path=str(path), weight=weight)


def grams(block) -> set[tuple[int, ...]]:
    tokens = list(map(int, block))
    return {tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)}


def read_of(source):
    return lambda: read_documents(*source.text)


@pytest.fixture
def encoder(tiny_tokenizer):
    return Encoder(tiny_tokenizer, len(tiny_tokenizer))


@pytest.fixture
def prepared(tiny_tokenizer, tmp_path):
    def prepare(sources, count: int, **data):
        corpus = make_corpus(sources, tiny_tokenizer, SEQ_LEN, tmp_path / "prepared", **data)
        return corpus.prepare(count)

    return prepare


DOCUMENTS = {
    "one document": [3001],
    "three documents": [900, 1100, 1000],
    "of which only small ones can be spared": [4000, 140, 90, 160, 70, 120, 80, 4000],
    "many documents": [33] * 1500,
    "many documents, and copies of them": [33] * 1500,
    "few documents, and copies of them": [120] * 12,
    "one document, and copies of it": [3001],
}
COPIES = {"many": 2, "few": 30, "one": 30}  # by the first word of what has copies


def source_of(kind, path) -> Source:
    copies = COPIES[kind.split()[0]] if "copies" in kind else 1
    return make_source(path, string.ascii_lowercase, DOCUMENTS[kind], copies=copies)


@pytest.mark.parametrize("weight", [0.01, 100])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_no_trace_of_a_held_out_block_is_ever_trained_on_from_its_own_source_or_another(
    kind, weight, prepared, tmp_path
):
    first = source_of(kind, tmp_path / "a.jsonl")
    other = make_source(tmp_path / "b.jsonl", string.digits, [40] * 300, weight=weight)
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    text = sum(DOCUMENTS[kind])
    # several whole passes of the first, if it has most of the weight, and one of the other
    blocks = prepared([first, other], (3 * text + 24_000) // SEQ_LEN, held_out_blocks=6)
    held = blocks.held_out
    assert held.shape == (6, SEQ_LEN)
    assert held.dtype == torch.int64
    trained = set().union(*map(grams, tokens_of(blocks)))
    assert len(trained) > 0.8 * text * (SEQ_LEN - GRAM) / SEQ_LEN
    assert not trained & set().union(*map(grams, held))


def test_copies_that_differ_in_white_space_are_treated_alike():
    rule = HeldOut(below=HASHES // 2)
    texts = [f"{number} {number} and more words" for number in range(40)]
    held = [not rule.split(text)[0] for text in texts]
    assert 10 < sum(held) < 30
    for copies in ([f"{text}\n" for text in texts], [text.replace(" ", "\r\n") for text in texts]):
        assert [not rule.split(text)[0] for text in copies] == held


SMALL_SOURCES = {"a tail": [3001], "documents": [40] * 40}


@pytest.mark.parametrize("small", SMALL_SOURCES.values(), ids=SMALL_SOURCES)
@pytest.mark.parametrize("lengths", [[33] * 1500, [220] * 60], ids=["large", "small"])
def test_a_source_is_trained_on_as_it_is_alone_beside_a_small_one(
    small, lengths, tiny_tokenizer, prepared, tmp_path
):
    beside = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, small)
    source = make_source(tmp_path / "b.jsonl", string.digits, lengths)
    alone, both = (
        {tuple(map(int, block)) for block in tokens_of(prepared(sources, count, held_out_blocks=n))}
        for sources, count, n in (
            ([source], sum(lengths) // 10, 4),
            ([beside, source], sum(lengths) // 3, 8),
        )
    )
    of_source = {block for block in both if {*string.digits} & {*tiny_tokenizer.decode(block)}}
    assert len(alone) > 0.8 * sum(lengths) // SEQ_LEN
    assert of_source == alone


@pytest.mark.parametrize("blocks", [6, 1000])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_most_that_is_held_out_includes_what_any_number_of_blocks_holds_out(
    kind, blocks, encoder, tmp_path
):
    read = read_of(source_of(kind, tmp_path / "a.jsonl"))
    rule, _ = held_out.hold_out(read, encoder, SEQ_LEN, blocks)
    most = held_out.most_held_out(read, encoder, blocks * SEQ_LEN)
    texts = [document.text for document in read()]
    assert all(rule.split(text)[0].startswith(most.split(text)[0]) for text in texts)
    assert sum(len(most.split(text)[0]) for text in texts) > 0.75 * sum(map(len, texts))


def test_held_out_blocks_are_mixed_by_weight_and_independent_of_the_seed(
    tiny_tokenizer, prepared, tmp_path
):
    letters = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [500] * 30, weight=3)
    digits = make_source(tmp_path / "b.jsonl", string.digits, [500] * 30, weight=1)
    held = prepared([letters, digits], 1, seed=1, held_out_blocks=8).held_out
    of_digits = ["0" <= tiny_tokenizer.decode(block[1:2]) <= "9" for block in held]
    assert of_digits == 6 * [False] + 2 * [True]
    again = prepared([letters, digits], 1, seed=2, held_out_blocks=8).held_out
    assert torch.equal(held, again)


def test_a_source_gives_at_most_a_tenth_and_the_rest_is_trained_on(
    tiny_tokenizer, prepared, tmp_path
):
    source = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [3001])
    blocks = prepared([source], 135, held_out_blocks=1000)
    assert 13 <= len(blocks.held_out) <= 15  # a tenth of 3001 bytes, a token each, in blocks of 20
    text = json.loads((tmp_path / "a.jsonl").read_text())["text"]
    trained = {tiny_tokenizer.decode(block) for block in tokens_of(blocks)}
    assert trained == {text[start : start + SEQ_LEN] for start in range(0, 2700, SEQ_LEN)}


def test_no_more_is_held_out_than_fills_the_blocks(encoder, tmp_path):
    source = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [3001])
    rule, blocks = held_out.hold_out(read_of(source), encoder, SEQ_LEN, 3)
    assert len(blocks) == 3
    assert 3 * SEQ_LEN / 3001 < rule.tail < 4 * SEQ_LEN / 3001


def test_without_held_out_blocks_everything_is_trained_on(prepared, tmp_path):
    source = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [400])
    assert prepared([source], 1, held_out_blocks=0).held_out.shape == (0, SEQ_LEN)
    assert HeldOut().split("all of it") == ("all of it", "")


def test_a_document_is_cut_at_white_space_where_there_is_some():
    assert HeldOut(tail=0.5).split("alpha beta gamma") == ("alpha beta", " gamma")
    assert HeldOut(tail=0.5).split("abcdefgh") == ("abcd", "efgh")
    assert HeldOut(tail=0.1).split("字" * 10_000 + "\n") == ("字" * 9001, "字" * 999 + "\n")


def test_shares_add_up():
    assert shares([0.75, 0.25], 64) == [48, 16]
    assert shares([1, 1, 1], 64) == [22, 21, 21]
    assert shares([1000, 1], 5) == [5, 0]


def test_blocks_are_of_many_documents_where_the_source_can_spare_them(
    tiny_tokenizer, encoder, tmp_path
):
    source = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [900] * 400)
    rule, blocks = held_out.hold_out(read_of(source), encoder, SEQ_LEN, 32)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    held = [text for text in texts if rule.split(text)[1]]
    assert held_out.DOCUMENTS <= len(held) < 20
    found = [sum(tiny_tokenizer.decode(block) in text for block in blocks) for text in held]
    assert len(blocks) == 32
    # none spans two documents
    assert found[: held_out.DOCUMENTS] == [2] * held_out.DOCUMENTS


@pytest.mark.parametrize("below", [held_out.LARGE, 2**63])
@pytest.mark.parametrize("from_all", [False, True])
def test_blocks_are_of_different_documents_however_often_each_comes(
    below, from_all, encoder, tmp_path, monkeypatch
):
    monkeypatch.setattr(held_out, "LARGE", below)
    monkeypatch.setattr(held_out, "MOST", 0.1 if below == LARGE else 1)
    source = make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [33] * 400, copies=3)
    rule, blocks = held_out.hold_out(read_of(source), encoder, SEQ_LEN, 16, from_all)
    assert (rule.below == below) == (below == 2**63)
    assert len({tuple(block.tolist()) for block in blocks}) == 16


def test_a_passage_is_from_the_middle_of_a_long_document(tiny_tokenizer, encoder):
    text = "a" * 5000 + "b" * (3 * held_out.TOKEN_CHARACTERS) + "c" * 5000
    assert tiny_tokenizer.decode(held_out._passage(text, encoder, 3)) == "bbb"
    assert tiny_tokenizer.decode(held_out._passage("short", encoder, 3)) == "sho"


@pytest.mark.parametrize("from_all", [False, True])
def test_a_large_source_gives_its_first_held_out_documents_or_those_from_all_over_it(
    from_all, tiny_tokenizer, encoder, tmp_path
):
    read = read_of(make_source(tmp_path / "a.jsonl", string.ascii_lowercase, [33] * 9000))
    rule, blocks = held_out.hold_out(read, encoder, SEQ_LEN, 32, from_all)
    assert rule == HeldOut(below=LARGE)  # the training text does not depend on from_all
    texts = [document.text for document in read()]
    held = [number for number, text in enumerate(texts) if not rule.split(text)[0]]
    text = tiny_tokenizer.decode(blocks.flatten())
    places = [number for number in held if texts[number][:20] in text]
    assert 15 < len(places) < len(held) / 2
    assert (places == held[: len(places)]) == (not from_all)
    assert (max(places) > 6000) == from_all


@pytest.mark.parametrize("from_all", [False, True])
def test_of_a_book_whose_hash_is_low_the_end_is_held_out_too(from_all, encoder, tmp_path):
    draw = random.Random(0)
    texts = ("".join(draw.choices(string.ascii_lowercase, k=3000)) for _ in range(2000))
    book = next(text for text in texts if HeldOut(below=LARGE).split(text)[1])
    (tmp_path / "a.txt").write_text(book)
    read = read_of(Source(path=str(tmp_path / "a.txt"), weight=1))
    rule, blocks = held_out.hold_out(read, encoder, SEQ_LEN, 1, from_all)
    assert len(blocks) == 1
    most = held_out.most_held_out(read, encoder, 10**6)
    assert most.split(book)[0] == book[:2700]
    assert len(rule.split(book)[0]) > 2900


def test_a_short_first_document_does_not_change_how_much_is_held_out(encoder, tmp_path):
    """Its end token alone would double its tokens per character."""
    draw = random.Random(1)
    rows = ["".join(draw.choices(string.ascii_lowercase, k=100)) for _ in range(300)]
    for first in ([], ["a"]):
        lines = [json.dumps({"text": row}) + "\n" for row in first + rows]
        (tmp_path / "a.jsonl").write_text("".join(lines))
        read = read_of(Source(path=str(tmp_path / "a.jsonl"), weight=1))
        assert 0.9 <= held_out.tokens_per_character(read, encoder) <= 0.93
        assert len(held_out.hold_out(read, encoder, SEQ_LEN, 100)[1]) == 100
