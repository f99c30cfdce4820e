"""Update the weights of a model with AdamW or Muon.

The optimizers access the weights through a ``OptimizerWeightAccess``, which hides whether one
device or several ranks hold them. The version for several ranks is in ``sharding.py``.

Which parameters each optimizer updates:

    matrices inside layers         Muon or AdamW, with weight decay
    embedding, output matrix       AdamW, without weight decay
    norms, biases, value head      AdamW, without weight decay

Muon (Jordan 2024; scaled like AdamW's step: 2502.16982): the step of a matrix is its orthogonalized
momentum. ``sharding.py`` has it for matrices that are sharded by rows.

    M ← βM + (1-β)G
    U = orthogonal(βM + (1-β)G)
    W ← (1 - lr·decay) W - lr · 0.2 √max(rows, columns) · U

The learning-rate schedule is in ``OptimizerSpec.lr_at``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ramify.train.backends.base import OptimizerSpec

_OUTSIDE = ("embed", "lm_head", "wte", "wpe", "output_embedding", "value_head")
"""Name fragments that identify matrices outside the layers, such as embeddings and the output
matrix.
"""


_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """The Muon optimizer, which updates matrices.

    Unlike ``torch.optim.Muon``, it processes matrices of the same shape together. On a CPU it
    multiplies in fp32, since bf16 is many times slower on most CPUs: with it, a step of the
    smallest policy took 0.6 s instead of 0.04 s.
    """

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
        updates = self._orthogonalize_matrices(
            [self._update_momentum(each, group["momentum"]) for each in parameters]
        )
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            parameters, list(updates.to(parameters[0].dtype)), alpha=-group["lr"] * scale
        )

    def _orthogonalize_matrices(self, matrices: list[Tensor]) -> Tensor:
        return orthogonalize(torch.stack(matrices))

    def _update_momentum(self, parameter: Tensor, beta: float) -> Tensor:
        """Update a parameter's momentum with its gradient, and return the Nesterov momentum."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - beta)
        return gradient.lerp(state["momentum"], beta)


class CombinedOptimizer:
    """A model's optimizer, which can combine Muon and AdamW.

    It uses AdamW for all parameters, or Muon for the matrices inside layers and AdamW for the rest.
    """

    def __init__(self, model: nn.Module, optim: OptimizerSpec, muon: type[Muon] = Muon) -> None:
        self._optim = optim
        inside, others = _split(model)
        adamw: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}]
        self._all: list[torch.optim.Optimizer] = []
        if optim.kind == "muon" and inside:
            self._all.append(muon(inside, optim.peak_lr, optim.momentum, optim.weight_decay))
        else:
            adamw.append({"params": inside, "weight_decay": optim.weight_decay})
        # Fused AdamW steps only tensors of one mesh together.
        groups = [
            {**group, "params": params} for group in adamw for params in _by_mesh(group["params"])
        ]
        if groups:
            betas = optim.betas or (0.9, 0.98)
            rate = optim.peak_lr
            adam = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=optim.eps, fused=True)
            self._all.append(adam)

    def step(self, lr: float) -> None:
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._all

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trained parameters into the matrices inside layers and all other parameters."""
    inside: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (inside if is_hidden_matrix(name, parameter) else others).append(parameter)
    return inside, others


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the device mesh over which they are sharded."""
    found: dict[Any, list[nn.Parameter]] = {}
    for each in parameters:
        found.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return list(found.values())


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a matrix inside a layer.

    Embeddings, norms and the output matrix are not.
    """
    return parameter.dim() == 2 and not any(part in name for part in _OUTSIDE)


def orthogonalize(matrices_nRC: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix to each of n matrices, given as a tensor of shape
    [n, R, C].

    All singular values become close to 1, between 0.7 and 1.2.
    """
    x = matrices_nRC.to(torch.bfloat16 if matrices_nRC.is_cuda else torch.float32)
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.transpose(1, 2) if is_tall else x


T = TypeVar("T")


class OptimizerWeightAccess(Protocol):
    """The interface through which an optimizer accesses a model's weights on one rank.

    The rank may hold only a shard of them.
    """

    @property
    def muon_class(self) -> type[Muon]:
        """The Muon optimizer class for these weights, which depends on how the weights are
        sharded."""
        ...

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        ...

    def run_with_weights(self, work: Callable[[], T]) -> T:
        """Call ``work``, a function that uses the weights, and return its result.

        All ranks must make this call together, because the weights may have to be gathered first.
        """
        ...

    def all_ranks_agree(self, is_well: bool) -> bool:
        """Return True if every rank passes True, so that all ranks reach the same decision."""
        ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the data-parallel ranks, which compute different batches."""
        ...

    def global_norm(self, tensors: Many[Tensor]) -> float:
        """Return the joint norm of all the given tensors.

        The shards on other ranks are included.
        """
        ...

    def scale(self, tensors: Many[Tensor], factor: float) -> None:
        """Multiply all tensors in place."""
        ...


class SingleProcessWeightSharding:
    """Access to the weights of a model on a single device.

    The device holds all of the weights, so nothing is sharded or gathered.
    """

    muon_class = Muon

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run_with_weights(self, work: Callable[[], T]) -> T:
        return work()

    def all_ranks_agree(self, is_well: bool) -> bool:
        return is_well

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def global_norm(self, tensors: Many[Tensor]) -> float:
        return float(sum_of_squares(tensors).sqrt()) if tensors else 0.0

    def scale(self, tensors: Many[Tensor], factor: float) -> None:
        torch._foreach_mul_(list(tensors), factor)


def sum_of_squares(tensors: Many[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements of the given tensors, computed in fp64.

    In fp32 the rounding, and so the factor of gradient clipping, would depend on the layout of the
    tensors. Gradients would then differ by 2e-5 after twenty steps.
    """
    return (
        torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors])
        .square()
        .sum()
    )
