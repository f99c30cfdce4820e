"""Groups of rollouts through the real engine and real sessions, with a scripted model that returns
token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.errors import ConfigError, RequestRefusedError
from ramify.tasks.base import (
    DatasetTask,
    Item,
    RolloutInitialState,
    Score,
    TrajectoryRewardFunction,
)
from ramify.testing.scripted_client import ScriptedByteTokenizer, ScriptedFailure, refused
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.types.message import Message
from ramify.types.trajectory import Group, Stop, Trajectory
from tests.engine.helpers import at_once
from tests.shown import heard

ITEMS = [
    Item(f"how long is {word}?", word, gold=len(word), id=f"len/train/{n}")
    for n, word in enumerate(("ab", "cde"))
]


def repeat_lines(*lines: Any) -> Callable[..., Any]:
    """Return a script that says the same lines in every call."""
    return lambda messages: lines[min(sum(m.role == "assistant" for m in messages), len(lines) - 1)]


def task(
    reward: Any = lambda answer, item: float(answer == item.gold), **options: Any
) -> DatasetTask:
    return DatasetTask("len", {"train": ITEMS}, reward, **options)


def run_groups(
    script: Any,
    *,
    group: int = 2,
    given: DatasetTask | None = None,
    limits: Mapping[str, Any] | None = None,
    client: ScriptedClient | None = None,
    **options: Any,
) -> list[Group]:
    client = client or ScriptedClient(script, ids=ScriptedByteTokenizer(version=3))

    async def run() -> list[Group]:
        async with RLM(
            client, scaffold="tiny", limits=Limits(**(limits or {})), sandbox="inprocess"
        ) as rlm:
            rollouts = TaskRolloutRunner(
                rlm, given or task(), RolloutOptions(group=group, **options), seed=1
            )
            return await rollouts.groups(ITEMS, step=4)

    return asyncio.run(run())


def test_groups_are_scored_and_in_order() -> None:
    groups = run_groups(repeat_lines("x=len(context)", "FINAL(x)"))
    assert [group.task for group in groups] == ["len/train/0", "len/train/1"]
    assert [[t.id for t in group.trajectories] for group in groups] == [
        ["step=4/group=0/rollout=0", "step=4/group=0/rollout=1"],
        ["step=4/group=1/rollout=0", "step=4/group=1/rollout=1"],
    ]
    for item, group in zip(ITEMS, groups, strict=True):
        for trajectory in group.trajectories:
            assert (trajectory.answer, trajectory.rewards, trajectory.errors) == (
                item.gold,
                {"correct": 1},
                [],
            )
            path = trajectory.path(trajectory.root)
            assert path is not None
            assert sum(path.sampled) == len(b"x=len(context)FINAL(x)") + 2
            assert {
                v for v, sampled in zip(path.versions, path.sampled, strict=True) if sampled
            } == {3}


def test_each_rollout_has_its_own_reproducible_seed() -> None:
    seeds = []
    for _ in range(2):
        client = ScriptedClient(repeat_lines("FINAL(1)"), ids=ScriptedByteTokenizer())
        run_groups(None, client=client, temperature=0.5)
        assert {(r.sampling.temperature, r.sampling.logprobs) for r in client.requests} == {
            (0.5, True)
        }
        seeds.append(sorted(r.sampling.seed or 0 for r in client.requests))
    assert len(set(seeds[0])) == 4
    assert seeds[0] == seeds[1]


def test_concurrency_limits_requests_in_flight() -> None:
    client = ScriptedClient(
        at_once(3, lambda _: "FINAL(1)"), ids=ScriptedByteTokenizer(), latency_s=0.002
    )
    run_groups(None, client=client, group=4, concurrency=3)
    assert (client.most_in_flight, len(client.requests)) == (3, 8)


def test_failed_rollout_is_recorded_and_its_group_continues() -> None:
    turns = iter([refused(401, "no key"), "FINAL(2)", "FINAL(2)", "FINAL(2)"])
    groups = run_groups(lambda messages: next(turns), concurrency=1)
    first, second = groups[0].trajectories
    assert (first.rewards, first.stop, second.rewards) == ({}, Stop.ERROR, {"correct": 1})
    assert "no key" in first.errors[0]


def test_prompt_too_long_for_the_window_is_scored_as_failure() -> None:
    class Small(ScriptedClient):
        async def complete(self, request: Any) -> Any:
            if len(request.messages) > 1:
                error = RequestRefusedError("the prompt has 900 tokens and the window 512")
                error.too_long = True
                raise error
            return await super().complete(request)

    (first, _), _ = (
        group.trajectories
        for group in run_groups(None, client=Small(repeat_lines("1"), ids=ScriptedByteTokenizer()))
    )
    assert (first.stop, first.rewards) == (Stop.MAX_TOKENS, {"correct": 0})


def test_failing_task_is_recorded_in_the_trajectory() -> None:
    async def begin(item: Item) -> RolloutInitialState:
        raise OSError("no such file")

    for given, words in (
        (task(begin=begin), "prepare raised OSError('no such file')"),
        (task(lambda answer, item: 1 / 0), "its score raised ZeroDivisionError"),
        (task(lambda answer, item: {}), "its score has no reward"),
    ):
        groups = run_groups(repeat_lines("FINAL(1)"), given=given)
        errors = [error for group in groups for t in group.trajectories for error in t.errors]
        assert len(errors) == 4
        assert all(words in error for error in errors)
        assert not any(t.rewards for group in groups for t in group.trajectories)


def test_each_rollout_has_its_own_state_and_passes_it_to_the_score() -> None:
    async def begin(item: Item) -> RolloutInitialState:
        counted: list[int] = []

        def count() -> int:
            counted.append(1)
            return len(counted)

        return RolloutInitialState(
            context=item.context,
            tools={"count": count},
            on_end=lambda answer: {"count": len(counted)},
        )

    def reward(item: Item, trajectory: Trajectory) -> Score:
        return Score({"count": trajectory.metadata["count"]})

    groups = run_groups(
        repeat_lines("count()", "count()\nFINAL(1)"),
        given=task(TrajectoryRewardFunction(reward), begin=begin),
    )
    assert [t.rewards["count"] for group in groups for t in group.trajectories] == [2, 2, 2, 2]


def test_rollout_cancelled_from_inside_fails_without_failing_the_run() -> None:
    def reward(answer: Any, item: Item) -> float:
        if item is ITEMS[0]:
            raise asyncio.CancelledError
        return 1.0

    first, second = run_groups(repeat_lines("FINAL(1)"), given=task(reward))
    assert [rollout.rewards for rollout in second.trajectories] == [{"correct": 1.0}] * 2
    assert [rollout.stop for rollout in first.trajectories] == [Stop.CANCELLED] * 2
    assert all("was cancelled from inside, at" in each.errors[0] for each in first.trajectories)


def test_stalled_rollout_is_cancelled_and_its_stacks_are_logged() -> None:
    logged: list[str] = []

    async def never(messages: tuple[Message, ...]) -> str:
        while True:  # ignore the run's attempts to cancel
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if logged:
                    raise

    with heard(logged.append):
        groups = run_groups(never, group=1, limits={"max_seconds": 0.05}, grace_s=0.1)
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.errors[-1] == "it did not end within 0.05 s and was cancelled"
        assert trajectory.rewards == {}
    assert "item len/train/0" in logged[0] + logged[1]
    assert f"{__file__}:" in logged[0]
    assert " never" in logged[0]


def test_slow_score_is_given_up_after_grace_period() -> None:
    import threading

    gate = threading.Event()
    groups = run_groups(
        repeat_lines("FINAL(1)"),
        given=task(lambda answer, item: gate.wait(30)),
        group=1,
        grace_s=0.1,
    )
    gate.set()
    assert "its score took more than 0.1 s" in groups[0].trajectories[0].errors[0]


def test_children_are_scored_by_call() -> None:
    def model(messages: tuple[Message, ...]) -> Any:
        if messages[0].content.startswith("how"):
            return "A=rlm_query_batched(['one']*2,['x','y'])\nFINAL(sum(A))"
        return "FINAL(1)" if messages[0].content.startswith("one") else ScriptedFailure("refused")

    def reward(item: Item, trajectory: Trajectory) -> Score:
        calls = {
            call.id: {"own": float(call.answer == 1)} for call in trajectory.calls if call.depth
        }
        return Score({"correct": float(trajectory.answer == 2)}, calls)

    trajectory = run_groups(model, given=task(TrajectoryRewardFunction(reward)))[0].trajectories[0]
    assert (trajectory.rewards, trajectory.call_rewards) == (
        {"correct": 1},
        {"0.0": {"own": 1}, "0.1": {"own": 1}},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 0}, r"^rl\.rollout\.group=0 must be at least 1$"),
        ({"concurrency": 0}, r"^rl\.rollout\.concurrency=0 must be at least 1$"),
        ({"temperature": 0}, r"^rl\.rollout\.temperature=0 must be above 0$"),
        ({"grace_s": 0}, r"^rl\.rollout\.grace_s=0 must be above 0$"),
    ],
)
def test_error_of_an_option_names_it_alone(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutOptions(**options)


def test_after_callback_runs_while_other_groups_continue() -> None:
    """The second item is answered only after ``after`` was called with the first group."""
    looked = asyncio.Event()
    seen: list[str] = []

    async def model(messages: tuple[Message, ...]) -> str:
        if "cde" in messages[0].content:
            await looked.wait()
        return "FINAL(len(context))"

    async def after(group: Group) -> None:
        seen.append(group.task)
        looked.set()

    async def run() -> list[Group]:
        client = ScriptedClient(model, ids=ScriptedByteTokenizer(version=3))
        async with RLM(
            client, scaffold="tiny", limits=Limits(max_seconds=200.0), sandbox="inprocess"
        ) as rlm:
            return await TaskRolloutRunner(rlm, task(), RolloutOptions(group=2), seed=1).groups(
                ITEMS, 0, after=after
            )

    assert [group.task for group in asyncio.run(run())] == seen == ["len/train/0", "len/train/1"]


def test_rollout_cut_at_its_deadline_has_no_reward() -> None:
    """Whether the deadline is reached depends on machine load, so the rollout must not be trained
    on, not even as a failure."""

    async def never(messages: tuple[Message, ...]) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    for number, group in enumerate(
        run_groups(never, group=1, limits={"max_seconds": 0.5}, concurrency=1)
    ):
        (cut,) = group.trajectories
        assert (cut.stop, cut.rewards, cut.call_rewards) == (Stop.DEADLINE, {}, {})
        assert cut.errors[-1] == (
            f"step=4/group={number}/rollout=0 was cut at its deadline, and nothing is learned from "
            "it: raise "
            "limits.max_seconds (0.5), or lower rl.rollout.concurrency (1)"
        )
