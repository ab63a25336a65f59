"""Prepared blocks against blocks packed by hand, and the same blocks on any number of processes."""

from collections import Counter

import pytest

from coca_hf import CocaError, tokens
from coca_hf.documents import read_documents
from coca_hf.train import data
from coca_hf.train.data import DealtBlocks
from coca_hf.train.recipe import Source
from tests.conftest import refused
from tests.train.corpora import make_corpus, tokens_of

SEQ_LEN = 20


@pytest.fixture
def corpus(tiny_tokenizer, tmp_path):
    def make(*sources, **options):
        return make_corpus(sources, tiny_tokenizer, SEQ_LEN, tmp_path / "prepared", **options)

    return make


def packed_by_hand(source: Source, tokenizer) -> list[tuple[int, ...]]:
    stream = []
    for document in read_documents(source.path, source.column):
        letters = document.text.replace(" ", "Ġ")
        stream += [*map(tokenizer.convert_tokens_to_ids, letters), tokenizer.eos_token_id]
    starts = range(0, len(stream) - SEQ_LEN + 1, SEQ_LEN)
    return [tuple(stream[start : start + SEQ_LEN]) for start in starts]


def test_a_pass_is_every_packed_block_once_and_the_next_pass_is_the_same_in_another_order(
    words, corpus, tiny_tokenizer
):
    expected = packed_by_hand(words, tiny_tokenizer)
    drawn = tokens_of(corpus(words).prepare(2 * len(expected)))
    first, second = drawn[: len(expected)], drawn[len(expected) :]
    assert Counter(first) == Counter(second) == Counter(expected)
    assert first != expected
    assert first != second
    # five documents; the last tail fills no block
    assert sum(block.count(tiny_tokenizer.eos_token_id) for block in first) == 4


def test_a_small_buffer_still_draws_every_block_once(words, corpus, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(data, "SHUFFLE_TOKENS", 6 * SEQ_LEN)
    expected = packed_by_hand(words, tiny_tokenizer)
    first = tokens_of(corpus(words).prepare(len(expected)))
    assert Counter(first) == Counter(expected)
    assert first[0] in expected[:6]
    assert first != expected


def test_weights_are_shares_of_tokens(words, digits, corpus, tiny_tokenizer):
    blocks = tokens_of(corpus(words, digits).prepare(1000))
    of_digits = sum("0" <= tiny_tokenizer.decode(block[1:2]) <= "9" for block in blocks)
    assert of_digits == pytest.approx(250, abs=45)  # 3.3 standard deviations


def test_the_blocks_are_fixed_by_the_seed(words, digits, corpus, tmp_path):
    once, again, other = (
        tokens_of(corpus(words, digits, seed=seed, prepared=str(tmp_path / place)).prepare(90))
        for place, seed in {"once": 5, "again": 5, "other": 6}.items()
    )
    assert once == again != other


class AddsItsOwn:
    """A tokenizer of letters that begins a text with 1 and ends it with its eos token, 2."""

    eos_token_id, eos_token = 2, "\x02"

    def __call__(self, text, add_special_tokens=True, **kwargs):
        if isinstance(text, list):
            return {"input_ids": [self(item, add_special_tokens)["input_ids"] for item in text]}
        letters = [ord(letter) for letter in text]
        return {"input_ids": [1, *letters, 2] if add_special_tokens else letters}


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "ab cdefghijklmn op q": "\x01ab cdefghijklmn op q\x02",  # of several pieces
        **{
            f"{begin}a\x01b{end}": "\x01a\x01b\x02"
            for begin in ("\x01", "")
            for end in ("\x02", "")
        },
        "\x01a\x02b\x02\n": "\x01a\x02b\x02\n",  # as rendered chats end
    }.items(),
)
def test_special_tokens_stand_once_around_a_document(text, expected, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 8)
    document = tokens.Encoder(AddsItsOwn(), 256).document(text)
    assert "".join(map(chr, document)) == expected


def test_a_document_larger_than_a_dozen_novels_is_named_once_and_trained_on_in_pieces(
    corpus, tiny_tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(data, "SHUFFLE_TOKENS", 2 * SEQ_LEN)
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 1000)
    plain, encoded = tokens.Encoder.__call__, []

    def encode(self, pieces):
        encoded.append(sum(len(piece.text) for piece in pieces))
        return plain(self, pieces)

    monkeypatch.setattr(tokens.Encoder, "__call__", encode)
    text = "many words " * 1_000_000
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "short one"}}\n{{"text": "{text}"}}\n')
    source = Source(path=str(tmp_path / "rows.jsonl"), weight=1)
    corpus(source).check_sources()
    once, again = (
        tokens_of(corpus(source, prepared=str(tmp_path / place)).prepare(200))
        for place in ("once", "again")
    )
    assert once == again
    assert max(encoded) < 2 * 1000
    assert "many words many" in tiny_tokenizer.decode(once[100])
    named = capsys.readouterr().err
    document = f"{tmp_path / 'rows.jsonl'}:1: got a document of 11,000,000 characters"
    assert named.startswith(f"{document}; it is trained on")
    assert named.count("\n") == 1


@pytest.mark.parametrize("method", [data.Corpus.check_sources, lambda corpus: corpus.prepare(100)])
def test_a_source_without_a_whole_block_is_named(words, corpus, tmp_path, method):
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(CocaError, match=r"short\.txt: got fewer than 20 tokens"):
        method(corpus(words, Source(path=str(tmp_path / "short.txt"), weight=1)))


@pytest.mark.parametrize(
    ("file", "why"),
    [("nowhere", "No such file or directory"), ("/proc/self/mem", "Input/output error")],
)
def test_a_link_to_a_file_that_is_gone_or_cannot_be_read_is_refused(corpus, tmp_path, file, why):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").symlink_to(file)
    message = rf"texts/a\.txt: cannot be read: {why}; mend or remove it"
    with pytest.raises(CocaError, match=message):
        _ = corpus(Source(path=str(tmp_path / "texts"), weight=1)).files


@pytest.mark.parametrize("method", [lambda corpus: corpus.files, lambda corpus: corpus.prepare(1)])
def test_options_that_its_files_do_not_have_are_refused_for_a_source(words, digits, corpus, method):
    split = digits.model_copy(update={"split": "test", "subset": "big"})
    message = r"digits\.jsonl: got split, subset, which only data sets on the hub have"
    refused(message, method, corpus(split))
    message = "got column, which only files of rows have; leave it out"
    refused(message, method, corpus(words.model_copy(update={"column": "code"})))


def test_a_tokenizer_without_eos_is_refused(words, corpus, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "eos_token_id", None, raising=False)
    refused("no eos token", corpus, words)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("restarts", [[], [160, 400]], ids=["unbroken", "restarted"])
def test_a_step_takes_the_same_blocks_in_the_same_order_on_any_number_of_processes_and_after_restarts(
    words, digits, corpus, groups, restarts
):
    step = 40  # blocks
    blocks = corpus(words, digits).prepare(600)
    seen = []
    for first, end in zip([0, *restarts], [*restarts, 600], strict=True):
        of_groups = [iter(DealtBlocks(blocks, first, 5, group, groups)) for group in range(groups)]
        for _ in range((end - first) // step):
            for _ in range(step // (5 * groups)):  # accumulated batches
                for dealt in of_groups:
                    seen += [tuple(next(dealt)["input_ids"].tolist()) for _ in range(5)]
    assert seen == tokens_of(blocks)
