"""`--allow-pickle`: pytorch_model.bin is read as tensors only, and nothing planted in it runs."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from coca_hf import convert_checkpoint
from tests.convert.checkpoints import record_of


@pytest.fixture
def tensors(tiny_llama_dir):
    return load_file(tiny_llama_dir / "model.safetensors")


@pytest.fixture
def source(source):
    (source / "model.safetensors").unlink()
    return source


def save_sharded(directory, tensors):
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def save_single(directory, tensors):
    torch.save(tensors, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("save", "dtype"),
    [(save_single, torch.bfloat16), (save_sharded, torch.float32)],
    ids=["single, bfloat16", "sharded, float32"],
)
def test_pickles_convert_to_the_bits_of_safetensors(
    source, tensors, tmp_path, converts, refusal, tiny_llama_dir, save, dtype
):
    save(source, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert "pass --allow-pickle, which reads tensors alone" in refusal(source, tmp_path / "dst")
    converts(source, tmp_path / "dst", "--allow-pickle", "--max-shard-size", "100KB")
    options = {"dtype": str(dtype).removeprefix("torch."), "max_shard_size": "100KB"}
    convert_checkpoint(tiny_llama_dir, tmp_path / "expected", **options)
    for file in (tmp_path / "expected").glob("*.safetensors"):
        if dtype == torch.float32:  # otherwise W_T comes from rounded numbers
            assert (tmp_path / "dst" / file.name).read_bytes() == file.read_bytes()
        else:
            for name, tensor in load_file(file).items():
                got = load_file(tmp_path / "dst" / file.name)[name]
                assert "t_proj" in name or torch.equal(got, tensor)
    assert record_of(tmp_path / "dst")["source_format"] == "pickles"


def test_safetensors_are_preferred_to_pickles(tiny_llama_dir, tmp_path):
    both = shutil.copytree(tiny_llama_dir, tmp_path / "both")
    (both / "pytorch_model.bin").write_bytes(b"no zip file")
    record = convert_checkpoint(both, tmp_path / "dst", allow_pickle=True)
    assert record["source_format"] == "safetensors"


class Payload:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize("place", ["beside tensors", "instead", "a list", "before zip files"])
def test_a_planted_payload_is_named_and_not_run(source, tensors, tmp_path, refusal, place):
    payload, is_zip = Payload(tmp_path / "victim"), place != "before zip files"
    planted = {"beside tensors": tensors | {"x": payload}, "a list": [payload]}.get(place, payload)
    file = source / "pytorch_model.bin"
    torch.save(planted, file, _use_new_zipfile_serialization=is_zip)
    printed = refusal(source, tmp_path / "dst", "--allow-pickle")
    named = "it names posix.mkdir), and nothing in it was" if is_zip else ""
    assert f"cannot be read as tensors alone ({named}" in printed
    assert "weights_only" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


REFUSED = {  # what is in the file, made from the tensors
    "got a dict, 'state_dict', expected a dictionary of dense tensors that lie in the file": (
        lambda t: {"state_dict": t}
    ),
    "got a Tensor, expected a dictio": lambda t: torch.ones(2),
    "got a Tensor, 's', expected a dictionary of dense tensors": (
        lambda t: t | {"s": torch.ones(2, 2).to_sparse()}
    ),
    "got a Tensor, 'without memory', expected a dictionary of dense tensors": (
        lambda t: t | {"without memory": torch.ones(2, device="meta")}
    ),
    "got a Tensor, 'larger', expected a dictionary of dense tensors that lie in the file": (
        lambda t: t | {"larger": torch.ones(1).expand(1 << 40)}
    ),
    "tensor model.norm.weight has dtype I8, expected one of F64, F32, F16, BF16": (
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.int8)}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_anything_but_a_dictionary_of_tensors_is_one_line_and_exit_code_2(
    source, tensors, tmp_path, refusal, message
):
    save_single(source, REFUSED[message](tensors))
    assert message in refusal(source, tmp_path / "dst", "--allow-pickle")


def test_a_damaged_file_and_an_absent_shard_are_one_line(source, tensors, tmp_path, refusal):
    save_single(source, tensors)
    file = source / "pytorch_model.bin"
    os.truncate(file, file.stat().st_size - 1000)
    printed = refusal(source, tmp_path / "dst", "--allow-pickle")
    assert "pytorch_model.bin: cannot be read as tensors alone (" in printed
    file.unlink()
    save_sharded(source, tensors)
    (source / "pytorch_model-2.bin").unlink()
    printed = refusal(source, tmp_path / "dst", "--allow-pickle")
    assert "pytorch_model-2.bin: no such file, expected a complete checkpoint" in printed


@pytest.mark.parametrize(
    "view",
    [lambda w: w.T.contiguous().T, lambda w: torch._neg_view(-w)],
    ids=["transposed", "negated"],
)
def test_a_tensor_that_was_saved_as_a_view_is_the_same(
    view, source, tensors, tmp_path, tiny_llama_dir
):
    q = "model.layers.0.self_attn.q_proj.weight"
    save_single(source, tensors | {q: view(tensors[q])})
    convert_checkpoint(source, tmp_path / "dst", allow_pickle=True)
    convert_checkpoint(tiny_llama_dir, tmp_path / "expected")
    name = "model.safetensors"
    assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
