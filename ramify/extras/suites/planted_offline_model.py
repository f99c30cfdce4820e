"""Simulate a language model that solves the benchmark ``planted``.

The offline model is a program that replaces a language model. Its sub-calls extract the facts of
each part of the text in order, and code keeps the last amount of each place.

This module decides how the root of a run proceeds, what a sub-call reads, and which plausible
errors it makes. How accurate replies are, and the steps of a root, are decided by
``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ramify.testing.offline_model import OfflineModelSuiteStrategy
from ramify.testing.plan_leaf_prompt_formats import ParsedPlanLeafRequest


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    wanted = re.findall(r"^Summarise (.+?) in at most \d+ words", question)[0]
    parts: list[str] = []
    start = 0
    while start < len(context):
        end = start + chars
        if end < len(context):  # a part ends with a sentence
            end = max(context.rfind(". ", start, end) + 2, start + chars // 2)
        parts.append(context[start:end])
        start = end
    task = f"List {wanted}: each place and its amount, as PLACE: AMOUNT, or reply NONE."
    amounts: dict[str, str] = {}
    for reply in ask([f"{part}\n\nQuestion: {task}" for part in parts]):
        amounts.update(re.findall(r"^(\w+): (\d+)$", reply, re.MULTILINE))
    return "\n".join(f"{place} has {amount} crowns." for place, amount in amounts.items())


def answer_from_text(question: str, text: str) -> str | None:
    asked = re.fullmatch(r"List (.+): each place and its amount, as PLACE: .*", question)
    if asked is None:
        return None
    return "\n".join(f"{place}: {amount}" for place, amount in _facts(asked[1], text)) or "NONE"


def _facts(wanted: str, text: str) -> list[tuple[str, str]]:
    """Extract the place and the amount of each planted fact from a text, in text order."""
    if bought := re.match(r"what (\w+ \w+) bought", wanted):
        form = rf"{bought[1]} bought the \w+ of (?P<place>\w+) for (?P<amount>\d+) crowns"
    elif "latest yearly grant" in wanted:
        form = r"The yearly grant of (?P<place>\w+) is now (?P<amount>\d+) crowns"
    else:
        form = r"The council granted (?P<amount>\d+) crowns to the \w+ of (?P<place>\w+)"
    return [(found["place"], found["amount"]) for found in re.finditer(form, text)]


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a plausible wrong summary of the planted facts.

    One fact gets another amount from the text, or the answer is ``NONE`` if there is no other
    amount. If the right answer has no facts, one is made up from the text. Without any amounts in
    the text, the answer stays right.
    """
    lines = right.split("\n")
    amounts = re.findall(r"(\d+) crowns", text)
    place = draw.randrange(len(lines))
    own = re.findall(r"\d+", lines[place])
    others = sorted(set(amounts) - set(own))
    if own and others:
        lines[place] = lines[place].replace(own[0], draw.choice(others))
        return "\n".join(lines)
    if own:
        return "NONE"
    found = re.findall(r"of (\w+)[^.]*?(\d+) crowns|(\d+) crowns to the \w+ of (\w+)", text)
    pairs = [(one or other, amount or second) for one, amount, second, other in found]
    return "{}: {}".format(*draw.choice(pairs)) if pairs else right


def answer_plan_request(turn: ParsedPlanLeafRequest) -> str | None:
    """Return the right reply to a model call that the plan ``summarise`` makes, or None for other
    calls.

    For a passage, the reply states its facts as sentences. For several summaries, it states the
    last amount of each place.
    """
    if turn.kind == "summarise":
        wanted = re.findall(r"^Summarise (.+?) in at most \d+ words", turn.question)[0]
        facts = _facts(wanted, turn.text)
    elif turn.kind == "merge":
        facts = re.findall(r"^(\w+) has (\d+) crowns\.$", turn.text, re.MULTILINE)
    else:
        return None
    amounts = dict(facts)
    return "\n".join(f"{place} has {amounts[place]} crowns." for place in amounts) or "None."


PLANTED = OfflineModelSuiteStrategy(
    "planted",
    r"^Summarise .+ in at most \d+ words: one sentence for each place",
    solve,
    answer_from_text,
    make_wrong_answer,
    leaf=answer_plan_request,
)
"""How the offline model answers ``planted``: sub-model calls extract facts, and code keeps the last
amounts."""
