"""Blocks streamed from a data set on the hub, which a server on this machine stands in for, are those of its files."""

import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import huggingface_hub
import pyarrow
import pytest
import yaml
from pyarrow import parquet

from coca_hf import CocaError
from coca_hf.train.data import PackedBlocks
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe

REPO = "somebody/lines"
SEQ_LEN = 20


class Hub(BaseHTTPRequestHandler):
    """One data set. `server.commits`: the files of each of its commits; the last one is main."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(self.path)
        revision, files = self.files(path)
        if match := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.+)", path):
            self.send_file(files.get(match[1]), revision)
        elif re.fullmatch(rf"/api/datasets/{REPO}(/revision/[^/]+)?", path):
            self.answer({"id": REPO, "sha": revision, "siblings": [{"rfilename": name} for name in files]})
        elif re.fullmatch(rf"/api/datasets/{REPO}/tree/[^/]+(/.*)?", path):
            self.answer([self.entry(name, content) for name, content in files.items()])
        else:
            self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        _, files = self.files(self.path)
        assert "/paths-info/" in self.path
        self.answer([self.entry(name, content) for name, content in files.items() if name.replace("/", "%2F") in asked])

    def files(self, path):
        named = re.search(r"/(?:revision|tree|resolve|paths-info)/([^/]+)", path)
        commits = self.server.commits
        revision = named[1] if named and named[1] in commits else list(commits)[-1]
        return revision, commits[revision]

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": name}

    def send_file(self, content, revision):
        if content is None:
            return self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
        first, last = 0, len(content) - 1
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or last), last)
        part = content[first : last + 1]
        if self.command == "GET" and self.server.bytes_left is not None:
            self.server.bytes_left -= len(part)
            if self.server.bytes_left < 0:
                return self.connection.close()
        headers = {"ETag": f'"{hash(content)}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if given:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
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


def as_parquet(rows, path):
    parquet.write_table(pyarrow.table({"code": rows}), path, row_group_size=2)
    return path.read_bytes()


@pytest.fixture
def hub(texts, tmp_path, monkeypatch):
    """The rows of `digits.jsonl`, in two parquet files: on disk in `local/`, and on the stand-in."""
    rows = [json.loads(line)["code"] for line in (texts / "digits.jsonl").read_text().splitlines()]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.bytes_left, server.local = [], None, tmp_path / "local"
    server.local.mkdir()
    names = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    files = {name: as_parquet(part, server.local / name) for name, part in zip(names, (rows[:4], rows[4:]), strict=True)}
    server.commits = {"1" * 40: files}
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
        (datasets.config, "STREAMING_READ_MAX_RETRIES", 1),
    ]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries
    yield server
    server.shutdown()
    server.server_close()


def rows_of(blocks, count):
    return [tuple(block["input_ids"].tolist()) for block in itertools.islice(blocks, count)]


@pytest.mark.parametrize("start_block", [0, 33])
def test_the_blocks_are_those_of_the_files_on_disk(hub, tiny_tokenizer, start_block):
    streams = [
        PackedBlocks([Source(path=path, weight=1, column="code")], tiny_tokenizer, SEQ_LEN, 0, start_block, 3)
        for path in (REPO, str(hub.local))
    ]
    streamed, local = (rows_of(blocks, 200) for blocks in streams)  # several passes
    assert streamed == local
    assert any("/resolve/" in path for path in hub.asked)
