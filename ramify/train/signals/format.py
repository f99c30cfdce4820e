r"""The format of replies: 0 for a turn whose reply matches, -1 for one that does not.

    pattern=r"```repl\n.*?```"     a reply with a code block
    last=r"\\boxed\{.+\}"          the last reply has a different format

A well-formed reply earns nothing: a policy that is rewarded for its format learns the format alone.
"""

from __future__ import annotations

import re

import msgspec

from ramify.errors import ConfigError
from ramify.train.signals.base import SignalContext, SignalScore, steps_of
from ramify.types.trajectory import Group, Trajectory

MAX_CHARS = 50_000
"""Only this many characters at the end of a reply are searched."""


class FormatSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="format",
):
    """Format check that gives a number per turn; implements ``Signal``."""

    pattern: str
    """Regular expression that a reply must contain; a dot also matches newlines."""
    last: str = ""
    """The same for the last reply of a call; empty: ``pattern`` applies."""
    good: float = 0.0
    bad: float = -1.0

    def __post_init__(self) -> None:
        for pattern in (self.pattern, self.last):
            try:
                re.compile(pattern, re.DOTALL)
            except re.error as error:
                raise ConfigError(
                    f"format: {pattern!r} is not a regular expression: {error}"
                ) from error

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        return [self._score(trajectory) for trajectory in group.trajectories]

    def _score(self, trajectory: Trajectory) -> SignalScore:
        reading = SignalScore()
        if not trajectory.calls or not trajectory.root.turns:
            reading.abstained = "empty"
            return reading
        steps = steps_of(trajectory.root)
        for step in steps:
            pattern = self.last if self.last and step is steps[-1] else self.pattern
            is_good = re.search(pattern, step.reply[-MAX_CHARS:], re.DOTALL) is not None
            reading.turns[step.place] = self.good if is_good else self.bad
        reading.counts["malformed"] = float(
            sum(value == self.bad for value in reading.turns.values())
        )
        return reading
