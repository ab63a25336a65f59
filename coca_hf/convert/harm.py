"""The harm of converting a layer: how much the original's predictions change.

The harm of a layer is a mean over tokens, in nats, where only this layer has CoCA's attention,
calibrated:

    KL(original's prediction || prediction with this layer converted)

The tokens are held-out text and, as it is lookups that conversion loses, the same with repeated
passages (`repeated_blocks`). `coca-eval layers` measures more: each layer as the last one to be
converted, too.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coca_hf.convert.calibrate import ATTENTION, Angles
from coca_hf.models.decoder import CocaForCausalLM

AUTO_SHARE = 0.5  # of the summed harm: `auto` keeps the fewest layers that do this much of it
CHUNK = 512  # tokens whose predictions are in memory at once


@torch.no_grad()
def layer_harms(
    original: PreTrainedModel,
    coca: CocaForCausalLM,
    fitted: dict[str, Tensor],
    blocks: Tensor,
    device: str,
) -> list[float]:
    """The harm of every layer on `blocks`, (n, m) token ids; both models stay as they are.

    coca: the CoCA model of `original`; fitted: by name, what calibration made of its tensors.
    Memory: the states of a model for every layer, n m hidden * 4 bytes each, on the CPU, and two
    layers on `device`.
    """
    base: Any = original.base_model
    angles = Angles(base, coca, device)
    embed: Any = original.get_input_embeddings()
    streams = [
        embed(blocks.to(embed.weight.device)).float().cpu()
    ]  # of the original, then with layer 0 converted, …
    for number, layers in enumerate(zip(base.layers, coca.model.layers, strict=True)):
        theirs, ours = (copy.deepcopy(layer).to(device, torch.float32).eval() for layer in layers)
        prefix = f"model.layers.{number}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in fitted.items()
            if name.startswith(prefix)
        }
        ours.load_state_dict(own, strict=False)
        converted = _run(ours, streams[0], angles.coca, device)
        streams = [_run(theirs, stream, angles.original, device) for stream in streams]
        streams.append(converted)
    last = coca.model.norm, coca.get_output_embeddings()
    norm, head = (copy.deepcopy(module).to(device, torch.float32) for module in last)
    harms = torch.zeros(len(streams) - 1, dtype=torch.float64)
    for original_states, *others in zip(
        *(stream.flatten(0, 1).split(CHUNK) for stream in streams), strict=True
    ):
        reference = head(norm(original_states.to(device))).log_softmax(-1)
        for layer, states in enumerate(others):
            prediction = head(norm(states.to(device))).log_softmax(-1)
            harms[layer] += (reference.exp() * (reference - prediction)).sum().item()
    return (harms / blocks.numel()).tolist()


def most_harmful(harms: list[float], number: int | None) -> list[int]:
    """The `number` layers of greatest harm; None: the fewest with `AUTO_SHARE` of the sum."""
    order = sorted(range(len(harms)), key=lambda layer: -harms[layer])
    if number is None:
        done = torch.tensor([harms[layer] for layer in order]).cumsum(0)
        number = int((done < AUTO_SHARE * done[-1]).sum()) + 1
    return sorted(order[:number])


def _run(layer: Any, states: Tensor, angles: Callable, device: str) -> Tensor:
    """What `layer` makes of `states`, (n, m, hidden), a block at a time."""
    attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
    attention.config._attn_implementation = ATTENTION
    at = torch.arange(states.shape[1], device=device)[None]
    options = {"attention_mask": None, "position_ids": at, "position_embeddings": angles(at)}
    return torch.cat([layer(block.to(device), **options).cpu() for block in states.split(1)])
