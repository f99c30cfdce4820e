"""Answer ``oolong_pairs`` as the offline model, a simulated language model.

The offline model is a program that replaces a language model. Its sub-calls label the lines as in
OOLONG. Code finds the users that satisfy the condition and joins them into pairs.

This module decides how the root of a run proceeds. How a sub-call labels lines is decided by
``oolong_offline_model.py``, and how accurate replies are, and the steps of a root, by
``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import collections
import datetime
import random
import re
from collections.abc import Callable
from typing import Any

from ramify.extras.suites import oolong_offline_model
from ramify.extras.suites.oolong_offline_model import labelled_lines
from ramify.testing.offline_model import OfflineModelSuiteStrategy
from ramify.testing.plan_leaf_prompt_formats import ParsedPlanLeafRequest


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    lines = labelled_lines(context, ask, chars)[1]
    after = re.findall(r"on or after (\w+ \d+, \d+)", question)
    if after:
        start = datetime.datetime.strptime(after[0], "%b %d, %Y")
        dates = {line[0] for line in lines}
        late = {date for date in dates if datetime.datetime.strptime(date, "%b %d, %Y") >= start}
        lines = [line for line in lines if line[0] in late]
    counts = collections.Counter((int(user), label) for _, user, label in lines)
    users = sorted({user for user, _ in counts})
    labels = re.findall(r"'([^']+)'", question)
    exact = re.findall(r"exactly (\d+) instances? with", question)
    if question.find("one of the users") >= 0:
        first = [user for user in users if counts[user, labels[0]]]
        second = [user for user in users if counts[user, labels[1]] == 1]
    elif exact:
        first = [user for user in users if counts[user, labels[0]] == int(exact[0])]
        second = first
    else:
        first = [user for user in users if any(counts[user, label] for label in labels)]
        second = first
    pairs = {(min(one, other), max(one, other)) for one in first for other in second}
    return "\n".join(f"({one}, {other})" for one, other in sorted(pairs) if one != other)


def answer_from_text(question: str, text: str) -> str | None:
    return oolong_offline_model.answer_from_text(question, text)


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a plausible wrong answer, in which a few labels or pairs are changed."""
    if "pairs of users" not in question:
        return oolong_offline_model.make_wrong_answer(question, text, right, draw)
    pairs = right.split("\n")
    users = sorted(set(re.findall(r"User: (\d+)", text)))
    for _ in range(1 + len(pairs) // 4):
        pairs[draw.randrange(len(pairs))] = f"({', '.join(sorted(draw.sample(users, 2)))})"
    changed = "\n".join(sorted(set(pairs)))
    return changed if set(pairs) != set(right.split("\n")) else "\n".join(pairs[1:]) or "none"


def answer_plan_request(turn: ParsedPlanLeafRequest) -> Any:
    """Return the right reply to a model call that the plan ``pairwise`` makes, or None for other
    calls.

    For numbered records, the reply is the user and the label that the condition counts. For counts
    of these, it is the side of a pair that each user can take.
    """
    labels = re.findall(r"'([^']+)'", turn.question)
    if turn.kind == "facts":
        after = re.search(r"on or after (\w+ \d+, \d+)", turn.question)
        start = None if after is None else datetime.datetime.strptime(after[1], "%b %d, %Y")
        return [_fact(record, labels, start) for record in turn.records]
    return _sides(turn.question, labels, turn.counts) if turn.kind == "sides" else None


def _fact(record: str, labels: list[str], start: datetime.datetime | None) -> dict[str, str]:
    date, user, label = oolong_offline_model.date_user_label(record)
    is_early = start is not None and date and datetime.datetime.strptime(date, "%b %d, %Y") < start
    is_counted = date and not is_early and label in labels
    return {"key": user, "value": label if is_counted else "none"}


def _sides(question: str, labels: list[str], counts: dict[str, int]) -> list[dict[str, str]]:
    """Return which side of a pair each user fits, according to the condition in the question.

    The side is ``first``, ``second``, ``both`` or ``neither``. ``counts`` maps each ``user |
    label`` to its number of records.
    """
    found = {tuple(key.split(" | ")): count for key, count in counts.items()}
    users = sorted({user for user, _ in found})
    exact = re.search(r"exactly (\d+) instances? with", question)
    sides = []
    for user in users:
        if "one of the users" in question:
            first = found.get((user, labels[0]), 0) > 0
            second = found.get((user, labels[1]), 0) == 1
        elif exact is not None:
            first = second = found.get((user, labels[0]), 0) == int(exact[1])
        else:
            first = second = any(found.get((user, label)) for label in labels)
        side = "both" if first and second else "first" if first else "second"
        sides.append({"key": user, "side": side if first or second else "neither"})
    return sides


PAIRS = OfflineModelSuiteStrategy(
    "oolong_pairs",
    r"List all pairs of users such that",
    solve,
    answer_from_text,
    make_wrong_answer,
    (labelled_lines,),
    answer_plan_request,
)
"""How the offline model answers OOLONG-Pairs: sub-model calls label the lines, and code joins users
into pairs."""
