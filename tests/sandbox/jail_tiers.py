"""The jail at each of its tiers on one machine: weaker ones by doing without the system calls that
make the stronger.

Run as a script it puts every promise to one tier and prints what was found: for a test that runs it
as another user.
"""

import asyncio
import functools
import json
import os
import sys

import pytest

from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.jail.probe import probe
from ramify.sandbox.jail.provider import JailSandbox
from ramify.sandbox.run_conformance import check

TIERS = "ABC"
_UNSHARE = {"x86_64": 272, "aarch64": 97}.get(os.uname().machine, 272)
_LANDLOCK = 444
WITHOUT = {"A": frozenset[int](), "B": frozenset({_UNSHARE}), "C": frozenset({_UNSHARE, _LANDLOCK})}
"""Tier -> the system calls that a machine which reaches no more lacks."""

GRACE_S = 3.0
"""In which a guest that can be interrupted comes to it on any machine, however busy."""


@functools.cache
def why_not(tier: str) -> str | None:
    """Why this machine cannot be tested at ``tier``."""
    if sys.platform != "linux":
        return f"the jail needs Linux, this is {sys.platform}"
    reached = probe(WITHOUT[tier])
    return None if reached.tier == tier else f"TIER {tier} IS NOT TESTED HERE: {reached.missing}"


def open_jail(spec: SandboxSpec) -> JailSandbox:
    """A jail of exactly ``spec.tier``; skips the test where the kernel does not allow it."""
    if why := why_not(spec.tier):
        pytest.skip(why)
    return JailSandbox(spec, deny=WITHOUT[spec.tier])


async def _broken(tier: str) -> list[str]:
    spec = SandboxSpec(
        provider="jail",
        tier=tier,
        memory_bytes=256 << 20,
        max_output_bytes=100_000,
        grace_s=GRACE_S,
    )
    sandbox = JailSandbox(spec, deny=WITHOUT[tier])
    try:
        found = await check(sandbox, spec)
    finally:
        await sandbox.close()
    return [f"{each.check}: {each.detail}" for each in found if each.kept is False]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "tier": probe(WITHOUT[sys.argv[1]]).tier,
                "broken": asyncio.run(_broken(sys.argv[1])),
            }
        )
    )
