"""The simulated queue decides like the real one: its events are replayed, one by one, to
``train/rollouts/group_queue.py``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from simpy import Environment

from ramify.extras.cluster import simulated_rollout
from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
from ramify.extras.cluster.rollout_workloads import CallWorkload, RolloutWorkload, TurnWorkload
from ramify.extras.cluster.simulate import SimulationSetting
from ramify.extras.cluster.simulated_engine import SimulatedEngine
from ramify.extras.cluster.simulated_rollout import RolloutSimulator
from ramify.tasks.base import Item
from ramify.train.rollouts.group_queue import RolloutBatchSpec, RolloutGroupProducer
from ramify.train.rollouts.rollouter import RolloutConcurrencyLimiter, RolloutGroupInProgress
from ramify.types.trajectory import Group, Trajectory

NUM_STEPS = 12
Event = tuple[str, Any]
"""("whole", number of a group) or ("taken", numbers of a step's groups) or ("newer", step)"""


class _RecordingQueue(simulated_rollout.RolloutGroupQueueSimulator):
    """Records when a group is complete."""

    events: list[Event]

    def _record_duration(self, attempt: Any, _: Any) -> None:
        super()._record_duration(attempt, _)
        self.events.append(
            ("whole", next(each.number for each in self._open if attempt in each.attempts))
        )


def simulated(
    sample: RolloutBatchSpec, has_no_signal: Callable[[int], bool], seed: int
) -> list[Event]:
    env, draw, events = Environment(), random.Random(seed), []
    rate = InferenceEngineSpeed(((1.0, 1.0),))
    took = [draw.choice([1, 2, 3, 30]) + draw.random() for _ in range(500)]
    rules = SimulationSetting(
        items=sample.items,
        group=1,
        concurrency=99,
        staleness=sample.max_staleness,
        max_items=sample.max_items or 0,
        grace_steps=sample.grace_steps,
    )
    stage = RolloutSimulator(env, [SimulatedEngine(env, rate, 99)], rate, 99, 99)

    def drawn(number: int) -> tuple[list[RolloutWorkload], bool]:
        return [
            RolloutWorkload((CallWorkload((TurnWorkload(0, 0, 0),), took[number]),))
        ], has_no_signal(number)

    queue = _RecordingQueue(env, stage, rules, drawn, 1, NUM_STEPS)
    queue.events = events

    def train() -> Any:
        for step in range(NUM_STEPS):
            taken = yield from queue.take(step)
            events.append(("taken", [each.number for each in taken]))
            yield env.timeout(2.5)
            queue.on_new_weights(step + 1)
            events.append(("newer", step + 1))

    env.run(until=env.process(train()))
    return events


class _Attempt:
    def __init__(self) -> None:
        self.began_at: float | None = 0.0
        self.took_s = 1.0
        self.is_over, self.was_given_up = True, False
        self.result: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.result.cancel()


class _Rollouts:
    """Groups of one attempt, which the test completes."""

    per_item, room = 1, RolloutConcurrencyLimiter(99)

    def __init__(self) -> None:
        self.begun: dict[str, _Attempt] = {}

    def begin(self, item: Item, name: str, over: Any) -> RolloutGroupInProgress:
        attempt = self.begun[item.id] = _Attempt()
        attempts: Any = [attempt]
        return RolloutGroupInProgress(item, attempts, None)

    def is_scored_by_step(self, item: Item) -> bool:
        return False


async def check(
    sample: RolloutBatchSpec, has_no_signal: Callable[[int], bool], events: list[Event]
) -> int:
    """Replay ``events`` to the real queue; return the number of steps that were compared."""
    items = [Item("?", "", id=str(number)) for number in range(500)]
    rollouts: Any = _Rollouts()
    zero_variance = lambda group: has_no_signal(int(group.task))  # noqa: E731
    queue = RolloutGroupProducer(
        rollouts, items, sample, NUM_STEPS, next_item=0, has_no_signal=zero_variance
    )
    num, taking = 0, asyncio.create_task(queue.take(0))
    for index, (what, which) in enumerate(events):
        await _settle()
        assert taking.done() is (what == "taken" or num > _count(events[:index], "newer")), (
            index,
            what,
            which,
        )
        if what == "whole":
            result = rollouts.begun[str(which)].result
            result.set_result(Trajectory("t", "?", task=str(which), rewards={"correct": 1.0}))
        elif what == "taken":
            groups: list[tuple[int, Group]] = taking.result().groups
            assert [number for number, _ in groups] == which
            num += 1
        else:
            queue.begin_groups_for_weights(which)
            if which < NUM_STEPS:
                taking = asyncio.create_task(queue.take(which))
    await queue.close()
    return num


def _count(events: list[Event], kind: str) -> int:
    return sum(what == kind for what, _ in events)


async def _settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_items", [0, 7])
@pytest.mark.parametrize(("staleness", "grace_steps"), [(0, 4), (1, 0), (1, 4), (2, 1)])
def test_simulated_and_real_queue_take_the_same_groups(
    staleness: int, grace_steps: int, max_items: int
) -> None:
    def has_no_signal(number: int) -> bool:
        return bool(max_items) and random.Random(f"silent/{number}").random() < 0.4

    sample = RolloutBatchSpec(
        items=3, max_items=max_items or None, max_staleness=staleness, grace_steps=grace_steps
    )
    for seed in range(3):
        events = simulated(sample, has_no_signal, seed)
        assert asyncio.run(check(sample, has_no_signal, events)) == NUM_STEPS
