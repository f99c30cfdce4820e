"""Tries attacks in a process of its own: ``python -m attacks.runner PLAN``, as whoever runs it.

PLAN is JSON: ``{"provider", "tier", "spec", "names", "landlock"}``. Prints a line of JSON per
attack as it ends, then one line about what was left over after all was closed.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Any

import msgspec

from attacks import cases
from attacks.arena import Arena
from attacks.base import Verdict
from attacks.outer import impoverish
from ramify.errors import RamifyError


class Plan(msgspec.Struct, frozen=True):
    """What one runner does."""

    provider: str
    tier: str = "A"
    """What the machine is made to look like; see ``outer.py``."""
    spec: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    """Attacks, in order; empty: all."""
    landlock: int = 0
    """The newest version of it that the jail may use; 0: what this kernel has."""


class Opening(msgspec.Struct, tag="opening"):
    """What the sandbox says of itself."""

    caps: dict[str, bool]
    tier: str = ""
    """As the provider names it, where it does."""
    refusal: str = ""
    """Why there is no sandbox."""


class Closing(msgspec.Struct, tag="closing"):
    """What is there after the end that was not there before."""

    faults: list[str]


class Told(msgspec.Struct, tag="verdict"):
    verdict: Verdict


Line = Opening | Told | Closing


def tell(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


async def run(plan: Plan) -> None:
    arena = Arena(plan.provider, plan.spec, plan.landlock)
    try:
        await arena.__aenter__()
    except RamifyError as error:
        tell(Opening({}, refusal=str(error)))
        return
    try:
        reached = getattr(arena.sandbox, "reached", None)
        tell(Opening(msgspec.to_builtins(arena.sandbox.caps), getattr(reached, "tier", "")))
        for name in plan.names or cases.ATTACKS:
            tell(Told(await arena.verdict(cases.ATTACKS[name])))
    finally:
        await arena.__aexit__()
    for _ in range(400):  # those that were told to end need a moment
        faults = arena.left_over()
        if not faults:
            break
        await asyncio.sleep(0.05)
    tell(Closing(faults))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    impoverish(plan.tier)
    asyncio.run(run(plan))
