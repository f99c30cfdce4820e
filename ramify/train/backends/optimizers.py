"""The optimizer of one model: which parameters Muon updates, which ones AdamW, and which ones
decay.

    matrices inside layers         Muon or AdamW, with weight decay
    embedding, output matrix       AdamW, without weight decay
    norms, biases, value head      AdamW, without weight decay

Not here: the learning-rate schedule (``OptimizerSpec.lr_at``), and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ramify.train.backends.base import OptimizerSpec
from ramify.train.backends.muon import Muon

_OUTSIDE = ("embed", "lm_head", "wte", "wpe", "output_embedding", "value_head")
"""Name parts of matrices that are not inside a layer."""


class CombinedOptimizer:
    """One or two optimizers behind one interface."""

    def __init__(self, model: nn.Module, optim: OptimizerSpec, muon: type[Muon] = Muon) -> None:
        self._optim = optim
        inside, others = _split(model)
        adamw: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}]
        self._all: list[torch.optim.Optimizer] = []
        if optim.kind == "muon" and inside:
            self._all.append(muon(inside, optim.lr, optim.momentum, optim.weight_decay))
        else:
            adamw.append({"params": inside, "weight_decay": optim.weight_decay})
        groups = [group for group in adamw if group["params"]]
        if groups:
            self._all.append(
                torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
            )

    def step(self, lr: float) -> None:
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    @property
    def each(self) -> list[torch.optim.Optimizer]:
        return self._all

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices inside layers, all other parameters) that are trained."""
    inside: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (inside if is_inside(name, parameter) else others).append(parameter)
    return inside, others


def is_inside(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside a layer."""
    return parameter.dim() == 2 and not any(part in name for part in _OUTSIDE)
