"""Process reward: a judge says of each turn, given the observation that followed, whether it was
right.

    votes 1, 1, -1                 mean: 1/3        majority: 1, and a tie is 0
    all votes outside the format   the turn has no number; if no turn has one, the signal abstains

Every turn of the root is judged, including the last, all concurrently. The judge never sees the
right answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.errors import RamifyError
from ramify.train.signals.base import Judge, JudgeVerdict, SignalContext, SignalScore, view_of
from ramify.train.signals.judge import judge_of, known_judge
from ramify.types.trajectory import Call, Group, Trajectory

Merge = Literal["mean", "majority"]


def merged(votes: Sequence[int], merge: Merge) -> float | None:
    """Merge valid votes into one number; None if there are none."""
    if not votes:
        return None
    if merge == "mean":
        return sum(votes) / len(votes)
    counts = {sign: sum(vote == sign for vote in votes) for sign in set(votes)}
    most = max(counts.values())
    best = [sign for sign, count in counts.items() if count == most]
    return float(best[0]) if len(best) == 1 else 0.0


class ProcessRewardSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="process",
):
    """A judge's score from -1 to 1 for each turn; implements ``Signal``."""

    judge: Any
    """A name from ``judge.JUDGES``, ``module:Class``, or an instance; its ``votes`` are used."""
    merge: Merge = "mean"
    children: bool = False
    """Also judge the turns of calls below the root."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "judge", known_judge(self.judge))

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        judge = judge_of(self.judge)
        return list(
            await asyncio.gather(
                *(
                    self._score(judge, trajectory, group.task, context)
                    for trajectory in group.trajectories
                )
            )
        )

    async def _score(
        self, judge: Judge, trajectory: Trajectory, task: str, context: SignalContext
    ) -> SignalScore:
        reading = SignalScore()
        item = context.items.get(task)
        ask = (
            context.asking.of(trajectory, "process", reading)
            if context.asking is not None
            else None
        )
        turns = [
            (call, index) for call in self._calls(trajectory) for index in range(len(call.turns))
        ]
        verdicts = await asyncio.gather(
            *(_judged(judge, trajectory, call, index, item, ask) for call, index in turns)
        )
        for (call, index), verdict in zip(turns, verdicts, strict=True):
            value = merged(verdict.votes, self.merge)
            if value is not None:
                reading.turns[call.id, index] = value
            _count(reading, "votes", len(verdict.votes))
            _count(reading, "invalid", verdict.invalid)
        if not reading.turns:
            reasons = (verdict.reason for verdict in verdicts if verdict.reason)
            reading.abstained = next(reasons, "no vote")
        return reading

    def _calls(self, trajectory: Trajectory) -> list[Call]:
        if not trajectory.calls:
            return []
        return (
            [call for call in trajectory.calls if call.kind == "rlm"]
            if self.children
            else [trajectory.root]
        )


async def _judged(
    judge: Judge, trajectory: Trajectory, call: Call, index: int, item: Any, ask: Any
) -> JudgeVerdict:
    try:
        return await judge.judge(view_of(trajectory, call, index, item, ask))
    except RamifyError as error:
        return JudgeVerdict(reason=type(error).__name__, invalid=1)


def _count(reading: SignalScore, name: str, num: int) -> None:
    reading.counts[name] = reading.counts.get(name, 0.0) + num
