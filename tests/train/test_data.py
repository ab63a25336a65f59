"""The stream of blocks against one packed by hand."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from coca_hf import CocaError
from coca_hf.documents import read_documents
from coca_hf.train import stream, tokens
from coca_hf.train.data import PackedBlocks
from coca_hf.train.recipe import Source

SEQ_LEN = 20


@pytest.fixture
def words(texts) -> Source:
    return Source(path=str(texts / "words/*.txt"), weight=3)


@pytest.fixture
def digits(texts) -> Source:
    return Source(path=str(texts / "digits.jsonl"), weight=1, column="code")


def take(blocks: PackedBlocks, count: int) -> list[tuple[int, ...]]:
    return [tuple(block["input_ids"].tolist()) for block in itertools.islice(blocks, count)]


def packed_by_hand(source: Source, tokenizer) -> list[tuple[int, ...]]:
    stream = []
    for document in read_documents(source.path, source.column):
        stream += [tokenizer.convert_tokens_to_ids(letter) for letter in document.text.replace(" ", "Ġ")]
        stream.append(tokenizer.eos_token_id)
    return [tuple(stream[start : start + SEQ_LEN]) for start in range(0, len(stream) - SEQ_LEN + 1, SEQ_LEN)]


def test_a_pass_is_every_packed_block_once_and_the_next_pass_is_the_same_in_another_order(words, tiny_tokenizer):
    expected = packed_by_hand(words, tiny_tokenizer)
    drawn = take(PackedBlocks([words], tiny_tokenizer, SEQ_LEN), 2 * len(expected))
    first, second = drawn[: len(expected)], drawn[len(expected) :]
    assert Counter(first) == Counter(second) == Counter(expected)
    assert first != expected
    assert first != second
    assert (
        sum(block.count(tiny_tokenizer.eos_token_id) for block in first) == 4
    )  # five documents; the last tail fills no block


def test_a_buffer_smaller_than_the_source_still_draws_every_block_once(words, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(stream, "SHUFFLE_TOKENS", 6 * SEQ_LEN)
    expected = packed_by_hand(words, tiny_tokenizer)
    first = take(PackedBlocks([words], tiny_tokenizer, SEQ_LEN), len(expected))
    assert Counter(first) == Counter(expected)
    assert first[0] in expected[:6]
    assert first != expected


def test_labels_are_the_tokens_in_memory_of_their_own(words, tiny_tokenizer):
    block = next(iter(PackedBlocks([words], tiny_tokenizer, SEQ_LEN)))
    assert torch.equal(block["input_ids"], block["labels"])
    assert block["input_ids"].dtype == block["labels"].dtype == torch.int64
    assert block["input_ids"].untyped_storage().data_ptr() != block["labels"].untyped_storage().data_ptr()
    assert block["input_ids"].untyped_storage().nbytes() == SEQ_LEN * 8


def test_weights_are_shares_of_tokens(words, digits, tiny_tokenizer):
    blocks = take(PackedBlocks([words, digits], tiny_tokenizer, SEQ_LEN), 1000)
    of_digits = sum("0" <= tiny_tokenizer.decode(block[1:2]) <= "9" for block in blocks)
    assert of_digits == pytest.approx(250, abs=45)  # 3.3 standard deviations


def test_the_stream_is_fixed_by_its_seed(words, digits, tiny_tokenizer):
    once, again, other = (PackedBlocks([words, digits], tiny_tokenizer, SEQ_LEN, seed) for seed in (5, 5, 6))
    assert take(once, 90) == take(again, 90) == take(once, 90)
    assert take(once, 90) != take(other, 90)


def test_a_later_start_is_the_same_stream_further_on(words, digits, tiny_tokenizer):
    whole = take(PackedBlocks([words, digits], tiny_tokenizer, SEQ_LEN), 130)
    part = take(PackedBlocks([words, digits], tiny_tokenizer, SEQ_LEN, start_block=47), 83)
    assert part == whole[47:]


def test_a_worker_process_reads_the_same_stream(words, tiny_tokenizer):
    blocks = PackedBlocks([words], tiny_tokenizer, SEQ_LEN)
    loader = DataLoader(blocks, batch_size=3, num_workers=1)
    loaded = torch.cat([batch["input_ids"] for batch in itertools.islice(loader, 4)])
    assert [tuple(row) for row in loaded.tolist()] == take(blocks, 12)


class AddsItsOwn:
    """A tokenizer of letters that begins a text with 1 and ends it with its eos token, 2."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens=True, **kwargs):
        if isinstance(text, list):
            return {"input_ids": [self(item, add_special_tokens)["input_ids"] for item in text]}
        letters = [ord(letter) for letter in text]
        return {"input_ids": [1, *letters, 2] if add_special_tokens else letters}


def test_special_tokens_stand_once_around_a_document_however_many_pieces_it_has(monkeypatch):
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 8)
    text = "ab cdefghijklmn op q"
    assert tokens.Encoder(AddsItsOwn()).document(text).tolist() == [1, *map(ord, text), 2]


@pytest.mark.parametrize("method", ["check", "__iter__"])
def test_a_source_without_a_whole_block_is_named(texts, words, tiny_tokenizer, tmp_path, method):
    (tmp_path / "short.txt").write_text("abc")
    blocks = PackedBlocks([words, Source(path=str(tmp_path / "short.txt"), weight=1)], tiny_tokenizer, SEQ_LEN)
    with pytest.raises(CocaError, match=r"short\.txt: got fewer than 20 tokens"):
        list(itertools.islice(getattr(blocks, method)() or (), 100))


def test_a_tokenizer_without_eos_is_refused(words, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "eos_token_id", None, raising=False)
    with pytest.raises(CocaError, match="no eos token"):
        PackedBlocks([words], tiny_tokenizer, SEQ_LEN)


DEAL = """
import json, sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from coca_hf.train.data import PackedBlocks
from coca_hf.train.recipe import Source

model, words, digits = sys.argv[1:]
sources = [Source(path=words, weight=3), Source(path=digits, weight=1, column="code")]
accelerator = Accelerator(cpu=True)
blocks = PackedBlocks(sources, AutoTokenizer.from_pretrained(model), 20, start_block=9)
dealt = []
for _, batch in zip(range(5), accelerator.prepare(DataLoader(blocks, batch_size=3))):
    assert batch["input_ids"].shape == (3, 20)
    dealt.append(accelerator.gather(batch["input_ids"]).tolist())
if accelerator.is_main_process:
    print(json.dumps(dealt))
accelerator.end_training()
"""


@pytest.mark.real
def test_two_processes_deal_out_the_same_global_batches(words, digits, tiny_coca_dir, tiny_tokenizer, tmp_path):
    (tmp_path / "deal.py").write_text(DEAL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    command = [*launcher, str(tmp_path / "deal.py"), str(tiny_coca_dir), words.path, digits.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    dealt = [[tuple(row) for row in batch] for batch in json.loads(result.stdout)]
    stream = take(PackedBlocks([words, digits], tiny_tokenizer, SEQ_LEN, start_block=9), 30)
    assert dealt == [stream[start : start + 6] for start in range(0, 30, 6)]
