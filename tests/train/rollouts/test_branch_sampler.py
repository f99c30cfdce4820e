"""Rollouts that fork: where, how many lines within a budget, and the score of each line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from ramify.engine.limits import Limits
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState, TrajectoryRewardFunction
from ramify.train.branch_sampler import BranchOptions, branch_sampling_arguments
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallForkOrigin, Trajectory
from tests.engine.helpers import SCAFFOLD, client, code

LIMITS = Limits(max_turns=4, max_calls=4)
"""A line has three turns, so only a rollout with more lines needs more calls than these."""
JAIL = SandboxSpec(provider="process", allow_weaker=True)


def right(item: Item, trajectory: Trajectory) -> dict[str, float]:
    return {"correct": float(trajectory.answer == item.gold), "turns": len(trajectory.root.turns)}


TASK = DatasetTask("forks", {"train": []}, TrajectoryRewardFunction(right), weights={"turns": 0.0})
ITEM = Item("count", "text", gold=12, id="forks/train/0")


def counting() -> Any:
    """A model that binds x = 1, then adds 10 and then 1, but 2 in every second line."""
    later = iter([10, 20, 10, 20, 10, 20])
    last = iter([1, 2, 1, 2, 1, 2, 1, 2])

    def reply(messages: Any) -> str:
        turns = sum(message.role == "assistant" for message in messages)
        if turns == 0:
            return code("x = 1")
        if turns == 1:
            return code(f"x += {next(later)}")
        return code(f"x += {next(last)}\nFINAL(x)")

    return client(reply)


def rolled(options: BranchOptions, model: Any = None, task: DatasetTask = TASK) -> Trajectory:
    async def main() -> Trajectory:
        async with RLM(model or counting(), limits=LIMITS, sandbox=JAIL, scaffold=SCAFFOLD) as rlm:
            return await attempt(
                rlm, task, ITEM, name="a", **branch_sampling_arguments(options, LIMITS)
            )

    return asyncio.run(main())


def test_each_line_is_scored_as_a_rollout_of_its_own() -> None:
    """x is 1 when the session is forked; the lines end with 12 or 13, and 22 or 23."""
    found = rolled(BranchOptions(where=(1, 2), num=2, budget=4))
    assert not found.errors
    answers = sorted(call.answer for call in found.calls)
    assert answers == [12, 13, 22, 23]
    lines = {call.answer: found.call_rewards[call.id] for call in found.calls}
    assert lines[12] == {"correct": 1.0, "turns": 3.0}
    assert found.rewards == {"correct": 0.25, "turns": 3.0}
    forks = {call.id: call.fork for call in found.calls}
    assert forks["0:1"] == CallForkOrigin("0", 0)
    assert sum(len(call.turns) for call in found.calls) == 1 + 2 + 4


def test_a_budget_is_divided_among_continuations() -> None:
    found = rolled(BranchOptions(where=(1, 2), num=2, budget=3))
    assert {call.id: call.fork for call in found.calls} == {
        "0": None,
        "0:1": CallForkOrigin("0", 0),
        "0:2": CallForkOrigin("0", 1),
    }
    first = rolled(BranchOptions(where="every", num=2, budget=8, lines="first"))
    assert {call.id: call.fork for call in first.calls} == {
        "0": None,
        "0:1": CallForkOrigin("0", 0),
        "0:2": CallForkOrigin("0", 1),
    }


def test_entropy_forks_after_a_reply_less_certain_than_the_first() -> None:
    surprisals = [0.1, 0.5, 0.1]

    def model() -> Any:
        texts = [code("x = 1"), code("x += 1"), code("FINAL(x)")]

        def reply(messages: Any) -> Reply:
            turn = sum(message.role == "assistant" for message in messages)
            said = Message("assistant", texts[turn])
            return Reply(said, token_ids=(2, 3), logprobs=(-surprisals[turn],) * 2)

        return client(reply)

    found = rolled(BranchOptions(where="entropy", num=2, budget=2), model())
    assert [call.fork for call in found.calls] == [None, CallForkOrigin("0", 1)]
    calm = rolled(BranchOptions(where="entropy", num=2, budget=2, entropy_rise=1.0), model())
    assert len(calm.calls) == 1


def test_state_outside_the_session_is_not_forked() -> None:
    class Counted(DatasetTask):
        async def prepare(self, item: Item) -> RolloutInitialState:
            return RolloutInitialState(context=item.context, on_end=lambda answer: {})

    found = rolled(BranchOptions(), task=Counted("counted", {"train": []}, right))
    assert not found.rewards
    assert "rl.rollout.branch=null" in found.errors[0]


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"budget": 1}, "allow no fork"
    yield {"where": (0,)}, "turns from 1 on"
    yield {"where": ()}, "turns from 1 on"


@pytest.mark.parametrize(("options", "why"), list(refusals()))
def test_options_that_allow_no_fork_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BranchOptions(**options)


def test_limits_that_allow_no_fork_are_refused() -> None:
    for options, turns in (
        (BranchOptions(where=(4,)), 4),
        (BranchOptions(where="every"), 1),
        (BranchOptions(where="entropy"), 2),
    ):
        with pytest.raises(ConfigError, match=r"limits\.max_turns"):
            options.check(LIMITS, turns)
    BranchOptions(where=(3,)).check(LIMITS, 4)
    with pytest.raises(ConfigError, match="direct=false"):
        RolloutOptions(branch=BranchOptions(), direct=True)
