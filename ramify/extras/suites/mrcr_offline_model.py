"""Simulate a language model that solves the suite ``mrcr``.

The offline model is a program that replaces a language model. Its code finds the identical requests
without any sub-model call.

The module contains the strategy of a root call, and the plausible errors of a model that reads
everything at once. The accuracy of replies and the steps of a root call are in
``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ramify.testing.offline_model import OfflineModelSuiteStrategy


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    form = r"Prepend (\S+) to the (\d+)\w\w \(1 indexed\) (.+?)\. Do not"
    mark, nth, wanted = map(str, re.findall(form, question)[0])
    # "a poem", but "an essay": the article of the request is not in the question.
    request = rf"^User: Write an? {re.escape(wanted)}\.?\n\nAssistant: (.*?)(?=\n\nUser: |\Z)"
    replies: list[str] = re.findall(request, context, re.MULTILINE | re.DOTALL)
    return mark + (replies[int(nth) - 1] if len(replies) >= int(nth) else "")


def answer_from_text(question: str, text: str) -> str | None:
    return None


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a plausible wrong answer: the reply to another of the identical requests.

    If there is no such reply, half of the right reply is returned.
    """
    nth = int(re.findall(r"to the (\d+)", question)[0])
    others = [number for number in range(1, 9) if number != nth]
    draw.shuffle(others)
    for number in others:
        asked = re.sub(r"to the \d+\w\w", f"to the {number}th", question)
        reply = solve(asked, text, lambda prompts: [], len(text))
        if len(reply) > len(right) // 2 and reply != right:
            return reply
    return right[: len(right) // 2]


MRCR = OfflineModelSuiteStrategy(
    "mrcr",
    r"^Prepend \S+ to the \d+\w\w \(1 indexed\) ",
    solve,
    answer_from_text,
    make_wrong_answer,
)
"""How the offline model answers ``mrcr``: code finds the identical requests, without a sub-model
call."""
