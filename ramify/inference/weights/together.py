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


def changed(now: Sequence[Tensor], had: Sequence[Tensor]) -> list[int]:
    """Which of ``now`` differ by a bit from those of ``had``, which have their shapes and are made equal to them. All of ``now``
    are of one precision and contiguous, those of ``had`` in main memory."""
    now_N, had_N = flat(now), flat(had).to(now[0].device)
    if torch.equal(now_N, had_N):
        return []
    ends = torch.tensor([*itertools.accumulate(each.numel() for each in now)], device=now_N.device)
    differs_N = torch.bucketize((now_N != had_N).nonzero()[:, 0], ends, right=True)
    found: list[int] = differs_N.unique_consecutive().tolist()
    torch._foreach_copy_([had[index] for index in found], [now[index] for index in found])
    return found


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Their bits as integers, one after the other."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.cat([each.view(-1) for each in tensors]).view(kinds[tensors[0].element_size()])


def joined(sources: Sequence[Source], now: Sequence[Tensor], number: int) -> tuple[Source, dict[str, Any]]:
    """(one source of the values ``now`` of all ``sources``, the table that takes it apart again)"""
    whole_N = flat(now).view(now[0].dtype)
    table = {"names": [source.name for source in sources], "shapes": [list(source.shape) for source in sources]}
    return Source(f"{PREFIX}{number}", tuple(whole_N.shape), whole_N.dtype, None, lambda: whole_N), table


def apart(whole_N: Tensor, table: Mapping[str, Any]) -> Iterator[Piece]:
    """What was joined. Raises ValueError where ``table`` is of other tensors."""
    try:
        names, shapes = table["names"], table["shapes"]
        parts = whole_N.split([math.prod(shape) for shape in shapes])
        for name, shape, part in zip(names, shapes, parts, strict=True):
            yield Piece(name, part.view(shape))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the table of tensors that came together does not describe them: {error!r}") from None
