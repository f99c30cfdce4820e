"""The conformance suite that ships with the package, run on the providers of this machine."""

import asyncio
from collections.abc import Iterator

import jail_tiers as tiers
import pytest

from ramify.sandbox.base import JailSpec, Sandbox, SandboxSpec, open_sandbox
from ramify.testing.sandbox_conformance import CHECKS, ConformanceCheck, check_one

OpenProvider = tuple[asyncio.Runner, Sandbox, SandboxSpec]
LIMITS = {"max_output_bytes": 100_000, "grace_s": tiers.GRACE_S}
SPECS = {
    "process": SandboxSpec(provider="process", memory_bytes=256 << 20, **LIMITS),
    "inprocess": SandboxSpec(provider="inprocess", **LIMITS),
    **{
        f"jail {tier}": JailSpec(tier=tier, memory_bytes=256 << 20, **LIMITS)
        for tier in tiers.TIERS
    },
}


@pytest.fixture(scope="module", params=SPECS)
def open_provider(request: pytest.FixtureRequest) -> Iterator[OpenProvider]:
    """A provider's sandbox, shared by all checks, and its event loop."""
    spec = SPECS[request.param]
    with asyncio.Runner() as runner:
        sandbox = runner.run(open_spec(spec))
        yield runner, sandbox, spec
        runner.run(sandbox.close())


async def open_spec(spec: SandboxSpec) -> Sandbox:
    return tiers.open_jail(spec) if isinstance(spec, JailSpec) else open_sandbox(spec)


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_conformance_check(open_provider: OpenProvider, check: ConformanceCheck) -> None:
    runner, sandbox, spec = open_provider
    result = runner.run(check_one(sandbox, spec, check))
    if result.passed is None:
        pytest.skip(result.detail)
    assert result.passed, result.detail
