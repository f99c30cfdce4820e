"""Many small tensors as one: looked at, copied and described together, since each by itself costs more than its bytes do.

    trainer   norm.1 norm.2 …   ── joined ──▶ '::together-0' [N], table: names, lengths, shapes
    engine    '::together-0', table           ── apart ──▶ norm.1, norm.2, …

Leaves out which tensors are small, and who keeps what engines have (``delta.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ramify.inference.weights.base import Piece, Source

PREFIX = "::together-"


def bits(tensor: Tensor) -> Tensor:
    """As integers, flat: equal bits are equal, also those of NaN and of the two zeros."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(kinds[tensor.element_size()])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all values of one precision, one tensor after the other: [N]."""
    return torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in tensors])


def differing(now_N: Tensor, had_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Which parts of these ``lengths`` differ by a bit."""
    num_N = torch.constant_pad_nd((bits(now_N) != bits(had_N)).cumsum(0), (1, 0))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=now_N.device)
    found: list[int] = num_N[bounds].diff().nonzero()[:, 0].tolist()
    return found


def joined(sources: Sequence[Source], values_N: Tensor, number: int) -> tuple[Source, dict[str, Any]]:
    """(one source of the values of all ``sources``, the table that takes it apart again)"""
    table = {"names": [source.name for source in sources], "shapes": [source.shape for source in sources]}
    return Source(f"{PREFIX}{number}", tuple(values_N.shape), values_N.dtype, None, lambda: values_N), table


def apart(values_N: Tensor, table: Mapping[str, Any]) -> Iterator[Piece]:
    """What was joined. Raises ValueError where ``table`` is of other tensors."""
    try:
        names, shapes = table["names"], table["shapes"]
        parts = values_N.split([math.prod(shape) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield Piece(name, part if len(shape) == 1 else part.view(shape))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the table of tensors that came together does not describe them: {error!r}") from None
