"""Facts among filler: a text of a given length, in which each fact is at a given share of it.

    plant([(0.5, "The code is 12.")], sentences, chars=4_000, separator=" ")

Facts and their places come from the item's random generator before the filler's is taken from it
(``filler_of``). So two lengths of one item have the same facts in the same order. Filler is made in
blocks that are joined at once: a text of 40 MB has about a million passages, and one object for
each would need more memory than the text.

Not here: what is planted (each suite's module).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

BLOCK = 2_000
"""Passages of filler that are made at once in a long text."""
_FIRST_BLOCK = 16
"""Passages that are made first, since a short text needs few. Blocks double in size."""
Fact = tuple[float, str]
"""(share of the text before it, from 0 to 1; passage)"""


def filler_of(rng: random.Random) -> random.Random:
    """Return the generator of an item's filler. Everything that all lengths share is drawn from
    ``rng`` before."""
    return random.Random(rng.getrandbits(64))


def plant(
    facts: Sequence[Fact],
    passages: Callable[[int], list[str]],
    chars: int,
    separator: str = "\n",
) -> str:
    """Return a text of ``chars`` characters, to within a passage.

    ``passages(num)`` makes ``num`` passages of filler. Facts with equal shares keep their order.
    Raises ValueError if the facts alone are longer."""
    room = chars - sum(len(text) + len(separator) for _, text in facts)
    if room < 0:
        raise ValueError(f"its facts have {chars - room:,} characters, and the text {chars:,}")
    waiting = sorted(facts, key=lambda fact: fact[0])
    waiting.reverse()  # so that the next fact can be popped
    parts: list[str] = []
    done, num = 0, _FIRST_BLOCK
    while done < room:
        block = _cut(passages(num), room - done, len(separator))
        num = min(BLOCK, 2 * num)
        size = sum(map(len, block)) + len(separator) * len(block)
        end = done + size
        due = []
        while waiting and waiting[-1][0] * room < end:
            due.append(waiting.pop())
        # Insert from the end, so that earlier positions stay valid.
        places = len(block)
        for share, text in reversed(due):
            block.insert(round((share * room - done) / size * places), text)
        parts.append(separator.join(block))
        done = end
    parts += [text for _, text in reversed(waiting)]
    return separator.join(parts)


def _cut(block: list[str], chars: int, gap: int) -> list[str]:
    """Return as many of the first passages of ``block`` as fit into ``chars`` characters, but at
    least one. ``gap`` is the number of characters between two passages."""
    if sum(map(len, block)) + gap * len(block) <= chars:
        return block
    size = 0
    for number, text in enumerate(block):
        size += len(text) + gap
        if size > chars:
            return block[: max(1, number)]
    return block
