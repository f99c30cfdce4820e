"""For each suite, a program that reads the whole text and answers, and the facts that it finds.

A reader sees the question and the context, as a model does. So if it is right, the text has the
answer; and if it finds the same facts in two texts, they differ only in filler.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ramify.extras.suites.oolong import COMPARISONS, LABELS
from ramify.tasks.base import Item

DATE = "%b %d, %Y"


class Found(NamedTuple):
    """What a reader found."""

    answer: Any
    facts: Any
    """The facts in their order; filler does not change them."""


# --- niah -----------------------------------------------------------------------------------------


def read_niah(question: str, text: str) -> Found:
    if asked := re.search(r"special magic \w+ for (.+) mentioned in", question):
        keys = re.split(r", and |, ", asked[1])
        needle = re.compile(
            rf"special magic \w+ for ({'|'.join(map(re.escape, keys))}) is: (\S+)\."
        )
        facts = needle.findall(text)
        return Found(", ".join(value for _, value in facts), facts)
    if asked := re.search(r"assigned the value (\d+)", question):
        chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        known = [asked[1]]
        for variable, source in chain:
            if source in known:
                known.append(variable)
        return Found(", ".join(known[1:]), chain)
    if "most common words" in question:
        counts = Counter(re.findall(r"\d+\. (\w+)", text))
        common = [word for word, _ in counts.most_common(10)]
        return Found(", ".join(common), sorted(common))
    if "coded text" in question:
        frequent = [word for word, _ in Counter(text.split()).most_common(4)][1:]
        return Found(", ".join(frequent), frequent)
    person = question.removeprefix("What is the access code of ").removesuffix("?")
    facts = re.findall(r"The access code of \w+ is \d+\.|Until last year the access [^.]+\.", text)
    return Found(re.findall(rf"The access code of {person} is (\d+)\.", text)[0], facts)


# --- oolong and oolong_pairs ----------------------------------------------------------------------


class Line(NamedTuple):
    date: datetime.date
    user: int
    label: str


def lines_of(text: str) -> list[Line]:
    """Read the lines, and infer the label of each from the form of its instance."""
    forms = {
        label: re.compile("|".join(form.replace("?", r"\?").format(r"\w+", r"\w+") for form in own))
        for label, own in LABELS.items()
    }
    lines = []
    for line in text.splitlines()[1:]:
        date, user, instance, *_ = line.split(" || ")
        label = next(
            label
            for label, form in forms.items()
            if form.fullmatch(instance.removeprefix("Instance: "))
        )
        day = datetime.datetime.strptime(date.removeprefix("Date: "), DATE).date()
        lines.append(Line(day, int(user.removeprefix("User: ")), label))
    return lines


def read_oolong(question: str, text: str) -> Found:
    lines = lines_of(text)
    if users := re.match(r"Consider only the lines of the users ([\d, ]+)\. ", question):
        lines = [line for line in lines if str(line.user) in users[1].split(", ")]
    if month := re.match(r"Consider only the lines of (\w+ \d{4})\. ", question):
        lines = [line for line in lines if line.date.strftime("%B %Y") == month[1]]
    counts = Counter(dict.fromkeys(LABELS, 0))
    counts.update(line.label for line in lines)
    labels = re.findall(r"'([a-z ]+)'", question)
    answer: Any
    if "Which of the labels is the most" in question:
        answer = [each for each in counts if counts[each] == max(counts.values())]
    elif "Which of the labels is the least" in question:
        answer = [each for each in counts if counts[each] == min(counts.values())]
    elif "second most common" in question:
        sizes = sorted({count for count in counts.values() if count}, reverse=True)[:2]
        answer = [each for each in counts if counts[each] == sizes[-1]]
    elif "How many instances" in question:
        answer = counts[labels[0]]
    elif times := re.search(r"How many dates occur in exactly (\d+) lines", question):
        answer = list(Counter(line.date for line in lines).values()).count(int(times[1]))
    elif "Which user has the most" in question:
        users_of = Counter(str(line.user) for line in lines if line.label == labels[0])
        answer = [user for user in users_of if users_of[user] == max(users_of.values())]
    elif "Which month" in question:
        months = Counter(line.date.strftime("%B %Y") for line in lines)
        answer = [each for each in months if months[each] == max(months.values())]
    elif day := re.search(r"more common before (.+?) than", question):
        first = datetime.datetime.strptime(day[1], DATE).date()
        own = [line.date < first for line in lines if line.label == labels[0]]
        answer = compared(own.count(True), own.count(False))
    else:
        answer = compared(counts[labels[0]], counts[labels[1]])
    return Found(", ".join(answer) if isinstance(answer, list) else answer, lines)


def compared(one: int, other: int) -> str:
    return COMPARISONS[0 if one > other else 1 if one < other else 2]


def read_oolong_pairs(question: str, text: str) -> Found:
    lines = lines_of(text)
    labels = re.findall(r"label '([a-z ]+)'(?: or '([a-z ]+)')?", question)
    first_day = datetime.date.min
    if day := re.search(r"on or after (\w+ \d+, \d+)", question):
        first_day = datetime.datetime.strptime(day[1], DATE).date()
    tests: list[Callable[[int], bool]] = []
    for named, number in zip(
        labels, re.findall(r"(at least one|exactly \w+) instance", question), strict=True
    ):
        counts = Counter(
            line.user for line in lines if line.label in named and line.date >= first_day
        )
        wanted = {"one": 1, "1": 1, "2": 2}[number.split()[-1]]
        tests.append(
            (lambda user, counts=counts: counts[user] >= 1)  # type: ignore[misc]
            if number.startswith("at least")
            else (lambda user, counts=counts, wanted=wanted: counts[user] == wanted)
        )
    one, other = tests[0], tests[-1]
    users = sorted({line.user for line in lines})
    pairs = [
        (user, mate)
        for user, mate in itertools.combinations(users, 2)
        if (one(user) and other(mate)) or (one(mate) and other(user))
    ]
    return Found(pairs, (users, pairs))


READERS: dict[str, Callable[[str, str], Found]] = {
    "niah": read_niah,
    "oolong": read_oolong,
    "oolong_pairs": read_oolong_pairs,
}


def read(suite: str, item: Item) -> Found:
    return READERS[suite](item.question, item.context)
