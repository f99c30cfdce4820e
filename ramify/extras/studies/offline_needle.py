"""How the offline model answers ``needle``: code finds the sentences that name the person, and a
leaf reads the code in them.

Decides the strategy of a root, what a leaf reads, and its plausible errors. Not here: the accuracy
of a reply, and the steps of a root (``ramify/testing/offline.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ramify.testing.offline import OfflineSuite


def solve(question: str, context: str, ask: Callable[[list[str]], list[str]], chars: int) -> str:
    name = re.findall(r"access code of (\w+)\?", question)[0]
    near = [
        context[max(0, found.start() - 100) : found.end() + 30]
        for found in re.finditer(rf"access code of {name} ", context)
    ]
    return ask(["\n".join(near) + f"\n\nQuestion: What do these lines say is the code of {name}?"])[
        0
    ]


def read(question: str, text: str) -> str | None:
    asked = re.fullmatch(r"What do these lines say is the code of (\w+)\?", question)
    if asked is None:
        return None
    found = re.search(rf"The access code of {asked[1]} is (\d+)", text)
    return found[1] if found else "unknown"


def spoil(question: str, text: str, right: str, draw: random.Random) -> str:
    """Return the code of another person, or a former one."""
    others = [code for code in re.findall(r"\b\d{6}\b", text) if code != right]
    return draw.choice(others) if others else "unknown"


NEEDLE = OfflineSuite("needle", r"What is the access code of \w+\?", solve, read, spoil)
"""Code finds the sentences that name the person, and a leaf reads the code."""
