"""A task proves itself before anything is spent on it: the right answer scores 1, a wrong one does not.

Leaves out whether a model can find the answer; only that the score would know it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import SPLITS, Item, Task, items_of, scored, total
from ramify.types.trajectory import Call, Stop, Trajectory

WRONG = "(no answer of this task looks like this: 7f3a9c)"
"""Stands in for a wrong answer where the item names none."""
_TOLERANCE = 1e-9


def validate(task: Task, splits: Iterable[str] | None = None, num: int = 8) -> None:
    """Check the first ``num`` items of each split. Raises ConfigError that names the item: one without a question, a
    right answer that does not score 1, a wrong one (or none at all) that does, the same item twice."""
    if num < 1:
        raise ConfigError(f"validate task '{task.name}': num is {num}; give at least 1")
    seen: dict[bytes, str] = {}
    for split in task.splits if splits is None else splits:
        items = items_of(task, split)
        if not len(items):
            raise ConfigError(f"task '{task.name}': its split '{split}' is empty")
        for index in range(min(num, len(items))):
            item = items[index]
            prove(task, item)
            _check_once(task, split, item, seen)


def prove(task: Task, item: Item) -> None:
    """Check one item."""
    where = f"task '{task.name}', item {item.id or '(without an id)'}"
    if not item.id or not item.question.strip():
        raise ConfigError(f"{where}: an item needs an id and a question")
    right = item.gold if item.right is None else item.right
    if right is None:
        raise ConfigError(f"{where}: it has no gold answer, so nothing shows that its score works: give gold or right")
    reached = _worth(task, item, right)
    if abs(reached - 1) > _TOLERANCE:
        raise ConfigError(
            f"{where}: the right answer {_short(right)} scores {reached:g} and not 1; correct the gold, the score or "
            "the weights"
        )
    for wrong in (WRONG if item.wrong is None else item.wrong, None):
        reached = _worth(task, item, wrong)
        if reached >= 1 - _TOLERANCE:
            raise ConfigError(f"{where}: the wrong answer {_short(wrong)} scores {reached:g}; the score takes anything")


def answered(item: Item, answer: Any) -> Trajectory:
    """A trajectory that is nothing but ``answer``."""
    call = Call("0", "rlm", "none:none", 0, item.question, answer=answer, stop=Stop.FINAL)
    return Trajectory(
        id="answered", question=item.question, task=item.id, calls=[call], answer=answer, stop=Stop.FINAL,
        metadata=dict(item.metadata),
    )  # fmt: skip


def _worth(task: Task, item: Item, answer: Any) -> float:
    return total(scored(task, item, answered(item, answer)).rewards, task.weights)


def _check_once(task: Task, split: str, item: Item, seen: dict[bytes, str]) -> None:
    """Training on what is tested is the fault that no curve shows."""
    try:
        key = hashlib.sha256(msgspec.json.encode((item.question, item.context))).digest()
    except (TypeError, ValueError):
        return  # a context without a JSON form is not compared
    other = seen.setdefault(key, item.id)
    same_split = other.rpartition("/")[0] == item.id.rpartition("/")[0]
    if other != item.id and not same_split and split in SPLITS:
        raise ConfigError(f"task '{task.name}': {item.id} is the same question over the same context as {other}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
