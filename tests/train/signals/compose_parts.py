"""Rollouts and groups of given tokens and rewards, and short ways to read their advantages."""

from __future__ import annotations

import asyncio

from ramify.tasks.base import Item
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.signals.base import SignalContext, SignalScore
from ramify.train.signals.outcome import OutcomeSignal
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn


def rollout(id: str, *sampled: int, reward: float | None = 0.0, given: int = 2) -> Trajectory:
    """Return a root with one turn per number in ``sampled``: that many sampled tokens after
    ``given`` prompt tokens."""
    turns, before = [], 0
    for num in sampled:
        ids = tuple(range(10, 10 + num))
        reply = Reply(
            Message("assistant", "x"),
            prompt_ids=tuple(range(1, given + 1)),
            token_ids=ids,
            logprobs=(-0.5,) * num,
        )
        turns.append(Turn(0, (Message("user", "go on"),), reply, reused_ids=before))
        before += given + num
    call = Call("0", "rlm", "test:m", 0, "?", turns=turns, stop=Stop.FINAL)
    return Trajectory(
        id, "?", task="t/0", calls=[call], rewards={} if reward is None else {"correct": reward}
    )


def group(*rewards: float | None, sampled: tuple[int, ...] = (2, 1)) -> Group:
    return Group(
        "t/0",
        [rollout(f"r{index}", *sampled, reward=reward) for index, reward in enumerate(rewards)],
    )


def advantages(assigned: OptimizerStepAdvantages) -> dict[str, list[float]]:
    """Return trajectory id -> advantages of all its tokens, in order."""
    return {
        each.trajectory.id: [
            value for place in sorted(each.credits) for value in each.credits[place].advantages
        ]
        for each in assigned.rollouts
    }


def read(outcome: OutcomeSignal, one: Group) -> list[SignalScore]:
    context = SignalContext(step=0, items={"t/0": Item("?", gold="7", id="t/0")})
    return asyncio.run(outcome.read(one, context))
