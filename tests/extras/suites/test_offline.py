"""The strategies of the offline model: with perfect leaves they are right on every suite and family,
and with wrong ones they are not.

The strategy runs in an empty namespace, as in a session of a root.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import collections
import datetime
import difflib
import hashlib
import inspect
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from ramify import plans
from ramify.engine.rlm import RLM
from ramify.evaluate.run_evaluation import EvaluationPlan, evaluate
from ramify.extras.suites import (
    code_qa,
    mrcr,
    multihop,
    niah,
    oolong,
    oolong_pairs,
    planted,
)
from ramify.tasks.base import DatasetTask, Item, items_of, task_of
from ramify.testing.offline_model import (
    OFFLINE_SUITES,
    OfflineModel,
    OfflineModelSuiteStrategy,
    SimulatedAccuracyCurve,
)
from ramify.types.message import Message

SUITES = (code_qa, mrcr, multihop, niah, oolong, oolong_pairs, planted)
FAMILIES = {module.__name__.rpartition(".")[2]: module.FAMILIES for module in SUITES}
"""Suite -> its families."""
ROWS = [
    pytest.param(suite, family, id=f"{suite}-{family}")
    for suite, families in FAMILIES.items()
    for family in families
]
PERFECT, HALF, WRONG = (
    OfflineModel(curve=SimulatedAccuracyCurve(((1, share),))) for share in (1.0, 0.5, 0.0)
)


def suite_task(suite: str, family: str | None = None) -> DatasetTask:
    task = task_of(suite, tokens=5_000, families=None if family is None else (family,))
    assert isinstance(task, DatasetTask)
    return task


def score(task: DatasetTask, answer: str, item: Item) -> float:
    reward = task.reward(answer, item)  # type: ignore[operator,call-arg]
    assert isinstance(reward, float)
    return reward


def session(suite: OfflineModelSuiteStrategy) -> Callable[..., str]:
    """The strategy, in a namespace that has only what a root's cell imports."""
    names: dict[str, Any] = {"__builtins__": builtins, "Callable": Callable}
    for module in (collections, datetime, difflib, re):
        names[module.__name__] = module
    exec(compile(suite.code(), "<strategy>", "exec", dont_inherit=True), names)
    solve: Callable[..., str] = names["solve"]
    return solve


def leaf(model: OfflineModel, asked: list[str]) -> Callable[[list[str]], list[str]]:
    """A sub-model, which keeps the prompts that it was ``asked``."""

    def ask(prompts: list[str]) -> list[str]:
        asked.extend(prompts)
        return [model.reply([Message("user", prompt)]) for prompt in prompts]

    return ask


def test_every_suite_is_tested_here() -> None:
    assert set(FAMILIES) == set(OFFLINE_SUITES)


@pytest.mark.parametrize(("suite", "family"), ROWS)
def test_a_strategy_with_perfect_leaves_is_right(suite: str, family: str) -> None:
    task, solve = suite_task(suite, family), session(OFFLINE_SUITES.resolve(suite))
    for item in items_of(task, "test")[:4]:
        asked: list[str] = []
        answer = solve(item.question, item.context, leaf(PERFECT, asked), 4_000)
        assert score(task, answer, item) == 1.0, (item.question, item.gold, answer)
        assert all(len(prompt) < 6_000 for prompt in asked)


@pytest.mark.parametrize(("suite", "family"), ROWS)
def test_one_reading_of_everything_is_right(suite: str, family: str) -> None:
    task = suite_task(suite, family)
    for item in items_of(task, "validation")[:4]:
        prompt = f"{item.context}\n\nQuestion: {item.question}"
        answer = PERFECT.reply([Message("user", prompt)])
        assert score(task, answer, item) == 1.0, (item.question, item.gold, answer)


@pytest.mark.parametrize(("suite", "family"), ROWS)
def test_a_wrong_reading_is_plausible_and_scores_less_than_1(suite: str, family: str) -> None:
    task = suite_task(suite, family)
    for item in items_of(task, "test")[:4]:
        prompt = f"{item.context}\n\nQuestion: {item.question}"
        answer = WRONG.reply([Message("user", prompt)])
        assert answer
        assert score(task, answer, item) < 1.0, (item.question, item.gold, answer)


@pytest.mark.parametrize(("suite", "family"), ROWS)
def test_a_strategy_survives_leaves_that_fail(suite: str, family: str) -> None:
    task, solve = suite_task(suite, family), session(OFFLINE_SUITES.resolve(suite))
    for reply in ("", "Error: the limit is reached", "unknown"):
        item = items_of(task, "test")[0]
        answer = solve(
            item.question, item.context, lambda prompts, r=reply: [r] * len(prompts), 4_000
        )
        assert isinstance(answer, str)


@pytest.mark.parametrize(("suite", "family"), ROWS)
def test_a_question_alone_has_no_right_reply(suite: str, family: str) -> None:
    """The model knows nothing but its request."""
    task = suite_task(suite, family)
    for item in items_of(task, "test")[:4]:
        assert score(task, PERFECT.reply([Message("user", item.question)]), item) < 1.0


@pytest.mark.parametrize("suite", FAMILIES)
def test_a_session_of_ramify_runs_the_strategy(suite: str) -> None:
    task = suite_task(suite)
    client = PERFECT.client()

    async def main() -> list[float | None]:
        plan = EvaluationPlan(model=client.name, task=suite, items=2)
        done = await evaluate(RLM(client), task, plan)
        return [outcome.reward for outcome in done.outcomes]

    assert asyncio.run(main()) == [1.0, 1.0]
    assert [len(each.messages) for each in client.requests if len(each.messages) > 1]


def test_spoiled_labels_differ_in_a_few_lines() -> None:
    question = "Which label has each line? 0 = a, 1 = b, 2 = c. Reply with one number a line."
    right = "\n".join(["0", "1", "2"] * 20)
    wrong = OFFLINE_SUITES.resolve("oolong").spoil(question, "", right, random.Random(0))
    differ = sum(a != b for a, b in zip(right.split("\n"), wrong.split("\n"), strict=True))
    assert 1 <= differ <= 4


PUBLISHED = {
    "code_qa": "5af619ab213718f3",
    "mrcr": "324403fb973368eb",
    "multihop": "9d4d3b58efd7f13d",
    "niah": "8c6554d35c9b3221",
    "oolong": "eb460900ef7ac1c2",
    "oolong_pairs": "28f0039123af6f46",
    "planted": "efae1be93e128a50",
}
"""Suite -> hash of its strategy and of how a leaf reads and errs, without docstrings of the leaf.
Scores that were published with the model for offline use hold only for these."""


def without_docstring(function: Callable[..., Any]) -> str:
    """Return the source of ``function``. No model reads the docstring, so it may be reworded."""
    source = inspect.getsource(function)
    (parsed,) = ast.parse(source).body
    assert isinstance(parsed, ast.FunctionDef)
    if ast.get_docstring(parsed) is None:
        return source
    lines = source.splitlines(keepends=True)
    first = parsed.body[0]
    return "".join(lines[: first.lineno - 1] + lines[first.end_lineno :])


@pytest.mark.parametrize("suite", PUBLISHED)
def test_published_strategies_and_leaves_have_not_changed(suite: str) -> None:
    known = OFFLINE_SUITES.resolve(suite)
    texts = [known.asks, known.code(), *map(without_docstring, (known.read, known.spoil))]
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == PUBLISHED[suite]


@pytest.mark.parametrize(
    ("suite", "plan"),
    [("oolong", "aggregate"), ("oolong_pairs", "pairwise"), ("planted", "summarise")],
)
@pytest.mark.parametrize("part_tokens", [700, 4_000])
def test_a_ready_plan_with_perfect_leaves_is_right(suite: str, plan: str, part_tokens: int) -> None:
    for family in FAMILIES[suite]:
        task = suite_task(suite, family)
        with RLM(PERFECT.client()) as rlm:
            # Counts do not name a label that no record has, which may be the least common one.
            for item in [e for e in items_of(task, "test")[:8] if not e.kind.endswith(" least")]:
                strategy = plans.strategy_for(item.question, name=plan, part_tokens=part_tokens)
                result = rlm.completion(item.context, item.question, strategy=strategy)
                answer = result.answer
                assert score(task, answer, item) == 1.0, (item.question, item.gold, answer)


def test_a_leaf_of_a_plan_errs_as_often_as_the_curve_says() -> None:
    task = suite_task("oolong", "counting")
    right = wrong = 0
    for item in items_of(task, "test")[:60]:
        plan = plans.aggregate(part_tokens=700)
        part = plan.steps[0].parts(item.context)[0]  # type: ignore[union-attr]
        prompt = next(plan.leaves()).request_text(item.question, part)
        replies = [m.reply([Message("user", prompt)]) for m in (PERFECT, HALF)]
        assert len(json.loads(replies[1])) == len(part.records)
        right, wrong = right + (replies[0] == replies[1]), wrong + (replies[0] != replies[1])
    assert (right > 15, wrong > 15) == (True, True), (right, wrong)
