"""What an algorithm is: it looks at scored groups and writes per-token streams on what was sampled; the trainer is blind.

    [Group] ── algorithm.stamp(groups, task's weights) ──> Stamping: [Stamped], denominators, metrics

An algorithm is a small struct in a file of its own; its fields are its options. It reads a whole step's groups at once,
so that every statistic is global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ramify.train.stamps import Stamped
from ramify.types.trajectory import Group


class Stamping(msgspec.Struct):
    """What one step learns from."""

    rollouts: list[Stamped]
    """Those that teach something, in the order of the groups."""
    denominators: dict[str, float]
    """Loss component -> what its sum over the whole step is divided by."""
    metrics: dict[str, float]
    silence: str = ""
    """Why there is nothing to learn, in a sentence; empty where there is."""


class Algorithm(Protocol):
    """Implemented by every class in this room's registry."""

    @property
    def has_group_baseline(self) -> bool:
        """Whether rollouts are judged against others of the same task, so that a group of one teaches nothing."""
        ...

    def stamp(self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False) -> Stamping:
        """The streams of one optimizer step. ``weights`` weigh the task's rewards by name. With ``every_token`` tokens
        whose advantage is 0 are stamped too, since the loss has a term that acts on each: a KL, an entropy."""
        ...
