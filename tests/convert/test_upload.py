"""`--push-to-hub`: what is refused before the work, the order of the upload, and failures."""

import pytest
from transformers import AutoTokenizer

from coca_hf.convert.preflight import check_repository
from tests.convert.test_adapter import make_adapter
from tests.test_hub import REPO, run, serving_this_process


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving_this_process(monkeypatch, tmp_path) as server:
        yield server


@pytest.mark.parametrize("public", [False, True])
def test_a_conversion_is_pushed_to_a_new_repository_with_its_card_first(
    hub, public, tiny_llama_dir, tmp_path, converts
):
    dst = tmp_path / "dst"
    options = ["--public"] if public else []
    printed = converts(tiny_llama_dir, dst, "--push-to-hub", REPO, *options)
    assert f"Uploaded to {REPO}, {'public' if public else 'private'}." in printed
    (asked,) = hub.created
    assert asked["name"] == "tiny-coca"
    # `private` until huggingface_hub 2
    private = asked.get("private", asked.get("visibility") == "private")
    assert private == (not public)
    assert hub.pushed[0] == ["README.md"]
    assert hub.files == {file.name: file.read_bytes() for file in dst.iterdir()}


EXPECTED = "expected OWNER/NAME, and a login that may write there: "
READER = {"name": "somebody", "auth": {"accessToken": {"role": "read"}}}
LOGINS = {  # the name, and the hub's login or files
    f"{EXPECTED}Repo id must use alphanumeric chars": ("tiny-coca", {}),
    f"{EXPECTED}Repo id must be in the form": ("a/b/c", {}),
    f"{EXPECTED}Token is required": (REPO, {}),
    f"{EXPECTED}Invalid user token": (REPO, {"login": {}}),
    "got the owner else, expected one that this login writes for: ": ("else/tiny", {}),
    "got a token that only reads, expected one that may write": (REPO, {"login": READER}),
    "is on the hub already, and is left as": (REPO, {"files": {"README.md": b"mine"}}),
}


@pytest.mark.parametrize("message", LOGINS)
def test_what_cannot_be_pushed_is_refused_before_the_work(
    hub, message, tiny_llama_dir, tmp_path, refusal, monkeypatch
):
    name, state = LOGINS[message]
    if "Token is required" in message:
        monkeypatch.delenv("HF_TOKEN")
    hub.login = state.get("login", hub.login)
    hub.files.update(state.get("files", {}))
    monkeypatch.setattr("coca_hf.convert.conversion.open_source", None)
    printed = refusal(tiny_llama_dir, tmp_path / "dst", "--push-to-hub", name)
    assert f"--push-to-hub {name}: {message}" in printed
    assert (hub.created, hub.pushed) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_an_organisation_of_the_login_may_be_pushed_to(hub):
    check_repository("lab/tiny-coca")


def test_a_dry_run_checks_the_repository_and_pushes_nothing(
    hub, tiny_llama_dir, tmp_path, converts, refusal
):
    options = tiny_llama_dir, tmp_path / "dst", "--dry-run", "--push-to-hub"
    assert "got the owner else" in refusal(*options, "else/tiny")
    converts(*options, REPO)
    assert hub.created == []


def test_an_adapter_with_another_tokenizer_is_refused_before_anything_is_uploaded_without_it(
    hub, tiny_llama_dir, tmp_path, converts, refusal
):
    lora, dst = make_adapter(tiny_llama_dir, tmp_path / "lora"), tmp_path / "dst"
    options = tiny_llama_dir, dst, "--push-to-hub", REPO, "--adapter", lora
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(lora)
    printed = refusal(*options)
    missing = "the tokenizer would be without the adapter's, which differs (eos_token)"
    assert f"--push-to-hub {REPO}: {missing}" in printed
    assert hub.created == []
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(lora)
    converts(*options)
    assert "model.safetensors" in hub.files


@pytest.mark.parametrize("fails_at", ["README.md", "model.safetensors"])
def test_a_failed_upload_keeps_the_checkpoint_and_names_the_command_that_continues(
    hub, fails_at, tiny_llama_dir, tmp_path, convert
):
    dst = tmp_path / "dst"
    hub.fails_at = fails_at
    code, printed = convert(tiny_llama_dir, dst, "--push-to-hub", REPO)
    assert code == 2
    last = printed.splitlines()[-1]  # after progress bars
    assert last.startswith(f"error: {REPO}: not uploaded; ")
    command = f"hf upload {REPO} {dst} --private"
    assert f"not uploaded; the checkpoint is complete in {dst}, and `{command}` cont" in printed
    assert "model.safetensors" not in hub.files
    assert (dst / "model.safetensors").is_file()


@pytest.mark.real
def test_the_command_that_a_failed_upload_names_continues_it(
    hub, tiny_llama_dir, tmp_path, convert
):
    hub.fails_at = "model.safetensors"
    _, printed = convert(tiny_llama_dir, tmp_path / "dst", "--push-to-hub", REPO)
    hub.fails_at = None
    run(hub, tmp_path / "home", *printed.split("`")[-2].split())
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "dst").iterdir()}
