"""Malicious checkpoints give one clear line: no hang, no traceback, no file elsewhere."""

import json
import os
import random
import shutil
import struct
import time

import pytest
from transformers import AutoModelForCausalLM

from coca_hf import CocaError, convert_checkpoint
from coca_hf.weights import parse_size
from tests.convert.checkpoints import edit_json, files_of, index, save_llama

K0 = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of one layer and no tokenizer."""
    sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return save_llama(tmp_path_factory.mktemp("hostile") / "small", **sizes)


@pytest.fixture
def source(small, tmp_path):
    return shutil.copytree(small, tmp_path / "source")


def refusal(source, **options):
    """The message of a conversion that fails."""
    message = outcome(source, **options)
    assert message is not None
    return message


def outcome(source, **options):
    """The message of a conversion, or None if it succeeds; nothing that it wrote is left."""
    before, dst = {*source.parent.iterdir()}, source.parent / "dst"
    try:
        convert_checkpoint(source, dst, **options)
    except CocaError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < 1100
    else:
        message = None
        shutil.rmtree(dst)
    assert {*source.parent.iterdir()} == before
    return message


def read_header(file):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return data[8 : 8 + length], data[8 + length :]


def write_header(file, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def with_header(change):
    """A damage: `change` edits the header's entries."""

    def apply(file):
        text, data = read_header(file)
        header = json.loads(text)
        change(header)
        write_header(file, header, data)

    return apply


def entry(**changes):
    """A damage: other values in the entry of `K0`."""
    return with_header(lambda header: header[K0].update(changes))


def duplicated(file):
    """The entry of `K0` a second time under its name, at the place of another tensor."""
    text, data = read_header(file)
    entries = json.loads(text)
    other = entries.pop(K0.replace("k_proj", "v_proj"))
    header = json.dumps(entries)[:-1] + f', "{K0}": {json.dumps(other)}}}'
    write_header(file, header.encode(), data)


def listed(file):
    """A tensor as a list of its fields, which safetensors reads."""
    entries, data = json.loads(read_header(file)[0]), read_header(file)[1]
    entries[K0] = [entries[K0][name] for name in ("dtype", "shape", "data_offsets")]
    write_header(file, json.dumps(entries).encode(), data)


HEADERS = {
    "tensor as a list": listed,
    "empty file": lambda file: file.write_bytes(b""),
    "length of all ones": lambda file: write_header(file, *read_header(file), length=2**64 - 1),
    "deeply nested": lambda file: write_header(file, b"[" * 100_000, b""),
    "duplicate tensor": duplicated,
    "data missing": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "data too long": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "shape and offsets differ": entry(shape=[12, 25]),
    "huge size": entry(shape=[2**70, 24]),
    "offsets beyond the file": entry(data_offsets=[2**40, 2**40 + 1152]),
    "unknown type": entry(dtype="F7"),
}


@pytest.mark.parametrize("damage", HEADERS.values(), ids=HEADERS.keys())
def test_a_false_header_is_refused(source, damage):
    damage(source / "model.safetensors")
    message = refusal(source)
    assert message.startswith(f"{source / 'model.safetensors'}: truncated or corrupted (")


PIECES = [
    *(b"null", b"-1", b"1e400", b"[]", b"{}", b'"\\ud800"', b"NaN", b"9" * 5000, b"true", b"\xff"),
    *(b"[" * 3000, b'"__metadata__":{},', b'"a\\nb\\u001b[31m":', b" " * 99, b""),
]


def mutated(draw, header):
    """The header with one to three changes: digits, and pieces cut, doubled or replaced."""
    text = bytearray(header)
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(text))
        end = draw.choice([start, min(len(text), start + draw.randint(1, 30))])
        digits = [i for i, byte in enumerate(text) if chr(byte).isdigit()]
        if draw.randrange(3) == 0 and digits:
            text[draw.choice(digits)] = ord(draw.choice("0123456789-.eE"))
        else:
            text[start:end] = draw.choice([*PIECES, text[start:end] * 2, draw.randbytes(30)])
    return bytes(text)


@pytest.mark.timeout(60)
def test_four_hundred_mutated_headers_are_refused_in_one_line_or_convert(source):
    draw, refused = random.Random(11), 0
    text, data = read_header(source / "model.safetensors")
    for number in range(400):
        header = mutated(draw, text)
        length = draw.choice([None] * 9 + [draw.randrange(2**64), draw.randrange(2 * len(text))])
        write_header(source / "model.safetensors", header, data, length)
        message = outcome(source)
        refused += message is not None
        assert message is None or str(source) in message, number
    assert refused > 360


CONFIG_VALUES = [
    *(None, True, -1, 0, 10**12, 2**70, 1e300),
    *("x" * 5000, "a\nb\x1b[31m", [1], {"a": {}}),
]


@pytest.mark.timeout(90)
def test_any_value_in_any_field_of_the_config_is_refused_in_one_line_or_converts(source):
    config = json.loads((source / "config.json").read_text())
    for field in config:
        for value in CONFIG_VALUES:
            (source / "config.json").write_text(json.dumps(config | {field: value}))
            begun = time.monotonic()
            outcome(source)
            assert time.monotonic() - begun < 10, (field, value)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../secret", "a/../../secret", "/etc/passwd", "a/b.safetensors", "a/", "a\0b"],
)
def test_an_index_that_names_a_file_outside_is_refused(source, tmp_path, name):
    shutil.copyfile(source / "model.safetensors", tmp_path / "secret")
    index(source, {K0: name})
    expected = f"got the file name {name!r}, expected a file in the directory itself"
    assert expected.replace("\\", "") in refusal(source).replace("\\", "")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
@pytest.mark.parametrize("chained", [False, True])
def test_link_out_of_the_checkpoint_is_refused_and_not_followed(source, tmp_path, name, chained):
    target = tmp_path / "secret"
    shutil.copyfile(source / name, target) if (source / name).exists() else target.write_text("{}")
    (source / name).unlink(missing_ok=True)
    if chained:
        (source / "hop").symlink_to(target)
        target = source / "hop"
    (source / name).symlink_to(target)
    expected = f"{source / name}: is a link to {tmp_path / 'secret'}, outside the checkpoint"
    assert expected in refusal(source)


def test_links_within_the_checkpoint_and_a_link_to_the_checkpoint_are_fine(source, tmp_path):
    (source / "model.safetensors").rename(source / "weights")
    (source / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(source)
    convert_checkpoint(tmp_path / "link", tmp_path / "dst")
    AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert not (tmp_path / "dst" / "model.safetensors").is_symlink()


def test_link_to_the_blobs_of_another_repository_is_refused(source, tmp_path):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    shutil.copytree(source, snapshot)
    other = tmp_path / "models--owner--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / "model.safetensors").rename(other / "blob")
    (snapshot / "model.safetensors").symlink_to("../../../models--owner--other/blobs/blob")
    assert "outside the checkpoint" in refusal(snapshot)


def test_circle_of_links_is_refused(source):
    (source / "tokenizer.json").symlink_to("other.json")
    (source / "other.json").symlink_to("tokenizer.json")
    assert "tokenizer.json" in refusal(source)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipe_in_the_place_of_a_file_is_refused_and_does_not_hang(source, name):
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    assert "is not an ordinary file" in refusal(source)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda file: file.symlink_to(file.parent.parent / "secret")]
)
def test_a_base_card_that_is_a_pipe_or_outside_is_ignored(source, tmp_path, make):
    (tmp_path / "secret").write_text("---\nlicense: secret\n---\n")
    make(source / "README.md")
    assert convert_checkpoint(source, tmp_path / "dst")["base"] == {}


def test_duplicate_key_is_refused(source):
    config = source / "config.json"
    before = config.read_text()
    config.write_text(before.replace("{", '{"hidden_size": 48,', 1))
    assert f"{config}: not JSON: the key 'hidden_size' comes twice" in refusal(source)
    config.write_text(before)
    index(source, {})
    file = source / "model.safetensors.index.json"
    file.write_text(f'{{"weight_map": {{"{K0}": "a.safetensors", "{K0}": "b.safetensors"}}}}')
    assert f"{file}: not JSON: the key '{K0}' comes twice" in refusal(source)


@pytest.mark.timeout(20)
def test_config_of_100_megabytes_is_refused_at_once(source):
    os.truncate(source / "config.json", 100_000_000)
    begun = time.monotonic()
    assert "config.json: got 100000000 bytes" in refusal(source)
    assert time.monotonic() - begun < 5


def test_tensor_in_two_shards_is_refused(source):
    index(source, {K0: "a.safetensors", "other": "b.safetensors"})
    shutil.copyfile(source / "a.safetensors", source / "b.safetensors")
    assert "in a.safetensors and in b.safetensors, expected it once" in refusal(source)


def test_names_that_would_break_a_line_or_colour_a_terminal_are_escaped(source):
    file, name = source / "model.safetensors", "x\n\x1b[31mok"
    with_header(lambda header: header.update({name: header.pop(K0)}))(file)
    assert K0 in refusal(source)
    data = read_header(file)[1]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2}
    with_header(lambda header: header.update({K0: header.pop(name), name: empty}))(file)
    assert r"tensor x\n\x1b[31mok is not understood" in refusal(source)


CODE = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_checkpoint_names_is_neither_run_nor_copied(source, tmp_path, file):
    marker = tmp_path / "ran"
    for name in ("evil.py", "llama.py", "attention.py", "tokenization_evil.py"):
        (source / name).write_text(CODE.format(str(marker)))
    named = {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
    edit_json(source / file, auto_map=named)
    if file == "config.json":
        assert "auto_map names the checkpoint's own code, which is never run" in refusal(source)
    else:
        convert_checkpoint(source, tmp_path / "dst")
        assert not any(str(marker) in path.read_text() for path in (tmp_path / "dst").glob("*.py"))
        assert not (tmp_path / "dst" / "evil.py").exists()
    assert not marker.exists()


def test_code_beside_a_coca_source_is_neither_run_nor_copied(source, tmp_path):
    convert_checkpoint(source, tmp_path / "coca")
    for file in (tmp_path / "coca").glob("*.py"):
        file.write_text(CODE.format(str(tmp_path / "ran")))
    convert_checkpoint(tmp_path / "coca", tmp_path / "dst", ntk_length=64)
    assert not (tmp_path / "ran").exists()
    assert not any(str(tmp_path) in file.read_text() for file in (tmp_path / "dst").glob("*.py"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("token_id", [2**24 + 1, 2**63])
def test_a_token_id_beyond_any_vocabulary_does_not_keep_the_conversion_busy(
    source, tmp_path, tiny_tokenizer, token_id
):
    tiny_tokenizer.save_pretrained(source)
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"]["<s>"] = token_id
    (source / "tokenizer.json").write_text(json.dumps(content))
    begun = time.monotonic()
    convert_checkpoint(source, tmp_path / "dst")
    assert time.monotonic() - begun < 20
    assert files_of(tmp_path / "dst")["tokenizer.json"] == files_of(source)["tokenizer.json"]


def test_sizes_are_read():
    sizes = {"5GB": 5 * 10**9, "500MB": 5 * 10**8, "1.5GiB": 1610612736}
    sizes |= {"64 kib": 65536, "1000": 1000, "2tb": 2e12}
    assert {text: parse_size(text, "--memory") for text in sizes} == sizes


@pytest.mark.parametrize(
    "text", ["", "GB", "0", "-5GB", "5 giga", "1e9", "0.1", "5GB5", "nan", "9" * 40, "٣GB"]
)
def test_other_sizes_are_refused(source, text):
    message = f"--max-shard-size: got {text!r}, expected a size as in 500MB"
    assert message in refusal(source, max_shard_size=text)
