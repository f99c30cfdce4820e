"""Bundles of many small tensors, compared, copied and described as one, since the overhead of each
exceeds the cost of its bytes.

    trainer   norm.1 norm.2 …  ── TensorBundles ──▶ '::together-0' [N], table: names, shapes
    engine    '::together-0', table  ── apart ──▶ norm.1, norm.2, …

Not here: which tensors are small (see ``delta.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ramify.inference.weight_sync import bits
from ramify.inference.weight_sync.base import WeightPiece, WeightSource

_PREFIX = "::together-"


class TensorBundles:
    """Small tensors of one precision, and the values that the engines have."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._had_N = torch.empty(0)
        """The engines' values, one tensor after the other, in main memory."""

    def changed(
        self, sources: Sequence[WeightSource], number: int
    ) -> tuple[WeightSource, dict[str, Any]] | None:
        """(one source of the tensors that engines lack, the table that takes it apart again); None
        if they lack nothing. The call records ``sources`` as what the engines now have, and forgets
        all others."""
        names = [source.name for source in sources]
        lengths = [math.prod(source.shape) for source in sources]
        now_N = _flat([source.full() for source in sources])
        which = self._which(names, lengths, now_N)
        self._names, self._lengths, self._had_N = names, lengths, now_N.cpu()
        if not which:
            return None
        if len(which) < len(sources):
            parts = now_N.split_with_sizes(lengths)
            now_N = torch.cat([parts[index] for index in which])
        table = {
            "names": [names[index] for index in which],
            "shapes": [sources[index].shape for index in which],
        }
        return WeightSource(
            f"{_PREFIX}{number}", tuple(now_N.shape), now_N.dtype, None, lambda: now_N
        ), table

    def _which(self, names: list[str], lengths: list[int], now_N: Tensor) -> Sequence[int]:
        if (names, lengths) == (self._names, self._lengths):
            return bits.parts(bits.bits(now_N), bits.bits(self._had_N.to(now_N.device)), lengths)
        had = dict(zip(self._names, self._had_N.split_with_sizes(self._lengths), strict=True))
        parts = zip(names, now_N.split_with_sizes(lengths), strict=True)
        return [
            index
            for index, (name, part) in enumerate(parts)
            if name not in had
            or not torch.equal(bits.bits(part), bits.bits(had[name].to(part.device)))
        ]


def apart(values_N: Tensor, table: Mapping[str, Any]) -> Iterator[WeightPiece]:
    """The tensors of a bundle. Raises ValueError if ``table`` does not describe it."""
    try:
        names, shapes = table["names"], table["shapes"]
        parts = values_N.split_with_sizes([math.prod(shape) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield WeightPiece(name, part if len(shape) == 1 else part.view(shape), holds=True)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the table of a tensor bundle does not describe it: {error!r}") from None


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all values, one tensor after the other: [N]."""
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])
