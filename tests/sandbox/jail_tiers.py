"""The jail at each tier on one machine: weaker tiers are emulated by refusing the system calls that
the stronger ones need.

Run as a script, it runs every conformance check at one tier and prints the results, for a test that
runs it as another user.
"""

import asyncio
import functools
import json
import os
import sys

import pytest

from ramify.sandbox.base import JailSpec
from ramify.sandbox.providers.jail import JailSandbox, probe
from ramify.testing.sandbox_conformance import check_sandbox

TIERS = "ABC"
_UNSHARE = {"x86_64": 272, "aarch64": 97}.get(os.uname().machine, 272)
_LANDLOCK = 444
WITHOUT = {"A": frozenset[int](), "B": frozenset({_UNSHARE}), "C": frozenset({_UNSHARE, _LANDLOCK})}
"""Tier -> the system calls that a machine with no stronger tier lacks."""

GRACE_S = 3.0
"""Long enough for an interrupt to reach the guest on any machine, however busy."""


@functools.cache
def why_not(tier: str) -> str | None:
    """Return why this machine cannot be tested at ``tier``, or None."""
    if sys.platform != "linux":
        return f"the jail needs Linux, this is {sys.platform}"
    reached = probe(WITHOUT[tier])
    return None if reached.tier == tier else f"TIER {tier} IS NOT TESTED HERE: {reached.missing}"


def open_jail(spec: JailSpec) -> JailSandbox:
    """Open a jail of exactly ``spec.tier``; skips the test if the kernel does not allow it."""
    if why := why_not(spec.tier):
        pytest.skip(why)
    return JailSandbox(spec, deny=WITHOUT[spec.tier])


async def _failed_checks(tier: str) -> list[str]:
    spec = JailSpec(
        tier=tier,
        memory_bytes=256 << 20,
        max_output_bytes=100_000,
        grace_s=GRACE_S,
    )
    sandbox = JailSandbox(spec, deny=WITHOUT[tier])
    try:
        results = await check_sandbox(sandbox, spec)
    finally:
        await sandbox.close()
    return [f"{result.check}: {result.detail}" for result in results if result.passed is False]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "uid": os.getuid(),
                "tier": probe(WITHOUT[sys.argv[1]]).tier,
                "broken": asyncio.run(_failed_checks(sys.argv[1])),
            }
        )
    )
