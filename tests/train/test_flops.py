"""Operations of a stage against closed forms, in multiplications for each token, two operations each."""

import pytest
import yaml
from transformers import LlamaConfig

import coca_hf
from coca_hf.train.flops import count_flops, peak_flops
from coca_hf.train.recipe import load_recipe
from tests.conftest import TINY

SEQ_LEN, VOCAB, WIDTH, RANK, LAYERS = 22, 70, 48, 5, 3
ADAPTER = 2 * RANK * WIDTH
Q = WIDTH * WIDTH
T, V = WIDTH * 8, WIDTH * 16  # two heads of 8, of which coefficients are half as wide
AFTER = WIDTH * WIDTH + 3 * WIDTH * 80  # o_proj and the MLP
LAYER, HEAD = Q + T + V + AFTER, VOCAB * WIDTH
PRODUCT = WIDTH * SEQ_LEN  # scores, sums of values, or one of their four gradients
FORWARD = LAYERS * (LAYER + 2 * PRODUCT) + HEAD
# What all gradients pass on the way to the projections of the first layer, without its attention
TO_FIRST = HEAD + (LAYERS - 1) * (LAYER + 4 * PRODUCT) + AFTER
STAGES = {
    "everything": ({"train": "all"}, 3 * FORWARD),
    "head": ({"train": ["lm_head"]}, FORWARD + HEAD),
    # in the first layer, the gradients of probabilities, and of keys or queries
    "coefficients": ({"train": ["t_proj"]}, FORWARD + TO_FIRST + 2 * PRODUCT + LAYERS * T),
    "queries": ({"train": ["q_proj"]}, FORWARD + TO_FIRST + 2 * PRODUCT + LAYERS * Q),
    "adapters": (
        {"train": ["q_proj"], "lora": {"r": RANK, "alpha": 6}},
        FORWARD + TO_FIRST + 2 * PRODUCT + (3 * LAYERS - 1) * ADAPTER + ADAPTER // 2,
    ),
}


@pytest.fixture
def count(tmp_path):
    def count(config, **stage) -> int:
        config.save_pretrained(tmp_path)
        tree = {"model": str(tmp_path), "stages": [{"name": "any", "max_steps": 1, **stage}]}
        tree["data"] = {"seq_len": SEQ_LEN, "sources": [{"path": "absent.txt", "weight": 1}]}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        recipe = load_recipe(tmp_path / "recipe.yaml", ["training.gradient_checkpointing=true"])
        return count_flops(recipe, recipe.stages[0])

    return count


def coca(**own):
    return coca_hf.CocaLlamaConfig(vocab_size=VOCAB, **TINY, **own)


@pytest.mark.parametrize("stage", STAGES)
def test_operations_are_those_that_the_trained_parameters_need(count, stage):
    own, products = STAGES[stage]
    assert count(coca(), **own) == 2 * products


def test_an_original_has_whole_keys(count):
    llama = count(LlamaConfig(vocab_size=VOCAB, **TINY), train="all")
    # transformers computes the angles by matrix products, of which there are few
    assert 0 <= llama - 2 * 3 * (FORWARD + LAYERS * T) < WIDTH


def test_a_window_bounds_the_keys_of_its_layers(count):
    wide, near = (
        count(coca(coca_kept_layers=[1], coca_kept_window=window), train="all")
        for window in (None, 9)
    )
    assert wide - near == 6 * 2 * WIDTH * (SEQ_LEN - 9)


def test_a_gpu_is_known_by_its_name():
    peaks = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12}
    peaks |= {"NVIDIA A100-SXM4-80GB": 312e12, "a100": 312e12}
    peaks |= {"NVIDIA RTX A4000": None, "cpu": None, "NVIDIA GeForce RTX 4090": 165.2e12}
    others = ["H100 80GB HBM3 MIG 1g.10gb", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D"]
    peaks |= {f"NVIDIA {name}": None for name in (*others, "GeForce RTX 3090 Ti", "A40-48Q")}
    assert {name: peak_flops(name) for name in peaks} == peaks
