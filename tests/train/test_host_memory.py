"""Host memory of two FSDP2 processes while the weights are loaded and sharded, on a model large
enough to matter.

COCA_LAYERS sets its size, 49 MB of float32 weights a layer: COCA_LAYERS=16 pytest -s
tests/train/test_host_memory.py
"""

import json
import os
import resource
from functools import partial

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import coca_hf
from coca_hf.train import model, stages
from tests.train.layouts import FSDP2, Run, before_each_step, succeed

pytestmark = pytest.mark.real
SIZES = {"hidden_size": 1024, "intermediate_size": 2816}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8}


def note_memory(directory, all_load):
    """Bytes of a process before and after it loads the model, and their peak up to step 1."""
    load, facts = stages._load, {}

    def load_and_note(*arguments):
        facts["before"] = psutil.Process().memory_info().rss
        loaded = load(*arguments)
        facts["loaded"] = psutil.Process().memory_info().rss
        return loaded

    def note_peak(trainer):
        facts["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(facts))

    stages._load = load_and_note
    before_each_step(note_peak)
    if all_load:
        model.weights_are_sent_here = lambda: False


@pytest.fixture(scope="module")
def large_recipe(tiny_tokenizer, real_recipe, tmp_path_factory):
    """A recipe that trains a few weights of a model of 0.4 GB, and the bytes of all of them."""
    directory = tmp_path_factory.mktemp("large")
    layers = int(os.environ.get("COCA_LAYERS", "8"))
    sizes = SIZES | {"num_hidden_layers": layers, "vocab_size": len(tiny_tokenizer)}
    config = coca_hf.CocaLlamaConfig(**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.bfloat16().save_pretrained(directory / "model")  # float32 would stay in the page cache
    tiny_tokenizer.save_pretrained(directory / "model")
    tree = yaml.safe_load(real_recipe.read_text()) | {"model": str(directory / "model")}
    tree["data"]["held_out_blocks"] = 0
    tree["stages"] = [{"name": "k", "train": ["norm"], "max_steps": 1, "save_strategy": "no"}]
    (directory / "large.yaml").write_text(yaml.safe_dump(tree))
    return directory / "large.yaml", sum(4 * p.numel() for p in model.parameters())


def peaks(recipe, num_bytes, directory, all_load=False) -> list[float]:
    """The peak of each process above its start, as a share of the bytes of all weights."""
    directory.mkdir()
    note = partial(note_memory, directory, all_load)
    succeed(directory, [Run([recipe, "--out", directory / "out"], FSDP2, note)])
    facts = [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, of_rank in enumerate(facts):
        values = {name: round(value / 1e9, 2) for name, value in of_rank.items()}
        print(f"weights {num_bytes / 1e9:.2f} GB, all load: {all_load}, rank {rank}: {values} GB")
    return [(of_rank["peak"] - of_rank["before"]) / num_bytes for of_rank in facts]


def test_a_process_that_is_sent_its_shard_never_holds_all_weights(large_recipe, tmp_path):
    main, other = peaks(*large_recipe, tmp_path / "sent")
    assert other < 0.9 < main
    assert min(peaks(*large_recipe, tmp_path / "all", all_load=True)) > 1
