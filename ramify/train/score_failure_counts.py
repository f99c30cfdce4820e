"""Count the rollouts of a training step that the task could not score, and summarise their errors.

A typical cause is a user's reward function that raises.

    rollouts ──> ScoreFailureCounts(num=9, num_scored=1, …)
             ──> "9 of 12 rollouts could not be scored: 9 times: its score raised KeyError: 'b', …"

Such rollouts have no reward, and nothing is learned from them. ``training_guard.py`` decides how
many of them end a run.
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
"""Parts that may differ between two errors of the same line of code: item, quoted values,
numbers."""


class ScoreFailureCounts(msgspec.Struct, frozen=True):
    """The number of rollouts in a training step that could not be scored, and the reasons."""

    num: int
    """Number of rollouts that could not be scored."""
    num_scored: int
    """Rollouts with both an answer and a reward. Rollouts without an answer may get a reward too,
    but do not show that the scoring works."""
    num_rollouts: int
    """Number of all rollouts of the step."""
    errors: str
    """The errors and how often each occurred. Empty if no score failed."""

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> ScoreFailureCounts:
        """Count the rollouts of ``groups`` that could not be scored."""
        trees = [tree for group in groups for tree in group.trajectories]
        reasons = [tree.score_error for tree in trees if tree.score_error]
        scored = sum(bool(tree.rewards) and tree.answer is not None for tree in trees)
        return cls(len(reasons), scored, len(trees), summarise_errors(reasons))

    def metrics(self) -> dict[str, float]:
        return {"score_errors": float(self.num), "scored_answers": float(self.num_scored)}

    def __str__(self) -> str:
        return f"{self.num} of {self.num_rollouts} rollouts could not be scored: {self.errors}"


def error_summary(trajectories: Sequence[Trajectory]) -> str:
    """Summarise the last error of each trajectory: the most common errors, with counts."""
    return summarise_errors([each.errors[-1] for each in trajectories if each.errors])


def summarise_errors(errors: Sequence[str]) -> str:
    """Format the most common errors and their counts as text.

    Errors that differ only in an item or a quoted value count as the same, and the first of them is
    quoted.

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
