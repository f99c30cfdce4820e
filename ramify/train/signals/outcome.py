"""The outcome: a verifier says whether, tool use shapes how wrong; its number takes the place of
the task's reward.

    acc = 1 -> o = 1        acc = 0 -> o = min(-0.6, -1 + 0.05·(k - 2)),  k = tool observations: 0 -> -1.1, 4 -> -0.9

A wrong answer stays below zero however many tools it used, and a right one gets no bonus, so that
shaping cannot pay for being wrong. Without a verifier the task's own total counts. Evaluate on the
task's reward, never on this one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import RamifyError
from ramify.tasks.base import Item, total
from ramify.tasks.scoring.rubric import Rubric
from ramify.train.signals.base import ModelCaller, SignalContext, SignalScore
from ramify.train.signals.tool_use import num_observations
from ramify.types.trajectory import Group, Trajectory

RIGHT = 1.0
WORST, PER_CALL, FREE, CAP = -1.0, 0.05, 2, -0.6


def shaped(right: bool, num_calls: int) -> float:
    """The outcome of a rollout with ``num_calls`` tool observations. 12 calls and wrong: -0.6, the
    cap."""
    return RIGHT if right else min(CAP, WORST + PER_CALL * (num_calls - FREE))


class OutcomeSignal(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="outcome",
):
    """Implements ``Signal``: ``SignalScore.outcome``."""

    verifier: str = ""
    """Of ``tasks.scoring.SCORERS``, or ``module:attribute`` called with (answer, item); empty: the
    task's own reward."""
    rubric: Rubric | None = None
    """A judge model grades instead."""
    model: str = ""
    """The judge's, ``provider:model``, for a rubric."""
    sampling: Sampling = Sampling(2048, temperature=0.0)
    passed: float = 0.5
    """Least score that is right."""
    tools: bool = True
    """Shape what is wrong by tool use; otherwise it is -1."""
    raw: bool = False
    """The score itself, neither ±1 nor shaped."""

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        item = context.items.get(group.task)
        return list(
            await asyncio.gather(*(self._one(each, item, context) for each in group.trajectories))
        )

    async def _one(
        self, trajectory: Trajectory, item: Item | None, context: SignalContext
    ) -> SignalScore:
        reading = SignalScore()
        if item is None or not trajectory.rewards:
            reading.abstained = "not scored" if item is not None else "unknown item"
            return reading
        try:
            score = await self._score(trajectory, item, context, reading)
        except RamifyError as error:
            reading.abstained = "no grade" if self.rubric is not None else "verifier failed"
            reading.counts["failed"] = 1.0
            trajectory.errors.append(f"outcome: {error}")
            return reading
        right = score >= self.passed
        num_calls = num_observations(trajectory.root) if self.tools else FREE
        reading.outcome = score if self.raw else shaped(right, num_calls)
        reading.counts["accuracy"] = float(right)
        return reading

    async def _score(
        self, trajectory: Trajectory, item: Item, context: SignalContext, reading: SignalScore
    ) -> float:
        if self.rubric is not None:
            if context.asking is None:
                raise RamifyError(
                    "a rubric needs a judge to ask, and there is no pool of clients here"
                )
            ask = context.asking.of(trajectory, "outcome", reading)
            return await self._graded(self.rubric, trajectory, item, ask)
        if not self.verifier:
            return total(trajectory.rewards, context.weights)
        worth = await asyncio.to_thread(_verifier(self.verifier), trajectory.answer, item)
        return float(worth)

    async def _graded(
        self, rubric: Rubric, trajectory: Trajectory, item: Item, ask: ModelCaller
    ) -> float:
        place = (trajectory.root.id, len(trajectory.root.turns) - 1)
        reply = await ask(
            self.model, rubric.messages(item, trajectory.answer), self.sampling, place
        )
        grade = rubric.read(reply.message.content)
        if grade is None:
            raise RamifyError(
                "the judge's reply holds no grades in the form asked for: "
                f"…{reply.message.content[-80:]!r}"
            )
        return grade


def _verifier(name: str) -> Any:
    from ramify.tasks.scoring import SCORERS
    from ramify.train.override import of_name

    return (
        SCORERS[name] if name in SCORERS else of_name(name, dict.fromkeys(SCORERS, ""), "verifier")
    )
