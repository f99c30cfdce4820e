"""Which groups teach something, and how many more are to be rolled out: the zero-variance filter,
dynamic sampling.

A group whose calls all have advantage 0 has no gradient. Kept in a batch it only dilutes the
others' weight, so it is left out before weights are counted, and, with dynamic sampling (DAPO,
2503.14476), another task is tried in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

EPSILON = 1e-9


def has_signal(numbers: Sequence[Mapping[str, float]]) -> bool:
    """Whether any call of the group's rollouts has an advantage."""
    return any(abs(value) > EPSILON for tree in numbers for value in tree.values())


def num_more(wanted: int, kept: int, tried: int, max_tried: int) -> int:
    """How many further groups to roll out, given that ``kept`` of ``tried`` had a signal: as many
    as should be enough at that rate, at least what is missing, never past ``max_tried`` in all.

    wanted 8, 2 of 8 kept, at most 32: 24 more.  6 of 8 kept: 3 more."""
    missing = wanted - kept
    if missing <= 0:
        return 0
    expected = math.ceil(missing * tried / kept) if kept else missing
    return max(0, min(expected, max_tried - tried))
