"""Counts the rollouts of a training step whose answer the task could not score, such as those on
which the user's reward function raised, and says what was raised and how often.

    rollouts ──> ScoreFailures(num=9, num_scored=1, …)
             ──> "9 of 12 rollouts could not be scored: 9 times: its score raised KeyError: 'b', …"

Such rollouts have no reward, and nothing is learned from them. Which share of them ends a run is
decided in ``run_doctor.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from ramify.types.trajectory import Group, Trajectory

_MOST_NAMED = 3
"""Number of different errors that a message quotes."""
_VARYING = re.compile(r"item \S+: |'[^']*'|\"[^\"]*\"|\b\d+\b(?! \()")
"""Parts in which two errors of the same line of code differ: the item, quoted values, numbers."""


class ScoreFailures(msgspec.Struct, frozen=True):
    """The rollouts of a training step that could not be scored."""

    num: int
    """Rollouts whose score failed."""
    num_scored: int
    """Rollouts with an answer that have a reward. Others, which gave no answer and got a reward all
    the same, do not show that the score works."""
    num_rollouts: int
    """All rollouts of the step."""
    errors: str
    """The errors and how often each occurred; empty if none failed."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> ScoreFailures:
        """Count the failures in the rollouts of ``groups``."""
        trees = [tree for group in groups for tree in group.trajectories]
        reasons = [tree.score_error for tree in trees if tree.score_error]
        scored = sum(bool(tree.rewards) and tree.answer is not None for tree in trees)
        return cls(len(reasons), scored, len(trees), counted(reasons))

    def metrics(self) -> dict[str, float]:
        return {"score_errors": float(self.num), "scored_answers": float(self.num_scored)}

    def __str__(self) -> str:
        return f"{self.num} of {self.num_rollouts} rollouts could not be scored: {self.errors}"


def failures_of(trajectories: Sequence[Trajectory]) -> str:
    """Return the last error of each trajectory, with the number of trajectories that have it."""
    return counted([each.errors[-1] for each in trajectories if each.errors])


def counted(errors: Sequence[str]) -> str:
    """Return each of the most common errors with its number. Errors that differ only in an item or
    in a quoted value count as the same, and the first of them is quoted.

    >>> counted(["no number in 'a'", "no number in 'b'", "the grader is down"])
    "2 times: no number in 'a'; once: the grader is down"
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for error in errors:
        kind = _VARYING.sub("…", error)
        first.setdefault(kind, error)
        counts[kind] += 1
    parts = [
        f"{'once' if num == 1 else f'{num:,} times'}: {first[kind]}"
        for kind, num in counts.most_common(_MOST_NAMED)
    ]
    more = len(counts) - _MOST_NAMED
    if more > 0:
        parts.append(f"{more:,} other error{'s' if more > 1 else ''}")
    return "; ".join(parts)
