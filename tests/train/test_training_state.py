"""What a stage resumes from is read as data: nothing that somebody planted in it runs."""

import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint.metadata
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from coca_hf.train.training_state import _Unpickler, load_state, save_state


class Payload:
    """Pickled, it makes a file `ran` where it is read."""

    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory / "ran"),)


def trained():
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_is_saved_comes_back(tmp_path):
    model, optimizer = trained()
    save_state(model, optimizer, tmp_path)
    other = nn.Linear(3, 5)
    empty = torch.optim.AdamW(other.parameters(), lr=0.3)
    load_state(other, empty, tmp_path)
    assert torch.equal(other.weight, model.weight)
    assert empty.param_groups[0]["lr"] == 0.01
    assert torch.equal(
        empty.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_a_bit_that_changed_on_the_disk_is_not_trained_on(tmp_path):
    model, optimizer = trained()
    save_state(model, optimizer, tmp_path)
    [file] = (tmp_path / "state").glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.find(model.weight.detach().numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    file.write_bytes(content)
    other = nn.Linear(3, 5)
    with pytest.raises(CheckpointException, match="got another CRC-32 than was written"):
        load_state(other, torch.optim.AdamW(other.parameters()), tmp_path)


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enum."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_an_enum_that_an_older_python_wrote_is_read_and_no_other_attribute():
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    written = pickle.dumps(Attribute(encoding, "TORCH_PRESERVE_FORMAT"))
    assert _Unpickler(io.BytesIO(written)).load() is encoding.TORCH_PRESERVE_FORMAT
    for kind, name in ((encoding, "__init__"), (torch.Size, "numel")):
        with pytest.raises(pickle.UnpicklingError, match=f"got attribute {name} in .metadata"):
            _Unpickler(io.BytesIO(pickle.dumps(Attribute(kind, name)))).load()


def test_a_payload_that_is_planted_as_an_optimizers_option_does_not_run(tmp_path):
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = Payload(tmp_path)
    save_state(model, optimizer, tmp_path)
    with pytest.raises(CheckpointException, match=r"mkdir"):
        load_state(*trained(), tmp_path)
    assert not (tmp_path / "ran").exists()
