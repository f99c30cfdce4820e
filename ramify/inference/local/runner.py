"""What the engine needs of a model: spans of tokens in, logits after each span out, and a memory of slots.

``DenseRunner`` computes all spans of a step in one pass over one axis of tokens. Other models: ``module_runner.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ramify.inference.local.cache import Cache, StepAttention, bytes_per_token
from ramify.inference.local.slots import Change, Span
from ramify.policy.dense import Dense


class Runner(Protocol):
    """A model with a cache of slots."""

    bytes_per_token: int
    """Of the cache; 0 where it is not laid out in advance."""

    def forward(self, spans: Sequence[Span], wanted: Sequence[bool]) -> Tensor:
        """Compute ``spans`` (those of one token first, by slot) into the cache; fp32 logits [n, V] after those spans that
        are ``wanted``, in order."""
        ...

    def change(self, change: Change) -> None:
        """Copy or swap slots."""
        ...

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        """Make other slots, the first of which hold what the slots ``stay`` held."""
        ...

    def forget(self) -> None:
        """Nothing that was computed will be read again."""
        ...

    def all_logits(self, ids: Sequence[int]) -> Tensor:
        """fp32 logits [T, V] after each of ``ids``, without touching the slots."""
        ...


class DenseRunner:
    """Runs ``Dense``."""

    def __init__(self, model: Dense) -> None:
        self._model = model
        parameter = next(model.parameters())
        self._device = parameter.device
        self.bytes_per_token = bytes_per_token(model.shape, parameter.dtype)
        self._cache = Cache(model.shape, 1, 1, parameter.dtype, parameter.device)

    def forward(self, spans: Sequence[Span], wanted: Sequence[bool]) -> Tensor:
        ids_T, positions_T = _flat(spans)
        attend = StepAttention(self._cache, spans)
        h_TD = self._model.hidden(ids_T.to(self._device), positions_T.to(self._device), attend)
        if len(spans) < len(ids_T) or not all(wanted):
            ends = torch.tensor([len(span.ids) for span in spans]).cumsum(0) - 1
            h_TD = h_TD[ends[torch.tensor(wanted)].to(self._device)]
        return self._model.logits(h_TD)

    def change(self, change: Change) -> None:
        self._cache.change(change)

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        self._cache = self._cache.resized(stay, num_slots, capacity)

    def forget(self) -> None:
        pass

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        parameter = next(self._model.parameters())
        alone = Cache(self._model.shape, 1, len(ids), parameter.dtype, parameter.device)
        span = Span(0, 0, ids, len(ids))
        ids_T, positions_T = (each.to(self._device) for each in _flat([span]))
        return self._model.logits(self._model.hidden(ids_T, positions_T, StepAttention(alone, [span])))


def _flat(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """(ids, positions) of all spans one after the other, each [T]."""
    ids: list[int] = []
    positions: list[int] = []
    for _, start, tokens, end in spans:
        ids += tokens
        positions += range(start, end)
    return torch.tensor(ids), torch.tensor(positions)
