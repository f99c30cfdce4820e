"""Roots of rollouts and evaluations: recursive call or direct answer, and the run's report on how
many are recursive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Limits, ScriptedClient
from ramify.evaluate.run_evaluation import evaluate
from ramify.store.folder_store import Store
from ramify.tasks.base import DatasetTask, Item, RolloutInitialState, items_of, task_of
from ramify.tasks.scoring import exact
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.train.recipe import load_recipe
from ramify.train.rollouts.rollouter import RolloutOptions, RootModeCounts, TaskRolloutRunner
from ramify.types.message import Message
from tests.evaluate.helpers import SPEC, plan
from tests.shown import train
from tests.train.small import small
from tests.train.test_loop import read_rows

ROOT = Path(__file__).parents[3]
ITEMS = [
    Item("how long is it?", "abc", gold=3, id="short/train/0"),
    Item("what is 1 + 2?", gold=3, id="short/train/1"),
    Item("how long is the long one?", "x" * 40_000, gold=3, id="short/train/2"),
]
TASK = DatasetTask("short", {"train": ITEMS, "test": ITEMS}, exact)


def answering(messages: Any) -> str:
    return "```repl\nFINAL(3)\n```"


def rlm(**options: Any) -> RLM:
    client = ScriptedClient(answering, ids=ScriptedByteTokenizer(version=1))
    return RLM(
        client, **{"scaffold": "default", "sandbox": SPEC, "limits": Limits(max_depth=1), **options}
    )


def kinds(direct: bool | None) -> tuple[list[str], RootModeCounts]:
    """Return the kind of each item's root as rolled out, and the counts predicted before."""

    async def roll() -> tuple[list[str], RootModeCounts]:
        async with rlm() as engine:
            given = {} if direct is None else {"direct": direct}
            rollouts = TaskRolloutRunner(engine, TASK, RolloutOptions(group=1, **given))
            counted = await rollouts.count_planned_modes(ITEMS)
            groups = await rollouts.groups(ITEMS, 0)
            return [each.trajectories[0].root.kind for each in groups], counted

    return asyncio.run(roll())


@pytest.mark.parametrize(
    ("direct", "found", "counted"),
    [
        (None, ["rlm", "rlm", "rlm"], RootModeCounts(3, 0, 1)),
        (True, ["lm", "lm", "rlm"], RootModeCounts(3, 2, 1)),
    ],
)
def test_root_kinds_of_rollouts_match_the_predicted_counts(
    direct: bool | None, found: list[str], counted: RootModeCounts
) -> None:
    assert kinds(direct) == (found, counted)


@pytest.mark.parametrize(("direct", "found"), [(False, ["rlm"] * 3), (True, ["lm", "lm", "rlm"])])
def test_evaluation_roots_are_recursive_unless_direct(direct: bool, found: list[str]) -> None:
    kinds: dict[str, str] = {}
    evaluating = evaluate(
        rlm(),
        TASK,
        plan(task="short", items=3),
        direct=direct,
        on_outcome=lambda outcome, trajectory: kinds.update({outcome.item: trajectory.root.kind}),
    )
    asyncio.run(evaluating)
    assert [kinds[item.id] for item in ITEMS] == found


def test_replay_keeps_the_direct_option_of_the_run(tmp_path: Path) -> None:
    store = Store(tmp_path)

    async def asked() -> list[str]:
        async with rlm(store=store) as engine:
            result = await engine.start("abc", "how long?", direct=False).result()
            again = await engine.areplay(result.trajectory.id)
            return [result.trajectory.root.kind, again.trajectory.root.kind]

    assert asyncio.run(asked()) == ["rlm", "rlm"]


def test_first_roots_of_the_hf_grpo_recipe_are_recursive() -> None:
    run = load_recipe(ROOT / "recipes/hf_grpo.py")
    assert run.rl is not None
    task = task_of(run.task.name, **run.task.options)
    items = [items_of(task, "train")[number] for number in range(20)]
    options = msgspec.structs.replace(run.rl.rollout, group=1)

    async def roll() -> tuple[RootModeCounts, list[str]]:
        async with rlm(scaffold=run.scaffold, limits=run.limits) as engine:
            rollouts = TaskRolloutRunner(engine, task, options)
            groups = await rollouts.groups(items, 0)
            return await rollouts.count_planned_modes(items), [
                each.trajectories[0].root.kind for each in groups
            ]

    assert asyncio.run(roll()) == (RootModeCounts(20, 0, 1), ["rlm"] * 20)


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (
            RootModeCounts(20, 0, 2),
            "20 of the first 20 items begin with a recursive root (a session, with children down "
            "to depth 2)",
        ),
        (
            RootModeCounts(20, 20, 1),
            "0 of the first 20 items begin with a recursive root: one plain call answers 20 of "
            "them "
            "(rl.rollout.direct=false gives each a session)",
        ),
        (
            RootModeCounts(20, 0, 0),
            "0 of the first 20 items begin with a recursive root: 20 have a session, and "
            "limits.max_depth=0 allows no "
            "children",
        ),
    ],
)
def test_root_count_sentence(count: RootModeCounts, sentence: str) -> None:
    assert count.sentence() == sentence


def test_run_reports_its_root_kinds_before_the_first_step(tmp_path: Path) -> None:
    events: list[Any] = []
    run = small(warmup=None)
    train(
        run,
        tmp_path,
        inform=events.append,
        listener=lambda row: events.append(row.stage),
        say=pytest.fail,
    )
    sentence = "rl: 20 of the first 20 items begin with a recursive root (a session, with children down to depth 1)"
    assert sentence in events
    assert events.index(sentence) < events.index("rl")
    (first,) = read_rows(tmp_path, "first")
    assert (first.values["recursive_roots"], first.values["direct_roots"]) == (20, 0)


def test_roots_of_a_task_that_holds_its_conversations_are_not_called_recursive() -> None:
    async def conduct(model: Any) -> str:
        return (await model.ask([Message("user", "hello")])).message.content

    async def begin(item: Item) -> RolloutInitialState:
        return RolloutInitialState(conduct=conduct)

    task = DatasetTask("talk", {"train": ITEMS}, lambda answer, item: 1.0, begin=begin)

    async def counted() -> RootModeCounts:
        async with rlm() as engine:
            return await TaskRolloutRunner(
                engine, task, RolloutOptions(group=1)
            ).count_planned_modes(ITEMS)

    count = asyncio.run(counted())
    assert count.metrics() == {"recursive_roots": 0.0, "direct_roots": 0.0}
    assert count.sentence() == (
        "the task itself holds the conversations of its items, without sessions"
    )
