"""Rewards that are called once per step: rollouts that await their score hold no slot, one call has
every rollout that the step takes, and a resumed run scores what a whole run does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.store.folder_store import Store
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState, Score, generated
from ramify.tasks.scoring.batched import BatchedReward
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.train.backends.base import OptimizerSpec
from ramify.train.branch_sampler import BranchOptions
from ramify.train.config import EvaluateSpec, RlSpec, Run, Schedule, TaskSpec
from ramify.train.metrics import GROUPS, read_metrics
from ramify.train.rollouts.group_queue import (
    RolloutBatchSpec,
    RolloutGroupProducer,
    StepRolloutGroups,
)
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.train.run_record import read_group_records
from ramify.types.trajectory import Group, RolloutGroupOutcome, Trajectory
from tests.engine.helpers import at_once
from tests.shown import train
from tests.train.rollouts.test_branch_sampler import JAIL, LIMITS, SCAFFOLD, counting
from tests.train.rollouts.test_queue import Gates, numbers
from tests.train.small import _even, _make, small
from tests.train.test_loop import Killed, kill_at

ITEMS = [Item(f"item {number}", gold="1", id=f"t/{number}") for number in range(20)]


class Reward:
    """A reward in TRL's form that notes the golds and completions of each of its calls."""

    def __init__(self, worth: Callable[[str], float | None] = lambda completion: 1.0) -> None:
        self.calls: list[list[str]] = []
        self._worth = worth

    def __call__(self, completions: list[str], gold: list[str]) -> list[float | None]:
        assert len(completions) == len(gold)
        self.calls.append(list(completions))
        return [self._worth(each) for each in completions]

    @property
    def sizes(self) -> list[int]:
        """Number of completions in each call."""
        return [len(call) for call in self.calls]


def roll(
    reward: Reward,
    test: Callable[[TaskRolloutRunner], Coroutine[Any, Any, Any]],
    client: Any,
    *,
    limits: Limits | None = None,
    store: Store | None = None,
    scaffold: Any = "tiny",
    sandbox: Any = "inprocess",
    greedy: bool = False,
    **options: Any,
) -> Any:
    async def run() -> Any:
        async with RLM(
            client,
            scaffold=scaffold,
            limits=limits or Limits(max_seconds=60),
            sandbox=sandbox,
            store=store,
        ) as rlm:
            task = DatasetTask("t", {"train": ITEMS}, BatchedReward(reward))
            rollouts = TaskRolloutRunner(
                rlm, task, RolloutOptions(**options), seed=1, greedy=greedy
            )
            return await asyncio.wait_for(test(rollouts), 60)

    return asyncio.run(run())


def groups_of(num: int) -> Callable[[TaskRolloutRunner], Coroutine[Any, Any, list[Group]]]:
    return lambda rollouts: rollouts.groups(ITEMS[:num], step=0)


def test_one_call_has_every_rollout_although_two_run_at_once() -> None:
    client = ScriptedClient(
        at_once(2, lambda _: "FINAL(1)"), ids=ScriptedByteTokenizer(), latency_s=0.002
    )
    reward = Reward()
    groups = roll(reward, groups_of(3), client, group=4, concurrency=2)
    assert (reward.sizes, client.most_in_flight, len(client.requests)) == ([12], 2, 12)
    assert all(t.rewards == {"correct": 1.0} for group in groups for t in group.trajectories)
    assert not any(t.awaits_score for group in groups for t in group.trajectories)


def test_greedy_rollout_is_scored_with_its_step() -> None:
    client = ScriptedClient(lambda _: "FINAL(1)", ids=ScriptedByteTokenizer())
    reward = Reward()
    groups = roll(reward, groups_of(2), client, group=2, concurrency=2, greedy=True)
    assert reward.sizes == [6]
    assert [group.greedy and group.greedy.rewards for group in groups] == [{"correct": 1.0}] * 2


def test_signals_are_read_after_the_step_is_scored() -> None:
    seen: list[dict[str, float]] = []

    async def after(group: Group) -> None:
        seen.extend(dict(each.rewards) for each in group.trajectories)

    client = ScriptedClient(lambda _: "FINAL(1)", ids=ScriptedByteTokenizer())
    roll(
        Reward(),
        lambda rollouts: rollouts.groups(ITEMS[:2], 0, after=after),
        client,
        group=2,
        concurrency=1,
    )
    assert seen == [{"correct": 1.0}] * 4


def test_failed_rollouts_and_answers_without_a_reward_do_not_fail_the_others() -> None:
    replies = iter(["FINAL('none')", "FINAL('good')", "FINAL('good')"])

    def script(messages: Any) -> str:
        return next(replies)  # the fourth rollout has no reply: its model is broken

    reward = Reward(lambda completion: None if completion == "none" else 1.0)
    client = ScriptedClient(script, ids=ScriptedByteTokenizer())
    groups = roll(reward, groups_of(2), client, group=2, concurrency=1)
    assert reward.calls == [["none", "good", "good"]]
    found = [each for group in groups for each in group.trajectories]
    assert [each.rewards for each in found] == [{}, {"correct": 1.0}, {"correct": 1.0}, {}]
    assert "returned None for item t/0" in found[0].errors[-1]
    assert found[3].errors


def test_each_line_of_a_fork_is_a_completion() -> None:
    reward = Reward(lambda completion: float(completion == "12"))
    branch = BranchOptions(where=(1, 2), num=2, budget=4)
    (group,) = roll(
        reward,
        groups_of(1),
        counting(),
        group=1,
        branch=branch,
        limits=LIMITS,
        sandbox=JAIL,
        scaffold=SCAFFOLD,
    )
    assert [sorted(call) for call in reward.calls] == [["12", "13", "22", "23"]]
    (found,) = group.trajectories
    assert found.rewards == {"correct": 0.25}
    assert {call.answer: found.call_rewards[call.id]["correct"] for call in found.calls} == {
        12: 1.0,
        13: 0.0,
        22: 0.0,
        23: 0.0,
    }


def test_stored_runs_have_their_scores(tmp_path: Path) -> None:
    store = Store(tmp_path)
    client = ScriptedClient(lambda _: "FINAL(1)", ids=ScriptedByteTokenizer())
    roll(Reward(), groups_of(2), client, group=2, concurrency=2, store=store)
    stored = [store.load(each.id) for each in store.runs()]
    assert [each.rewards for each in stored] == [{"correct": 1.0}] * 4


def run_queue(
    reward: Reward,
    client: Any,
    test: Callable[[RolloutGroupProducer], Coroutine[Any, Any, None]],
    *,
    has_no_signal: Callable[[Group], bool] = lambda group: False,
    concurrency: int = 64,
    **sample: Any,
) -> None:
    async def within(rollouts: TaskRolloutRunner) -> None:
        queue = RolloutGroupProducer(
            rollouts,
            ITEMS,
            RolloutBatchSpec(**sample),
            9,
            next_item=0,
            has_no_signal=has_no_signal,
        )
        try:
            await test(queue)
        finally:
            await queue.close()

    roll(reward, within, client, group=2, concurrency=concurrency)


def test_synchronous_step_is_one_call() -> None:
    reward = Reward()

    async def test(queue: RolloutGroupProducer) -> None:
        for step in range(2):
            assert len((await queue.take(step)).groups) == 3
            queue.begin_groups_for_weights(step + 1)

    client = ScriptedClient(at_once(2, lambda _: "FINAL(1)"), ids=ScriptedByteTokenizer())
    run_queue(reward, client, test, items=3, concurrency=2)
    assert reward.sizes == [6, 6]


def test_step_of_rollouts_that_run_ahead_scores_the_groups_that_it_takes() -> None:
    """Four groups run ahead. The first step takes and scores two of them, and the
    other two are scored when the second step takes them, together."""
    gates = Gates(0, 1, 2, 3)
    reward = Reward()

    async def test(queue: RolloutGroupProducer) -> None:
        taken: list[StepRolloutGroups] = [await queue.take(0)]
        queue.begin_groups_for_weights(1)
        assert reward.sizes == [4]
        taken.append(await queue.take(1))
        assert reward.sizes == [4, 4]
        assert [numbers(each) for each in taken] == [[0, 1], [2, 3]]

    client = ScriptedClient(gates, ids=ScriptedByteTokenizer())
    # One rollout at a time, so that groups end in order.
    run_queue(reward, client, test, concurrency=1, items=2, max_staleness=1, grace_steps=0)


def test_rollout_that_was_given_up_is_not_in_the_call() -> None:
    """The second attempt at item 1 never ends; the step is scored without it."""
    gates = Gates(0, 1)
    gates.held = {(1, 2): asyncio.Event()}
    reward = Reward()

    async def test(queue: RolloutGroupProducer) -> None:
        taken = await queue.take(0)
        assert [len(group.trajectories) for _, group in taken.groups] == [2, 1]
        assert all(run.rewards for _, group in taken.groups for run in group.trajectories)

    client = ScriptedClient(gates, ids=ScriptedByteTokenizer())
    run_queue(reward, client, test, items=2, straggler_factor=25.0)
    assert reward.sizes == [3]


def test_step_that_is_cancelled_scores_nothing() -> None:
    """Three of four rollouts have ended when the step is cancelled."""
    gates = Gates(0, 1)
    gates.held = {(1, 2): asyncio.Event()}
    reward = Reward()

    async def test(queue: RolloutGroupProducer) -> None:
        taking = asyncio.create_task(queue.take(0))
        while sum(each.rolling.num_ended for each in queue.open_groups) < 3:
            await asyncio.sleep(0.001)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    run_queue(reward, ScriptedClient(gates, ids=ScriptedByteTokenizer()), test, items=2)
    assert reward.calls == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_without_signal_are_replaced_and_the_others_scored_once(staleness: int) -> None:
    """Items 0 and 1 have no signal. Each round of a step scores its own groups, none twice."""
    reward = Reward()

    def has_no_signal(group: Group) -> bool:
        assert all(each.rewards for each in group.trajectories)
        return group.task in ("t/0", "t/1")

    async def test(queue: RolloutGroupProducer) -> None:
        taken = await queue.take(0)
        assert numbers(taken) == [2, 3]
        assert [each.item for each in taken.given_up] == ["t/0", "t/1"]

    client = ScriptedClient(lambda _: "FINAL(1)", ids=ScriptedByteTokenizer())
    run_queue(
        reward,
        client,
        test,
        concurrency=1,  # so that groups end in order
        items=2,
        max_items=4,
        max_staleness=staleness,
        has_no_signal=has_no_signal,
    )
    assert reward.sizes == [4, 4]


calls: list[int] = []
"""Number of rollouts in each call of ``ranked``."""


class RankedTask:
    """A task of a user that gives each rollout the share of the step's rollouts that have no more
    even ids."""

    name = "ranked"
    weights: Mapping[str, float] = {}
    splits = generated("ranked", _make)

    async def prepare(self, item: Item) -> RolloutInitialState:
        return RolloutInitialState(context=item.context)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        raise AssertionError("no rollout is scored alone")

    def is_scored_by_step(self, item: Item) -> bool:
        return True

    def score_step(self, rollouts: Sequence[tuple[Item, Trajectory]]) -> list[Score]:
        calls.append(len(rollouts))
        shares = [_even(item, trajectory) for item, trajectory in rollouts]
        return [
            Score({"rank": sum(other <= own for other in shares) / len(shares)}) for own in shares
        ]


ranked = RankedTask()


def run_of(staleness: int) -> Run:
    return small(
        task=TaskSpec(name=f"{__name__}:ranked", validate=False),
        rl=RlSpec(
            steps=4,
            sample=RolloutBatchSpec(items=2, max_staleness=staleness),
            rollout=RolloutOptions(group=3, concurrency=2),
            optim=OptimizerSpec(lr=1e-3),
        ),
        evaluate=EvaluateSpec(num=2, final=()),
        schedule=Schedule(evaluate_every=2, checkpoint_every=1),
    )


def rewards(out: Path) -> list[float]:
    return [each.values["reward"] for each in read_metrics(out) if "reward" in each.values]


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_and_resumed_run_has_every_step_once(tmp_path: Path, staleness: int) -> None:
    """A run that was killed in step 3 continues from the checkpoint of step 2. Rollouts that had
    ended and awaited their score then are made again; recorded ones are not."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    calls.clear()
    last = train(run_of(staleness), whole).step
    assert calls == [2, 6, 6, 2, 6, 6, 2]  # evaluations have 2 completions
    with pytest.raises(Killed):
        train(run_of(staleness), broken, listener=kill_at(last - 1))
    calls.clear()
    train(run_of(staleness), broken, resume=broken)
    assert calls == [6, 6, 2]
    records = list(GROUPS.read(broken))
    assert [last - each.step for each in records] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert {each.outcome for each in records} == {RolloutGroupOutcome.LEARNT}
    assert read_group_records(broken).has_each_group_once
    if not staleness:
        ours, theirs = (
            [(each.number, each.item, each.rollouts) for each in GROUPS.read(folder)]
            for folder in (broken, whole)
        )
        assert (ours, rewards(broken)) == (theirs, rewards(whole))
