"""Prepared blocks are the same, block for block, whatever interrupts their preparation."""

import errno
import os
import re
import shutil
import signal
import threading
import time
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from filelock import FileLock
from transformers import AutoTokenizer

from coca_hf import CocaError, held_out, tokens
from coca_hf.train import data, run_directory
from coca_hf.train.processes import EXIT_STOPPED, Stopped
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import prepare_recipe, run_recipe
from tests.conftest import flip, refused
from tests.train.corpora import make_corpus, tokens_of
from tests.train.results import logged, no_file_above

SEQ_LEN = 20


def set_small_sizes(patch):
    """Several pieces a document, several passes, a buffer smaller than a source, many states."""
    patch.setattr(data, "SHUFFLE_TOKENS", 13 * SEQ_LEN)
    patch.setattr(tokens, "PIECE_CHARACTERS", 90)
    patch.setattr(data, "STATE_TOKENS", 17 * SEQ_LEN)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    set_small_sizes(monkeypatch)


@pytest.fixture
def sources(words, digits) -> list[Source]:
    return [words, digits]


@pytest.fixture
def corpus(sources, tiny_tokenizer, tmp_path):
    def make(directory=tmp_path / "prepared", **options):
        return make_corpus(sources, tiny_tokenizer, SEQ_LEN, directory, 7, **options)

    return make


@pytest.fixture(scope="module")
def plain(words, digits, tiny_tokenizer, tmp_path_factory):
    """400 blocks, prepared in one go."""
    directory = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        set_small_sizes(patch)
        whole = make_corpus([words, digits], tiny_tokenizer, SEQ_LEN, directory, 7)
        return tokens_of(whole.prepare(400))


def test_prepared_blocks_are_read_without_their_sources(corpus, plain, monkeypatch):
    corpus().prepare(200)
    monkeypatch.setattr(data, "read_documents", None)
    assert tokens_of(corpus().blocks()) == plain[:200]
    assert len(corpus().blocks().held_out) == 7


def test_a_preparation_is_extended_to_the_same_blocks_and_holds_out_the_same(
    corpus, plain, tmp_path
):
    held_out = corpus(tmp_path / "at-once").prepare(310).held_out
    for count in (3, 100, 100, 310):
        blocks = corpus().prepare(count)
        assert len(blocks) == count
        assert torch.equal(blocks.held_out, held_out)
    assert tokens_of(blocks) == plain[:310]
    assert len(corpus().prepare(50)) == 310  # never shortened


def test_what_a_killed_preparation_wrote_after_its_last_state_does_not_count(corpus, plain):
    directory = corpus().prepare(100).directory
    for file in directory.glob("*.bin"):
        with file.open("ab") as stream:
            stream.write(b"half a block")
    (directory / ".state.json.1.partial").write_bytes(b"half a state")
    assert tokens_of(corpus().blocks()) == plain[:100]
    assert tokens_of(corpus().prepare(260)) == plain[:260]


def test_a_preparation_killed_again_and_again_continues_to_the_same_blocks(corpus, tmp_path):
    state = corpus().prepare(1).directory / "state.json"
    for _ in range(3):
        reached, written = len(corpus().blocks()), state.stat().st_mtime_ns
        process = get_context("fork").Process(target=corpus().prepare, args=(10**9,))
        process.start()
        while process.is_alive() and (
            state.stat().st_mtime_ns == written or len(corpus().blocks()) == reached
        ):
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was killed, it did not end"
    count = len(corpus().blocks()) + 40
    whole = corpus(tmp_path / "plain").prepare(count)
    assert tokens_of(corpus().prepare(count)) == tokens_of(whole)


def test_a_preparation_that_is_stopped_keeps_every_block(corpus, plain, monkeypatch):
    done = [0]

    def watched(order, *_, **__):
        for number, row in order:
            yield number, row
            done.append(number + 1)

    monkeypatch.setattr(data, "tqdm", watched)
    for _ in range(3):
        calls = []

        def stop(calls=calls):
            calls.append(None)
            if len(calls) > 60:
                raise Stopped("SIGTERM")

        with pytest.raises(Stopped):
            corpus(check_stop=stop).prepare(400)
        assert len(corpus().blocks()) == max(done)
    assert tokens_of(corpus().prepare(400)) == plain


def test_a_small_source_is_on_disk_once_for_any_number_of_passes(corpus):
    few, many = (corpus().prepare(count).directory / "source-0.bin" for count in (100, 500))
    assert few.stat().st_size == many.stat().st_size < 100 * SEQ_LEN * 2


def test_blocks_say_how_far_their_sources_are_read(corpus, words, digits):
    # 18 of the first blocks and of the buffer, of documents of 299 characters and more
    part = "blocks of documents 1 to 2 (1.txt); what follows is not read"
    assert corpus().prepare(5).read_of_sources()[0] == f"data: {words.path}: {part}"
    blocks = corpus().prepare(400)
    order = np.fromfile(blocks.directory / "order.bin", "uint32").reshape(-1, 2)
    for source, line in enumerate(blocks.read_of_sources()):
        rows = order[order[:, 0] == source, 1]
        times = -(-len(rows) // len(set(rows)))
        path = (words, digits)[source].path
        assert line == f"data: {path}: blocks of all documents, read up to {times} times"


def test_a_file_whose_name_is_not_utf8_is_named_in_words_that_any_terminal_prints(
    corpus, sources, texts, tmp_path
):
    for file in (texts / "words").iterdir():
        os.link(file, f"{tmp_path}/\udce9\n{file.name}")  # a byte of another encoding
    sources[0] = Source(path=f"{tmp_path}/*.txt", weight=3)
    [line, _] = corpus().prepare(5).read_of_sources()
    assert r"blocks of documents 1 to 2 (\udce9\n1.txt); what" in line.encode().decode()


def test_another_seed_length_weight_or_text_has_another_directory(
    corpus, sources, tiny_tokenizer, texts, tmp_path
):
    prepared = corpus().prepare(5).directory
    light = [sources[0], sources[1].model_copy(update={"weight": 2.0})]
    for changed, seq_len, num_held_out, seed in (
        (sources, SEQ_LEN, 7, 1),
        (sources, SEQ_LEN + 1, 7, 0),
        (sources, SEQ_LEN, 8, 0),
        (light, SEQ_LEN, 7, 0),
        (sources[::-1], SEQ_LEN, 7, 0),
    ):
        options = tmp_path / "prepared", num_held_out
        assert not make_corpus(changed, tiny_tokenizer, seq_len, *options, seed=seed).has(1)
    assert len(corpus().blocks()) == 5
    file = texts / "words/0.txt"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    text = file.read_text()
    try:
        file.write_text(text.swapcase())
        os.utime(file, ns=times)
        assert corpus().directory != prepared
    finally:
        file.write_text(text)


def test_files_that_are_copied_or_touched_have_the_same_blocks(corpus, sources, texts, tmp_path):
    prepared = corpus().prepare(5).directory
    os.utime(texts / "words/0.txt", (1, 1))
    shutil.copytree(texts / "words", tmp_path / "copy")
    sources[0] = sources[0].model_copy(update={"path": str(tmp_path / "copy/*.txt")})
    assert corpus().directory == prepared
    assert corpus().has(5)


def test_a_file_is_hashed_once_and_again_after_a_change(corpus, texts, monkeypatch):
    monkeypatch.setattr(data, "FRESH_SECONDS", 0)
    read, plain = [], data.file_hash

    def file_hash(file, check_stop):
        digest = plain(file, check_stop)
        read.append(file.name)
        return digest

    def stop():
        if len(read) == 3:
            raise Stopped("SIGTERM")

    monkeypatch.setattr(data, "file_hash", file_hash)
    with pytest.raises(Stopped):
        corpus(check_stop=stop).prepare(5)
    assert len(read) == 3
    for _ in range(2):
        prepared = corpus().prepare(5).directory
        assert corpus().directory == prepared
    assert sorted(read) == [*(f"{number}.txt" for number in range(5)), "digits.jsonl"]
    os.utime(texts / "words/0.txt", (1, 1))
    assert corpus().directory == prepared
    assert read[6:] == ["0.txt"]
    (prepared.parent / "coca-files.json").write_text("[1")
    assert corpus().directory == prepared


@pytest.mark.parametrize(("directory", "name"), [(".", "digits.jsonl"), ("words", "5.txt")])
def test_a_file_that_changes_or_appears_while_its_blocks_are_prepared_leaves_none(
    corpus, texts, plain, directory, name
):
    before = (texts / "digits.jsonl").read_text()
    (texts / "digits.jsonl").write_text(before)

    def change():
        if "files" in vars(changing):  # after they were hashed
            (texts / directory / name).write_text(before.replace("1", "2"))

    changing = corpus(check_stop=change)
    refused(rf"{name}: changed while its blocks were prepared", changing.prepare, 60)
    (texts / "words/5.txt").unlink(missing_ok=True)
    (texts / "digits.jsonl").write_text(before)
    assert not corpus().has(1)
    assert tokens_of(corpus().prepare(60)) == plain[:60]


@pytest.mark.parametrize("prepared", [".", "prepared"])
def test_blocks_are_refused_inside_a_source_and_nothing_is_made_there(
    corpus, sources, texts, tmp_path, prepared, monkeypatch
):
    monkeypatch.setattr(data, "FRESH_SECONDS", 0)
    shutil.copytree(texts / "words", tmp_path / "words")
    sources[0] = Source(path=str(tmp_path / "words"), weight=3)
    files = [*(tmp_path / "words").rglob("*")]
    inside = corpus(tmp_path / "words" / prepared)
    for work in (inside.pin_, inside.check_sources, lambda: inside.prepare(5)):
        refused(r"data\.prepared: got .*words.* inside the source ", work)
    assert [*(tmp_path / "words").rglob("*")] == files


@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_text_that_was_another_for_a_while_leaves_none_of_it_in_the_blocks(
    corpus, texts, plain, monkeypatch, ends
):
    file, begun = texts / "digits.jsonl", []
    before = file.read_text()

    def stop():
        if begun and ends == "stopped":
            begun.append(1)
            if len(begun) > 400:
                raise Stopped("SIGTERM")

    def replace_text(path, text):
        plain_replace(path, text)
        if ends == "killed" and begun and path.name == "state.json":
            raise KeyboardInterrupt  # which, like a kill, saves nothing

    plain_replace = data.replace_text
    monkeypatch.setattr(data, "replace_text", replace_text)
    stopping = corpus(check_stop=stop)
    assert stopping.files
    try:
        file.write_text(before[: before.index("\n") + 1])
        begun.append(1)
        with pytest.raises((CocaError, Stopped, KeyboardInterrupt)):
            stopping.prepare(10_000)
    finally:
        file.write_text(before)
    begun.clear()
    assert tokens_of(corpus().prepare(60))[:60] == plain[:60]


def test_the_directory_of_blocks_does_not_depend_on_that_of_the_tokenizer(
    corpus, sources, tiny_tokenizer, tmp_path
):
    corpus().prepare(5)
    tiny_tokenizer(["a", "bcd"], padding=True)  # leaves its setting behind
    tiny_tokenizer.save_pretrained(tmp_path / "copy")
    copy = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert len(make_corpus(sources, copy, SEQ_LEN, tmp_path / "prepared", 7).blocks()) == 5


DAMAGE = [
    ("source-0.bin: got 100 bytes, expected the ", lambda path: os.truncate(path, 100)),
    ("order.bin: got 0 bytes, expected the 800 that were prepared", os.unlink),
    (r"source-0.bin: got another xxh3_128 of rows 0 to \d+ than", lambda path: flip(path, 5)),
    ("order.bin: got another xxh3_128 of rows 34 ", lambda path: flip(path, 400)),
    ("held-out.bin: got another xxh3_128 of rows 0 to 6 ", lambda path: flip(path, 9)),
    ("state.json: cannot be read", lambda path: path.write_bytes(b"nonsense")),
    ("state.json: cannot be read", lambda path: flip(path, path.stat().st_size // 2)),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGE)
def test_a_damaged_file_is_named_when_it_is_read_and_made_again_by_a_preparation(
    corpus, plain, capsys, message, damage
):
    file = message.split(":")[0]
    damage(corpus().prepare(100).directory / file)
    message = rf"{message}.*; `coca-train RECIPE --prepare` makes them again"
    with pytest.raises(CocaError, match=message):
        tokens_of(corpus().blocks()), corpus().blocks().held_out
    assert tokens_of(corpus().prepare(120)) == plain[:120]
    assert f"{file}: " in capsys.readouterr().out
    assert len(corpus().blocks().held_out) == 7


def test_a_reader_keeps_its_blocks_while_damaged_ones_are_made_again(corpus, plain):
    reader = corpus().prepare(100)
    assert tokens_of(reader, 0, 100) == plain[:100]
    flip(reader.directory / "held-out.bin", 9)
    corpus().prepare(100)
    assert tokens_of(reader, 0, 100) == plain[:100]


def test_blocks_before_the_start_are_not_read(corpus, plain):
    flip(corpus().prepare(100).directory / "order.bin", 0)
    assert tokens_of(corpus().blocks(), 60) == plain[60:100]


def test_a_second_preparation_says_that_it_waits_and_has_the_same_blocks(corpus, plain, capsys):
    second = threading.Thread(target=lambda: corpus().prepare(50))
    with FileLock(corpus().prepare(5).directory / "lock"):
        second.start()
        second.join(1)
        assert second.is_alive()
        printed = capsys.readouterr().out
        assert "another process is preparing these blocks; waiting for it" in printed
    second.join(60)
    assert tokens_of(corpus().blocks()) == plain[:50]


def test_a_process_that_waits_for_another_preparation_can_be_stopped(corpus):
    signals = []

    def stop():
        if signals:
            raise Stopped("SIGUSR1")

    waiting = corpus(check_stop=stop)
    directory = waiting.prepare(5).directory
    signals.append("SIGUSR1")
    with FileLock(directory / "lock"), pytest.raises(Stopped):
        waiting.prepare(50)


def test_a_full_disk_says_what_is_needed_and_loses_nothing(corpus, plain):
    corpus().prepare(100)
    message = r"cannot be written: .*400 blocks take up to 0\.02 MB; make room"
    with no_file_above(3_000), pytest.raises(CocaError, match=message):
        corpus().prepare(400)
    assert len(corpus().blocks()) >= 100
    assert tokens_of(corpus().prepare(400)) == plain


def test_a_read_only_directory_is_refused_before_out_unless_it_has_the_blocks(
    train, recipe_path, tmp_path, monkeypatch
):
    shared, real = tmp_path / "shared", os.access
    shared.mkdir()
    read_only = [shared]  # root may write anywhere
    monkeypatch.setattr(
        os, "access", lambda path, *mode: path not in read_only and real(path, *mode)
    )
    setting = f"data.prepared={shared}"
    refused("shared: cannot be written; choose another data", train, setting)
    (tmp_path / "file").write_text("")
    with pytest.raises(CocaError, match="file: cannot be written; choose another data"):
        train(f"data.prepared={tmp_path}/file/blocks")
    assert not (tmp_path / "out").exists()
    read_only.append(prepare_recipe(load_recipe(recipe_path, [setting]), 1)[0].directory)
    train(setting)


def test_complete_blocks_on_a_read_only_disk_are_checked_and_damaged_ones_refused(
    corpus, plain, monkeypatch
):
    def locked(file, *_):
        raise OSError(errno.EROFS, "Read-only file system", str(file))

    directory = corpus().prepare(100).directory
    monkeypatch.setattr(data, "locked", locked)
    assert tokens_of(corpus().prepare(100)) == plain[:100]
    flip(directory / "source-0.bin", 5)
    for damaged_or_too_few in (100, 400):
        refused(r"cannot be written: .*Read-only file system", corpus().prepare, damaged_or_too_few)


def test_a_source_that_holding_out_leaves_too_short_is_refused_before_out(train, tmp_path):
    (tmp_path / "short.txt").write_text("abc " * 15)  # 61 tokens; a tenth is held out
    settings = [f"data.sources=[{{path: {tmp_path}/short.txt, weight: 1}}]", "stages.k.max_steps=1"]
    settings.append("data.held_out_blocks=7")
    with pytest.raises(CocaError, match=r"short\.txt: got fewer than 60 tokens to train on"):
        train(*settings, "data.seq_len=60")
    assert not (tmp_path / "out").exists()
    train(*settings, "data.seq_len=50")


def test_blocks_below_a_file_are_one_line_without_a_word_on_room(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CocaError, match=r"cannot be written: .*; choose another data\.") as caught:
        corpus(tmp_path / "file").prepare(5)
    assert "room" not in str(caught.value)


def test_the_command_prepares_what_all_stages_take_and_a_run_from_it_is_the_same(
    recipe_path, unbroken, tmp_path, monkeypatch, coca_train, capsys
):
    monkeypatch.undo()  # `unbroken` was made with the product's sizes
    setting = f"data.prepared={tmp_path / 'blocks'}"
    assert coca_train(recipe_path, setting, "--prepare", "--world-size", "2") == 0
    # 2 processes x 4 x (3 + 5 + 4) steps
    assert "prepared: 96 blocks, 1,920 tokens in" in capsys.readouterr().out
    run_recipe(load_recipe(recipe_path, [setting]), tmp_path / "out")
    assert "data: 96 blocks, 0.01 MB, in" in capsys.readouterr().out
    for stage in ("1-k", "2-qkv", "3-full"):
        assert logged(tmp_path / "out" / stage) == logged(unbroken / stage)


@pytest.mark.parametrize(
    ("kind", "name", "calls_until_it_ends"),
    [(data, "file_hash", 1), (held_out, "_rule_of_small", 1), (data.GrowingRows, "append", 2)],
    ids=["hashing the first of 6 files", "choosing what is held out", "writing blocks"],
)
def test_the_command_is_stopped_by_a_signal_and_continues(
    kind, name, calls_until_it_ends, recipe_path, tmp_path, monkeypatch, coca_train, capsys
):
    plain, calls = getattr(kind, name), []

    def signal_and_go_on(*arguments):
        calls.append(arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    settings = [f"data.prepared={tmp_path / 'blocks'}", "data.held_out_blocks=7"]
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, signal_and_go_on)
        assert coca_train(recipe_path, *settings, "--prepare") == EXIT_STOPPED
    printed = " ".join(capsys.readouterr().err.split())
    assert "stopped by SIGTERM; the same command continues" in printed
    assert len(calls) == calls_until_it_ends
    assert coca_train(recipe_path, *settings, "--prepare") == 0
    assert "prepared: 48 blocks" in capsys.readouterr().out


def test_a_run_prepares_the_blocks_up_to_its_last_stage_says_where_and_continues_on_others(
    recipe_path, unbroken, tmp_path, monkeypatch, capsys
):
    monkeypatch.undo()
    # 4 blocks a step
    for place, stage, count in (("one", "k", 12), ("one", "qkv", 32), ("other", None, 48)):
        recipe = load_recipe(recipe_path, [f"data.prepared={tmp_path / place}"])
        run_recipe(recipe, tmp_path / "out", stage, resume=True)
        printed = capsys.readouterr().out
        (made,) = (path.parent for path in (tmp_path / place).glob("*/state.json"))
        assert f"data: preparing {count} blocks in {made}\n" in printed
        assert re.search(rf"data: {count} blocks, 0\.0\d MB, in {made}\n", printed)
        assert printed.count(": blocks of all documents\n") == 2
    run_recipe(
        load_recipe(recipe_path, [f"data.prepared={tmp_path / 'other'}"]), tmp_path / "k", "k"
    )
    printed = capsys.readouterr().out
    assert re.search(rf"data: 48 blocks, .*, in {made}; this run takes the first 12\n", printed)
    assert logged(tmp_path / "out/3-full") == logged(unbroken / "3-full")


@pytest.mark.parametrize(
    ("hashed", "message"),
    [
        ("tiny-coca", "out: stopped by SIGTERM before the first stage; continue with --resume"),
        ("1-k", "out/2-qkv: stopped by SIGTERM before it began; .* continue with --resume"),
    ],
)
def test_a_signal_while_weights_are_hashed_stops_the_run_then(hashed, message, train, monkeypatch):
    plain, read = run_directory.file_hash, []

    def signal_and_hash(file, *check_stop):
        read.append(file.name)
        if file.parent.name == hashed:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(file, *check_stop)

    monkeypatch.setattr(run_directory, "file_hash", signal_and_hash)
    with pytest.raises(Stopped, match=message):
        train(stage=None)
    assert read[-1] == "model.safetensors"
