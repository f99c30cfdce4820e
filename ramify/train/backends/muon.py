"""Muon: the step of a matrix is its orthogonalized momentum (Jordan 2024; scaled like AdamW's step:
2502.16982).

    M ← βM + (1-β)G
    U = orthogonal(βM + (1-β)G)
    W ← (1 - lr·decay) W - lr · 0.2 √max(rows, columns) · U

``orthogonal`` is five Newton–Schulz steps, which bring all singular values close to 1. Same as
``torch.optim.Muon`` with two exceptions. On a CPU the products are fp32, since most CPUs are many
times slower in bf16 (a step of the smallest policy took 0.6 s, of which 0.04 s are needed). And
matrices of the same shape are processed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """The Muon optimizer, for matrices only."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                self._step(parameters, group, 0.2 * max(shape) ** 0.5)

    def _step(self, parameters: list[Tensor], group: dict[str, Any], scale: float) -> None:
        updates = self._orthogonal([self._momentum(each, group["momentum"]) for each in parameters])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            parameters, list(updates.to(parameters[0].dtype)), alpha=-group["lr"] * scale
        )

    def _orthogonal(self, matrices: list[Tensor]) -> Tensor:
        return orthogonal(torch.stack(matrices))

    def _momentum(self, parameter: Tensor, beta: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - beta)
        return gradient.lerp(state["momentum"], beta)


def orthogonal(matrices_nRC: Tensor) -> Tensor:
    """Each matrix with its singular values brought close to 1 (0.7 to 1.2), [n, R, C]."""
    x = matrices_nRC.to(torch.bfloat16 if matrices_nRC.is_cuda else torch.float32)
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.transpose(1, 2) if is_tall else x
