"""Define the interface of hint sources, which provide hints for a teacher, and the registry of
sources.

    finished group ── source of hints ──> HintsForTrajectory for each trajectory ── teacher

The sources are in ``extras/studies/hindsight_hints.py`` or in plug-ins. ``teacher.py`` decides how
hints are used.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry
from ramify.train.signals.base import SignalContext, SignalScore, TurnId
from ramify.types.trajectory import Group


class HintsForTrajectory(msgspec.Struct, eq=False):
    """The hints that a source found for one trajectory, by turn.

    Example:
        HintsForTrajectory(SignalScore(), {("0", 1): ["The list is sorted."]})
    """

    reading: SignalScore
    """The source's notes, counts and judge calls for this trajectory. Its field ``abstained`` is
    set if no hint was found.
    """
    at: dict[TurnId, list[str]] = msgspec.field(default_factory=dict)
    """Candidate hints for each turn, best first. The teacher sees a hint just before the turn's
    reply.
    """


class HintSource(Protocol):
    """The interface of a hint source, such as ``train.HindsightHints`` or ``train.FeedbackHints``.

    It finds hints in finished rollouts for a teacher to use.
    """

    async def hints(self, group: Group, context: SignalContext) -> list[HintsForTrajectory]:
        """Return the hints for each trajectory of ``group``, in order."""
        ...


HINTS = PluginRegistry("source of hints", "ramify.hints", {})
"""Maps a name to the class that implements ``HintSource``."""


def build_hint_source(spec: Any) -> HintSource | None:
    """Build the hint source that a configuration describes.

    Returns None if ``spec`` is None. Raises ConfigError if there is no such source.
    """
    if spec is None:
        return None
    source: HintSource = HINTS.build(spec)
    if not callable(getattr(source, "hints", None)):
        raise ConfigError(f"{spec!r} does not give hints: use one of {', '.join(HINTS)}")
    return source
