import pytest
import torch
from torch import nn

from coca_hf.errors import CocaError
from coca_hf.evaluate.sample import draw_sample


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


def test_a_drawn_sample_is_the_same_for_the_same_seed_only(llama, many):
    drawn = [draw_sample(llama, many, 10, documents=6, seed=seed).names for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 6
    assert drawn[0] == sorted(drawn[0])


def test_every_document_is_drawn_about_equally_often(llama, many):
    names = [name for seed in range(60) for name in draw_sample(llama, many, 10, documents=10, seed=seed).names]
    counts = [names.count(f"{number:02}.txt") for number in range(30)]
    assert min(counts) >= 8
    assert max(counts) <= 33


def test_documents_are_cut_to_their_first_tokens(llama, many):
    cut, whole = draw_sample(llama, many, 10, max_tokens=23), draw_sample(llama, many, 10)
    assert all(torch.equal(short, long[:23]) for short, long in zip(cut.token_ids, whole.token_ids, strict=True))
    assert cut.describe()["data_hash"] != whole.describe()["data_hash"]


def test_a_document_shorter_than_the_window_is_refused_with_the_remedy(llama, many):
    with pytest.raises(CocaError, match=r"00\.txt: got a document of 50 tokens, expected at least 71, .* --skip-short"):
        draw_sample(llama, many, 71)


def test_skipped_documents_are_named(llama, many):
    sample = draw_sample(llama, many, 71, skip_short=True)
    assert sample.names == [f"{number:02}.txt" for number in range(21, 30)]
    assert sample.describe()["skipped_documents"] == [f"{number:02}.txt" for number in range(21)]


def test_a_sample_of_short_documents_only_is_refused(llama, many):
    with pytest.raises(CocaError, match="got no document of at least 200 tokens"):
        draw_sample(llama, many, 200, skip_short=True)


def test_a_cut_shorter_than_the_window_is_refused(llama, many):
    with pytest.raises(CocaError, match="--max-tokens: got 32, expected at least 33"):
        draw_sample(llama, many, 33, max_tokens=32)


def test_more_documents_than_there_are_is_refused(llama, many):
    with pytest.raises(CocaError, match="got 30 documents, expected --documents 31"):
        draw_sample(llama, many, 10, documents=31)


def test_token_ids_that_the_model_does_not_embed_are_refused(llama, many):
    llama.model.set_input_embeddings(nn.Embedding(60, 48))
    with pytest.raises(CocaError, match=r"00\.txt: got token id \d+ .* below the model's vocabulary of 60"):
        draw_sample(llama, many, 10)
