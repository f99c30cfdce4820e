"""Simulate a language model that solves the suite ``niah`` and the task ``needle``.

The offline model is a program that replaces a language model. Its code finds the sentences with the
names in the question, and a sub-model call reads their values. Words are counted by code alone.

The module contains the strategy of a root call, what a leaf reads, and plausible errors. The
accuracy of replies and the steps of a root call are in ``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Callable

from ramify.testing.offline_model import OfflineModelSuiteStrategy

_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_FORMS = (rf"\b{_UUID}\b", r"(?<!\d)\d{7}(?!\d)", r"(?<!\d)\d{6}(?!\d)", r"\b[A-Z]{5}\b")
"""Patterns of the possible values: UUIDs, numbers, access codes, variables."""


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    if "most common words" in question:
        counts = collections.Counter(found[1] for found in re.finditer(r"\d+\. (\w+)", context))
        return ", ".join(word for word, _ in counts.most_common(10))
    if "coded text" in question:
        counts = collections.Counter(found[0] for found in re.finditer(r"[a-z]+", context))
        return ", ".join(word for word, _ in counts.most_common(3))
    if "Find all variables" in question:
        near = re.findall(r"VAR [A-Z]+ = [^.]*\.", context)
    elif "access code" in question:
        name = re.findall(r"access code of (\w+)", question)[0]
        near = [
            context[max(0, found.start() - 30) : found.end()]
            for found in re.finditer(rf"access code of {name} [^.]*\.", context)
        ]
    else:
        keys = re.findall(r"for (.+) mentioned in the provided text", question)[0]
        near = [
            found
            for key in re.split(r",? and |, ", keys)
            for found in re.findall(rf"special magic \w+ for {re.escape(key)} is: \S+", context)
        ]
    lines = "\n".join(line.strip() for line in near)
    return ask([f"{lines}\n\nQuestion: By these lines alone: {question}"])[0]


def answer_from_text(question: str, text: str) -> str | None:
    if not question.startswith("By these lines alone: "):
        return None
    value = re.search(r"assigned the value (\d+)", question)
    if value is not None:
        return ", ".join(_chain(value[1], text)) or "unknown"
    name = re.search(r"access code of (\w+)\?", question)
    if name is not None:
        found = re.search(rf"The access code of {name[1]} is (\d+)", text)
        return found[1] if found else "unknown"
    keys = re.search(r"for (.+) mentioned in the provided text", question)
    values = [
        each
        for key in (re.split(r",? and |, ", keys[1]) if keys else ())
        for each in re.findall(rf"\bfor {re.escape(key)} is: (\S+)\.", text)
    ]
    return ", ".join(values) or "unknown"


def _chain(value: str, text: str) -> list[str]:
    """Return all variables that have the given value, directly or through a chain of
    assignments."""
    pairs = re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text)
    chain: list[str] = []
    while True:
        more = [
            name for name, source in pairs if name not in chain and source in (value, *chain[-1:])
        ]
        if not more:
            return chain
        chain.append(more[0])


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a wrong answer in which one of the right values is replaced.

    The other value comes from the text if possible.
    """
    values = right.split(", ")
    place = draw.randrange(len(values))
    form = next((form for form in _FORMS if re.fullmatch(form, values[place])), "")
    if form:
        others = sorted(set(re.findall(form, text)) - set(values))
    else:
        others = sorted(set(re.findall(r"[a-z]{6,}", text[:20_000])) - set(values))
    values[place] = draw.choice(others) if others else _alter_value(values[place], draw)
    return ", ".join(values)


def _alter_value(value: str, draw: random.Random) -> str:
    """Return a wrong value in the same format, made by changing the last character."""
    kind = "0123456789" if value[-1].isdigit() else "ABCDEF" if value.isupper() else "abcdef"
    return value[:-1] + draw.choice([each for each in kind if each != value[-1]])


NIAH = OfflineModelSuiteStrategy(
    "niah",
    r"What is the access code of \w+\?|special magic (number|uuid)s? for .* mentioned in the"
    r"|Find all variables that are assigned the value \d+|most common words in the above list"
    r"|most frequently appeared words in the above coded text",
    solve,
    answer_from_text,
    make_wrong_answer,
)
"""How the offline model answers ``niah`` and ``needle``: code finds sentences, and a sub-model call
reads values."""
