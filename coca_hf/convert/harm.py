"""The harm of converting a layer: how much the original's predictions change.

The harm of a layer is a mean over tokens, in nats, where only this layer has CoCA's attention,
calibrated:

    KL(original's prediction || prediction with this layer converted)

The tokens are held-out text and, as it is lookups that conversion loses, the same with repeated
passages (`repeated_blocks`). `coca-eval layers` measures more: each layer as the last one to be
converted, too.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from coca_hf.convert.layer_pairs import HiddenStates, LayerPairs, run_layer
from coca_hf.models.decoder import CocaConfig

AUTO_SHARE = 0.5  # of the summed harm: `auto` keeps the fewest layers that do this much of it
CHUNK = 512  # tokens whose predictions are in memory at once


@torch.no_grad()
def layer_harms(
    pairs: LayerPairs, fitted: Mapping[str, Tensor], blocks: Tensor, folder: Path
) -> list[float]:
    """The harm of every layer of `pairs` on `blocks`, (n, m) token ids.

    fitted: by name in the CoCA model, what calibration made of its tensors. folder: gets a file of
    `harm_bytes` while this runs; memory holds a pair of layers and a block.
    """
    file, shape = folder / "states-harm", (*blocks.shape, pairs.config.hidden_size)
    states = HiddenStates(file, (len(blocks) * (len(pairs) + 1), *shape[1:]))
    # of the original, then with layer 0 converted, …
    streams = list(states.split(*[len(blocks)] * (len(pairs) + 1)))
    positions = torch.arange(blocks.shape[1], device=pairs.device).expand(blocks.shape)
    angles = pairs.angles
    try:
        streams[0][:] = pairs.embeddings()[blocks]
        for number in range(len(pairs)):
            theirs, ours = pairs.load(number)
            prefix = f"model.layers.{number}."
            names = [name for name in fitted if name.startswith(prefix)]
            own = {name.removeprefix(prefix): fitted[name] for name in names}
            ours.load_state_dict(own, strict=False)
            run_layer(ours, streams[0], streams[number + 1], positions, angles.coca, batch_tokens=1)
            for stream in streams[: number + 1]:
                run_layer(theirs, stream, stream, positions, angles.original, batch_tokens=1)
        return _divergences(pairs, streams)
    finally:
        file.unlink(missing_ok=True)


def _divergences(pairs: LayerPairs, streams: list[HiddenStates]) -> list[float]:
    """KL of the predictions of the first stream to those of each of the others, nats."""
    norm, head = pairs.norm_and_head()
    harms = torch.zeros(len(streams) - 1, dtype=torch.float64)
    blocks, length, _ = streams[0].shape
    chunks = [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]
    for block, rows in itertools.product(range(blocks), chunks):
        chosen = (stream[block : block + 1][0, rows].to(pairs.device) for stream in streams)
        log_predictions = (linear(norm(states), head).log_softmax(-1) for states in chosen)
        reference = next(log_predictions)
        for layer, prediction in enumerate(log_predictions):
            harms[layer] += (reference.exp() * (reference - prediction)).sum().item()
    return (harms / (blocks * length)).tolist()


def harm_bytes(config: CocaConfig, num_tokens: int) -> int:
    """Bytes of hidden states in a model for each layer, and in the original."""
    return num_tokens * config.hidden_size * 4 * (config.num_hidden_layers + 1)


def most_harmful(harms: list[float], number: int | None) -> list[int]:
    """The `number` layers of greatest harm; None: the fewest with `AUTO_SHARE` of the sum."""
    order = sorted(range(len(harms)), key=lambda layer: -harms[layer])
    if number is None:
        done = torch.tensor([harms[layer] for layer in order]).cumsum(0)
        number = int((done < AUTO_SHARE * done[-1]).sum()) + 1
    return sorted(order[:number])
