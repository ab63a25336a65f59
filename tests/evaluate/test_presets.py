"""Presets read their data set on the hub, which a server on this machine stands in for, as its file would be read."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from coca_hf.evaluate.sample import PRESETS, draw_sample
from tests.evaluate.test_cli import rows_in

FILE, COMMIT = "test-00000-of-00001.parquet", "1" * 40


class Hub(BaseHTTPRequestHandler):
    """One data set of one parquet file, `server.content`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        repo = f"datasets/{self.server.repo}"
        content, path = self.server.content, self.path.partition("?")[0]
        entry = {"type": "file", "path": FILE, "size": len(content), "oid": "file"}
        if path == f"/{repo}/resolve/{COMMIT}/{FILE}":
            self.send_part(content)
        elif path.startswith((f"/api/{repo}/tree/{COMMIT}", f"/api/{repo}/paths-info/{COMMIT}")):
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            self.answer([entry] if self.command != "POST" or FILE in asked else [])
        elif re.fullmatch(rf"/api/{repo}(/revision/\w+)?", path):
            self.answer({"id": self.server.repo, "sha": COMMIT, "siblings": [{"rfilename": FILE}]})
        else:
            self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def send_part(self, content):
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(given[1]), int(given[2] or len(content) - 1)) if given else (0, len(content) - 1)
        part = content[first : last + 1]
        headers = {"ETag": '"file"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if given:
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self.send(206 if given else 200, part, **headers)

    def answer(self, content):
        self.send(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def send(self, status, content, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two long documents with a short one between them, on the stand-in and in `tmp_path / "books.parquet"`."""
    texts = ["It was the best of times. " * 5100, "Too short. " * 20, "It was the worst of times. " * 5000]
    parquet.write_table(pyarrow.table({"text": texts, "meta": ["", "", ""]}), tmp_path / "books.parquet")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.content, server.repo = (tmp_path / "books.parquet").read_bytes(), None
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for module, name, value in [
        (huggingface_hub.constants, "ENDPOINT", url),
        (huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
        (huggingface_hub.constants, "HF_HUB_OFFLINE", False),
        (huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub")),
        (datasets.config, "HF_ENDPOINT", url),
        (datasets.config, "HF_HUB_OFFLINE", False),
        (datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules")),
    ]:
        monkeypatch.setattr(module, name, value)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_data_set_on_the_hub(preset, hub, llama, tiny_llama_dir, tmp_path, coca_eval):
    hub.repo = PRESETS[preset]["data"]
    code, _, stderr = coca_eval(
        *("perplexity", tiny_llama_dir, "--preset", preset, "--lengths", 64, "--batch-size", 64, "--out", tmp_path),
        *(("--documents", 2) if preset == "proof-pile" else ()),
    )
    assert code == 0, stderr
    (row,) = rows_in(tmp_path)
    assert row["document_names"] == [f"{hub.repo}:0", f"{hub.repo}:2"]
    assert row["skipped_documents"] == ([f"{hub.repo}:1"] if preset == "pg19" else [])  # the other draws by characters
    assert (row["tokens"], row["max_tokens"]) == (2 * 32767, 32768)
    file = str(tmp_path / "books.parquet")
    assert row["data_hash"] == draw_sample(llama, file, 64, max_tokens=32768, min_chars=9999).describe()["data_hash"]
