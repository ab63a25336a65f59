"""The model card: what README.md says from the records of conversion, training and measurements."""

import errno
import json
import os
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from coca_cli.evaluate import app as evaluate_app
from coca_hf import CocaError, convert_checkpoint
from coca_hf.card import MARK, base_metadata, write_card
from coca_hf.evaluate.loaded_model import fingerprint
from tests.conftest import refused
from tests.convert.checkpoints import edit_json
from tests.models.test_golden import write_golden

FRONT_MATTER = """---
license: other
license_name: llama3
license_link: LICENSE
language: [en, de]
tags: [not-carried-over]
base_model: somebody/the-base-of-the-base
---
# A model
"""

STAGE = {
    "name": "full",
    "train": "all",
    "steps": 3,
    "tokens": 41,
    "seq_len": 7,
    "learning_rate": 1e-4,
    "final_loss": None,
    "seconds": 61.5,
    "hardware": {"device": "x86_64", "processes": 2},
    "sources": [
        {"path": "owner/books", "weight": 0.75, "on_hub": True},
        {"path": "/home/me/secret/code.jsonl", "weight": 0.25, "on_hub": False},
    ],
}
TRAINING = {"stages": [STAGE], "versions": {"torch": "2.13.0"}}
ROW = {
    **{"model": "tiny", "task": "passkey", "rope": "default", "stride": None, "error": None},
    **{"tokens": 9, "date": "2026-11-21T06:59:52+00:00", "seconds": 1.5, "model_path": "/tmp/x"},
    **{"dtype": "float32", "trained_length": 64, "coca_constraint": "slack", "tokens_seen": 0},
    **{"device": "cpu", "command": "coca-eval", "versions": {"torch": "2.13.0"}, "cases": 5},
    **{"new_tokens": 8, "seed": 0, "depths": None},
    "raw": {"cases": "passkey-cases/0123456789abcdef.parquet"},
    **{"trained_seq_len": None, "variant": "paper"},
}


def card_of(directory):
    return ModelCard.load(directory / "README.md")


def write_rows(directory, **fields):
    rows = [
        ROW | fields | {"length": length, "value": value}
        for length, value in ((128, 0.6), (256, 0.4))
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def card_command(checkpoint, *options):
    return CliRunner().invoke(evaluate_app, ["card", str(checkpoint), *options])


@pytest.fixture
def checkpoint(tiny_coca_dir, tmp_path):
    return shutil.copytree(tiny_coca_dir, tmp_path / "checkpoint")


def test_conversion_writes_a_card_that_says_it_is_untrained(tiny_llama_dir, tiny_coca_dir):
    card = card_of(tiny_coca_dir)
    record = json.loads((tiny_coca_dir / "conversion.json").read_text())
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["coca", "long-context"]
    assert not any(card.data.get(name) for name in ("license", "base_model", "datasets"))
    assert f"# {tiny_llama_dir.name} with CoCA" in card.text
    assert "has to be trained before the model is useful" in card.text
    assert "Not trained yet." in card.text
    assert "Not measured yet." in card.text
    assert f"{record['parameters']['after']:,} after" in card.text
    assert str(tiny_llama_dir.parent) not in card.text  # a private path


def test_the_licence_of_the_base_is_carried_over_with_its_file(tiny_llama_dir, tmp_path):
    source = shutil.copytree(tiny_llama_dir, tmp_path / "source")
    (source / "README.md").write_text(FRONT_MATTER)
    (source / "LICENSE").write_text("Do no harm.")
    record = convert_checkpoint(source, tmp_path / "coca")
    carried = {"license": "other", "license_name": "llama3", "license_link": "LICENSE"}
    carried["language"] = ["en", "de"]
    assert record["base"] == carried
    card = card_of(tmp_path / "coca")
    assert {key: card.data.get(key) for key in carried} == carried
    assert card.data.tags == ["coca", "long-context"]
    assert card.data.get("base_model") is None  # that of the source is not ours
    assert (tmp_path / "coca" / "LICENSE").read_text() == "Do no harm."


@pytest.mark.parametrize(
    "text",
    [
        *("", "# No front matter\n", "---\n[broken\n---\n", "---\n- a list\n---\n"),
        *("---\nlicense: {a: b}\n---\n", "\x00\xff"),
    ],
    ids=["empty", "none", "broken", "list", "nested", "binary"],
)
def test_a_base_whose_card_cannot_be_read_declares_nothing(text, tmp_path):
    (tmp_path / "README.md").write_text(text, encoding="latin-1")
    assert base_metadata(str(tmp_path), tmp_path) == {}
    assert base_metadata("owner/model", tmp_path) == {"model": "owner/model"}


def test_what_is_converted_again_keeps_its_base(checkpoint, tmp_path):
    base = {"model": "owner/model", "license": "mit"}
    edit_json(checkpoint / "conversion.json", base=base)
    again = convert_checkpoint(checkpoint, tmp_path / "again", ntk_length=128)
    assert again["base"] == base
    assert card_of(tmp_path / "again").data.base_model == "owner/model"
    assert "# model with CoCA" in card_of(tmp_path / "again").text


def test_what_is_converted_again_untrained_still_says_what_it_lacks(checkpoint, tmp_path):
    convert_checkpoint(checkpoint, tmp_path / "again", ntk_length=128)
    assert "has to be trained before the model is useful" in card_of(tmp_path / "again").text
    first = json.loads((tmp_path / "again" / "conversion.json").read_text())["earlier"][0]
    perplexity = {"start": 3.0, "calibrated": 2.0, "original": 1.0}
    calibration = {"tokens": 7, "held_out_tokens": 5, "perplexity": perplexity}
    earlier = [first | {"calibration": calibration}]
    edit_json(tmp_path / "again" / "conversion.json", earlier=earlier)
    write_card(tmp_path / "again")
    text = card_of(tmp_path / "again").text
    assert "The attention is converted and calibrated" in text
    assert "before the model is useful" not in text


def test_a_checkpoint_of_the_authors_is_not_called_untrained(tmp_path):
    write_golden(tmp_path / "src", "mha")
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    convert_checkpoint(tmp_path / "dst", tmp_path / "again", ntk_length=64)
    for name in ("dst", "again"):
        text = card_of(tmp_path / name).text
        assert "the slack form) as its authors trained it, in the layout of coca_hf." in text
        assert "Not trained since it was converted." in text
        assert "has to be trained" not in text


def test_data_sets_of_the_hub_are_named_and_local_paths_are_not(checkpoint):
    (checkpoint / "training.json").write_text(json.dumps(TRAINING))
    write_card(checkpoint)
    card = card_of(checkpoint)
    assert card.data.datasets == ["owner/books"]
    assert "- owner/books, weight 0.75" in card.text
    assert "- code.jsonl, weight 0.25" in card.text
    assert "secret" not in card.content


@pytest.mark.parametrize(
    ("stage", "objective"),
    [
        (STAGE | {"answer_weight": 0.5, "teacher": None}, "lm + 0.5 answers"),
        ({name: value for name, value in STAGE.items() if name != "seconds"}, ""),
    ],
    ids=["the loss over answers too", "nothing, if an older record lacks it"],
)
def test_the_table_of_stages_says_what_was_minimised(checkpoint, stage, objective):
    (checkpoint / "training.json").write_text(json.dumps(TRAINING | {"stages": [stage]}))
    write_card(checkpoint)
    assert f"| full | all | {objective} | 3 |" in card_of(checkpoint).text


def test_the_card_command_adds_measured_tables_and_the_base(checkpoint, tmp_path):
    write_rows(tmp_path)
    result = card_command(checkpoint, "--rows", str(tmp_path), "--base-model", "owner/model")
    assert result.exit_code == 0, result.output
    card = card_of(checkpoint)
    assert "| tiny | 0.60 | 0.40 |" in card.text
    assert "Not measured yet" not in card.text
    assert "on cpu; torch 2.13.0" in card.text
    assert card.data.base_model == "owner/model"
    assert yaml.safe_load(card.content.split("---")[1])["base_model"] == "owner/model"
    # what is not given again stays
    assert card_command(checkpoint).exit_code == 0
    assert card_of(checkpoint).content == card.content


@pytest.mark.parametrize("base", ["/home/me/llama", "https://huggingface.co/a/b", "a/b/c", "a: b"])
def test_a_base_that_is_no_hub_id_is_refused(checkpoint, base):
    before = (checkpoint / "README.md").read_text()
    error = card_command(checkpoint, "--base-model", base).exception
    assert isinstance(error, CocaError)
    assert str(error).startswith("--base-model: expected a hub id, as in owner/name: ")
    assert base in str(error)
    assert (checkpoint / "README.md").read_text() == before


def test_rows_of_another_model_or_of_earlier_weights_give_a_warning(checkpoint, tmp_path):
    rows = "--rows", str(tmp_path)
    write_rows(tmp_path, fingerprint=fingerprint(str(checkpoint), None, False))
    assert "warning" not in card_command(checkpoint, *rows).output
    with (tmp_path / "rows.jsonl").open("a") as file:
        earlier = ROW | {"length": 9, "value": 0.5, "fingerprint": "earlier"}
        file.write(json.dumps(earlier) + "\n")
    notice = "tiny: its rows are of 2 states of its files"
    assert notice in " ".join(card_command(checkpoint, *rows).output.split())
    assert f"> {notice}" in card_of(checkpoint).text
    os.utime(checkpoint / "model.safetensors", (1, 1))
    said = "no row was measured on these files, as they are now"
    assert said in card_command(checkpoint, *rows).output


def test_a_card_written_by_hand_is_left_as_it_is(checkpoint):
    (checkpoint / "README.md").write_text("By hand.")
    message = "README.md: not written by coca_hf, and left as it is; move it"
    refused(message, write_card, checkpoint)
    assert (checkpoint / "README.md").read_text() == "By hand."
    (checkpoint / "README.md").write_text(f"{MARK}\nAn older card.")
    write_card(checkpoint)
    assert "An older card" not in (checkpoint / "README.md").read_text()


def test_the_card_command_leaves_a_card_that_somebody_edited(checkpoint):
    card = checkpoint / "README.md"
    assert card_command(checkpoint).exit_code == 0
    text = card.read_text() + "\n## My limitations\n"
    card.write_text(text)
    error = card_command(checkpoint).exception
    assert isinstance(error, CocaError)
    assert "README.md: was edited since coca_hf wrote it, and is left as it is" in str(error)
    assert card.read_text() == text


def test_a_card_that_cannot_be_written_is_one_line(checkpoint, monkeypatch):
    def is_read_only(path, text):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("coca_hf.card.replace_text", is_read_only)
    refused(r"README.md: cannot be written: Read-only file system", write_card, checkpoint)


@pytest.mark.timeout(20)
def test_a_card_that_is_a_pipe_is_refused_and_does_not_hang(checkpoint):
    (checkpoint / "README.md").unlink()
    os.mkfifo(checkpoint / "README.md")
    refused(r"README.md: is not an ordinary file", write_card, checkpoint)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{}", "its records are not what coca-convert and coca-train write"),
        ("[]", "conversion.json: got a list, expected a JSON object"),
        ("{", "conversion.json: not JSON"),
        (None, "conversion.json: no such file"),
    ],
)
def test_records_that_are_not_ours_are_refused(checkpoint, record, message):
    (checkpoint / "conversion.json").unlink()
    if record:
        (checkpoint / "conversion.json").write_text(record)
    refused(message, write_card, checkpoint)
