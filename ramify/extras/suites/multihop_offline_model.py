"""Answer the suite ``multihop`` as the offline model, a simulated language model.

The offline model is a program that replaces a language model. Its code finds the document of each
hop, and a sub-model call reads from it who or what comes next.

The module contains the strategy of a root call, what a leaf reads, and plausible errors. The
questions of BrowseComp-Plus have another form and cannot be answered. The accuracy of replies and
the steps of a root call are in ``ramify/testing/offline_model.py``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ramify.testing.offline_model import OfflineModelSuiteStrategy

_PERSON = r"(\w+ \w+)"
_FACTS = {
    "teacher": rf"studied under {_PERSON}",
    "spouse": rf"is married to {_PERSON}",
    "landlord": rf"rents a house from {_PERSON}",
    "town": r"born in \d+ in (\w+),",
    "mayor": rf"its mayor is {_PERSON}",
    "founder": rf"was founded by {_PERSON}",
    "book": r"first book by \w+ is '([^']+)'",
    "bridge": r"only bridge is the ([\w ]+)\.",
}
"""Relation -> pattern of the sentence that states it in a document."""


def parse_hops(question: str) -> tuple[str, list[str]]:
    """Return the description of the first person, and the relations from there to the answer."""
    forms = {
        "book": r"What is the title of the first book by (.+)\?.*",
        "bridge": r"What is the name of the only bridge of (.+)\?.*",
        "teacher": r"the teacher of (.+)",
        "spouse": r"the person who is married to (.+)",
        "landlord": r"the person from whom (.+) rents a house",
        "town": r"the town in which (.+) was born",
        "mayor": r"the mayor of (.+)",
        "founder": r"the founder of (.+)",
    }
    path: list[str] = []
    while True:
        found = [
            (relation, inner)
            for relation, form in forms.items()
            for inner in re.findall(rf"^{form}$", question, re.DOTALL)
        ]
        if not found:
            return question, path
        path.insert(0, found[0][0])
        question = found[0][1]


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    first, path = parse_hops(question)
    form = r"the (\w+) who was born in (\d+) and won the (\w+) Prize"
    profession, year, prize = re.findall(form, first)[0]
    documents = context.split("\n\n")
    near = [
        document
        for document in documents
        if f" is a {profession}, born in {year} " in document and f"the {prize} Prize" in document
    ]
    texts = "\n\n".join(near)[:chars]
    name = ask([f"{texts}\n\nQuestion: Who is {first}? Reply with the name of the document."])[0]
    for relation in path:
        near = [document for document in documents if document.startswith(f"# {name}\n")]
        texts = "\n\n".join(near)[:chars]
        name = ask([f"{texts}\n\nQuestion: What does it say is the {relation} of {name}?"])[0]
    return name


def answer_from_text(question: str, text: str) -> str | None:
    first = re.match(r"Who is the (\w+) who was born in (\d+) and won the (\w+) Prize\?", question)
    if first is not None:
        form = rf"# (.+)\n.* is a {first[1]}, born in {first[2]} .*the {first[3]} Prize"
        found = re.search(form, text)
        return found[1] if found else "unknown"
    asked = re.fullmatch(r"What does it say is the (\w+) of (.*)\?", question, re.DOTALL)
    if asked is None or asked[1] not in _FACTS:
        return None
    fact = re.search(_FACTS[asked[1]], text)
    return fact[1] if fact and text.startswith(f"# {asked[2]}\n") else "unknown"


def make_wrong_answer(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return a plausible wrong answer of the same kind as the right one.

    It is another person, town, book or bridge from the text.
    """
    form = r"\b[A-Z][a-z]+ [A-Z][a-z]+\b"
    if right.endswith(" Bridge"):
        form = r"\b[A-Z][a-z]+ [A-Z][a-z]+ Bridge\b"
    elif right.startswith("The "):
        form = r"'(The [^']+)'"
    elif " " not in right:
        form = r"born in \d+ in (\w+)"
    others = sorted(set(re.findall(form, text)) - {right})
    return draw.choice(others) if others else "unknown"


MULTIHOP = OfflineModelSuiteStrategy(
    "multihop",
    r"What is the (title of the first book by|name of the only bridge of) ",
    solve,
    answer_from_text,
    make_wrong_answer,
    (parse_hops,),
)
"""How the offline model answers ``multihop``: code finds each document, and a sub-model call reads
from it."""
