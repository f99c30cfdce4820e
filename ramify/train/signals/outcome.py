"""The outcome signal: a verifier decides whether a rollout is right, and tool use shapes how wrong
a wrong one is. Its number replaces the task's reward.

    accuracy 1 -> outcome 1
    accuracy 0 -> outcome min(-0.6, -1 + 0.05·(k - 2)) for k tool observations: 0 -> -1.1, 4 -> -0.9

A wrong answer stays below zero however many tools it used, and a right one gets no bonus, so
shaping can never reward a wrong answer. Without a verifier, the task's own total reward counts.
Evaluate on the task's reward, never on this one.
"""

from __future__ import annotations

import asyncio

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
    """The outcome of a rollout with ``num_calls`` tool observations. Wrong with 12 calls: -0.6, the
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
    """Verifier or judge that sets ``SignalScore.outcome``; implements ``Signal``.

    Example:
        train.RlSpec(signals={"outcome": train.OutcomeSignal(verifier="math")})
    """

    verifier: str = ""
    """A name from ``tasks.scoring.SCORERS``, or ``module:attribute``, called with (answer, item);
    empty: use the task's own reward."""
    rubric: Rubric | None = None
    """A rubric by which a judge model grades, instead of a verifier."""
    model: str = ""
    """The judge model for a rubric, as ``provider:model``."""
    sampling: Sampling = Sampling(2048, temperature=0.0)
    passed: float = 0.5
    """Minimum score of a right answer."""
    tools: bool = True
    """Whether tool use shapes the outcome of a wrong answer; otherwise it is -1."""
    raw: bool = False
    """Use the score itself, neither mapped to ±1 nor shaped."""

    async def read(self, group: Group, context: SignalContext) -> list[SignalScore]:
        item = context.items.get(group.task)
        return list(
            await asyncio.gather(
                *(self._outcome(trajectory, item, context) for trajectory in group.trajectories)
            )
        )

    async def _outcome(
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
                raise RamifyError("a rubric needs a judge to ask, and this run has no client pool")
            ask = context.asking.of(trajectory, "outcome", reading)
            return await self._graded(self.rubric, trajectory, item, ask)
        if not self.verifier:
            return total(trajectory.rewards, context.weights)
        from ramify.tasks.scoring import SCORERS

        score = await asyncio.to_thread(SCORERS.of(self.verifier), trajectory.answer, item)
        return float(score)

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
                "the judge's reply holds no grades in the requested form: "
                f"…{reply.message.content[-80:]!r}"
            )
        return grade
