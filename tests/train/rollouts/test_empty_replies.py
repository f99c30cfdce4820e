"""An empty reply in a rollout or an evaluation is the policy's own output: it is scored, learned
from, and asked for once. A person's question is asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ramify import RLM, ScriptedClient
from ramify.evaluate.run_evaluation import EvaluationResult, evaluate
from ramify.store.folder_store import Store
from ramify.tasks.base import DatasetTask, Item
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import PolicySpec, RlSpec, Schedule, TaskSpec
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.data.sft_data import read
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.types.message import Message, Reply, ToolCall
from ramify.types.trajectory import Group, Stop
from tests.evaluate.helpers import plan
from tests.shown import train
from tests.train.small import SHAPE, small
from tests.train.test_loop import read_rows

END = 7
ITEM = Item("2 + 2?", gold="4", id="sum/0")


def some_text(answer: object, item: Item) -> float:
    assert isinstance(answer, str)
    return 1.0 if answer.strip() else -1.0


TASK = DatasetTask("sum", {"train": [ITEM], "test": [ITEM]}, some_text)
EMPTY = Reply(Message("assistant", ""), prompt_ids=(1, 2), token_ids=(END,), logprobs=(-1.0,))
CALL = Reply(
    Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),)),
    finish="tool_calls",
    prompt_ids=(1, 2),
    token_ids=(5, END),
    logprobs=(-1.0, -1.0),
)
FULL = Reply(Message("assistant", "4"), prompt_ids=(1, 2), token_ids=(4, END), logprobs=(-1.0,) * 2)


def texts() -> DatasetTask:
    """Reward any text, and punish an empty one."""
    splits = {
        split: [Item("a", id=f"{split}/{number}") for number in range(8)]
        for split in ("train", "validation", "test")
    }
    return DatasetTask("texts", splits, some_text)


def rolled(*replies: Reply) -> Group:
    async def roll() -> Group:
        async with RLM(ScriptedClient(list(replies)), scaffold="bare") as rlm:
            options = RolloutOptions(group=len(replies), concurrency=1, direct=True)
            (group,) = await TaskRolloutRunner(rlm, TASK, options).groups([ITEM], 0)
            return group

    return asyncio.run(roll())


@pytest.mark.parametrize("reply", [EMPTY, CALL])
def test_an_empty_reply_of_a_rollout_is_scored_and_learned_from(reply: Reply) -> None:
    group = rolled(reply, FULL)
    first, second = group.trajectories
    assert (first.answer, first.stop, first.errors) == ("", Stop.FINAL, [])
    assert (first.rewards, second.rewards) == ({"correct": -1.0}, {"correct": 1.0})
    (turn,) = first.root.turns  # asked for once
    assert turn.reply.token_ids == reply.token_ids
    found = DrGRPO().assign_advantages([group], {})
    assert (found.notes, found.metrics["failed_rollouts"], found.metrics["reward"]) == ([], 0, 0)
    row, _ = token_sequences(found.rollouts)
    assert tuple(row.token_ids[row.mask]) == reply.token_ids
    assert (row.advantages[row.mask] < 0).all()


def evaluated(*replies: Reply, store: Store | None = None) -> EvaluationResult:
    async def main() -> EvaluationResult:
        async with RLM(ScriptedClient(list(replies)), scaffold="bare", store=store) as rlm:
            return await evaluate(rlm, TASK, plan(task="sum", items=1), direct=True)

    return asyncio.run(main())


def test_an_empty_reply_of_an_evaluation_is_scored() -> None:
    (outcome,) = evaluated(EMPTY).outcomes
    assert (outcome.reward, outcome.error, outcome.usage.calls) == (-1.0, "", 1)


def test_a_repeated_attempt_keeps_its_empty_answer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (outcome,) = evaluated(EMPTY, store=store).outcomes

    async def again() -> str | None:
        async with RLM(ScriptedClient([EMPTY]), scaffold="bare", store=store) as rlm:
            return (await rlm.areplay(outcome.run)).answer

    assert asyncio.run(again()) == ""


def test_training_counts_empty_replies_in_its_reward(tmp_path: Path) -> None:
    """A random policy with a handful of tokens often samples its end token first."""
    run = small(
        policy=PolicySpec(shape=SHAPE, words=("a", "b"), slots=16),
        task=TaskSpec(name=f"{__name__}:texts"),
        warmup=None,
        sft=None,
        rl=RlSpec(
            steps=2,
            sample=RolloutBatchSpec(items=4),
            rollout=RolloutOptions(group=8, concurrency=1, direct=True),
            optim=OptimizerSpec(lr=1e-3),
        ),
        scaffold="bare",
        schedule=Schedule(save_rollouts_every=1),
    )
    train(run, tmp_path, say=lambda text: None)
    steps = [row for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert len(steps) == 2
    for row in steps:
        (path,) = tmp_path.glob(f"rollouts/*{row.step}.jsonl")
        rollouts = list(read(path))
        empty = [each for each in rollouts if not (each.answer or "").strip()]
        assert 0 < len(empty) < len(rollouts) == 32
        assert row.values["failed_rollouts"] == 0
        assert row.values["reward"] == pytest.approx(1 - 2 * len(empty) / len(rollouts))
        assert {len(each.root.turns) for each in rollouts} == {1}
    for row in (*read_rows(tmp_path, "first"), *read_rows(tmp_path, "last")):
        assert row.values.get("validation/failed", 0) == row.values.get("test/failed", 0) == 0
