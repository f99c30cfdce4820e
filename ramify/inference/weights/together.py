"""Many small tensors as one: looked at, copied and described together, since each by itself costs more than its bytes do.

    trainer   norm.1 norm.2 …   ── joined ──▶ '::together-0' [N], table: names, shapes
    engine    '::together-0', table           ── apart ──▶ norm.1, norm.2, …

Leaves out which tensors are small, and who keeps what engines have (``delta.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ramify.inference.weights.base import Piece, Source

_PREFIX = "::together-"


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all values of one precision, one tensor after the other: [N]."""
    return torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in tensors])


def joined(sources: Sequence[Source], values_N: Tensor, number: int) -> tuple[Source, dict[str, Any]]:
    """(one source of the values of all ``sources``, the table that takes it apart again)"""
    table = {"names": [source.name for source in sources], "shapes": [source.shape for source in sources]}
    return Source(f"{_PREFIX}{number}", tuple(values_N.shape), values_N.dtype, None, lambda: values_N), table


def apart(values_N: Tensor, table: Mapping[str, Any]) -> Iterator[Piece]:
    """What was joined. Raises ValueError where ``table`` is of other tensors."""
    try:
        names, shapes = table["names"], table["shapes"]
        parts = values_N.split([math.prod(shape) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield Piece(name, part if len(shape) == 1 else part.view(shape))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the table of tensors that came together does not describe them: {error!r}") from None
