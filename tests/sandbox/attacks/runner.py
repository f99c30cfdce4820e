"""Runs attacks in a separate process, as the current user: ``python -m attacks.runner PLAN``.

PLAN is JSON: ``{"provider", "tier", "spec", "names", "landlock"}``. Prints a line of JSON per
attack as it ends, then one line about what was left over after everything was closed.
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
    """The task of one runner."""

    provider: str
    tier: str = "A"
    """The tier to which the machine is restricted; see ``outer.py``."""
    spec: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    """Attacks, in order; empty: all."""
    landlock: int = 0
    """The newest version that the jail may use; 0: the kernel's own."""


class Opening(msgspec.Struct, tag="opening"):
    """The sandbox's description of itself."""

    caps: dict[str, bool]
    tier: str = ""
    """As the provider names it, if it does."""
    refusal: str = ""
    """Why the sandbox could not be opened."""


class Closing(msgspec.Struct, tag="closing"):
    """Leftovers: what exists at the end but did not at the beginning."""

    faults: list[str]


class VerdictLine(msgspec.Struct, tag="verdict"):
    verdict: Verdict


Line = Opening | VerdictLine | Closing


def write_line(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


async def run(plan: Plan) -> None:
    arena = Arena(plan.provider, plan.spec, plan.landlock)
    try:
        await arena.__aenter__()
    except RamifyError as error:
        write_line(Opening({}, refusal=str(error)))
        return
    try:
        reached = getattr(arena.sandbox, "reached", None)
        write_line(Opening(msgspec.to_builtins(arena.sandbox.caps), getattr(reached, "tier", "")))
        for name in plan.names or cases.ATTACKS:
            write_line(VerdictLine(await arena.verdict(cases.ATTACKS[name])))
    finally:
        await arena.__aexit__()
    for _ in range(400):  # processes that are ending need a moment
        faults = arena.left_over()
        if not faults:
            break
        await asyncio.sleep(0.05)
    write_line(Closing(faults))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    impoverish(plan.tier)
    asyncio.run(run(plan))
