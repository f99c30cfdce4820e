"""The weights of a model that answers, given back while it sleeps: kept in main memory, or dropped.

    give_back(keep=True)  ── take_again                          what was there is there again
    give_back(keep=False) ── take_again ── every tensor arrives  until then the model has no weights, and ``missing`` says which

Parameters stay the objects that they are, so that whoever holds the model, or ties two matrices,
need not know. Buffers stay. Leaves out the cache of keys and values (``engine.py``), and who sends
weights (``serve/weight_routes.py``).
"""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor, nn


class SleepingWeights:
    """The weights of one model. Belongs to the engine's thread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._away: dict[str, Tensor] | None = None
        """Name -> the weight in main memory, or one on PyTorch's meta device where it was dropped;
        None while all are there."""
        self._device = torch.device("cpu")
        self._missing: dict[int, str] = {}
        """Identity -> name, of parameters whose memory is there again and whose values are not."""

    @property
    def is_away(self) -> bool:
        return self._away is not None

    @property
    def missing(self) -> list[str]:
        """Names of the tensors whose values nobody has brought since they were dropped."""
        return list(self._missing.values())

    @property
    def num_bytes(self) -> int:
        """That the weights take where the model computes."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def give_back(self, *, keep: bool) -> None:
        """Free the memory of all weights. With ``keep`` they go to main memory; where they are in
        it already, they stay."""
        parameters = dict(self._model.named_parameters())
        self._device = next(iter(parameters.values())).device
        if self._away is not None or (keep and self._device.type == "cpu"):
            return
        self._away = {
            name: each.detach().to("cpu" if keep else "meta") for name, each in parameters.items()
        }
        for each in parameters.values():
            each.data = each.data.new_empty(0)
        if self._device.type == "cpu":
            with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
                ctypes.CDLL(None).malloc_trim(0)  # or it keeps what was freed, for later

    def wake(self) -> None:
        """Take the memory again, and what was kept into it. Idempotent."""
        away, self._away = self._away, None
        for name, each in (away or {}).items():
            parameter = self._model.get_parameter(name)
            if each.is_meta:
                parameter.data = torch.empty_like(each, device=self._device)
                self._missing[id(parameter)] = name
            else:
                parameter.data = each.to(self._device)

    def lacks(self, parameter: Tensor) -> bool:
        """Whether the values of ``parameter``, by whichever of its names, are missing."""
        return id(parameter) in self._missing

    def arrived(self, parameter: Tensor) -> None:
        """All values of ``parameter`` are there."""
        self._missing.pop(id(parameter), None)
