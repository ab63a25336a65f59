import json

import pytest
import torch

from coca_hf.evaluate.copying import copying_rows, repeated_sequences
from coca_hf.evaluate.sample import draw_sample
from tests.conftest import refused
from tests.evaluate.conftest import put_around_texts
from tests.evaluate.runs import raw_of, run_of


def measure(loaded, out, length=41, batch_size=None, **options):
    (row,) = copying_rows(run_of(loaded, out, length, batch_size=batch_size), **options)
    return row


@torch.no_grad()
def test_losses_are_those_of_a_loop_over_tokens(coca, tmp_path):
    coca.model.double()
    row = measure(coca, tmp_path, length=20, num_cases=3, seed=5, batch_size=2)
    cases, copy_len = repeated_sequences(coca, 20, 3, 5)
    assert copy_len == 10
    losses = []
    for ids in cases:
        assert torch.equal(ids[:10], ids[10:])
        log_probabilities = coca.model(ids[None]).logits[0].double().log_softmax(-1)
        losses.append([-log_probabilities[place, ids[place + 1]].item() for place in range(19)])
    assert row["nll_first"] == pytest.approx(sum(sum(one[:9]) for one in losses) / 27)
    assert row["value"] == pytest.approx(sum(sum(one[10:]) for one in losses) / 27)
    assert row["tokens"] == 27
    copies = raw_of(row, tmp_path, "copies")
    assert [line["nll_second"] for line in copies] == pytest.approx(
        [sum(one[10:]) for one in losses]
    )


def test_cases_have_ordinary_tokens_after_the_tokenizers_beginning(llama):
    plain, again, other = (repeated_sequences(llama, 31, 8, seed)[0] for seed in (0, 0, 1))
    assert all(len(ids) == 30 and ids.min() > 2 for ids in plain)  # 0 to 2 are <unk>, <s>, </s>
    assert all(map(torch.equal, plain, again))
    assert not any(map(torch.equal, plain, other))

    put_around_texts(llama.tokenizer, "<s> $A")
    cases, copy_len = repeated_sequences(llama, 31, 2, 0)
    assert copy_len == 15
    assert all(len(ids) == 31 and ids[0] == 1 for ids in cases)


def test_a_token_that_the_tokenizer_puts_after_texts_begins_none(llama):
    """Not even if it is the beginning's as well, as one token is both in GPT-NeoX's tokenizer."""
    llama.tokenizer.bos_token = "</s>"
    put_around_texts(llama.tokenizer, "$A </s>")
    cases, copy_len = repeated_sequences(llama, 31, 2, 0)
    assert copy_len == 15
    assert all(len(ids) == 30 and ids.min() > 2 for ids in cases)


def test_a_beginning_that_the_model_does_not_embed_is_refused_before_a_row(llama, tmp_path):
    """A bos was added to the tokenizer, and the embedding was not resized."""
    tokenizer = llama.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    put_around_texts(tokenizer, "<begin> $A")
    rows = llama.model.get_input_embeddings().weight.shape[0]
    said = f"beginning of a text: got token id {rows} .* below the model's vocabulary of {rows}"
    refused(said, measure, llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lengths_without_two_tokens_in_a_copy_are_refused(coca, tmp_path):
    refused("--lengths: got 4, expected at least 5", measure, coca, tmp_path, 4)


def test_a_passage_is_read_again_from_each_document_in_turn(coca, books, tmp_path):
    sample = draw_sample(coca, str(books), 20, special_tokens=False)
    cases, copy_len = repeated_sequences(coca, 40, 7, 2, sample)
    texts = [path.read_text() for path in sorted(books.iterdir())]
    starts = set()
    for number, ids in enumerate(cases):
        assert torch.equal(ids[:20], ids[20:])
        passage = coca.tokenizer.decode(ids[:copy_len])
        assert passage in texts[number % 3]
        starts.add(texts[number % 3].index(passage))
    assert len(starts) > 4
    random_tokens, row, again = (
        measure(coca, tmp_path, length=40, num_cases=7, seed=2, sample=text)
        for text in (None, sample, sample)
    )
    assert again == row
    assert row["row_id"] != random_tokens["row_id"]
    assert (row["documents"], row["tokens"]) == (3, 7 * 19)


def test_random_tokens_and_other_documents_have_tables_of_their_own(
    tiny_coca_dir, tmp_path, coca_eval
):
    line = {"text": "the sea is wide and blue " * 9, "code": "for i in range(9): print(i) " * 9}
    (tmp_path / "two.jsonl").write_text(2 * (json.dumps(line) + "\n"))
    options = f"--lengths 32 --cases 2 --out {tmp_path}/out"
    texts = [f"--data {tmp_path}/two.jsonl --column {column}" for column in line]
    for data in ("", *texts, f"{texts[0]} --documents 1", f"{texts[0]} --max-tokens 90"):
        code, _, stderr = coca_eval(f"copying {tiny_coca_dir}", options, data)
        assert code == 0, stderr
    assert coca_eval(f"report {tmp_path}/out --out {tmp_path}/page")[0] == 0
    page = (tmp_path / "page" / "report.md").read_text()
    assert "Copying: random tokens, 2 cases per length, seed 0" in page
    assert "Copied: random tokens, 2 cases per length, seed 0." in page
    assert page.count("Copied: passages of") == 4
    cut = "2 documents cut to 90 tokens"
    for drawn in ("2 documents", "1 document", "column code, 2 documents", cut):
        assert f"two.jsonl, {drawn}, 2 cases per length." in page
    assert "2 states" not in page
