"""The group queue (asynchronous rollouts): real rollouts of a model whose replies the test
releases one by one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.errors import ConfigError
from ramify.progress import ProgressState, subscribe
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.train.metrics import group_record
from ramify.train.rollouts.group_queue import (
    RolloutBatchSpec,
    RolloutGroupProducer,
    StepRolloutGroups,
)
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.types.message import Message
from ramify.types.trajectory import Group, Trajectory

ITEMS = [Item(f"item {number}", gold=1, id=f"t/{number}") for number in range(20)]


class Gates:
    """A model that answers questions about an item only after the item's gate was opened."""

    def __init__(self, *open: int) -> None:
        self.asked: list[int] = []
        self.held: dict[tuple[int, int], asyncio.Event] = {}
        """(item, attempt) -> an event that this attempt also waits for."""
        self._gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.open(*open)

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self._gates[number].set()

    async def __call__(self, messages: tuple[Message, ...]) -> str:
        number = int(messages[0].content.split("item ")[1].split()[0])
        self.asked.append(number)
        held = self.held.get((number, self.asked.count(number)))
        await self._gates[number].wait()
        if held is not None:
            await held.wait()
        return "FINAL(1)"


def scored(item: Item, trajectory: Trajectory) -> float:
    return 1.0


def run_queue_test(
    gates: Gates,
    test: Callable[[RolloutGroupProducer], Coroutine[Any, Any, None]],
    num_steps: int = 9,
    *,
    group: int = 1,
    reward: Any = scored,
    concurrency: int = 64,
    queue: dict[str, Any] | None = None,
    **sample: Any,
) -> None:
    async def run() -> None:
        client = ScriptedClient(gates, ids=ScriptedByteTokenizer())
        async with RLM(
            client, scaffold="tiny", limits=Limits(max_seconds=60), sandbox="inprocess"
        ) as rlm:
            task = DatasetTask("t", {"train": ITEMS}, TrajectoryRewardFunction(reward))
            rollouts = TaskRolloutRunner(
                rlm, task, RolloutOptions(group=group, concurrency=concurrency, grace_s=5), seed=1
            )
            made = RolloutGroupProducer(
                rollouts,
                ITEMS,
                RolloutBatchSpec(**sample),
                num_steps,
                **{"next_item": 0, **(queue or {})},
            )
            try:
                await asyncio.wait_for(test(made), 30)
            finally:
                await made.close()
        assert client.in_flight == 0

    asyncio.run(run())


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def check_blocked(taking: asyncio.Task[StepRolloutGroups]) -> None:
    for _ in range(30):
        await asyncio.sleep(0.001)
    assert not taking.done()


def numbers(taken: StepRolloutGroups) -> list[int]:
    return [number for number, _ in taken.groups]


def test_step_takes_complete_groups_and_next_step_waits_for_those_too_stale() -> None:
    gates = Gates(2, 3)

    async def test(queue: RolloutGroupProducer) -> None:
        assert numbers(await queue.take(0)) == [2, 3]
        assert (sorted(gates.asked), queue.resume_position()) == ([0, 1, 2, 3], (4, [0, 1]))
        queue.begin_groups_for_weights(1)
        assert queue.resume_position() == (6, [0, 1, 4, 5])
        gates.open(4, 5)
        taking = asyncio.create_task(queue.take(1))
        await check_blocked(taking)
        gates.open(0, 1)
        assert numbers(await taking) == [0, 1]
        queue.begin_groups_for_weights(
            2
        )  # the last step: no group is started that no step would take
        assert queue.resume_position() == (6, [4, 5])
        assert numbers(await queue.take(2)) == [4, 5]
        assert queue.resume_position() == (6, [])

    run_queue_test(gates, test, 3, items=2, max_staleness=1, grace_steps=0)


def test_slow_group_may_be_late_by_at_most_grace_steps() -> None:
    gates = Gates(*range(1, 20))

    async def test(queue: RolloutGroupProducer) -> None:
        assert [numbers(await queue.take(step)) for step in range(3)] == [[1], [2], [3]]
        queue.begin_groups_for_weights(3)
        taking = asyncio.create_task(queue.take(3))
        await check_blocked(taking)
        gates.open(0)
        assert numbers(await taking) == [0]

    run_queue_test(gates, test, items=1, max_staleness=1, grace_steps=2)


def test_step_leaves_later_steps_no_more_groups_than_they_can_take() -> None:
    """With a maximum staleness of two and one group per step, 0 and 1 are both due at step 2, so
    step 1 must take one of them."""
    gates = Gates(2, 3)

    async def test(queue: RolloutGroupProducer) -> None:
        assert numbers(await queue.take(0)) == [2]
        queue.begin_groups_for_weights(1)
        taking = asyncio.create_task(queue.take(1))
        await wait_until(lambda: 3 in gates.asked)
        await check_blocked(taking)
        gates.open(1)
        assert numbers(await taking) == [1]
        queue.begin_groups_for_weights(2)
        gates.open(0)
        assert numbers(await queue.take(2)) == [0]
        assert numbers(await queue.take(3)) == [3]

    run_queue_test(gates, test, 4, items=1, max_staleness=2, grace_steps=0)


def test_without_staleness_groups_start_only_at_their_step() -> None:
    gates = Gates(*range(9))

    async def test(queue: RolloutGroupProducer) -> None:
        for step in range(3):
            taken = await queue.take(step)
            assert numbers(taken) == [2 * step, 2 * step + 1]
            queue.begin_groups_for_weights(step + 1)
            assert queue.resume_position() == (2 * step + 2, [])
            assert [t.id for _, group in taken.groups for t in group.trajectories] == [
                f"step={step}/group={index}/rollout={number}"
                for index in range(2)
                for number in range(2)
            ]

    run_queue_test(gates, test, 3, items=2, group=2)


def test_rollout_names_do_not_depend_on_when_a_group_started() -> None:
    found: list[dict[str, Any]] = []
    for first in ([0, 1], [3, 2]):
        gates = Gates(*first)

        async def test(queue: RolloutGroupProducer, gates: Gates = gates) -> None:
            taken = [await queue.take(0)]
            gates.open(*range(9))
            taken.append(await queue.take(1))
            found.append(
                {
                    t.id: t.task
                    for each in taken
                    for _, group in each.groups
                    for t in group.trajectories
                }
            )

        run_queue_test(gates, test, 2, items=2, max_staleness=1)
    assert (
        found[0] == found[1] == {f"item={number}/rollout=0": f"t/{number}" for number in range(4)}
    )


def test_resumed_queue_starts_with_pending_groups() -> None:
    gates = Gates(3, 5)

    async def test(queue: RolloutGroupProducer) -> None:
        assert queue.resume_position() == (7, [3, 5])
        assert numbers(await queue.take(0)) == [3, 5]
        gates.open(7, 8)
        assert queue.resume_position() == (9, [7, 8])
        assert numbers(await queue.take(1)) == [7, 8]

    run_queue_test(
        gates, test, 2, items=2, max_staleness=1, queue={"next_item": 7, "pending": [3, 5]}
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_without_signal_are_replaced_by_others(max_staleness: int) -> None:
    """Odd items have a signal; a step of two groups may try five items."""
    gates = Gates(*range(20))

    def has_no_signal(group: Group) -> bool:
        return int(group.task.split("/")[1]) % 2 == 0 or int(group.task.split("/")[1]) > 6

    async def test(queue: RolloutGroupProducer) -> None:
        first = await queue.take(0)
        assert numbers(first) == [1, 3]
        second = await queue.take(1)
        assert numbers(second)[0] == 5  # and one without signal, since no more may be tried
        assert all(each.outcome == "no_signal" for each in first.given_up + second.given_up)
        assert second.metrics["items"] <= 5
        tried = [
            *numbers(first),
            *numbers(second),
            *(each.number for each in first.given_up + second.given_up),
        ]
        next_item, pending = queue.resume_position()
        assert sorted([*tried, *pending]) == list(range(next_item))

    run_queue_test(
        gates,
        test,
        2,
        items=2,
        max_items=5,
        max_staleness=max_staleness,
        queue={"has_no_signal": has_no_signal},
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_straggler_is_given_up_and_its_group_is_used_without_it(
    max_staleness: int,
) -> None:
    gates = Gates(*range(20))
    never = asyncio.Event()
    gates.held = {(1, 2): never}

    async def test(queue: RolloutGroupProducer) -> None:
        taken = [await queue.take(step) for step in range(2 if max_staleness else 1)]
        (group,) = [group for each in taken for number, group in each.groups if number == 1]
        assert [(len(each.rewards), each.errors) for each in group.trajectories] == [
            (1, []),
            (1, []),
        ]
        ((lost,),) = [each.stragglers[1] for each in taken if each.stragglers]
        (note,) = [note for each in taken for note in each.notes]
        assert note.startswith(f"{lost} was given up: ")
        assert "times the median, and the step waited for nothing else" in note
        known = [each.id for each in group.trajectories]
        assert lost not in known
        assert group_record(1, group, known, [lost]).failed == [lost]
        assert sum(each.metrics["stragglers"] for each in taken) == 1

    run_queue_test(
        gates,
        test,
        2,
        items=2,
        group=3,
        max_staleness=max_staleness,
        grace_steps=0,
        straggler_factor=25.0,
    )


def test_step_progress_counts_only_rollouts_the_step_needs() -> None:
    """Four groups are open, each with two of three rollouts complete: the step needs two groups, so
    it has four of six rollouts."""
    gates = Gates(*range(4))
    last = [asyncio.Event() for _ in range(4)]
    gates.held = {(number, 3): last[number] for number in range(4)}
    seen: list[ProgressState] = []

    async def test(queue: RolloutGroupProducer) -> None:
        with subscribe(seen.append):
            taking = asyncio.create_task(queue.take(0))
            await wait_until(
                lambda: [each.rolling.num_ended for each in queue.open_groups] == [2, 2, 2, 2]
            )
            assert max((each.done, each.total) for each in seen if each.what == "rollouts") == (
                4,
                6,
            )
            last[0].set()
            last[1].set()
            assert numbers(await taking) == [0, 1]
        assert max((each.done, each.total) for each in seen if each.what == "rollouts") == (6, 6)

    run_queue_test(gates, test, 2, items=2, group=3, max_staleness=1, grace_steps=0)


def test_slow_rollout_not_needed_by_the_step_keeps_running() -> None:
    gates = Gates(1, 2, 3, 4, 5)

    async def test(queue: RolloutGroupProducer) -> None:
        taken = await queue.take(0)
        assert (0 in numbers(taken), taken.notes) == (False, [])
        gates.open(0)
        await wait_until(lambda: all(each.task.done() for each in queue.open_groups))
        taken = await queue.take(1)
        assert (0 in numbers(taken), taken.notes) == (True, [])

    run_queue_test(gates, test, 2, items=2, max_staleness=1, grace_steps=0, straggler_factor=25.0)


def test_paused_queue_starts_nothing_and_open_groups_continue() -> None:
    gates = Gates()

    async def test(queue: RolloutGroupProducer) -> None:
        taking = asyncio.create_task(queue.take(0))
        await wait_until(lambda: sorted(gates.asked) == [0, 1])  # two at once
        with queue.paused():
            gates.open(0, 1)
            assert numbers(await taking) == [0, 1]
            await asyncio.sleep(0.02)
            assert sorted(gates.asked) == [0, 1]
        await wait_until(lambda: 2 in gates.asked)

    run_queue_test(gates, test, 2, items=2, max_staleness=1, concurrency=2, pause=True)


def test_unexpected_exception_is_raised_by_the_next_take() -> None:
    async def read(group: Group) -> None:
        raise ZeroDivisionError(group.task)

    async def test(queue: RolloutGroupProducer) -> None:
        with pytest.raises(ZeroDivisionError, match="t/1"):
            await queue.take(0)

    run_queue_test(Gates(1), test, items=2, max_staleness=1, queue={"read": read})


def test_group_without_failed_rollouts_is_learnt_and_group_without_any_is_lost() -> None:
    def reward(item: Item, trajectory: Trajectory) -> float:
        if trajectory.id == "item=0/rollout=1" or item.id == "t/1":
            raise OSError("the grader is down")
        return 1.0

    async def test(queue: RolloutGroupProducer) -> None:
        taken = await queue.take(0)
        found = [
            group_record(number, group, {"item=0/rollout=0"}) for number, group in taken.groups
        ]
        assert [(each.outcome, len(each.rollouts), each.failed) for each in found] == [
            ("learnt", 2, ["item=0/rollout=1"]),
            ("lost", 0, [f"item=1/rollout={number}" for number in range(3)]),
        ]

    run_queue_test(Gates(*range(9)), test, 1, items=2, group=3, max_staleness=1, reward=reward)


def test_straggler_factor_below_one_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"straggler_factor=0\.5 is a multiple of the median"):
        RolloutBatchSpec(straggler_factor=0.5)
