"""Checks a task before a run.

The right answer must score 1, a wrong one must not, and no item may be in two splits.

Items without a gold answer (open questions, environments that need several actions) are not scored,
because their score is unknown. They may have equal questions, as episodes of an environment often
do, and differ by their ids. Tasks with ``needs_rollout`` are not scored either, because
their score sees more than an answer. The check only shows that the score would accept the right
answer, and not that a model can find it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.base import SPLITS, Item, Task, items_of, total
from ramify.tasks.batch_scoring import EndedRollout, is_batch_scored, score_batch_with_timeout
from ramify.tasks.score_with_timeout import score_with_timeout
from ramify.types.trajectory import Call, Stop, Trajectory

WRONG = "(no answer of this task looks like this: qzxvkj)"
"""Wrong answer for items that do not specify one. It has no digit that a score function could read
as a number.
"""
SCORE_S = 30.0
"""Default time limit for one call of a task's score function, in seconds."""
_TOLERANCE = 1e-9
_OFF = (
    "switch this check off if the score has another scale, such as 0 to 100 or below 0, or if one "
    "answer cannot show it (task.validate=false in a recipe, --no-validate for eval)"
)


def validate(
    task: Task,
    splits: Iterable[str] | None = None,
    num: int = 8,
    *,
    gold: bool = True,
    score_s: float = SCORE_S,
) -> str:
    """Check that right answers score 1 and wrong ones do not, for the first ``num`` items of each
    split.

    Scoring one answer may take ``score_s`` seconds.

    Raises ConfigError that names the item if it has no question, if its right answer does not score
    1, if a wrong answer (or none) scores 1, or if the item is in two splits.

    Items without a gold answer are not scored. With ``gold=False`` no item is scored or compared
    with those of other splits. The returned sentence says so; it is empty if all were scored.

    >>> tasks.validate(tasks.task_of("needle"), num=1)
    ''
    """
    if num < 1:
        raise ConfigError(f"validate task '{task.name}': num is {num}; give at least 1")
    seen: dict[bytes, str] = {}
    checked = without = 0
    together: list[EndedRollout] = []
    for split in task.splits if splits is None else splits:
        items = items_of(task, split)
        if not len(items):
            raise ConfigError(f"task '{task.name}': its split '{split}' is empty")
        for index in range(min(num, len(items))):
            item = items[index]
            is_proved = validate_item(task, item, gold=gold, score_s=score_s)
            if is_proved and is_batch_scored(task, item):
                together += [
                    (item, answer_only_trajectory(item, each))
                    for each in (_right_answer(task, item), WRONG)
                ]
            without += not is_proved
            checked += 1
            if gold:
                _check_once(task, split, item, seen)
    _check_together(task, together, score_s)
    return _skipped_checks_note(task, without, checked, gold)


def _check_together(task: Task, rollouts: Sequence[EndedRollout], score_s: float) -> None:
    """Raise ConfigError if the task fails to score several rollouts in one call.

    A training step scores them in this way. The values are not checked, since rewards may depend on
    each other.
    """
    if rollouts:
        errors = score_batch_with_timeout(task, rollouts, score_s)
        if failed := next((error for error in errors if error is not None), None):
            raise ConfigError(str(failed))


def _skipped_checks_note(task: Task, without: int, checked: int, gold: bool) -> str:
    """Return a message that says which checks of a task were skipped, or "" if none were.

    Otherwise return an empty string.
    """
    if not gold:
        return f"task '{task.name}': the check of its scores with gold answers is switched off"
    if not without or getattr(task, "needs_rollout", False):
        return ""
    return (
        f"task '{task.name}': {without} of the {checked} items checked have no gold answer; the "
        "check of their scores was skipped"
    )


def validate_item(task: Task, item: Item, *, gold: bool = True, score_s: float = SCORE_S) -> bool:
    """Check that an item is valid and that only right answers to it score 1.

    Raises ConfigError if it has no question or is scored wrongly. Returns False if its score was
    not checked, because it has no gold answer or ``gold`` is False.
    """
    where = f"task '{task.name}', item {item.id or '(without an id)'}"
    if not item.id or not item.question.strip():
        raise ConfigError(f"{where}: an item needs an id and a question")
    right = _right_answer(task, item)
    if right is None or not gold or getattr(task, "needs_rollout", False):
        return False
    rewards, most = _score_answer(task, item, right, score_s), _right_worth(task, item)
    reached = total(rewards, task.weights)
    if abs(reached - most) > _TOLERANCE:
        raise ConfigError(
            f"{where}: the right answer {_short_repr(right)} scores {reached:g} and not {most:g}"
            f"{_summands(rewards, task.weights)}; correct the gold, the score or the weights, or "
            f"{_OFF}"
        )
    for wrong in (WRONG if item.wrong is None else item.wrong, None):
        reached = total(_score_answer(task, item, wrong, score_s), task.weights)
        if reached >= most - _TOLERANCE:
            raise ConfigError(
                f"{where}: the wrong answer {_short_repr(wrong)} scores {reached:g}; the "
                "score accepts "
                "any answer"
            )
    return True


def _right_answer(task: Task, item: Item) -> Any:
    """Return an answer to ``item`` that the task must score as right, or None if none is known."""
    right = item.gold if item.right is None else item.right
    owner = task if hasattr(task, "as_answer") else getattr(task, "reward", None)
    as_answer = getattr(owner, "as_answer", None)
    return right if right is None or as_answer is None else as_answer(right)


def answer_only_trajectory(item: Item, answer: Any) -> Trajectory:
    """Return a trajectory that contains only an answer, for scoring that answer."""
    call = Call("0", "rlm", "none:none", 0, item.question, answer=answer, stop=Stop.FINAL)
    return Trajectory(
        id="answered",
        question=item.question,
        task=item.id,
        calls=[call],
        answer=answer,
        stop=Stop.FINAL,
        metadata=dict(item.metadata),
    )


def _score_answer(task: Task, item: Item, answer: Any, score_s: float) -> dict[str, float]:
    return score_with_timeout(task, item, answer_only_trajectory(item, answer), score_s).rewards


def _summands(rewards: Mapping[str, float], weights: Mapping[str, float]) -> str:
    """Format the named rewards and their weights as a sum, such as `` = 0.5 x close 1 + len 1``.

    Returns an empty string for a single reward without a weight.
    """
    if len(rewards) == 1 and not weights:
        return ""
    parts = (f"{weights.get(name, 1.0):g} x {name} {value:g}" for name, value in rewards.items())
    return f" (weight x reward: {' + '.join(parts)})"


def _right_worth(task: Task, item: Item) -> float:
    """Return the reward that the task should give for a right answer to ``item``.

    It is 1, except in a mixture, where each part has a reward factor.
    """
    worth = getattr(task, "right_answer_reward", None)
    return 1.0 if worth is None else float(worth(item))


def _check_once(task: Task, split: str, item: Item, seen: dict[bytes, str]) -> None:
    """Raise ConfigError if another split of the task contains the same item.

    No learning curve would show such a leak.

    Two items are the same if question, messages, context, gold answer and metadata are equal. Items
    without a gold answer must also have the same id.
    """
    same = (item.question, item.messages, item.context, item.gold, item.metadata)
    try:
        key = msgspec.json.encode((*same, item.id if item.gold is None else ""))
    except (TypeError, ValueError):
        return  # a context without a JSON form is not compared
    place = f"{split}: {item.id}"
    other = seen.setdefault(hashlib.sha256(key).digest(), place)
    if other.partition(": ")[0] != split and split in SPLITS:
        raise ConfigError(
            f"task '{task.name}': {item.id} of split '{split}' is the same item as "
            f"{other.partition(': ')[2]} of split '{other.partition(': ')[0]}' (question, context, "
            "gold answer and metadata are equal): keep it in one of them, put what tells them "
            "apart into its metadata (a seed, for example), or switch this check off "
            "(task.validate=false in a recipe, --no-validate for eval)"
        )


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
