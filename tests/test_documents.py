"""What is read as documents, and what is said, with file and row, of what is none."""

import functools
import gzip
import json
import os
import re

import pyarrow
import pytest
from pyarrow import parquet

from coca_hf.documents import Document, read_documents
from tests.conftest import refused

ROWS = ["first", "second\nline", "drittes, ß"]


def lines(rows: list) -> bytes:
    return "".join(json.dumps({"text": row, "id": 7}) + "\n" for row in rows).encode()


def table(rows: list) -> pyarrow.Table:
    return pyarrow.table({"id": list(range(len(rows))), "text": rows})


def write(path, rows: list) -> None:
    """`rows` in the format that the name of `path` asks for."""
    if ".jsonl" in path.name or ".txt" in path.name:
        pack = {".gz": gzip.compress, ".zst": functools.partial(pyarrow.compress, codec="zstd")}
        path.write_bytes(pack.get(path.suffix, bytes)(lines(rows)))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps([{"text": row} for row in rows]))
    elif path.name.endswith(".parquet"):
        parquet.write_table(table(rows), path)
    else:
        new = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
        with new(str(path), table(rows).schema) as writer:
            writer.write_table(table(rows))


def read(path, **options) -> list[Document]:
    return list(read_documents(str(path), **options))


def texts_of(path, **options) -> list[str]:
    return [document.text for document in read(path, **options)]


FILES = [
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a[1].json",
    "a.parquet",
    "stream[1].arrow",
    "file.arrow",
]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_documents_in_every_format(tmp_path, name):
    write(tmp_path / name, ROWS)
    place = tmp_path / name
    expected = [Document(f"{name}:{n}", text, f"{place}:{n}") for n, text in enumerate(ROWS)]
    assert read(tmp_path / name) == expected


def test_a_text_file_is_a_document_also_compressed_and_a_directory_is_all_its_files(tmp_path):
    (tmp_path / "b.txt").write_text("zwei ß")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    (tmp_path / "C.TXT.GZ").write_bytes(gzip.compress(b"three"))
    (tmp_path / "notes.md").write_text("not read")
    texts = {"C.TXT.GZ": "three", "a.txt.gz": "one", "b.txt": "zwei ß"}
    expected = [Document(name, text, str(tmp_path / name)) for name, text in texts.items()]
    assert read(tmp_path) == expected


BAD_ROWS = {
    "null": ([*ROWS, None], "{name}:3: got an empty document"),
    "blank": ([*ROWS, " \n"], "{name}:3: got an empty document, expected text; remove it"),
    "binary": ([*ROWS, "MZ\0\1" * 9], "{name}:3: got 9 zero bytes, expected text, not binary data"),
    "numbers": ([1, 2], "{name}:0: got int in column 'text', expected text"),
    "conversations": (
        [[{"role": "user", "content": "hi"}]],
        "{name}:0: got list in column 'text', expected text; render conversations first, with "
        "tokenizer.apply_chat_template(…, tokenize=False)",
    ),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "stream.arrow"])
@pytest.mark.parametrize(("rows", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_without_text_is_named(tmp_path, name, rows, message):
    write(tmp_path / name, rows)
    refused("^" + re.escape(message.format(name=tmp_path / name)), read, tmp_path / name)


def test_a_row_is_named_with_the_path_as_it_was_given(tmp_path, monkeypatch):
    """Of files of one name in several directories, the one to mend can be told."""
    monkeypatch.chdir(tmp_path)
    for directory, rows in (("a", ["good"]), ("b", ["good", " "])):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory / "part.jsonl", rows)
    refused(r"^b/part\.jsonl:1: got an empty document", read, "*/part.jsonl")


def test_equal_file_names_become_paths_and_others_stay(tmp_path):
    for place in ("a/one.txt", "b/c/one.txt", "b/two.txt"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(place)
    write(tmp_path / "b" / "three.jsonl", ["x"])

    def names(pattern):
        return [document.name for document in read(tmp_path / pattern)]

    assert names("**/*.*") == ["a/one.txt", "b/c/one.txt", "b/three.jsonl:0", "b/two.txt"]
    assert names("b/**/*.*") == ["one.txt", "three.jsonl:0", "two.txt"]
    assert names("b/**/**/*.*") == ["one.txt", "three.jsonl:0", "two.txt"]


def test_a_row_of_parquet_that_is_not_utf_8_is_named(tmp_path):
    bad = pyarrow.array([b"one", b"two", b"\xff\xfe"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    message = r"a\.parquet: row 2: cannot be read as \.parquet \(UnicodeDecodeError: "
    refused(message, read, tmp_path / "a.parquet")


def test_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "caf\\u00e9"}\n{"text": "ab\\ud800c"}\n')
    message = r"a\.jsonl:1: got half of a surrogate pair at character 2, expected text"
    refused(message, read, tmp_path / "a.jsonl")


def test_rows_without_text_can_be_skipped(tmp_path):
    write(tmp_path / "a.jsonl", ["one", None, " ", "two"])
    assert texts_of(tmp_path / "a.jsonl", skip_empty=True) == ["one", "two"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_column_is_named_with_the_existing_ones(tmp_path, name):
    write(tmp_path / name, ROWS)
    message = rf"{re.escape(name)}: got columns .*text.*, expected a column 'content'"
    refused(message, read, tmp_path / name, column="content")


def damaged(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


RANDOM = [os.urandom(90).hex() for _ in range(90)]
BAD_FILES = {  # their content, and what is said after their name
    "binary.txt": (b"MZ\0\1", "got 1 zero bytes, expected text, not binary data"),
    "latin.txt": ("naïve".encode("latin-1"), r"cannot be read as \.txt .*position 2.*in UTF-8"),
    "latin.jsonl": (lines(ROWS) + b'{"text": "na\xefve"}\n', "row 3: .*position 12"),
    "half.jsonl": (lines(ROWS)[:-9], r"row 2: cannot be read as \.jsonl \(JSONDecodeError"),
    "list.jsonl": (lines(ROWS) + b"[1]\n", "row 3: got a JSON list, expected an object"),
    "deep.jsonl": (b"[" * 100_000, "row 0: cannot be read as .*RecursionError"),
    "half.txt.gz": (damaged(gzip.compress(os.urandom(900))), "cannot be read as .*EOFError"),
    "half.jsonl.gz": (
        damaged(gzip.compress(lines(RANDOM))),
        r"row \d\d: cannot be read as \.jsonl\.gz \(EOFError.*is the file whole",
    ),
    "empty.jsonl.gz": (b"", "row 0: cannot be read as .*EOFError: it is empty"),
    "empty.jsonl.zst": (b"", "row 0: cannot be read as .*EOFError: it is empty"),
    "none.jsonl.gz": (b"plain", "row 0: cannot be read as .*BadGzipFile"),
    "half.parquet": (b"PAR1 and no more", r"row 0: cannot be read as \.parquet \(ArrowInvalid"),
    "half.arrow": (b"ARROW1 and no more", r"row 0: cannot be read as \.arrow \(ArrowInvalid"),
    "a.docx": (b"", r"got a \.docx file, expected one of \.txt.*; write other files as"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_or_binary_file_is_named(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    refused(f"{re.escape(name)}: {message}", read, tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")  # is a file to everybody, but none can read it
    refused(rf"{name}: .*cannot be read as .*OSError", read, tmp_path / name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (os.mkfifo, "a.txt"),
        (os.mkfifo, "*.txt"),
        (os.mkfifo, ""),
        (os.mkdir, "*.txt"),
        (os.mkdir, ""),
    ],
)
def test_what_is_no_ordinary_file_is_refused_and_does_not_hang(tmp_path, make, given):
    make(tmp_path / "a.txt")
    message = r"a\.txt: is not an ordinary file, expected one; copy its text"
    refused(message, read, tmp_path / given)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.zst", "a.jsonl.gz", "a.txt.gz"])
def test_a_compressed_file_that_was_cut_off_is_not_read_as_if_it_were_whole(tmp_path, name):
    write(tmp_path / name, ROWS)
    assert len(read(tmp_path / name)) == (1 if ".txt" in name else len(ROWS))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    refused(rf"{re.escape(name)}: .*cannot be read as .*(EOF|OS)Error", read, tmp_path / name)


def test_one_value_that_is_no_text_does_not_change_the_others(tmp_path):
    """`datasets` would give all texts of the column as JSON, quotes included."""
    rows = [{"text": 'He said "no".\n'}, {"text": "plain"}]
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    for name in ("array.json", "lines.json"):
        assert texts_of(tmp_path / name) == [row["text"] for row in rows]
    (tmp_path / "array.json").write_text(json.dumps([*rows, {"text": 7}]))
    message = r"array\.json:2: got int in column 'text', expected text"
    refused(message, read, tmp_path / "array.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "one"), ("a.jsonl", '{"text": "one"}'), ("a.json", '[{"text": "one"}]')],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert texts_of(tmp_path / name) == ["one"]


def test_a_name_that_looks_like_a_url_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("another")
    (tmp_path / "file:x.txt").write_text("this")
    assert texts_of("file:x.txt") == ["this"]


@pytest.mark.parametrize("path", ["nothing.txt", "no/such/place/*.jsonl", "."])
def test_a_source_with_nothing_to_read_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    message = r"got no such file|got a directory without \.txt.*; write other files as rows"
    refused(message, read, path)


def test_files_of_a_directory_that_are_not_read_are_named_once(tmp_path, caplog):
    for name in ("a.txt", "b.md", "c.csv", "d", "e.md", ".gitattributes"):
        (tmp_path / name).write_text("some text")
    (tmp_path / "deeper").mkdir()
    for _ in range(2):
        assert [document.name for document in read(tmp_path)] == ["a.txt"]
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path}: does not read b.md, c.csv, d and 1 more, only .txt, ")
    assert told.endswith('; write other files as rows of a .jsonl, {"text": …}')


@pytest.mark.timeout(20)
@pytest.mark.parametrize("given", ["", "**/*.txt", "*.txt"])
def test_a_file_that_is_there_twice_by_a_link_is_refused(tmp_path, given):
    (tmp_path / "a.txt").write_text("one")
    if given == "**/*.txt":  # loops, in which a search never ends
        for name in ("one", "two"):
            (tmp_path / name).symlink_to(".")
    else:
        (tmp_path / "b.txt").symlink_to("a.txt")
    message = r"\.txt: is .*a\.txt itself, by a symbolic link, expected each file once"
    refused(message, read, tmp_path / given)


def test_a_directory_with_text_in_subdirectories_is_refused_with_the_globs_that_say_which(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "more/notes.md").write_text("no text of ours")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/b.txt").write_text("hidden")
    (tmp_path / ".b.txt").write_text("hidden")
    assert texts_of(tmp_path) == ["one"]
    (tmp_path / "more/b.jsonl").write_text('{"text": "two"}')
    refused(r"text in subdirectories too, such as .*b\.jsonl", read, tmp_path)
    for glob, texts in (("*.txt", ["one"]), ("**/*.jsonl", ["two"])):
        assert texts_of(f"{tmp_path}/{glob}") == texts
