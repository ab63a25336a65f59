"""Presets read their data set on the hub, which a server on this machine stands in for, as its file would be read."""

import pyarrow
import pytest
from pyarrow import parquet

from coca_hf.evaluate.sample import PRESETS, draw_sample
from tests.evaluate.test_cli import rows_in
from tests.hub import serving_data_set


@pytest.fixture
def hub(preset, tmp_path, monkeypatch):
    """Two long documents with a short one between them, on the stand-in and in `tmp_path / "books.parquet"`."""
    texts = ["It was the best of times. " * 5100, "Too short. " * 20, "It was the worst of times. " * 5000]
    parquet.write_table(pyarrow.table({"text": texts, "meta": ["", "", ""]}), tmp_path / "books.parquet")
    files = {"test-00000-of-00001.parquet": (tmp_path / "books.parquet").read_bytes()}
    with serving_data_set(PRESETS[preset]["data"], files, tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_data_set_on_the_hub(preset, hub, llama, tiny_llama_dir, tmp_path, coca_eval):
    code, _, stderr = coca_eval(
        *("perplexity", tiny_llama_dir, "--preset", preset, "--lengths", 64, "--batch-size", 64, "--out", tmp_path),
        *("--documents", 3 if preset == "pg19" else 2),
    )
    assert code == 0, stderr
    assert ("warning: 2 documents have at least 32,768 tokens, 3 were asked for" in stderr) == (preset == "pg19")
    (row,) = rows_in(tmp_path)
    assert row["document_names"] == [f"{hub.repo}:0", f"{hub.repo}:2"]
    is_drawn_by_tokens = preset == "pg19"  # the other by bytes
    assert row["skipped_documents"] == ([f"{hub.repo}:1"] if is_drawn_by_tokens else [])
    assert row["left_out_documents"] == (0 if is_drawn_by_tokens else 1)
    assert ("left out 1 documents of fewer than 32,000 bytes" in " ".join(stderr.split())) != is_drawn_by_tokens
    assert (row["tokens"], row["max_tokens"]) == (2 * 32767, 32768)
    file = str(tmp_path / "books.parquet")
    assert row["data_hash"] == draw_sample(llama, file, 64, max_tokens=32768, min_bytes=9999).describe()["data_hash"]
