"""Hints for a teacher: what a source of hints returns, and which sources have names.

    finished group ── source of hints ──> HintsForTrajectory for each trajectory ── teacher

Decides what a source of hints is. Not here: the sources (``extras/studies/hindsight_hints.py``, or
a plug-in), and how hints are used (``teacher.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import Registry
from ramify.train.signals.base import SignalContext, SignalScore, TurnId
from ramify.types.trajectory import Group


class HintsForTrajectory(msgspec.Struct, eq=False):
    """The hints found for one trajectory.

    Example:
        HintsForTrajectory(SignalScore(), {("0", 1): ["The list is sorted."]})
    """

    reading: SignalScore
    """Notes, counts and the judges' calls; ``abstained`` is set if no hint was found."""
    at: dict[TurnId, list[str]] = msgspec.field(default_factory=dict)
    """Turn before whose reply the hints are shown -> candidate hints, best first."""


class HintSource(Protocol):
    """A source of hints, such as ``train.Hindsight`` or ``train.FeedbackHints``."""

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        """The hints for each trajectory, in order."""
        ...


HINTS = Registry("source of hints", "ramify.hints", {})
"""Name -> the class that implements ``HintSource``."""


def hints_of(spec: Any) -> HintSource | None:
    """Build the hint source that ``spec`` describes; None if ``spec`` is None. Raises ConfigError
    if there is no such source."""
    if spec is None:
        return None
    source: HintSource = HINTS.build(spec)
    if not callable(getattr(source, "hints", None)):
        raise ConfigError(f"{spec!r} does not give hints: use one of {', '.join(HINTS)}")
    return source
