"""Divide a forked root call into segments, and trace the paths (lines) through these segments.

A root call is forked if several continuations start from one of its turns. A segment is the turns
between two forks. A line is one path through the segments, from the question to one of the ends.

    call 0     t0 t1 t2 ┬ t3 t4        a fork after turn 2: calls 0:1 and 0:2 continue there
    call 0:1            ├ t0
    call 0:2            └ t0 t1

    segments   0 [0, 3)  ->  0 [3, 5),  0:1 [0, 1),  0:2 [0, 2)
    lines      ending in 0 (5 turns), 0:1 (4 turns), 0:2 (5 turns): each as if it were the only one

A segment's share of the rollout is divided equally among the continuations at its end, so the
shares of all lines add up to 1. ``BranchSearch`` decides where a run forks, and
``train/advantages/fork_estimators.py`` decides how training uses the lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ramify.types.trajectory import Call, CallSite, Trajectory


class ForkSegment(NamedTuple):
    """Consecutive turns of a root call, or of one of its continuations, up to the next fork or the
    end."""

    call: Call
    start: int
    """Index of the segment's first turn in ``call.turns``."""
    stop: int
    """Index after the segment's last turn."""
    continuations: tuple[ForkSegment, ...] = ()
    """Segments that follow the fork at the end of this one, starting with the one in the same
    call. Empty at the end of a path.
    """

    def path_ends(self, share: float = 1.0) -> Iterator[tuple[Call, float]]:
        """Yield the last call of each path through this segment, and the path's fraction of the
        rollout.

        These fractions add up to ``share``, the fraction of this segment.
        """
        if not self.continuations:
            yield self.call, share
        for each in self.continuations:
            yield from each.path_ends(share / len(self.continuations))


def first_segment(trajectory: Trajectory) -> ForkSegment:
    """Return the first segment of a forked rollout.

    It leads to all other segments.
    """
    forks: dict[str, dict[int, list[Call]]] = {}
    for call in trajectory.calls:
        if call.parent is None and call.fork is not None:
            after = forks.setdefault(call.fork.call, {})
            after.setdefault(call.fork.turn + 1, []).append(call)

    def from_turn(call: Call, start: int, cuts: list[int]) -> ForkSegment:
        if not cuts:
            return ForkSegment(call, start, len(call.turns))
        cut, *later = cuts
        others = forks[call.id][cut]
        continuations = (from_turn(call, cut, later), *(whole(other) for other in others))
        return ForkSegment(call, start, cut, continuations)

    def whole(call: Call) -> ForkSegment:
        return from_turn(call, 0, sorted(forks.get(call.id, ())))

    return whole(trajectory.root)


def path_trajectory(trajectory: Trajectory, end: Call) -> Trajectory:
    """Extract one path of a forked rollout as a trajectory without forks.

    The path leads from the question to the end of the call ``end``. The result's root call has all
    turns on the path, and the result has only the calls that these turns made. It has no rewards
    yet.
    """
    lineage = [(end, len(end.turns))]
    while (fork := lineage[-1][0].fork) is not None:
        lineage.append((trajectory.call(fork.call), fork.turn + 1))
    places = [(call.id, index) for call, num in reversed(lineage) for index in range(num)]
    number = {place: index for index, place in enumerate(places)}
    root = msgspec.structs.replace(
        end,
        id=trajectory.root.id,
        fork=None,
        turns=[turn for call, num in reversed(lineage) for turn in call.turns[:num]],
    )
    calls, kept = [root], set[str]()
    for call in trajectory.calls:
        if call.parent is None:
            continue
        place = (call.parent.call, call.parent.turn)
        if place in number:
            parent = CallSite(root.id, number[place], call.parent.cell)
            calls.append(msgspec.structs.replace(call, parent=parent))
        elif call.parent.call in kept:
            calls.append(call)
        else:
            continue
        kept.add(call.id)
    return msgspec.structs.replace(
        trajectory,
        calls=calls,
        answer=end.answer,
        answered_by="",
        stop=end.stop,
        reason=end.reason,
        rewards={},
        call_rewards={},
        metrics={},
        marks=[],
        errors=[],
    )
