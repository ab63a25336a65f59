"""Stand-ins for the hub's endpoint on this machine: what all of them need, and one that has data
sets.
"""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import huggingface_hub


class HubHandler(BaseHTTPRequestHandler):
    """Answers as JSON or bytes, without a word on stderr."""

    protocol_version = "HTTP/1.1"

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


class DataSetHub(HubHandler):
    """One data set, `server.repo`. commits: the files of each of its commits, of which the last is
    main; without any, the hub is down. lost: a file whose reader gets no answer. asked: the paths
    of all requests.
    """

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(self.path)
        revision, files = self.files(path)
        if not files:
            self.send(503, b"{}")
        elif match := re.fullmatch(rf"/datasets/{server.repo}/resolve/[^/]+/(.+)", path):
            if self.command == "GET" and match[1] == server.lost:
                self.close_connection = True  # without a word
            else:
                self.send_file(files.get(match[1]), revision)
        elif re.fullmatch(rf"/api/datasets/{server.repo}(/revision/[^/]+)?", path):
            self.answer(
                {
                    "id": server.repo,
                    "sha": revision,
                    "siblings": [{"rfilename": name} for name in files],
                }
            )
        elif re.fullmatch(rf"/api/datasets/{server.repo}/tree/[^/]+(/.*)?", path):
            self.answer([self.entry(name, content) for name, content in files.items()])
        else:
            self.send_missing()

    do_HEAD = do_GET

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        _, files = self.files(self.path)
        assert "/paths-info/" in self.path
        self.answer(
            [
                self.entry(name, content)
                for name, content in files.items()
                if name.replace("/", "%2F") in asked
            ]
        )

    def files(self, path):
        named = re.search(r"/(?:revision|tree|resolve|paths-info)/([^/]+)", path)
        commits = self.server.commits
        revision = (
            named[1] if named and named[1] in commits else [*commits, ""][-2 if commits else -1]
        )
        return revision, commits.get(revision)

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": name}

    def send_file(self, content, revision):
        if content is None:
            return self.send_missing()
        first, last = 0, len(content) - 1
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or last), last)
        part = content[first : last + 1]
        headers = {
            "ETag": f'"{hash(content)}"',
            "X-Repo-Commit": revision,
            "Accept-Ranges": "bytes",
        }
        if given:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(206 if given else 200, part, **headers)


@contextmanager
def serving(handler):
    """A server of `handler`, its address in `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    # the interval is what a shutdown waits for
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving_data_set(repo, files, cache, monkeypatch):
    """A `DataSetHub` of one commit, bytes by name in `files`, which `datasets` reads in this
    process.
    """
    with serving(DataSetHub) as server:
        server.repo, server.commits, server.asked, server.lost = repo, {"1" * 40: files}, [], None
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module, name, value in [
            (huggingface_hub.constants, "ENDPOINT", server.url),
            (huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
            (huggingface_hub.constants, "HF_HUB_OFFLINE", False),
            (huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub")),
            (datasets.config, "HF_ENDPOINT", server.url),
            (datasets.config, "HF_HUB_OFFLINE", False),
            (datasets.config, "HF_MODULES_CACHE", str(cache / "modules")),
            (datasets.config, "STREAMING_READ_MAX_RETRIES", 1),
        ]:
            monkeypatch.setattr(module, name, value)
        yield server
