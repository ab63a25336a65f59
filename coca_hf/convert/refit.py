"""W_O of the calibrated layers, by ridge regression on the hidden states of the converted model.

`layer_fit.py` fits each layer on what the original has there. Put together, each layer reads what the
layers before it made of the text, and their small differences add up. So every converted layer, in
order, gets the W_O that brings the residual stream after its attention nearest to the original's,
earlier differences included (GPTAQ, arXiv 2504.02692):

    minimise  mean over tokens  |(x' + a') - (x + W_O o)|^2 / |x' + a'|^2  +  λ |W_O - the original's|^2

with x the stream, a the output of the attention and o what W_O receives; ' marks the original. The
division lets all tokens count alike: attention sinks have norms a thousand times those of others. λ is
`RIDGE` times the mean of the diagonal of what o's second moments are in this sum.

Positions are in order. With skipped ones, whose maps are farther from the original's, the regression
shrinks W_O, and repeated passages come out worse than without it (docs/results/calibrate).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coca_hf.convert.layer_pairs import (
    ATTENTION,
    HiddenStates,
    LayerPairs,
    attention_of,
    batches,
    run_layer,
)
from coca_hf.models.decoder import CocaConfig
from coca_hf.precision import tf32

RIDGE = 1.0
TOKENS_A_COLUMN = 32  # of W_O; a quarter of the blocks, if that is more


def blocks_to_refit_on(config: CocaConfig, blocks: Tensor, seed: int) -> Tensor:
    """The numbers of the blocks, out of (n_b, m), that W_O is fitted on."""
    width = config.num_attention_heads * config.head_dim
    wanted = max(TOKENS_A_COLUMN * width, blocks.numel() // 4)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(blocks), generator=draw)
    return order[: math.ceil(wanted / blocks.shape[1])].sort().values


@torch.no_grad()
def refit_outputs(
    pairs: LayerPairs,
    fitted: Mapping[str, Tensor],
    blocks: Tensor,
    held_out: Tensor,
    folder: Path,
) -> tuple[dict[str, Tensor], HiddenStates]:
    """W_O of the converted layers by name, in float32, and the hidden states of `held_out` after the
    last layer.

    fitted: the calibrated tensors by name in the CoCA model. blocks: token ids to fit on, (n_b, m);
    held_out: (n, m). folder: gets a file for every W_O, `refit-N.safetensors`, from which it is mapped
    into memory, and one of hidden states, `states-refit`.
    """
    ids, embeddings = torch.cat((blocks, blocks, held_out)), pairs.embeddings()
    sizes = len(blocks), len(blocks), len(held_out)
    states = HiddenStates(folder / "states-refit", (*ids.shape, pairs.config.hidden_size))
    for some in batches(states):
        states[some] = embeddings[ids[some]].float()
    theirs, ours, unseen = states.split(*sizes)
    at, at_unseen = (
        torch.arange(ids.shape[1], device=pairs.device).expand(size, -1) for size in sizes[1:]
    )
    outputs = dict[str, Tensor]()
    for number in range(len(pairs)):
        original, converted = pairs.load(number, fitted)
        if number in pairs.layout.converted:
            sums = Sums(pairs, original, converted)
            run_layer(
                original,
                theirs,
                theirs,
                at,
                pairs.angles.original,
                lambda some, *_: sums.add(theirs[some], ours[some], at[some]),  # noqa: B023
            )
            name = f"model.layers.{number}.self_attn.o_proj.weight"
            file = folder / f"refit-{number:05}.safetensors"
            save_file({name: sums.solve()}, file)
            outputs |= load_file(file)  # mapped into memory
            weight = converted.self_attn.o_proj.weight
            weight.data = outputs[name].to(weight)
        else:
            run_layer(original, theirs, theirs, at, pairs.angles.original)
        run_layer(converted, ours, ours, at, pairs.angles.coca)
        run_layer(converted, unseen, unseen, at_unseen, pairs.angles.coca)
    return outputs, unseen


class Sums:
    """The sums over tokens that decide a layer's W_O.

    original, converted: the layer in both models; they are given hooks, which stay.
    """

    def __init__(self, pairs: LayerPairs, original: Any, converted: Any):
        self._pairs, self._converted = pairs, converted
        self._output = converted.self_attn.o_proj
        converted.self_attn.config._attn_implementation = ATTENTION
        self._scale = getattr(pairs.config, "residual_multiplier", 1.0)
        width, hidden = self._output.in_features, self._output.out_features
        self._moments = torch.zeros(width, width, dtype=torch.float64)
        self._wanted = torch.zeros(width, hidden, dtype=torch.float64)
        # what the original's attention returns, and what W_O receives
        self._noted = noted = dict[str, Tensor]()
        attention_of(original).register_forward_hook(
            lambda _, __, result: noted.update(a=result[0])
        )
        self._output.register_forward_pre_hook(lambda _, given: noted.update(o=given[0]))

    def add(self, theirs: Tensor, ours: Tensor, at: Tensor) -> None:
        """Count the tokens of blocks that have just run through the original's layer.

        theirs, ours: the states before it in both models, (b, m, hidden). at: positions, (b, m).
        """
        theirs, ours = (states.to(at.device) for states in (theirs, ours))
        self._converted.self_attn(
            self._converted.input_layernorm(ours),
            attention_mask=None,
            position_embeddings=self._pairs.angles.coca(at),
        )
        theirs, ours, a, o = (
            part.flatten(0, 1).float()
            for part in (theirs, ours, self._noted["a"], self._noted["o"])
        )
        wanted = a + (theirs - ours) / self._scale
        if self._output.bias is not None:
            wanted -= self._output.bias
        with torch.autocast("cpu", enabled=False), tf32(False):
            sizes = (theirs + self._scale * a).square().mean(-1, keepdim=True)
            weighted = (o / sizes.clamp(min=1e-8)).mT  # an embedding may be zero
            self._moments += (weighted @ o).double().cpu()
            self._wanted += (weighted @ wanted).double().cpu()

    def solve(self) -> Tensor:
        """W_O, (hidden, width), in float32."""
        before = self._output.weight.double().cpu()
        ridge = RIDGE * self._moments.diagonal().mean()
        if ridge == 0:  # values that are always zero decide nothing
            return before.float()
        moments = self._moments + ridge * torch.eye(len(self._moments), dtype=torch.float64)
        return torch.linalg.solve(moments, self._wanted + ridge * before.mT).mT.float().contiguous()
