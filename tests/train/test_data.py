"""The stream of blocks against one packed by hand."""

import hashlib
import itertools
import os
import socket
from collections import Counter
from multiprocessing import get_context

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from coca_hf import CocaError, tokens
from coca_hf.documents import read_documents
from coca_hf.train import stream
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


def test_a_document_of_100_mb_is_named_once_and_trained_on_in_pieces(tiny_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stream, "SHUFFLE_TOKENS", 2 * SEQ_LEN)
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 1000)
    plain, encoded = tokens.Encoder.__call__, []

    def encode(self, pieces):
        encoded.append(sum(len(piece.text) for piece in pieces))
        return plain(self, pieces)

    monkeypatch.setattr(tokens.Encoder, "__call__", encode)
    text = "many words " * 9_100_000
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "short one"}}\n{{"text": "{text}"}}\n')
    blocks = PackedBlocks([Source(path=str(tmp_path / "rows.jsonl"), weight=1)], tiny_tokenizer, SEQ_LEN)
    blocks.check()
    passes = [take(blocks, 200) for _ in range(2)]
    assert passes[0] == passes[1]
    assert max(encoded) < 2 * 1000
    assert "many words many" in tiny_tokenizer.decode(passes[0][100])
    named = capsys.readouterr().err
    assert named.startswith(f"{tmp_path / 'rows.jsonl'}:1: got a document of 100,100,000 characters; it is trained on")
    assert named.count("\n") == 1


@pytest.mark.parametrize("method", ["check", "__iter__"])
def test_a_source_without_a_whole_block_is_named(texts, words, tiny_tokenizer, tmp_path, method):
    (tmp_path / "short.txt").write_text("abc")
    blocks = PackedBlocks([words, Source(path=str(tmp_path / "short.txt"), weight=1)], tiny_tokenizer, SEQ_LEN)
    with pytest.raises(CocaError, match=r"short\.txt: got fewer than 20 tokens"):
        list(itertools.islice(getattr(blocks, method)() or (), 100))


def test_a_split_of_local_files_is_refused(digits, tiny_tokenizer):
    source = digits.model_copy(update={"split": "test", "subset": "big"})
    with pytest.raises(CocaError, match=r"digits\.jsonl: got split, subset, which only data sets on the hub have"):
        PackedBlocks([source], tiny_tokenizer, SEQ_LEN).check()


def test_a_tokenizer_without_eos_is_refused(words, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "eos_token_id", None, raising=False)
    with pytest.raises(CocaError, match="no eos token"):
        PackedBlocks([words], tiny_tokenizer, SEQ_LEN)


def deal(blocks: PackedBlocks, count: int, file, port: int, world_size: int, workers: int, rank: int) -> None:
    """A process of a training: takes `count` blocks with the others; the first one writes them all to `file`."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()} if world_size > 1 else {})
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    batch_size = min(250, count // world_size)
    loader = accelerator.prepare(DataLoader(blocks, batch_size=batch_size, num_workers=workers))
    for _, batch in zip(range(count // (batch_size * world_size)), loader, strict=False):
        assert batch["input_ids"].shape == (batch_size, SEQ_LEN)
        dealt = accelerator.gather(batch["input_ids"])
        if rank == 0:
            file.write(dealt.numpy().tobytes())
    file.flush()
    accelerator.wait_for_everyone()
    os._exit(0)


def dealt_to(world_size: int, blocks: PackedBlocks, count: int, file, workers: int) -> None:
    """Let so many processes take `count` blocks, and append them to `file`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = (blocks, count, file, port, world_size, workers)
    processes = [get_context("fork").Process(target=deal, args=(*shared, rank)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * world_size
    file.seek(0, os.SEEK_END)


@pytest.fixture(scope="module")
def first_10k(texts, tiny_tokenizer):
    """What the blocks hash to, read in this process."""
    stream = itertools.islice(mixed(texts, tiny_tokenizer), 10_000)
    return hashlib.sha256(torch.stack([block["input_ids"] for block in stream]).numpy().tobytes()).hexdigest()


def mixed(texts, tokenizer, start_block: int = 0) -> PackedBlocks:
    sources = [
        Source(path=str(texts / "words/*.txt"), weight=3),
        Source(path=str(texts / "digits.jsonl"), weight=1, column="code"),
    ]
    return PackedBlocks(sources, tokenizer, SEQ_LEN, 0, start_block, held_out_blocks=7)


@pytest.mark.real
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 1), (4, 0)])
@pytest.mark.parametrize("restarts", [[], [1000, 3000]], ids=["unbroken", "restarted"])
def test_the_first_10k_blocks_are_the_same_on_any_number_of_processes_and_after_restarts(
    texts, tiny_tokenizer, first_10k, tmp_path, world_size, workers, restarts
):
    with (tmp_path / "dealt").open("w+b") as file:
        for start, end in zip([0, *restarts], [*restarts, 10_000], strict=True):
            dealt_to(world_size, mixed(texts, tiny_tokenizer, start), end - start, file, workers)
        file.seek(0)
        dealt = hashlib.sha256(file.read())
    assert (tmp_path / "dealt").stat().st_size == 10_000 * SEQ_LEN * 8
    assert dealt.hexdigest() == first_10k
