"""Floating-point operations of training, per token, and the peak of GPUs, for times and MFU.

Matrix products count, with two operations for each multiplication: those of the linear layers,
including the head, and those of attention over the whole square of scores, not its causal half, as
in PaLM (arXiv 2204.02311, appendix B). In the backward, a frozen weight has no gradient, and
nothing before the first trained parameter has one.
"""

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from coca_hf.models.attention import layer_types

# Dense bfloat16 operations a second, from the manufacturers' data sheets (which often give twice
# the number, for sparse matrices): nvidia.com/en-us/data-center/{b200,h200,h100,a100,l40s,l4,...},
# NVIDIA's Ampere and Ada GPU architecture whitepapers for RTX (with float32 sums),
# amd.com/en/products/accelerators/instinct. The first key whose words are all in a name counts.
PEAK_FLOPS = {
    **{"B200": 2250e12, "H200 NVL": 836e12, "H200": 989e12, "GH200": 989e12, "H100 NVL": 835e12},
    **{"H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12},
    **{"A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12},
    **{"A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12},
    **{"RTX 4090": 165.2e12, "RTX 3090": 71e12, "MI325X": 1307.4e12, "MI300X": 1307.4e12},
}

# The order of modules inside a decoder layer, by their names in all families; others come first
_STEPS = (
    ("input_layernorm",),
    ("q_proj", "k_proj", "t_proj", "v_proj", "query_key_value"),
    ("q_norm", "k_norm"),
    ("o_proj", "dense"),
    ("post_attention_layernorm",),
    ("gate_proj", "up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
)
_STEP = {part: step for step, parts in enumerate(_STEPS) for part in parts}
_PROJECT, _OUTPUT = _STEP["q_proj"], _STEP["o_proj"]
_QUERY = {"q_proj", "q_norm", "query_key_value"}
_KEY = {"k_proj", "k_norm", "t_proj", "query_key_value"}
_VALUE = {"v_proj", "query_key_value"}


@dataclass(frozen=True)
class TokenFlops:
    """Operations for one token. MFU counts `model`, without those of gradient checkpointing."""

    forward: int
    backward_activations: int
    backward_weights: int
    # Added by gradient checkpointing: every layer's forward again, and gradients down to the
    # embedding, which transformers then requires whatever is trained
    checkpointing: int

    @property
    def model(self) -> int:
        return self.forward + self.backward_activations + self.backward_weights


def count_flops(model: PreTrainedModel, seq_len: int) -> TokenFlops:
    """Operations per token of a causal language model, for blocks of `seq_len` tokens, if those of
    its parameters are trained that require gradients.

    The model may be on the meta device or sharded. LoRA adapters count as linear layers. Parallel
    attention and MLP (GPT-NeoX) count as one after the other, so the first trained layer may come
    out a little high.
    """
    config = model.config
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = min(map(_position, trained), default=(float("inf"), 0))
    forward = activations = weights = layers = unneeded = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            place, flops = _position(name), 2 * module.weight.numel()
            forward += flops
            activations += flops * (place > first)
            unneeded += flops * (place <= first)
            weights += flops * module.weight.requires_grad
            layers += flops * (place[0] < config.num_hidden_layers)

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer, kind in enumerate(layer_types(config)):
        keys = min(seq_len, config.sliding_window) if kind == "sliding_attention" else seq_len
        # The forward has two products: the scores, and the sums of values
        product = 2 * config.num_attention_heads * head_dim * keys
        gradients = _attention_gradients(trained, layer, first)
        forward += 2 * product
        activations += product * gradients
        unneeded += product * (4 - gradients)
        layers += 2 * product
    return TokenFlops(forward, activations, weights, layers + unneeded)


def peak_flops(gpu: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU, by torch's name or a short one (H100), or None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if _words(name) <= _words(gpu)), None)


def _position(name: str) -> tuple[float, int]:
    """Where a module or parameter comes in the forward: its layer (embeddings first) and step."""
    parts = name.split(".")
    if "layers" in parts:
        step = max(_STEP.get(part, 0) for part in parts)
        return int(parts[parts.index("layers") + 1]), step
    return (-1, 0) if any("embed" in part for part in parts) else (float("inf"), 0)


def _attention_gradients(trained: list[str], layer: int, first: tuple[float, int]) -> int:
    """Products in the backward of a layer's attention: values, probabilities, queries, keys."""
    if not (layer, _PROJECT) <= first < (layer, _OUTPUT):
        return 4 if first < (layer, _PROJECT) else 0
    parts = {part for name in trained if _position(name)[0] == layer for part in name.split(".")}
    queries, keys, values = (not parts.isdisjoint(names) for names in (_QUERY, _KEY, _VALUE))
    return values + (queries or keys) + queries + keys


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name.lower()))
