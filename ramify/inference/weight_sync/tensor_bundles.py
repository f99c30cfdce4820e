"""Bundles of many small tensors, compared, copied and described as one, since the overhead of each
exceeds the cost of its bytes.

    trainer   norm.1 norm.2 …  ── TensorBundles ──▶ '::together-0' [N], table: names, shapes
    engine    '::together-0', table  ── apart ──▶ norm.1, norm.2, …

Differences are those of bits: equal bits are equal, also for NaN; the two zeros differ. Not here:
which tensors are small, and what is sent of the difference (see ``delta.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.inference.weight_sync.base import WeightPiece, WeightSource

SAMPLE = 512
"""Values in a sample; only larger tensors are sampled."""
_RUNS = 32
"""Number of runs of neighbouring values in a sample."""
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, flat."""
    return tensor.contiguous().view(-1).view(_KINDS[tensor.element_size()])


def differing_places(now_N: Tensor, had_N: Tensor) -> Tensor:
    """Positions at which the bits differ, in order. On a CPU, numpy takes a third of PyTorch's
    time."""
    if now_N.is_cuda:
        return (now_N != had_N).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(now_N.numpy() != had_N.numpy()))


def differing_parts(now_N: Tensor, had_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Which parts differ; their ``lengths`` follow one after the other."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=now_N.device)
    differing: list[int] = (
        torch.searchsorted(differing_places(now_N, had_N), bounds).diff().nonzero()[:, 0].tolist()
    )
    return differing


def differing_share(now_N: Tensor, had_N: Tensor) -> float:
    """Share of differing values in a sample."""
    return int(torch.count_nonzero(_sample(now_N) != _sample(had_N))) / SAMPLE


def _sample(bits_N: Tensor) -> Tensor:
    """Values from all over the tensor, in runs of neighbours: loading a page is expensive, and the
    values next to the first are then free."""
    return bits_N[: len(bits_N) // _RUNS * _RUNS].view(_RUNS, -1)[:, : SAMPLE // _RUNS]


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
            return differing_parts(bits(now_N), bits(self._had_N.to(now_N.device)), lengths)
        had = dict(zip(self._names, self._had_N.split_with_sizes(self._lengths), strict=True))
        parts = zip(names, now_N.split_with_sizes(lengths), strict=True)
        return [
            index
            for index, (name, part) in enumerate(parts)
            if name not in had or not torch.equal(bits(part), bits(had[name].to(part.device)))
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
