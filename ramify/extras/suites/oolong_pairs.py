"""The OOLONG-Pairs benchmark: find all pairs of users that satisfy a condition (RLM paper, Zhang et
al. 2025).

    oolong_pairs(tokens=32_768)
    oolong_pairs(families=("exact",), users=40, with_labels=True)

    Date: Mar 07, 2024 || User: 48213 || Instance: What colour is the bridge of Lodavi ?
    … both users have at least one instance with the label 'entity' or 'location'
      ->  (48213, 51822), (48213, 70416), (51822, 70416)

The lines are those of OOLONG (``oolong.py``), so labels have to be inferred. The lines that make a
user satisfy a condition are planted. The filler has other lines of the same users, none of which
changes who satisfies the condition. So the pairs are the same at every length of the text, and
every line counts.

The families of conditions are ``both`` (each user has a line with one of two labels), ``dated``
(the same from a date on), ``exact`` (a given number of lines with a label), and ``cross`` (one user
satisfies one condition, the other another one). This module defines the conditions and the score,
which is F1 over pairs.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.extras.suites.fact_planting import filler_rng
from ramify.extras.suites.filler_text import invented_name, pool_size
from ramify.extras.suites.oolong import LABELS, THINGS, format_text_line, header, written_date
from ramify.extras.suites.suite_common import (
    CHARS_PER_TOKEN,
    chosen_families,
    suite_task,
)
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.scoring.answer_text import as_text

MIN_USERS, MAX_USERS = 6, 100
_DAYS = 730
_CHARS_PER_USER = 300
"""Upper bound on the characters of one user's planted lines. There are at most three."""
_PAIR = re.compile(
    r"[(\[{]\s*[\"']?(\d{1,12})[\"']?\s*,\s*[\"']?(\d{1,12})[\"']?\s*[)\]}]"
    r"|^[^\d\n]*(\d{1,12})\s*[,;&-]\s*(\d{1,12})[^\d\n]*$",
    re.MULTILINE,
)
_FORM = (
    "List all pairs of users such that {}. Write one pair per line as (id, id), with the smaller "
    "id first, and each pair once."
)


class PairListF1Scorer(msgspec.Struct, frozen=True):
    """A reward function: the F1 score of the user pairs in an answer.

    It is 2·s / (m + r), where m is the number of pairs in the answer, r the number of pairs in the
    right answer, and s the number of pairs in both. The order within a pair does not matter. A pair
    is written in brackets or alone on a line: ``(12, 15)``, ``[[12, 15]]``.
    """

    def __call__(self, answer: Any, item: Item) -> float:
        gold = {frozenset(map(int, pair)) for pair in item.gold}
        text = as_text(answer)
        if text is None:
            return 0.0
        named = {
            frozenset((int(one or third), int(other or fourth)))
            for one, other, third, fourth in _PAIR.findall(text)
        }
        return 2 * len(named & gold) / (len(named) + len(gold))


def oolong_pairs(
    *,
    tokens: int = 8_192,
    families: str | Sequence[str] | None = None,
    users: int = 12,
    with_labels: bool = False,
    seed: int = 0,
) -> DatasetTask:
    """Return a task that asks for all pairs of users whose lines satisfy a condition on labels and
    dates.

    Args:
        tokens: Length of a text in tokens: 1,000 to 10,000,000. A token counts as four characters.
        families: Which of ``both``, ``dated``, ``exact`` and ``cross`` are asked; None for all.
        users: Number of different users, from 6 to 100. A text has at least 300 characters for
            each.
        with_labels: Write the labels into the text.
        seed: Seed of the generated items.

    Raises ConfigError for options with which no question can be asked.
    """
    chosen = chosen_families("oolong_pairs", families, FAMILIES, tokens)
    chars = tokens * CHARS_PER_TOKEN
    if not MIN_USERS <= users <= min(MAX_USERS, chars // _CHARS_PER_USER):
        raise ConfigError(
            f"oolong_pairs: users={users}; give {MIN_USERS} to "
            f"{min(MAX_USERS, chars // _CHARS_PER_USER)} users for {tokens:,} tokens"
        )
    make = functools.partial(_make, chars, chosen, users, with_labels)
    return suite_task("oolong_pairs", make, PairListF1Scorer(), seed=seed, families=chosen)


class UserPairCondition(msgspec.Struct, frozen=True):
    """A condition on pairs of users, and the planted text lines that decide which pairs satisfy it.

    The matching pairs are stored, too.
    """

    text: str
    """The condition in words. It completes "pairs of users such that …"."""
    labels: tuple[str, ...]
    """Labels that the condition names."""
    planted: Mapping[int, Sequence[str]]
    """User -> labels of the lines planted within the condition's period."""
    closed: Mapping[int, Sequence[str]]
    """User -> labels that none of the user's other lines in the period may have."""
    pairs: Sequence[tuple[int, int]]
    """The pairs of users that satisfy the condition."""
    first_day: int = 0
    """Day on which the period begins. A user without planted lines in the period gets lines with
    the condition's labels before that day; they do not count."""


def _make(
    chars: int, families: Sequence[str], users: int, with_labels: bool, rng: random.Random
) -> Item:
    family = rng.choice(families)
    ids = sorted(rng.sample(range(10_000, 100_000), users))
    condition = _CONDITIONS[family](rng, ids)
    text = _text(rng, chars, ids, condition, with_labels)
    right = "\n".join(f"({one}, {other})" for one, other in condition.pairs)
    return Item(
        _FORM.format(condition.text),
        text,
        [list(pair) for pair in condition.pairs],
        family,
        right=right,
        wrong=f"{right}\n(1, 2)",
    )


def _text(
    rng: random.Random,
    chars: int,
    ids: Sequence[int],
    condition: UserPairCondition,
    with_labels: bool,
) -> str:
    planted = _planted_lines(rng, ids, condition, with_labels)
    labels = tuple(LABELS)
    filler = filler_rng(rng)
    size = pool_size(chars)
    pool = {label: [_instance(filler, label) for _ in range(size // 4)] for label in labels}
    open_labels = {
        user: tuple(label for label in labels if label not in condition.closed.get(user, ()))
        for user in ids
    }

    def written(day: int, user: int) -> str:
        known = open_labels[user] if day >= condition.first_day else labels
        label = filler.choice(known)
        return format_text_line(day, user, filler.choice(pool[label]), label if with_labels else "")

    sample = [written(condition.first_day, user) for user in filler.choices(ids, k=size)]
    mean = sum(map(len, sample)) / size + 1
    room = chars - len(header(0, labels))
    room -= sum(len(text) + 1 for day in planted.values() for text in day)
    num = max(0, round(room / mean))
    num_of_day = [0] * _DAYS
    for _ in range(num):
        num_of_day[int(filler.random() * _DAYS)] += 1
    parts = [header(num + sum(map(len, planted.values())), labels)]
    for day, number in enumerate(num_of_day):
        lines = [written(day, user) for user in filler.choices(ids, k=number)]
        for text in planted.get(day, ()):
            lines.insert(filler.randrange(len(lines) + 1), text)
        if lines:
            parts.append("\n".join(lines))
    return "\n".join(parts)


def _planted_lines(
    rng: random.Random, ids: Sequence[int], condition: UserPairCondition, with_labels: bool
) -> dict[int, list[str]]:
    """Return the planted lines of a generated text, grouped by day.

    They decide which pairs satisfy the condition. Every user gets at least one.
    """
    planted: dict[int, list[str]] = {}
    neutral = [label for label in LABELS if label not in condition.labels]
    for user in ids:
        begin, end = condition.first_day, _DAYS
        labels = condition.planted.get(user, ())
        if not labels and begin:
            begin, end, labels = 0, begin, condition.labels
        for label in labels or [rng.choice(neutral)]:
            day = rng.randrange(begin, end)
            text = format_text_line(day, user, _instance(rng, label), label if with_labels else "")
            planted.setdefault(day, []).append(text)
    return planted


def _instance(rng: random.Random, label: str) -> str:
    return rng.choice(LABELS[label]).format(rng.choice(THINGS), invented_name(rng, 3))


# --- conditions -----------------------------------------------------------------------------------


def _both_condition(rng: random.Random, ids: Sequence[int]) -> UserPairCondition:
    one, other = labels = tuple(rng.sample(list(LABELS), 2))
    chosen = _choose_users(rng, ids)
    return UserPairCondition(
        f"both users have at least one instance with the label '{one}' or '{other}'",
        labels,
        {user: [rng.choice(labels)] for user in chosen},
        {user: labels for user in ids if user not in chosen},
        list(itertools.combinations(chosen, 2)),
    )


def _dated_condition(rng: random.Random, ids: Sequence[int]) -> UserPairCondition:
    label, first_day = rng.choice(list(LABELS)), rng.randrange(_DAYS // 4, 3 * _DAYS // 4)
    chosen = _choose_users(rng, ids)
    return UserPairCondition(
        f"both users have at least one instance with the label '{label}' on or after "
        f"{written_date(first_day)}",
        (label,),
        {user: [label] for user in chosen},
        {user: [label] for user in ids if user not in chosen},
        list(itertools.combinations(chosen, 2)),
        first_day,
    )


def _exact_condition(rng: random.Random, ids: Sequence[int]) -> UserPairCondition:
    label, number = rng.choice(list(LABELS)), rng.choice((1, 2))
    chosen = _choose_users(rng, ids)
    wrong_numbers = itertools.cycle((0, number + 1))
    planted = {user: [label] * (number if user in chosen else next(wrong_numbers)) for user in ids}
    return UserPairCondition(
        f"both users have exactly {number} instance{'s' * (number > 1)} with the label '{label}'",
        (label,),
        planted,
        {user: [label] for user in ids},
        list(itertools.combinations(chosen, 2)),
    )


def _cross_condition(rng: random.Random, ids: Sequence[int]) -> UserPairCondition:
    one, other = labels = tuple(rng.sample(list(LABELS), 2))
    some = rng.sample(list(ids), max(5, len(ids) // 2))
    third = len(some) // 3
    # Some users satisfy both conditions, some the first one, and some the second one.
    first, second = set(some[: 2 * third]), set(some[third:])
    planted = {
        user: [one] * (user in first) + [other] * (user in second or 2 * (user not in first))
        for user in ids
    }
    pairs = [
        (user, mate)
        for user, mate in itertools.combinations(ids, 2)
        if (user in first and mate in second) or (mate in first and user in second)
    ]
    return UserPairCondition(
        f"one of the users has at least one instance with the label '{one}', and the other user "
        f"has exactly one instance with the label '{other}'",
        labels,
        planted,
        {user: [other] if user in first else labels for user in ids},
        pairs,
    )


def _choose_users(rng: random.Random, ids: Sequence[int]) -> list[int]:
    """Choose a random third to half of the users, and return them in ascending order."""
    return sorted(rng.sample(list(ids), rng.randint(len(ids) // 3, len(ids) // 2)))


_CONDITIONS: Mapping[str, Callable[[random.Random, Sequence[int]], UserPairCondition]] = {
    "both": _both_condition,
    "dated": _dated_condition,
    "exact": _exact_condition,
    "cross": _cross_condition,
}
FAMILIES = tuple(_CONDITIONS)
