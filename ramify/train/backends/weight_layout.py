"""The interface between ``single.py``, which computes, and ``sharding.py``, which knows where
weights are stored.

``SingleProcessLayout`` is for a single device that holds all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ramify.train.backends.optimizers import Muon

T = TypeVar("T")


class WeightLayout(Protocol):
    """How the weights of a model are sharded over ranks, from the view of one rank."""

    @property
    def muon(self) -> type[Muon]:
        """The class that steps matrices in this layout."""
        ...

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        ...

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` with access to the weights. All ranks enter and leave it together."""
        ...

    def agree(self, is_well: bool) -> bool:
        """Whether ``is_well`` is true on every rank."""
        ...

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that compute different batches."""
        ...

    def norm(self, tensors: Many[Tensor]) -> float:
        """Norm of all full tensors together."""
        ...

    def scale(self, tensors: Many[Tensor], factor: float) -> None:
        """Multiply all tensors in place."""
        ...


class SingleProcessLayout:
    """Implements ``WeightLayout`` for a single device."""

    muon = Muon

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def agree(self, is_well: bool) -> bool:
        return is_well

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def norm(self, tensors: Many[Tensor]) -> float:
        return float(squares(tensors).sqrt()) if tensors else 0.0

    def scale(self, tensors: Many[Tensor], factor: float) -> None:
        torch._foreach_mul_(list(tensors), factor)


def squares(tensors: Many[Tensor]) -> Tensor:
    """The sum of all squares, in fp64. In fp32 its rounding would depend on the layout of the
    tensors; so would the clipping factor, and after twenty steps gradients would differ by 2e-5."""
    return (
        torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors])
        .square()
        .sum()
    )
