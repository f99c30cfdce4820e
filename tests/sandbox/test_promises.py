"""Every provider keeps every promise that it claims: the suite that ships, put to the providers of this machine."""

import asyncio

import pytest

from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.sandbox.check import Finding, check_one
from ramify.sandbox.promises import PROMISES, Promise

SPECS = {
    "process": SandboxSpec(provider="process", memory_bytes=256 << 20, max_output_bytes=100_000),
    "inprocess": SandboxSpec(provider="inprocess", max_output_bytes=100_000),
}


async def put(spec: SandboxSpec, promise: Promise) -> Finding:
    sandbox = open_sandbox(spec)
    try:
        return await check_one(sandbox, spec, promise)
    finally:
        await sandbox.close()


@pytest.mark.parametrize("promise", PROMISES, ids=[promise.name for promise in PROMISES])
@pytest.mark.parametrize("provider", SPECS)
def test_promise(provider: str, promise: Promise) -> None:
    finding = asyncio.run(put(SPECS[provider], promise))
    if finding.kept is None:
        pytest.skip(finding.detail)
    assert finding.kept, finding.detail
