"""Data sets on the hub, served by a local stand-in, are read like local files."""

import pyarrow
import pytest
from pyarrow import parquet

from coca_hf.evaluate.sample import PRESETS, draw_sample
from coca_hf.report.read import read_tables
from tests.evaluate.test_cli import rows_in
from tests.hub import serving_data_set


@pytest.fixture
def hub(preset, tmp_path, monkeypatch):
    """A short document between two long ones, there and in `tmp_path / "books.parquet"`."""
    long = "It was the best of times. " * 5100, "It was the worst of times. " * 5000
    table = pyarrow.table({"text": [long[0], "Too short. " * 20, long[1]], "meta": ["", "", ""]})
    parquet.write_table(table, tmp_path / "books.parquet")
    files = {"test-00000-of-00001.parquet": (tmp_path / "books.parquet").read_bytes()}
    with serving_data_set(PRESETS[preset]["data"], files, tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_data_set_on_the_hub(preset, hub, llama, tiny_llama_dir, tmp_path, coca_eval):
    is_drawn_by_tokens = preset == "pg19"  # the other by bytes
    documents = 3 if is_drawn_by_tokens else 2
    command = f"perplexity {tiny_llama_dir} --preset {preset} --lengths 64 --batch-size 64"
    code, _, stderr = coca_eval(command, f"--out {tmp_path} --documents {documents}")
    assert code == 0, stderr
    warning = "warning: 2 documents have at least 32,768 tokens, 3 were asked for"
    assert (warning in stderr) == is_drawn_by_tokens
    (row,) = rows_in(tmp_path)
    assert (row["data_commit"], row["data_revision"], row["subset"]) == ("1" * 40, None, None)
    assert row["document_names"] == [f"{hub.repo}:0", f"{hub.repo}:2"]
    assert row["skipped_documents"] == ([f"{hub.repo}:1"] if is_drawn_by_tokens else [])
    assert row["left_out_documents"] == (0 if is_drawn_by_tokens else 1)
    note = "documents left out, of fewer than 32,000 bytes: 1"
    assert (note in " ".join(stderr.split())) != is_drawn_by_tokens
    assert (row["tokens"], row["max_tokens"]) == (2 * 32767, 32768)
    file = str(tmp_path / "books.parquet")
    local = draw_sample(llama, file, 64, max_tokens=32768, min_bytes=9999)
    assert row["data_hash"] == local.describe()["data_hash"]


def test_a_subset_at_a_revision_is_read_and_named_in_the_row(
    tiny_llama_dir, tmp_path, monkeypatch, coca_eval
):
    def files(**texts):
        made = {}
        for name, text in texts.items():
            parquet.write_table(pyarrow.table({"text": [text * 9]}), tmp_path / "a.parquet")
            made[f"{name}.parquet"] = (tmp_path / "a.parquet").read_bytes()
        listed = "".join(
            f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}.parquet\n"
            for name in texts
        )
        return made | {"README.md": f"---\nconfigs:\n{listed}---\n".encode()}

    first = files(en="Emma Woodhouse, handsome, clever. ", de="Alle Tage sind gleich lang. ")
    out, one = tmp_path / "out", "1" * 40
    with serving_data_set("somebody/books", first, tmp_path, monkeypatch) as hub:
        hub.commits["2" * 40] = files(en="Something else altogether. ", de="Etwas anderes. ")
        command = f"perplexity {tiny_llama_dir} --data {hub.repo} --lengths 64 --out {out}"
        for subset in ("en", "de"):
            code, _, stderr = coca_eval(command, f"--subset {subset} --data-revision {one}")
            assert code == 0, stderr
    english, german = rows_in(out)
    names = ("subset", "data_revision", "data_commit")
    assert [english[name] for name in names] == ["en", one, one]
    assert (english["tokens"], german["tokens"]) == (34 * 9 - 1, 28 * 9 - 1)
    settings = {table.settings.partition(", ")[2] for table in read_tables([out])}
    rest = f"revision {one}, 1 document, stride 512"
    assert settings == {f"subset {name}, {rest}" for name in ("en", "de")}
