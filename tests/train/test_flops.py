"""Counted operations against those that torch's own counter sees in a real forward and backward."""

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import coca_hf
from coca_hf.train.flops import count_flops, peak_flops
from coca_hf.train.model import freeze_
from coca_hf.train.recipe import Stage
from tests.conftest import TINY

SEQ_LEN, BATCH = 22, 2
CONFIGS = {
    "coca": coca_hf.CocaLlamaConfig(vocab_size=70, **TINY),
    "tied": coca_hf.CocaLlamaConfig(vocab_size=70, tie_word_embeddings=True, **TINY),
    "llama": LlamaConfig(vocab_size=70, **TINY),
    "sliding": Qwen2Config(
        vocab_size=70, use_sliding_window=True, sliding_window=8, max_window_layers=1, **TINY
    ),
}
STAGES = {
    "k": ["t_proj"],
    "qkv": ["q_proj", "t_proj", "v_proj"],
    "attention": ["self_attn"],
    "mlp": ["up_proj"],
    "last": ["2.mlp", "lm_head"],
    "norms": ["post_attention_layernorm"],
    "full": "all",
}


def counted(model, checkpointing: bool = False) -> tuple[int, int]:
    """Operations that a forward and a backward do, per token."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 70, (BATCH, SEQ_LEN))
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    tokens = BATCH * SEQ_LEN
    assert counter.get_total_flops() % tokens == 0
    return forward // tokens, (counter.get_total_flops() - forward) // tokens


def build(config, train):
    # torch counts all of its products
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    freeze_(model, Stage.model_validate({"name": "any", "train": train}))
    return model


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", ["coca", "tied"])
def test_operations_are_those_that_torch_counts(family, stage):
    model = build(CONFIGS[family], STAGES[stage])
    flops = count_flops(model, SEQ_LEN)
    forward, backward = counted(model)
    assert flops.forward == forward
    assert flops.backward_activations + flops.backward_weights == backward
    assert flops.model == forward + backward


def test_operations_of_the_original_are_those_that_torch_counts():
    model = build(CONFIGS["llama"], "all")
    angles = sum(counted(model)) - count_flops(model, SEQ_LEN).model
    assert angles in (0, 4)  # transformers 5.17 computes the angles by matrix products


@pytest.mark.parametrize("stage", ["k", "full", "last"])
def test_checkpointing_adds_what_is_stated(stage):
    model = build(CONFIGS["coca"], STAGES[stage])
    flops = count_flops(model, SEQ_LEN)
    _, backward = counted(model, checkpointing=True)
    assert backward == flops.backward_activations + flops.backward_weights + flops.checkpointing


def test_a_model_without_memory_counts_the_same():
    with torch.device("meta"):
        empty = build(CONFIGS["coca"], ["t_proj"])
    assert count_flops(empty, SEQ_LEN) == count_flops(build(CONFIGS["coca"], ["t_proj"]), SEQ_LEN)


def test_a_sliding_window_bounds_the_keys():
    model = build(CONFIGS["sliding"], "all")
    full_layers, sliding_layers, width = 1, 2, 6 * 8
    products = count_flops(model, 100).forward - count_flops(model, 50).forward
    assert products == full_layers * 4 * width * 50
    assert count_flops(model, 50).forward - count_flops(model, 4).forward == (
        full_layers * 4 * width * 46 + sliding_layers * 4 * width * 4
    )


def test_a_gpu_is_known_by_its_name():
    peaks = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12}
    peaks |= {"NVIDIA A100-SXM4-80GB": 312e12, "a100": 312e12}
    peaks |= {"NVIDIA RTX A4000": None, "cpu": None}
    assert {name: peak_flops(name) for name in peaks} == peaks
