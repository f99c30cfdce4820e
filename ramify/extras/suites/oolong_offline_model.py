"""Answer OOLONG as the offline model, a simulated language model.

The offline model is a program that replaces a language model. Its sub-calls label the lines of each
part of the text, and code counts the labels.

This module decides how the root of a run proceeds, how a sub-call labels lines, and which plausible
errors it makes. A sub-call recognizes the sentences of generated texts only; in the public files it
recognizes none. How accurate replies are, and the steps of a root, are decided by
``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import collections
import datetime
import random
import re
from collections.abc import Callable
from typing import Any

from ramify.extras.suites.oolong import COMPARISONS, LABELS
from ramify.testing.offline_model import OfflineModelSuiteStrategy
from ramify.testing.plan_leaf_prompt_formats import ParsedPlanLeafRequest

_LABEL_TASK = re.compile(r"Which label has each line\? (.*)\. Reply with one number a line\.")
_BEGINNINGS = {form.partition("{}")[0]: label for label, forms in LABELS.items() for form in forms}
"""Beginning of a sentence -> its label."""


def labelled_lines(
    context: str, ask: Callable[[list[str]], list[str]], chars: int
) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the labels that occur, and (date, user, label) of each line."""
    labels = re.findall(r"one of these labels: (.*?)\.\n", context)[0].split(", ")
    found = re.findall(
        r"^Date: (.+?) \|\| User: (\d+) \|\| Instance: (.*?)(?: \|\| Label: (.*))?$", context, re.M
    )
    if found[0][3]:
        return labels, [(date, user, label) for date, user, _, label in found]
    codes = ", ".join(f"{number} = {label}" for number, label in enumerate(labels))
    task = f"Question: Which label has each line? {codes}. Reply with one number a line."
    parts: list[list[str]] = [[]]
    size = 0
    for _, _, instance, _ in found:
        if size + len(instance) + 1 > chars and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(instance)
        size += len(instance) + 1
    replies = ask(["\n".join(part) + "\n\n" + task for part in parts])
    numbers: list[str] = []
    for part, reply in zip(parts, replies, strict=True):
        read = re.findall(r"\d+", reply)
        # A part without a reply counts as the first label: its lines still have dates and users.
        numbers += read if len(read) == len(part) else ["0"] * len(part)
    names = [labels[int(number)] if int(number) < len(labels) else "" for number in numbers]
    return labels, [
        (date, user, name) for (date, user, _, _), name in zip(found, names, strict=True)
    ]


def names_by_count_rank(counts: dict[str, int], which: int) -> str:
    """Return all names with the largest (0), the second largest (1) or the smallest count (-1)."""
    sizes = sorted(set(counts.values()), reverse=True)
    size = sizes[-1 if which < 0 else min(which, len(sizes) - 1)]
    return ", ".join(sorted(name for name in counts if counts[name] == size))


def frequency_comparison(one: int, other: int) -> str:
    if one == other:
        return "same frequency as"
    return "more common than" if one > other else "less common than"


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    labels, lines = labelled_lines(context, ask, chars)
    known = {date: datetime.datetime.strptime(date, "%b %d, %Y") for date, _, _ in lines}
    days = [known[line[0]] for line in lines]
    names = {day: day.strftime("%B %Y") for day in set(days)}
    months = [names[day] for day in days]
    kept = list(range(len(lines)))
    users = re.findall(r"only the lines of the users ([\d, ]+)\.", question)
    if users:
        kept = [number for number in kept if lines[number][1] in users[0].split(", ")]
    month = re.findall(r"only the lines of (\w+ \d{4})\.", question)
    if month:
        kept = [number for number in kept if months[number] == month[0]]
    counts = collections.Counter(lines[number][2] for number in kept)
    named = re.findall(r"'([^']+)'", question)
    if "is the most common" in question:
        return names_by_count_rank({label: counts[label] for label in labels}, 0)
    if "is the least common" in question:
        return names_by_count_rank({label: counts[label] for label in labels}, -1)
    if "is the second most common" in question:
        return names_by_count_rank(counts, 1)
    if "How many instances have" in question:
        return str(counts[named[0]])
    if "How many dates occur" in question:
        times = int(re.findall(r"exactly (\d+) lines", question)[0])
        return str(sum(count == times for count in collections.Counter(days).values()))
    if "Which user has the most" in question:
        return names_by_count_rank(
            collections.Counter(line[1] for line in lines if line[2] == named[0]), 0
        )
    if "Which month" in question:
        return names_by_count_rank(collections.Counter(months), 0)
    if "more common before" in question:
        date = re.findall(r"before (\w+ \d+, \d+) than", question)[0]
        start = datetime.datetime.strptime(date, "%b %d, %Y")
        early = [days[at] < start for at in range(len(lines)) if lines[at][2] == named[0]]
        return frequency_comparison(early.count(True), early.count(False))
    return frequency_comparison(counts[named[0]], counts[named[1]])


def answer_from_text(question: str, text: str) -> str | None:
    asked = _LABEL_TASK.fullmatch(question)
    if asked is None:
        return None
    numbers = {}
    for part in asked[1].split(", "):
        number, _, label = part.partition(" = ")
        numbers[label] = number
    return "\n".join(numbers.get(_label_of(line), "0") for line in text.splitlines() if line)


def _label_of(instance: str) -> str:
    return next((label for start, label in _BEGINNINGS.items() if instance.startswith(start)), "")


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a plausible wrong answer in the format of the right one.

    In a list of labels, a few change. A number changes by at most 3. Otherwise it is another label,
    comparison, user or month.
    """
    asked = _LABEL_TASK.fullmatch(question)
    if asked is not None:
        most = asked[1].count(" = ")
        replies = right.split("\n")
        for place in draw.sample(range(len(replies)), 1 + len(replies) // 20):
            replies[place] = str((int(replies[place]) + draw.randrange(1, most)) % most)
        return "\n".join(replies)
    labels = re.findall(r"one of these labels: (.*?)\.\n", text)
    kinds = [labels[0].split(", ") if labels else list(LABELS), COMPARISONS]
    for kind in kinds:
        if right.split(", ")[0] in kind:
            return draw.choice([each for each in kind if each != right])
    if "Which user" in question:
        users = sorted(set(re.findall(r"User: (\d+)", text)) - {right})
        return draw.choice(users) if users else "unknown"
    if right.isdecimal():
        return str(max(0, int(right) + draw.choice((-3, -2, -1, 1, 2, 3))))
    year = draw.randrange(2020, 2030)
    return f"{draw.choice(('May', 'June', 'July', 'August'))} {year}"


def answer_plan_request(turn: ParsedPlanLeafRequest) -> Any:
    """Return the right reply to a model call that the plan ``aggregate`` makes, or None for other
    calls.

    For numbered records, the reply is the value that the question counts in each. For counts of
    these values, it is the answer to the question.
    """
    if turn.kind == "value":
        return [
            _counted_value(turn.question, *parts) for parts in map(date_user_label, turn.records)
        ]
    if turn.kind != "answer":
        return None
    return _by_counts(turn.question, turn.counts, turn.count_frequencies)


def date_user_label(record: str) -> tuple[str, str, str]:
    """Parse one line of the text into its date, user and label.

    All are empty if the line has another format.
    """
    found = re.fullmatch(
        r"Date: (.+?) \|\| User: (\d+) \|\| Instance: (.*?)(?: \|\| Label: (.*))?", record
    )
    return (found[1], found[2], found[4] or _label_of(found[3])) if found else ("", "", "")


def _counted_value(question: str, date: str, user: str, label: str) -> str:
    """Return the property of a line that the question counts, such as its label, user or month.

    Returns ``none`` if the question excludes the line.
    """
    if not date:
        return "none"
    day = datetime.datetime.strptime(date, "%b %d, %Y")
    month = day.strftime("%B %Y")
    users = re.search(r"only the lines of the users ([\d, ]+)\.", question)
    asked_month = re.search(r"only the lines of (\w+ \d{4})\.", question)
    if users is not None and user not in users[1].split(", "):
        return "none"
    if asked_month is not None and month != asked_month[1]:
        return "none"
    named = re.findall(r"'([^']+)'", question)
    if "How many dates occur" in question:
        return date
    if "Which month" in question:
        return month
    if "Which user has the most" in question:
        return user if label == named[0] else "none"
    if before := re.search(r"more common before (\w+ \d+, \d+) than", question):
        start = datetime.datetime.strptime(before[1], "%b %d, %Y")
        return "none" if label != named[0] else "before" if day < start else "from then on"
    return label


def _by_counts(question: str, counts: dict[str, int], spread: dict[str, int]) -> str:
    """Return the answer to a question, given how many lines have each counted value.

    ``counts`` maps each value from ``_counted_value`` to its number of lines. ``spread`` maps each
    such number to how many values have it.
    """
    named = re.findall(r"'([^']+)'", question)
    if times := re.search(r"in exactly (\d+) lines", question):
        return str(spread.get(times[1], 0))
    if "How many instances have" in question:
        return str(counts.get(named[0], 0))
    if "more common before" in question:
        return frequency_comparison(counts.get("before", 0), counts.get("from then on", 0))
    if not counts:
        return "unknown"
    if "is the least common" in question:
        return names_by_count_rank(counts, -1)
    if "is the second most common" in question:
        return names_by_count_rank(counts, 1)
    if re.search(r"is the most common|Which user|Which month", question):
        return names_by_count_rank(counts, 0)
    return frequency_comparison(counts.get(named[0], 0), counts.get(named[1], 0))


OOLONG = OfflineModelSuiteStrategy(
    "oolong",
    r"Which of the labels is the |How many instances have the label '|Is the label '.* more common "
    r"|How many dates occur in exactly \d+ lines\?|Which user has the most instances with the label"
    r"|Which month, as in 'May 2023', has the most lines\?",
    solve,
    answer_from_text,
    make_wrong_answer,
    (labelled_lines, names_by_count_rank, frequency_comparison),
    answer_plan_request,
)
"""How the offline model answers OOLONG: sub-model calls label the lines, and code counts."""
