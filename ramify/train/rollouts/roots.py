"""Counts, before the first step, how many roots will be recursive.

    20 of the first 20 items begin with a recursive root (a session, with children down to depth 1)
    0 of the first 20 items begin with a recursive root: one plain call answers 20 of them

A root that is answered by one plain call has no session, and teaches nothing about recursion.
Decides how many items are counted, and what is reported. Not here: the decision for each root,
which is the engine's (``engine/question.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.tasks.base import Item

ITEMS = 20
"""Number of items to count: the first ones that the run will roll out."""


class RootCount(msgspec.Struct, frozen=True):
    """How the first items of a run begin."""

    items: int
    """Number of items that were counted."""
    direct: int
    """Number of items that one plain call answers, without a session."""
    depth: int
    """``limits.max_depth``: with 0 no root may call a child, so none is recursive."""

    @property
    def recursive(self) -> int:
        """Number of items whose root has a session and may call children."""
        return self.items - self.direct if self.depth else 0

    def metrics(self) -> dict[str, float]:
        return {"recursive_roots": float(self.recursive), "direct_roots": float(self.direct)}

    def sentence(self) -> str:
        """The result as a sentence."""
        head = f"{self.recursive} of the first {self.items} items begin with a recursive root"
        if self.recursive:
            head += f" (a session, with children down to depth {self.depth})"
        reasons = []
        if self.direct:
            reasons.append(
                f"one plain call answers {self.direct} of them (rl.rollout.direct=false gives each "
                "a session)"
            )
        if not self.depth and self.direct < self.items:
            reasons.append(
                f"{self.items - self.direct} have a session, and limits.max_depth=0 allows no "
                "children"
            )
        return head + (": " + "; ".join(reasons) if reasons else "")


def first_items(items: Sequence[Item], first: int) -> list[Item]:
    """The first items from number ``first`` on, in the order of a run, which starts over at the
    end."""
    return [items[(first + number) % len(items)] for number in range(min(ITEMS, len(items)))]
