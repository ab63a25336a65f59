"""Upload to the hub and back, against a stand-in for its endpoint on this machine: no network."""

import hashlib
import json
import re
import shutil
import sys
from base64 import b64decode
from contextlib import contextmanager

import huggingface_hub
import pytest
import transformers.utils.hub
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coca_cli.evaluate import app as evaluate_app
from coca_hf import convert_checkpoint, patch_
from coca_hf.models.hub import without_paths
from tests.conftest import output_of
from tests.hub import RepositoryHub, serving_commits
from tests.test_card import FRONT_MATTER, TRAINING, write_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "somebody/tiny-coca"


class Hub(RepositoryHub):
    """One model repository: creation, branches, uploads inline and by LFS, commits, downloads.

    `commits` holds the files of every branch too, `files` those of main. `pushed` has the names of
    the files of each commit; one with the file `fails_at` fails. `login` is what whoami answers.
    """

    def do_POST(self):
        body, hub = self.read(), self.server
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer({"url": f"{hub.url}/{REPO}"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif match := re.fullmatch(rf"/api/models/{REPO}/branch/(.+)", self.path):
            hub.commits.setdefault(match[1], dict(hub.files))
            self.answer({})
        elif re.fullmatch(rf"/api/models/{REPO}/preupload/.+", self.path):
            self.answer({"files": [self.how_to_upload(file) for file in json.loads(body)["files"]]})
        elif self.path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [self.lfs(item) for item in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(rf"/api/models/{REPO}/commit/([^?]+)(\?.+)?", self.path):
            branch = "refs/pr/1" if match[2] else hub.tags.get(match[1], match[1])
            files = hub.commits.setdefault(branch, {})
            lines = [json.loads(line) for line in body.splitlines()]
            hub.pushed.append([line["value"]["path"] for line in lines if line["key"] != "header"])
            if hub.fails_at in hub.pushed[-1]:
                return self.send(503, b"{}")
            for line in lines:
                if line["key"] == "file":
                    files[line["value"]["path"]] = b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    files[line["value"]["path"]] = hub.objects[line["value"]["oid"]]
            urls = {"commitUrl": f"{hub.url}/{REPO}/commit/{COMMIT}"}
            urls["pullRequestUrl"] = f"{hub.url}/{REPO}/discussions/1"
            self.answer({"success": True, "commitOid": COMMIT, **urls})
        else:
            self.send_missing()

    def do_PUT(self):
        content = self.read()
        assert hashlib.sha256(content).hexdigest() == self.path.split("/")[-1]
        self.server.objects[self.path.split("/")[-1]] = content
        self.answer({})

    def do_GET(self):
        if self.path == "/api/whoami-v2":
            self.send(200 if self.server.login else 401, json.dumps(self.server.login).encode())
        elif not (self.server.created or self.server.files):
            self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        else:
            super().do_GET()

    do_HEAD = do_GET

    def how_to_upload(self, file):
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def lfs(self, item):
        upload = {"upload": {"href": f"{self.server.url}/lfs/{item['oid']}", "header": {}}}
        return {"oid": item["oid"], "size": item["size"], "authenticated": True, "actions": upload}

    def read(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, status, content, **headers):
        super().send(status, content, **{**headers, "X-Repo-Commit": COMMIT})


@pytest.fixture(scope="module")
def finished_dir(tiny_llama_dir, tmp_path_factory):
    """A checkpoint that was converted from a base with a licence, has been trained, and was
    measured.
    """
    directory = tmp_path_factory.mktemp("hub")
    base = shutil.copytree(tiny_llama_dir, directory / "base")
    (base / "README.md").write_text(FRONT_MATTER)
    (base / "LICENSE").write_text("Do no harm.")
    convert_checkpoint(base, directory / "coca")
    (directory / "coca" / "training.json").write_text(json.dumps(without_paths(TRAINING)))
    write_rows(directory)
    options = ["card", str(directory / "coca"), "--rows", str(directory)]
    options += ["--base-model", "owner/model"]
    assert CliRunner().invoke(evaluate_app, options).exit_code == 0
    return directory / "coca"


@contextmanager
def serving_this_process(monkeypatch, tmp_path):
    """A `Hub`, that of this process, whose repository, `REPO`, has not been created."""
    tags = {None: COMMIT, "main": COMMIT}
    with serving_commits(REPO, {COMMIT: {}}, tmp_path / "hub", monkeypatch, Hub, tags) as server:
        server.created, server.pushed, server.objects, server.fails_at = [], [], {}, None
        server.files = server.commits[COMMIT]
        server.login = {"name": "somebody", "orgs": [{"name": "Lab"}], "auth": {}}
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # it has its own endpoint
        monkeypatch.setenv("HF_TOKEN", "hf_nobody")
        yield server


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving_this_process(monkeypatch, tmp_path) as server:
        yield server


def run(hub, home, *command):
    """Run a command whose hub is the stand-in; returns its last line."""
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_nobody", "HF_HOME": str(home)}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return (output_of(*command, **environment).splitlines() or [""])[-1]


def push(directory, **options):
    AutoModelForCausalLM.from_pretrained(directory).push_to_hub(REPO, **options)


PULL = """
import sys
sys.modules["coca_hf"] = None  # importing it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("some text", return_tensors="pt").input_ids
print(type(model).__module__.split(".")[0], repr(model(ids).logits.double().sum().item()))
"""


def test_push_to_hub_sends_a_checkpoint_whole_with_its_card_and_no_path_of_this_machine(
    hub, finished_dir
):
    push(finished_dir)
    AutoTokenizer.from_pretrained(finished_dir).push_to_hub(REPO)
    assert hub.created[0]["name"] == REPO.split("/")[1]
    code = {path.name for path in finished_dir.glob("*.py")}
    assert {"attention.py", "llama.py", "rotary.py"} <= code
    code |= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert code <= {*hub.files}
    assert hub.files["LICENSE"] == (finished_dir / "LICENSE").read_bytes()
    for name in ("conversion.json", "training.json"):
        assert json.loads(hub.files[name]) == json.loads((finished_dir / name).read_text())
    assert json.loads(hub.files["conversion.json"])["source"] == "base"
    assert len(json.loads(hub.files["config.json"])["auto_map"]) == 5
    for name, content in hub.files.items():
        assert str(finished_dir.parent).encode() not in content, name

    pushed = ModelCard(hub.files["README.md"].decode())
    written = ModelCard.load(finished_dir / "README.md")
    assert pushed.data.to_dict() == written.data.to_dict()
    assert pushed.text.strip() == written.text.strip()
    licence = {"license": "other", "license_name": "llama3", "license_link": "LICENSE"}
    assert pushed.data.to_dict().items() >= licence.items()
    assert (pushed.data.base_model, pushed.data.datasets) == ("owner/model", ["owner/books"])
    assert "Tokens seen in CoCA training: 41." in pushed.text
    assert "| tiny | 0.60 | 0.40 |" in pushed.text


@pytest.mark.real
def test_what_was_uploaded_comes_down_without_coca_hf(hub, finished_dir, tiny_tokenizer, tmp_path):
    run(hub, tmp_path, "hf", "upload", REPO, str(finished_dir))
    found = run(hub, tmp_path / "down", sys.executable, "-c", PULL, REPO)
    ids = tiny_tokenizer("some text", return_tensors="pt").input_ids
    expected = AutoModelForCausalLM.from_pretrained(finished_dir)(ids).logits.double().sum().item()
    assert found == f"transformers_modules {expected!r}"


def test_a_card_that_is_in_the_repository_stays(hub, tiny_coca_dir):
    hub.files["README.md"] = b"---\nlicense: mit\n---\nWritten by hand.\n"
    push(tiny_coca_dir)
    assert "model.safetensors" in hub.files
    assert hub.files["README.md"].endswith(b"Written by hand.\n")


def test_push_to_hub_sends_no_path_of_a_record_that_has_some(hub, finished_dir, tmp_path):
    older = shutil.copytree(finished_dir, tmp_path / "older")
    (older / "training.json").write_text(json.dumps(TRAINING))
    push(older)
    assert json.loads(hub.files["training.json"]) == without_paths(TRAINING)


@pytest.mark.parametrize("came_from", ["", "the original"])
def test_a_model_from_no_coca_checkpoint_is_sent_without_files_of_other_directories(
    hub, came_from, tiny_llama_dir, tmp_path, monkeypatch
):
    original = shutil.copytree(tiny_llama_dir, tmp_path / "original")
    for name in ("README.md", "LICENSE", "NOTICE", "conversion.json"):
        (original / name).write_text("a secret" if name != "conversion.json" else '{"a": "secret"}')
    monkeypatch.chdir(original)
    patched = patch_(AutoModelForCausalLM.from_pretrained(tiny_llama_dir))
    patched.name_or_path = str(original) if came_from else ""
    patched.push_to_hub(REPO)
    assert "model.safetensors" in hub.files
    assert b"automatically generated" in hub.files["README.md"]
    assert not {"LICENSE", "NOTICE", "conversion.json"} & set(hub.files)


def test_a_branch_gets_the_card_and_keeps_one_that_was_edited(hub, finished_dir):
    push(finished_dir, revision="step-100", tags=["mine"])
    assert hub.files == {}
    branch = hub.commits["step-100"]
    assert {"README.md", "model.safetensors", "conversion.json", "LICENSE"} <= {*branch}
    card = ModelCard(branch["README.md"].decode())
    assert card.data.tags == ["coca", "long-context", "mine"]
    assert card.text.strip() == ModelCard.load(finished_dir / "README.md").text.strip()
    branch["README.md"] += b"Edited by hand.\n"
    push(finished_dir, revision="step-100", tags=["mine"])
    assert branch["README.md"].endswith(b"Edited by hand.\n")
    assert "README.md" not in hub.files


def test_a_pull_request_gets_no_card_and_no_records(hub, finished_dir):
    push(finished_dir, create_pr=True)
    assert hub.files == {}
    assert "model.safetensors" in hub.commits["refs/pr/1"]
    assert not {"LICENSE", "conversion.json", "training.json"} & {*hub.commits["refs/pr/1"]}
