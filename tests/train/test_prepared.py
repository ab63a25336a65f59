"""Blocks on disk are the stream, block for block, whatever happened while they were written."""

import itertools
import os
import signal
import sys
import time
from multiprocessing import get_context

import pytest
import torch
from filelock import FileLock

from coca_cli import main
from coca_hf import CocaError, tokens
from coca_hf.train import prepared, stream
from coca_hf.train.data import PackedBlocks
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.layouts import log_lines

SEQ_LEN = 20


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Several pieces a document, several passes, a buffer smaller than a source, many states."""
    monkeypatch.setattr(stream, "SHUFFLE_TOKENS", 13 * SEQ_LEN)
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 90)
    monkeypatch.setattr(prepared, "STATE_TOKENS", 17 * SEQ_LEN)


@pytest.fixture
def sources(texts) -> list[Source]:
    digits = Source(path=str(texts / "digits.jsonl"), weight=1, column="code")
    return [Source(path=str(texts / "words/*.txt"), weight=3), digits]


@pytest.fixture
def blocks(sources, tiny_tokenizer, tmp_path):
    def make(start_block: int = 0, prepared_dir=tmp_path / "prepared", seed: int = 0) -> PackedBlocks:
        return PackedBlocks(sources, tiny_tokenizer, SEQ_LEN, seed, start_block, 7, prepared_dir)

    return make


def take(blocks: PackedBlocks, count: int) -> list[tuple[int, ...]]:
    return [tuple(block["input_ids"].tolist()) for block in itertools.islice(blocks, count)]


def rows(ready) -> list[tuple[int, ...]]:
    return [tuple(block.tolist()) for block in ready.blocks()]


@pytest.mark.parametrize("start_block", [0, 33, 200, 240])
def test_the_stream_is_the_same_with_and_without_prepared_blocks_and_past_their_end(blocks, start_block):
    plain = take(blocks(start_block, None), 130)
    assert blocks().prepare(200).num_blocks == 200
    assert take(blocks(start_block), 130) == plain


def test_prepared_blocks_are_read_and_nothing_else(blocks, sources, texts, monkeypatch):
    plain = take(blocks(150, None), 50)
    blocks().prepare(200)
    monkeypatch.setattr(stream, "read_documents", forbidden)
    monkeypatch.setattr("coca_hf.held_out.read_documents", forbidden)
    assert take(blocks(150), 50) == plain
    assert len(blocks().held_out()) == 7


def forbidden(*args):
    raise AssertionError("reads a source")


def test_a_preparation_is_prolonged_to_the_same_stream(blocks):
    plain = take(blocks(0, None), 310)
    for count in (3, 100, 100, 310):
        ready = blocks().prepare(count)
    assert rows(ready) == plain
    assert blocks().prepare(50).num_blocks == 310  # never shortened


def test_what_a_killed_preparation_left_behind_its_last_state_does_not_count(blocks):
    plain = take(blocks(0, None), 260)
    directory = blocks().prepare(100).directory
    with (directory / "blocks.bin").open("ab") as file:
        file.write(b"half a block")
    (directory / "state.pt.partial").write_bytes(b"half a state")
    assert take(blocks(), 120) == plain[:120]
    assert rows(blocks().prepare(260)) == plain


def test_a_preparation_killed_again_and_again_goes_on_to_the_same_stream(blocks):
    state = blocks().prepare(1).directory / "state.pt"
    for _ in range(3):
        reached, written = blocks().prepared().num_blocks, state.stat().st_mtime_ns
        process = get_context("fork").Process(target=blocks().prepare, args=(10**9,))
        process.start()
        while process.is_alive() and state.stat().st_mtime_ns == written:
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was killed, it did not end"
        assert blocks().prepared().num_blocks > reached
    count = blocks().prepared().num_blocks + 40
    assert take(blocks(), count) == take(blocks(0, None), count)


def test_another_seed_length_weight_or_text_has_another_place(blocks, sources, tiny_tokenizer, texts, tmp_path):
    blocks().prepare(5)
    others = {
        "seed": (sources, SEQ_LEN, 1, 7),
        "length": (sources, SEQ_LEN + 1, 0, 7),
        "held out": (sources, SEQ_LEN, 0, 8),
        "weight": ([sources[0], sources[1].model_copy(update={"weight": 2.0})], SEQ_LEN, 0, 7),
        "order": (sources[::-1], SEQ_LEN, 0, 7),
    }
    for name, (changed, seq_len, seed, held_out) in others.items():
        other = PackedBlocks(changed, tiny_tokenizer, seq_len, seed, 0, held_out, tmp_path / "prepared")
        assert other.prepared() is None, name
    assert blocks().prepared().num_blocks == 5
    os.utime(texts / "words/0.txt", (1, 1))
    assert blocks().prepared() is None


def test_the_place_does_not_depend_on_where_the_tokenizer_lies(blocks, sources, tiny_tokenizer, tmp_path):
    from transformers import AutoTokenizer

    blocks().prepare(5)
    tiny_tokenizer(["a", "bcd"], padding=True)  # leaves its setting behind
    tiny_tokenizer.save_pretrained(tmp_path / "copy")
    copy = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert PackedBlocks(sources, copy, SEQ_LEN, 0, 0, 7, tmp_path / "prepared").prepared().num_blocks == 5


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, 1000)


def flip_block_50(path):
    flip(path, 50 * SEQ_LEN * 2 + 3)  # two bytes a token


DAMAGE = {
    "cut": ("blocks.bin", cut, r"blocks\.bin: got 1,000 bytes, expected the 4,000 that were prepared"),
    "gone": ("blocks.bin", os.unlink, r"blocks\.bin: got 0 bytes, expected the 4,000"),
    "a bit": ("blocks.bin", flip_block_50, r"blocks\.bin: got another xxh3_128 of blocks 34 to 50 than when"),
    "state": ("state.pt", lambda path: path.write_bytes(b"nonsense"), r"state\.pt: cannot be read"),
    "a bit of the state": ("state.pt", lambda path: flip(path, path.stat().st_size // 2), r"state\.pt: cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named_by_who_reads_it_and_made_again_by_who_prepares(blocks, damage):
    plain = take(blocks(0, None), 120)
    directory = blocks().prepare(100).directory
    name, do, message = DAMAGE[damage]
    do(directory / name)
    with pytest.raises(CocaError, match=message + ".*; `coca-train RECIPE --prepare` makes them again"):
        take(blocks(), 100)
    assert rows(blocks().prepare(120)) == plain
    assert take(blocks(), 120) == plain


def test_blocks_before_the_start_are_not_read(blocks):
    plain = take(blocks(60, None), 40)
    flip_block_50(blocks().prepare(100).directory / "blocks.bin")
    assert take(blocks(60), 40) == plain


def test_of_two_preparations_one_is_refused(blocks):
    directory = blocks().prepare(5).directory
    with FileLock(directory / "lock"), pytest.raises(CocaError, match="another process is preparing"):
        blocks().prepare(50)


def test_a_full_disk_says_what_is_needed_and_loses_nothing(blocks, tmp_path):
    from tests.train.test_resume import no_file_above

    plain = take(blocks(0, None), 400)
    blocks().prepare(100)
    message = r"cannot be written: .*400 blocks take 0\.0 GB; make room"
    with no_file_above(12_000), pytest.raises(CocaError, match=message):
        blocks().prepare(400)
    assert blocks().prepared().num_blocks >= 100
    assert rows(blocks().prepare(400)) == plain


def test_the_command_prepares_what_all_stages_take_and_a_run_from_it_is_the_same(
    recipe_path, unbroken, tmp_path, monkeypatch, capsys
):
    monkeypatch.undo()  # `unbroken` has the sizes of the product
    setting = f"data.prepared={tmp_path / 'blocks'}"
    monkeypatch.setattr(sys, "argv", ["coca-train", str(recipe_path), setting, "--prepare", "--world-size", "2"])
    with pytest.raises(SystemExit) as stopped:
        main.train()
    assert stopped.value.code == 0
    assert "prepared: 96 blocks, 1,920 tokens in" in capsys.readouterr().out  # 2 processes x 4 x (3 + 5 + 4) steps
    run_recipe(load_recipe(recipe_path, [setting]), tmp_path / "out")
    assert "data: 96 of 48 blocks lie prepared in" in capsys.readouterr().out
    for stage in ("1-k", "2-qkv", "3-full"):
        runs = (tmp_path / "out", unbroken)
        ours, theirs = ([line["loss"] for line in log_lines(run / stage)] for run in runs)
        assert ours == theirs


def test_the_held_out_blocks_are_kept_with_the_stream(blocks, sources, tiny_tokenizer, tmp_path):
    fresh = PackedBlocks(sources, tiny_tokenizer, SEQ_LEN, held_out_blocks=7).held_out()
    blocks().prepare(5)
    kept = PackedBlocks(
        sources, tiny_tokenizer, SEQ_LEN, held_out_blocks=7, prepared_dir=tmp_path / "prepared"
    ).held_out()
    assert torch.equal(torch.stack(kept), torch.stack(fresh))
