"""Parameters in groups of the same settings, what is remembered of each, and its saved form; AdamW.

The saved form and AdamW's kernel are those of ``torch.optim``, to the bit. Its classes are left out for what they cost: the
first that is made in a process imports torch's compiler, two seconds, which is as long as a small run takes.
Which parameter is moved by what is in ``optimizers.py``, Muon in ``muon.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Optimizer(ABC):
    """Of parameters whose gradients are there when ``step`` is called."""

    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self.param_groups: list[dict[str, Any]] = [{**group, "params": list(group["params"])} for group in groups]
        """Each with its ``params``, ``lr`` and what else the algorithm asks for."""
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """Parameter -> what is remembered of it, by name; none before its first step."""

    @abstractmethod
    def step(self) -> None:
        """Move every parameter that has a gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Parameters are numbered in the order of their groups."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        groups = [group | {"params": [numbers[each] for each in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[each]: dict(state) for each, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        there = [len(group["params"]) for group in saved["param_groups"]]
        here = [len(group["params"]) for group in self.param_groups]
        if there != here:
            raise ValueError(f"the saved optimizer has groups of {there} parameters, this one of {here}")
        for group, other in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({name: other[name] for name in group.keys() & other.keys() - {"params"}})
        parameters = self._parameters()
        self.state.clear()
        for number, state in saved["state"].items():
            owner = parameters[number]
            self.state[owner] = {name: _beside(owner, name, each) for name, each in state.items()}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class AdamW(Optimizer):
    """Decoupled weight decay (1711.05101). A group has ``params`` and its own ``weight_decay``."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__({"lr": lr, "betas": betas, "eps": eps, **group} for group in groups)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.device, parameter.dtype].append(parameter)
            for parameters in alike.values():
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[each] for each in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        steps, means, squares = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters, [each.grad for each in parameters if each.grad is not None], means, squares, [], steps, lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False,
        )  # fmt: skip


def _beside(parameter: Tensor, name: str, value: Tensor) -> Tensor:
    """A copy where the parameter is, in its precision; the number of steps stays exact."""
    return value.to(device=parameter.device, dtype=None if name == "step" else parameter.dtype, copy=True)
