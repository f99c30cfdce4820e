"""The zero-variance filter and dynamic sampling: which groups have a signal, and how many more
groups to roll out.

A group whose calls all have advantage 0 has no gradient. In a batch it would only dilute the other
groups' weight, so it is left out before weights are computed. With dynamic sampling (DAPO,
2503.14476) another task is rolled out in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

EPSILON = 1e-9


def has_signal(numbers: Sequence[Mapping[str, float]]) -> bool:
    """Whether any call of the group's rollouts has a non-zero advantage."""
    return any(abs(value) > EPSILON for tree in numbers for value in tree.values())


def num_more(wanted: int, kept: int, tried: int, max_tried: int) -> int:
    """How many more groups to roll out, given that ``kept`` of ``tried`` had a signal: as many as
    should suffice at that rate, at least the number missing, and never more than ``max_tried`` in
    total.

    wanted 8, 2 of 8 kept, at most 32: 24 more.  6 of 8 kept: 3 more."""
    missing = wanted - kept
    if missing <= 0:
        return 0
    expected = math.ceil(missing * tried / kept) if kept else missing
    return max(0, min(expected, max_tried - tried))
