"""The simulated queue decides as the real one does: what it took when is played to ``train/queue.py``, event by event."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from simpy import Environment

from ramify.cluster import admission
from ramify.cluster.engine import Engine
from ramify.cluster.play import Stage
from ramify.cluster.rate import Rate
from ramify.cluster.simulate import Setting
from ramify.cluster.trees import CallShape, Rollout, TurnShape
from ramify.tasks.base import Item
from ramify.train.queue import Queue
from ramify.train.rollout import Rolling
from ramify.train.room import Room
from ramify.train.stages import Sample
from ramify.types.trajectory import Group, Trajectory

NUM_STEPS = 12
Event = tuple[str, Any]
"""("whole", number of a group) or ("taken", numbers of a step's groups) or ("newer", step)"""


class _Noting(admission.Queue):
    """Says when a group became whole."""

    events: list[Event]

    def _over(self, attempt: Any, _: Any) -> None:
        super()._over(attempt, _)
        self.events.append(("whole", next(each.number for each in self._open if attempt in each.attempts)))


def simulated(sample: Sample, is_silent: Callable[[int], bool], seed: int) -> list[Event]:
    env, draw, events = Environment(), random.Random(seed), []
    rate = Rate(((1.0, 1.0),))
    took = [draw.choice([1, 2, 3, 30]) + draw.random() for _ in range(500)]
    rules = Setting(
        items=sample.items, group=1, concurrency=99, staleness=sample.max_staleness, max_items=sample.max_items,
        late=sample.late,
    )  # fmt: skip
    stage = Stage(env, [Engine(env, rate, 99)], rate, 99, 99)

    def drawn(number: int) -> tuple[list[Rollout], bool]:
        return [Rollout((CallShape((TurnShape(0, 0, 0),), took[number]),))], is_silent(number)

    queue = _Noting(env, stage, rules, drawn, 1, NUM_STEPS)
    queue.events = events

    def train() -> Any:
        for step in range(NUM_STEPS):
            taken = yield from queue.take(step)
            events.append(("taken", [each.number for each in taken]))
            yield env.timeout(2.5)
            queue.newer(step + 1)
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
    """Groups of one attempt, which ends when a test says so."""

    per_item, room = 1, Room(99)

    def __init__(self) -> None:
        self.begun: dict[str, _Attempt] = {}

    def begin(self, item: Item, name: str, over: Any) -> Rolling:
        attempt = self.begun[item.id] = _Attempt()
        attempts: Any = [attempt]
        return Rolling(item, attempts, None)


async def check(sample: Sample, is_silent: Callable[[int], bool], events: list[Event]) -> int:
    """Has the real queue go through ``events``; the number of steps that were compared."""
    items = [Item("?", "", id=str(number)) for number in range(500)]
    rollouts: Any = _Rollouts()
    silent = lambda group: is_silent(int(group.task))  # noqa: E731
    queue = Queue(rollouts, items, sample, NUM_STEPS, next_item=0, is_silent=silent)
    num, taking = 0, asyncio.create_task(queue.take(0))
    for index, (what, which) in enumerate(events):
        await _settle()
        assert taking.done() is (what == "taken" or num > _count(events[:index], "newer")), (index, what, which)
        if what == "whole":
            result = rollouts.begun[str(which)].result
            result.set_result(Trajectory("t", "?", task=str(which), rewards={"correct": 1.0}))
        elif what == "taken":
            groups: list[tuple[int, Group]] = taking.result().groups
            assert [number for number, _ in groups] == which
            num += 1
        else:
            queue.newer(which)
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
@pytest.mark.parametrize(("staleness", "late"), [(0, 4), (1, 0), (1, 4), (2, 1)])
def test_both_take_the_same_groups_at_the_same_events(staleness: int, late: int, max_items: int) -> None:
    def is_silent(number: int) -> bool:
        return bool(max_items) and random.Random(f"silent/{number}").random() < 0.4

    sample = Sample(items=3, max_items=max_items, max_staleness=staleness, late=late)
    for seed in range(3):
        events = simulated(sample, is_silent, seed)
        assert asyncio.run(check(sample, is_silent, events)) == NUM_STEPS
