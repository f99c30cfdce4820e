"""What is otherwise where a model's weights lie over several ranks: the seam between ``single.py``,
which computes, and ``sharding.py``, which knows where weights are.

``SingleProcessLayout`` is for one device that holds them all: everything is as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ramify.train.backends.muon import Muon

T = TypeVar("T")


class WeightLayout(Protocol):
    """How the weights of a model lie over ranks, as one of them sees it."""

    @property
    def muon(self) -> type[Muon]:
        """The class that steps matrices as they lie."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def run(self, work: Callable[[], T]) -> T:
        """``work`` with the weights at hand. Every rank enters and leaves it together with the
        others."""
        ...

    def agree(self, is_well: bool) -> bool:
        """Whether all is well on every rank."""
        ...

    def norm(self, tensors: Many[Tensor]) -> float:
        """Of all tensors together, whole."""
        ...


class SingleProcessLayout:
    """Implements ``WeightLayout``."""

    muon = Muon

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def agree(self, is_well: bool) -> bool:
        return is_well

    def norm(self, tensors: Many[Tensor]) -> float:
        return float(squares(tensors).sqrt()) if tensors else 0.0


def squares(tensors: Many[Tensor]) -> Tensor:
    """The sum of all squares, in fp64. In fp32 it would be rounded as the tensors happen to lie:
    with it the factor that gradients are scaled by, and after twenty steps the gradient differs by
    2e-5."""
    return (
        torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors])
        .square()
        .sum()
    )
