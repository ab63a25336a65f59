"""`muon: true`: weight matrices learn by Muon (Jordan et al., 2024), everything else by AdamW.

Muon moves a matrix by its momentum made orthogonal: equally far along all directions, however
little of the gradient they have. Scaled to AdamW's step (arXiv 2502.16982), both take the same
learning rate.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel


def block_matrices(model: PreTrainedModel) -> list[Tensor]:
    """The parameters that learn by Muon: matrices, except those of the embedding and the head."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    others = {id(parameter) for end in ends for parameter in end.parameters()}
    learning = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return [matrix for matrix in learning if matrix.ndim == 2 and id(matrix) not in others]


class MuonWithAdamW(Optimizer):
    """One optimizer for whatever schedules rates, shards parameters or saves states: Muon updates
    `matrices`, `adamw` its other parameters.

    Groups keep the learning rate and weight decay that `adamw` has for them.
    """

    def __init__(self, adamw: AdamW, matrices: Iterable[Tensor]):
        self._adamw, chosen = adamw, {id(matrix) for matrix in matrices}
        self._muon = Muon([torch.zeros(1, 1)], adjust_lr_fn="match_rms_adamw")
        groups: list[dict[str, Any]] = []
        for group in adamw.param_groups:
            by_muon = [parameter for parameter in group["params"] if id(parameter) in chosen]
            by_adamw = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            rates = {key: group[key] for key in ("lr", "weight_decay")}
            own = {**self._muon.defaults, **rates}
            groups += [
                {**own, "params": by_muon, "by_muon": True},
                {**group, "params": by_adamw, "by_muon": False},
            ]
        super().__init__([group for group in groups if group["params"]], defaults={})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            # both may have been replaced: parameters by shards, states by those of a checkpoint
            part.param_groups = [g for g in self.param_groups if g["by_muon"] is is_muon]
            part.state = self.state
            part.step()
