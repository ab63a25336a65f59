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
import torch
import yaml
from pyarrow import parquet

from coca_hf import CocaError
from coca_hf.train import stream, tokens
from coca_hf.train.data import PackedBlocks, blocks_of
from coca_hf.train.out import last_checkpoint
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.test_data import dealt_to

REPO = "somebody/lines"
SEQ_LEN = 20
FILES = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]


class Hub(BaseHTTPRequestHandler):
    """One data set. commits: the files of each of its commits, of which the last is main; without any, the hub is
    down. lost: a file whose reader gets no answer.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(self.path)
        revision, files = self.files(path)
        if not files:
            self.send(503, b"{}")
        elif match := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.+)", path):
            if self.command == "GET" and match[1] == server.lost:
                self.close_connection = True  # without a word
            else:
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
        revision = named[1] if named and named[1] in commits else [*commits, ""][-2 if commits else -1]
        return revision, commits.get(revision)

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": name}

    def send_file(self, content, revision):
        if content is None:
            return self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
        first, last = 0, len(content) - 1
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or last), last)
        part = content[first : last + 1]
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
    """The rows of `digits.jsonl`, in two parquet files: on disk in `server.local`, and on the stand-in."""
    rows = [json.loads(line)["code"] for line in (texts / "digits.jsonl").read_text().splitlines()]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.lost, server.local = [], None, tmp_path / "files"
    server.local.mkdir()
    files = {
        name: as_parquet(part, server.local / name) for name, part in zip(FILES, (rows[:4], rows[4:]), strict=True)
    }
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


@pytest.fixture
def recipe_of(recipe_tree, hub, tmp_path):
    """The recipe of one stage of 12 steps, from the hub or from the same files on disk."""

    def recipe_of(path, *settings):
        recipe_tree["data"]["sources"] = [{"path": str(path), "weight": 1, "column": "code"}]
        recipe_tree["stages"] = [{"name": "k", "train": ["t_proj"], "max_steps": 12}]
        (tmp_path / "hub.yaml").write_text(yaml.safe_dump(recipe_tree))
        return load_recipe(tmp_path / "hub.yaml", settings)

    return recipe_of


def losses(out):
    lines = [json.loads(line) for line in (out / "1-k/log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens_seen"]) for line in lines]


@pytest.fixture
def small_sizes(monkeypatch):
    """A row is asked for only when the blocks of the one before are used up."""
    monkeypatch.setattr(stream, "SHUFFLE_TOKENS", 4 * SEQ_LEN)
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 100)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_network_that_fails_in_the_middle_is_one_line_and_the_run_goes_on_at_the_same_commit(
    hub, recipe_of, tmp_path, small_sizes, workers
):
    run_recipe(recipe_of(hub.local), tmp_path / "local")
    recipe, out = recipe_of(REPO, f"training.dataloader_num_workers={workers}"), tmp_path / "out"
    hub.lost = FILES[1]
    with pytest.raises(CocaError) as caught:
        run_recipe(recipe, out)
    assert "somebody/lines: the hub gave nothing after row 3" in str(caught.value)
    assert "with --resume" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("\n", "\\n", "Traceback"))
    assert last_checkpoint(out / "1-k/trainer") is not None
    hub.lost = None
    hub.commits["2" * 40] = {FILES[0]: hub.commits["1" * 40][FILES[1]]}
    run_recipe(recipe_of(REPO, f"training.dataloader_num_workers={workers}"), out, resume=True)
    assert losses(out) == losses(tmp_path / "local")
    (source,) = json.loads((out / "1-k/training.json").read_text())["stages"][0]["sources"]
    assert (source["on_hub"], source["commit"]) == (True, "1" * 40)


def test_a_hub_that_does_not_answer_at_the_begin_is_one_line_and_nothing_is_written(hub, recipe_of, tmp_path):
    hub.commits.clear()
    with pytest.raises(CocaError, match="somebody/lines: no such file here, and not readable as a data set on the hub"):
        run_recipe(recipe_of(REPO), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prepared_blocks_are_trained_on_without_the_hub(hub, recipe_of, tiny_tokenizer, tmp_path):
    recipe = recipe_of(REPO, f"data.prepared={tmp_path / 'prepared'}")
    blocks_of(recipe, tiny_tokenizer).prepare(recipe.num_blocks(1))
    run_recipe(recipe_of(hub.local), tmp_path / "local")
    hub.asked.clear()
    hub.commits.clear()
    run_recipe(recipe_of(REPO, f"data.prepared={tmp_path / 'prepared'}"), tmp_path / "out")
    assert not hub.asked
    assert losses(tmp_path / "out") == losses(tmp_path / "local")


def test_a_preparation_is_prolonged_at_the_commit_it_began_at(hub, recipe_of, tiny_tokenizer, tmp_path):
    recipe, local = recipe_of(REPO, f"data.prepared={tmp_path / 'prepared'}"), recipe_of(hub.local)
    blocks_of(recipe, tiny_tokenizer).prepare(10)
    hub.commits["2" * 40] = {FILES[0]: hub.commits["1" * 40][FILES[1]]}
    again = blocks_of(recipe_of(REPO, f"data.prepared={tmp_path / 'prepared'}"), tiny_tokenizer)
    assert again.prepare(150).num_blocks == 150
    assert rows_of(again, 200) == rows_of(blocks_of(local, tiny_tokenizer), 200)  # the last 50 from the hub


@pytest.mark.real
def test_two_processes_are_dealt_the_blocks_of_the_files_on_disk_after_a_restart(hub, tiny_tokenizer, tmp_path):
    def blocks(path, start_block=0):
        return PackedBlocks([Source(path=str(path), weight=1, column="code")], tiny_tokenizer, SEQ_LEN, 0, start_block)

    with (tmp_path / "dealt").open("w+b") as file:
        for start_block in (0, 500):
            dealt_to(2, blocks(REPO, start_block), 500, file, 1)
    local = torch.tensor(rows_of(blocks(hub.local), 1000))
    assert (tmp_path / "dealt").read_bytes() == local.numpy().tobytes()
