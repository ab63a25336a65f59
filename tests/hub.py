"""A stand-in for the hub's endpoint on this machine, to read from."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import datasets
import huggingface_hub


class RepositoryHub(BaseHTTPRequestHandler):
    """One repository, `server.repo`, of a model or a data set.

    commits: bytes by name of the files of each commit, the last of which is main; without any, the
    hub is down. tags: other names of commits. lost: a file whose reader gets no answer. asked: the
    paths of all requests. downloaded: the names of all files that were sent.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(self.path)
        what, commit, name = self.wanted()
        files = self.server.commits.get(commit)
        if not self.server.commits:
            self.send(503, b"{}")
        elif what is None:
            self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif files is None:
            self.send(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        elif what == "resolve":
            self.send_file(name, files.get(name), commit)
        elif what == "tree":
            self.answer([self.entry(name, content) for name, content in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self.answer({"id": self.server.repo, "sha": commit, "siblings": siblings})

    do_HEAD = do_GET

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        what, commit, _ = self.wanted()
        assert what == "paths-info"
        files = self.server.commits[commit].items()
        self.answer([self.entry(*file) for file in files if file[0].replace("/", "%2F") in asked])

    def wanted(self):
        """What is asked for, of which commit, and the file."""
        found = re.fullmatch(
            rf"/(?:api/models/|api/datasets/|datasets/)?{self.server.repo}"
            r"(?:/(revision|tree|resolve|paths-info)/([^/]+)(?:/(.+))?)?",
            unquote(self.path.partition("?")[0]),
        )
        if found is None:
            return None, None, None
        main = next(reversed(self.server.commits), None)
        commits = {None: main, "main": main} | self.server.tags
        return found[1] or "revision", commits.get(found[2], found[2]), found[3]

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": name}

    def send_file(self, name, content, commit):
        if content is None:
            return self.send_missing()
        if self.command == "GET":
            if name == self.server.lost:
                self.close_connection = True  # without a word
                return None
            self.server.downloaded.append(name)
        headers = {"ETag": f'"{hash(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if given is None:
            return self.send(200, content, **headers)
        first, last = int(given[1]), min(int(given[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self.send(206, content[first : last + 1], **headers)

    def answer(self, content):
        self.send(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def send_missing(self):
        self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    def send(self, status, content, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def serving_commits(repo, commits, cache, monkeypatch, handler=RepositoryHub, tags=None):
    """A `RepositoryHub`, the hub of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repo, server.commits, server.tags, server.lost = repo, commits, tags or {}, None
    server.asked, server.downloaded = [], []
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in [
        ("ENDPOINT", server.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", template),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_CACHE", str(cache)),
    ]:
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    # the interval is what a shutdown waits for
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving_data_set(repo, files, cache, monkeypatch):
    """A `RepositoryHub` of one commit, bytes by name in `files`, which `datasets` reads in this
    process.
    """
    with serving_commits(repo, {"1" * 40: files}, cache / "hub", monkeypatch) as server:
        for name, value in [
            ("HF_ENDPOINT", server.url),
            ("HF_HUB_OFFLINE", False),
            ("HF_MODULES_CACHE", str(cache / "modules")),
            ("STREAMING_READ_MAX_RETRIES", 1),
        ]:
            monkeypatch.setattr(datasets.config, name, value)
        yield server
