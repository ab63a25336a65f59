import copy
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.sample import PRESETS, draw_sample
from tests.conftest import refused
from tests.evaluate.conftest import put_around_texts


@pytest.fixture
def many(tmp_path):
    """Thirty documents of 50 tokens and more."""
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02} " + "x" * (47 + number))
    return str(tmp_path)


def test_without_a_number_every_document_is_there_in_order(llama, many):
    sample = draw_sample(llama, many, 10)
    assert sample.names == [f"{number:02}.txt" for number in range(30)]
    assert [len(ids) for ids in sample.token_ids] == list(range(50, 80))
    assert llama.tokenizer.decode(sample.token_ids[7]).startswith("07 xxx")


def test_a_text_begins_with_special_tokens_once_and_ends_without_any(llama, many):
    plain = draw_sample(llama, many, 10)
    tokenizer = copy.deepcopy(llama.tokenizer)
    put_around_texts(tokenizer, "<s> $A </s>")
    first = Path(many) / "00.txt"
    first.write_text(f"<s>{first.read_text()}")  # as a chat template begins a text
    around = draw_sample(replace(llama, tokenizer=tokenizer), many, 10)
    for ids, own in zip(around.token_ids, plain.token_ids, strict=True):
        assert ids.tolist() == [1, *own.tolist()]


def test_a_document_that_no_row_can_name_is_refused_if_it_is_drawn(llama, tmp_path):
    """A name with the byte 0x80, as the system gives it."""
    for name in ("austen.txt", "b\udc80.txt"):
        (tmp_path / name).write_text("It is a truth universally acknowledged")
    with pytest.raises(CocaError, match=r"got the name b\\udc80.txt, which is not UTF-8.*rename"):
        draw_sample(llama, str(tmp_path), 10)
    assert draw_sample(llama, str(tmp_path), 10, documents=1, seed=1).names == ["austen.txt"]


def test_a_drawn_sample_is_the_same_for_the_same_seed_only(llama, many):
    drawn = [draw_sample(llama, many, 10, documents=6, seed=seed).names for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 6
    assert drawn[0] == sorted(drawn[0])


def test_every_document_is_drawn_about_equally_often(llama, many):
    drawn = (draw_sample(llama, many, 10, documents=10, seed=seed).names for seed in range(60))
    counts = Counter(itertools.chain(*drawn))
    assert len(counts) == 30
    assert 8 <= min(counts.values()) <= max(counts.values()) <= 33


def test_documents_are_cut_to_their_first_tokens_and_hashed_by_tokens_and_by_text(llama, many):
    whole, cut = draw_sample(llama, many, 10), draw_sample(llama, many, 10, max_tokens=23)
    for short, long in zip(cut.token_ids, whole.token_ids, strict=True):
        assert torch.equal(short, long[:23])
    Path(many, "07.txt").write_text("07 " + "y" * 54)
    whole, cut, other = (one.describe() for one in (whole, cut, draw_sample(llama, many, 10)))
    assert whole["document_names"] == other["document_names"]
    assert whole["text_hash"] == cut["text_hash"] != other["text_hash"]
    assert whole["data_hash"] != cut["data_hash"]


def test_documents_shorter_than_the_window_are_refused_all_at_once_with_the_remedy(llama, many):
    with pytest.raises(CocaError) as caught:
        draw_sample(llama, many, 71)
    assert str(caught.value) == (
        f"{many}: 21 of 30 documents have fewer than 71 tokens, the longest of --lengths, first: "
        f"{many}/00.txt (50), {many}/01.txt (51), {many}/02.txt (52) and 18 more; ask for shorter "
        f"--lengths or add --skip-short"
    )


def test_empty_documents_are_refused_as_too_short_or_skipped_and_named(llama, many):
    for number, text in ((3, ""), (8, " \n"), (29, "\t")):
        (Path(many) / f"{number:02}.txt").write_text(text)
    first = ", ".join(f"{many}/{name}.txt (0)" for name in ("03", "08", "29"))
    said = f"3 of 30 documents have fewer than 10 tokens, the longest of --lengths, first: {first};"
    refused(re.escape(said), draw_sample, llama, many, 10)
    about = draw_sample(llama, many, 10, skip_short=True).describe()
    assert about["skipped_documents"] == ["03.txt", "08.txt", "29.txt"]
    assert about["documents"] == 27


def test_with_skip_short_the_draw_is_from_the_long_documents_alone(llama, many):
    sample = draw_sample(llama, many, 65, documents=9, seed=5, skip_short=True)
    short = [f"{number:02}.txt" for number in range(15)]
    assert (len(sample.names), sample.skipped) == (9, short)
    for name in short:
        (Path(many) / name).unlink()
    assert draw_sample(llama, many, 65, documents=9, seed=5).names == sample.names
    few = draw_sample(llama, many, 71, documents=10, skip_short=True)
    assert few.names == [f"{number:02}.txt" for number in range(21, 30)]


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (200, {"skip_short": True}, "got no document of at least 200 tokens"),
        (33, {"max_tokens": 32}, "--max-tokens: got 32, expected at least 33"),
        (10, {"documents": 31}, "got 30 documents, expected --documents 31"),
    ],
)
def test_what_the_documents_do_not_have_is_refused(llama, many, length, options, message):
    refused(message, draw_sample, llama, many, length, **options)


def test_token_ids_that_the_model_does_not_embed_are_refused(llama, many):
    llama.model.set_input_embeddings(nn.Embedding(60, 48))
    said = r"00\.txt: got token id \d+ .* below the model's vocabulary of 60"
    refused(said, draw_sample, llama, many, 10)


def test_documents_of_too_few_bytes_are_not_drawn_from_and_are_counted(llama, many):
    """Bytes of UTF-8: 40 characters of two bytes each are 80 tokens."""
    (Path(many) / "00.txt").write_text("ß" * 40)
    sample = draw_sample(llama, many, 10, documents=6, min_bytes=75)
    assert sample.names == ["00.txt", "25.txt", "26.txt", "27.txt", "28.txt", "29.txt"]
    assert (sample.describe()["min_bytes"], sample.left_out) == (75, 24)


def test_without_special_tokens_the_text_alone_is_tokenized(llama, many):
    llama.tokenizer.add_special_tokens({"bos_token": "<s>"})
    plain = draw_sample(llama, many, 10, special_tokens=False).token_ids[0]
    assert llama.tokenizer.decode(plain).startswith("00 xxx")
    assert len(plain) == 50


def test_the_preset_of_the_paper_is_its_setting():
    """Section 4.2: documents of at least 32768 tokens of PG-19's test split, cut to them."""
    preset = PRESETS["pg19"]
    assert preset["data"] == "emozilla/pg19-test"
    assert (preset["min_tokens"], preset["max_tokens"]) == (32768, 32768)
    assert preset["skip_short"]
    assert (preset["documents"], PRESETS["proof-pile"]["documents"]) == (100, 50)


def test_options_that_local_files_do_not_have_are_refused(llama, many):
    names = "--split, --subset, --data-revision"
    message = f"got {names}, which only data sets on the hub have; leave it out"
    refused(message, draw_sample, llama, many, 10, split="train", subset="en", data_revision="v1")
    with pytest.raises(CocaError, match="got --column, which only files of rows have; leave it"):
        draw_sample(llama, many, 10, column="body")
    Path(many, "rows.jsonl").write_text('{"body": "a row beside text files"}\n')
    sample = draw_sample(llama, many, 10, column="body")
    assert sample.names[-1] == "rows.jsonl:0"
    assert sample.describe()["data_commit"] is None
