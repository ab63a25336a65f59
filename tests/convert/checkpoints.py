"""Helpers that read and edit checkpoints."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coca_hf import convert_checkpoint
from tests.conftest import TINY, refused

PROCESSES = multiprocessing.get_context("forkserver")
# they and their imports would otherwise be imported by each process
PROCESSES.set_forkserver_preload(
    ["coca_hf", *(f"tests.convert.test_{name}" for name in ("interrupted", "destination"))]
)


def save_llama(directory, seed=2, **fields):
    """A LLaMA with random weights, by default of the sizes `TINY`."""
    torch.manual_seed(seed)
    config = LlamaConfig(**(TINY | {"vocab_size": 101, "initializer_range": 0.2} | fields))
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def exit_code_of(function, *arguments):
    """The exit code of a process that calls `function`."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


class Stop(BaseException):
    """Like KeyboardInterrupt, at a chosen moment."""


def interrupt(src, dst, share, **options):
    """Convert until `share` of the bytes are written."""

    def stop(done, total):
        if done > share * total:
            raise Stop

    with pytest.raises(Stop):
        convert_checkpoint(src, dst, progress=stop, **options)


def edit_json(file, **fields):
    """Change fields of a JSON object; ... drops one."""
    content = (json.loads(file.read_text()) if file.exists() else {}) | fields
    kept = {name: value for name, value in content.items() if value is not ...}
    file.write_text(json.dumps(kept))


def edit_config(directory, **fields):
    edit_json(directory / "config.json", **fields)


def edit_weights(directory, change, name="model.safetensors"):
    """change: edits the tensors, by name, in place."""
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name, metadata={"format": "pt"})


def weights_of(directory):
    """All tensors by name, from all files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_clean(directory, auto=AutoModelForCausalLM, **options):
    """The model of a checkpoint that has all of its weights and no others."""
    model, report = auto.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(report.values())
    return model


def record_of(directory, name="conversion.json"):
    return json.loads((directory / name).read_text())


def assert_same_weights(first, second):
    one, other = weights_of(first), weights_of(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_text(directory):
    """A text to calibrate on."""
    file = directory / "text.txt"
    file.write_text("".join(f"{n} times {n % 7} is {n * (n % 7)}; " for n in range(400)))
    return file


def files_of(directory):
    """Bytes by relative path; None for a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def index(directory, weight_map):
    """Turn a single-file checkpoint into a sharded one, with its weights in a.safetensors."""
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def full_disk(monkeypatch):
    full = shutil._ntuple_diskusage(10**6, 10**6, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)


def content_of(place):
    """What is at a path: nothing, a file, or a directory with its files."""
    return os.path.lexists(place), files_of(Path(place)) if os.path.isdir(place) else None


def refuses(message, src, dst, *arguments, **options):
    """Claim that `convert_checkpoint` raises a CocaError which matches `message`, and leaves `dst`
    as it was.
    """
    before = content_of(dst)
    refused(message, convert_checkpoint, src, dst, *arguments, **options)
    assert content_of(dst) == before
