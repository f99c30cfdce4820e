"""Build long texts from filler, with facts planted at chosen positions.

    plant([(0.5, "The code is 12.")], sentences, chars=4_000, separator=" ")

Facts and their positions are drawn from the item's random generator before the generator of the
filler is split off (``filler_rng``). So an item has the same facts in the same order at every
length. Filler is made in blocks that are joined at once: a text of 40 MB has about a million
passages, and one object for each would need more memory than the text. Each benchmark's module
decides which facts are planted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

BLOCK = 2_000
"""Maximum number of filler passages that are generated at once."""
_FIRST_BLOCK = 16
"""Number of filler passages in the first block, which is small because short texts need few. Blocks
then double in size."""
Fact = tuple[float, str]
"""A fact to plant: (fraction of the text before it, from 0 to 1; passage)."""


def filler_rng(rng: random.Random) -> random.Random:
    """Create a separate random generator for the filler text of a task item.

    Call it after drawing from ``rng`` everything that must be the same at all lengths.
    """
    return random.Random(rng.getrandbits(64))


def plant(
    facts: Sequence[Fact],
    passages: Callable[[int], list[str]],
    chars: int,
    separator: str = "\n",
) -> str:
    """Build a text of about ``chars`` characters that hides the given facts among filler passages.

    The length is exact to within one filler passage.

    ``passages(num)`` makes ``num`` passages of filler. Facts with equal positions keep their order.
    Raises ValueError if the facts alone are longer than the text.
    """
    room = chars - sum(len(text) + len(separator) for _, text in facts)
    if room < 0:
        raise ValueError(
            f"its facts have {chars - room:,} characters, but the text only {chars:,}: give a "
            "longer text"
        )
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
    """Return as many of a block's filler passages as fit into ``chars`` characters.

    They are the first ones. There is always at least one. ``gap`` is the number of characters
    between passages.
    """
    if sum(map(len, block)) + gap * len(block) <= chars:
        return block
    size = 0
    for number, text in enumerate(block):
        size += len(text) + gap
        if size > chars:
            return block[: max(1, number)]
    return block
