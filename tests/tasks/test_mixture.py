"""Mixtures: proportions, scores and weights of each part, pools, and parts used only for tests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.tasks.base import items_of, score_trajectory, task_of, total
from ramify.tasks.validation import answer_only_trajectory, validate

PARTS: dict[str, Any] = {
    "sums": {"task": "ledger", "weight": 3, "options": {"kinds": ["sum"]}},
    "papers": {"task": "evidence", "reward": 0.5},
    "held": {"task": "needle", "weight": 0, "options": {"chars": 2000}},
}


def test_parts_have_their_proportion_score_and_reward_weight() -> None:
    task = task_of("mixture", parts=PARTS)
    train = items_of(task, "train")
    parts = [item.id.partition(":")[0] for item in train[:400]]
    assert Counter(parts) == {"sums": 300, "papers": 100}
    assert Counter(parts[:8]) == {"sums": 6, "papers": 2}
    assert len({item.id for item in train[:400]}) == 400
    sums, papers = (
        next(item for item in train if item.id.startswith(n)) for n in ("sums", "papers")
    )
    assert sums.kind == "sums sum"
    for item, rewards, worth in (
        (sums, {"sums.correct": 1.0}, 1.0),
        (papers, {"papers.f1": 1.0}, 0.5),
    ):
        trajectory = score_trajectory(task, item, answer_only_trajectory(item, item.gold))
        assert trajectory.rewards == rewards
        assert total(trajectory.rewards, task.weights) == worth
    start = asyncio.run(task.prepare(papers))
    assert "papers()" in start.about
    assert {item.id.partition(":")[0] for item in items_of(task, "validation")[:20]} == {
        "sums",
        "papers",
    }
    assert {item.id.partition(":")[0] for item in items_of(task, "test_held")[:5]} == {"held"}
    assert validate(task, ("train", "validation", "test_held")) == ""


def test_pool_contains_the_items_a_run_learned_from(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    rows = [(7, "learnt"), (8, "no_signal"), (9, "learnt"), (7, "learnt")]
    lines = [json.dumps({"item": f"sums:ledger/train/{n}", "outcome": out}) for n, out in rows]
    path.write_text("\n".join(lines))
    parts = {"again": {"task": "ledger", "pool": str(path)}}
    items = items_of(task_of("mixture", parts=parts), "train")
    assert [item.id for item in items[:2]] == ["again:ledger/train/7", "again:ledger/train/9"]
    parts["again"]["outcomes"] = ["lost"]  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"has no item of ledger/train with an outcome in \['lost'\]"
    ):
        task_of("mixture", parts=parts)


def test_pool_of_file_rows_repeats_when_exhausted(tmp_path: Path) -> None:
    """Items of a split file have their row number in their id, not their index in the split."""
    data, path = tmp_path / "rows.jsonl", tmp_path / "groups.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": n}) for n in range(99)))
    rows = items_of(task_of(str(data)), "train")
    chosen = [rows[40], rows[7]]
    lines = [json.dumps({"item": item.id, "outcome": "silent"}) for item in chosen]
    path.write_text("\n".join([*lines, '{"item": "torn']))
    again = {"task": str(data), "pool": str(path), "outcomes": ["no_signal"]}
    train = items_of(task_of("mixture", parts={"again": again, "new": {"task": "ledger"}}), "train")
    assert len(train) > 10**9
    assert [item.question for item in train[:8] if item.id.startswith("again")] == [
        chosen[0].question,
        chosen[1].question,
    ] * 2
    assert len({item.id for item in train[:80] if item.id.startswith("new")}) == 40
    again["pool"] = str(tmp_path)  # the run's folder
    again["outcomes"] = ["learnt"]
    with pytest.raises(ConfigError, match=r"in \['learnt'\]; its groups: 2 no_signal"):
        task_of("mixture", parts={"again": again})
    again["outcomes"] = ["learned"]
    with pytest.raises(ConfigError, match=r"'learned' .*known: learnt, no_signal, lost, spare"):
        task_of("mixture", parts={"again": again})


def test_task_may_be_in_two_parts_but_items_not_in_train_and_test(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({"item": "ledger/train/0", "outcome": "learnt"}))
    parts = {"sums": {"task": "ledger"}, "again": {"task": "ledger", "pool": str(path)}}
    task = task_of("mixture", parts=parts)
    assert validate(task, ("train", "validation", "test", "test_again")) == ""
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": n}) for n in range(99)))
    parts = {name: {"task": str(data)} for name in "ab"}
    mixed = task_of("mixture", parts=parts)
    assert validate(mixed, ("train", "test")) == ""
    items = items_of(mixed, "train")[:4]
    shown = [msgspec.structs.replace(item, id=f"b:rows/test/{n}") for n, item in enumerate(items)]
    mixed = msgspec.structs.replace(mixed, splits={**mixed.splits, "test": shown})  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="is the same item as"):
        validate(mixed, ("train", "test"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "parts is {}: give each task a name, as in"),
        ([1], r"parts is \[1\]: give each task a name"),
        ({"a:b": {"task": "ledger"}}, "the names of parts must not contain ':' or '.'"),
        ({"a": "ledger"}, "part 'a' is 'ledger': .* give a task with its options"),
        ({"a": {"task": "ledger", "reward": 0}}, "reward=0 is a factor .* must be above 0"),
        ({"a": {"task": "ledger", "weight": 0}}, "all weights are 0, so there is nothing to train"),
        ({"a": {"task": "ledger", "weight": -1}}, "must be finite numbers, at least 0"),
        (
            {"a": {"task": "ledger"}, "b": {"task": "needle", "weight": 1e-5}},
            "'b' .* is too small to get one of every",
        ),
        ({"a": {"task": "ledgr"}}, "did you mean 'ledger'"),
        ({"a": {"tusk": "ledger"}}, "part 'a' is .*tusk"),
        ({"a": {"task": "ledger", "pool": "nowhere"}}, "its pool nowhere does not exist"),
    ],
)
def test_invalid_mixture_parts_are_rejected(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of("mixture", parts=parts)
