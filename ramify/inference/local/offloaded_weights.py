"""Release a model's weights while its engine sleeps, and restore them afterwards.

Their memory is released, and they move to main memory or are dropped.

    release_memory(keep=True)  ── wake                          the weights are back
    release_memory(keep=False) ── wake ── every tensor arrives  until then ``missing_names`` names
                                                                those without values

Parameters stay the same objects, so that other users of the model, and matrices that share their
weights, are not affected. Buffers of the model stay.

The KV cache is released in ``engine.py``, and weights are received in ``serve/weight_routes.py``.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor, nn


class OffloadedWeights:
    """Releases and restores the memory of one model's weights.

    Use it only in the engine's thread.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._away: dict[str, Tensor] | None = None
        """Name -> weight in main memory, or on PyTorch's meta device if it was dropped. None while
        all weights are in place."""
        self._device = torch.device("cpu")
        self._missing: dict[int, str] = {}
        """Object id -> name of parameters whose memory is allocated but whose values have not
        arrived."""

    @property
    def is_released(self) -> bool:
        return self._away is not None

    @property
    def missing_names(self) -> list[str]:
        """The names of all weights that were dropped and must be received again."""
        return list(self._missing.values())

    @property
    def num_bytes(self) -> int:
        """The size of the model's weights on the compute device, in bytes."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def release_memory(self, *, keep: bool) -> None:
        """Free the memory of all weights on the compute device.

        With ``keep``, they are first moved to main memory, so nothing happens if the device is the
        CPU.
        """
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
            with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
                ctypes.CDLL(None).malloc_trim(0)  # otherwise it keeps the freed memory

    def wake(self) -> None:
        """Reallocate the weights' device memory, and restore the values of weights that were kept.

        A second call has no effect.
        """
        away, self._away = self._away, None
        for name, each in (away or {}).items():
            parameter = self._model.get_parameter(name)
            if each.is_meta:
                parameter.data = torch.empty_like(each, device=self._device)
                self._missing[id(parameter)] = name
            else:
                parameter.data = each.to(self._device)

    def lacks(self, parameter: Tensor) -> bool:
        """Return True if a weight's values were dropped and have not been received again yet.

        A tied parameter counts as dropped under each of its names.
        """
        return id(parameter) in self._missing

    def mark_received(self, parameter: Tensor) -> None:
        """Record that a weight has been received again completely."""
        self._missing.pop(id(parameter), None)
