"""The conformance suite for sandbox providers: small tests of the guarantees in
``sandbox/base.py``.

There is one test for each guarantee. Every provider must pass it before it is documented.

The suite ships with the package: ``python -m ramify.testing sandbox NAME``.

A check that needs a capability that the provider does not claim (see ``SandboxCapabilities``) is
skipped, and the report says so.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from ramify.errors import RamifyError
from ramify.sandbox.base import Sandbox, SandboxSpec, open_sandbox
from ramify.testing.sandbox_conformance import cells, host_calls, session_isolation, stopping
from ramify.testing.sandbox_conformance.base import (
    ConformanceCheck,
    SandboxUnderTest,
    answer_host_call,
    checks_by_module,
)

CHECKS = [
    check
    for part in (cells, host_calls, stopping, session_isolation)
    for check in checks_by_module[part.__name__]
]
"""Every check of the conformance suite, in the order in which they run.

>>> any(check.name.startswith("a closed session") for check in testing.CHECKS)
True
"""
CHECK_S = 60.0
"""Time limit of one check in seconds."""
__all__ = ["CHECKS", "ConformanceCheck", "SandboxUnderTest", "answer_host_call"]


class ConformanceResult(msgspec.Struct, frozen=True):
    """The result of one conformance check: passed, failed or skipped.

    Example:
        ConformanceResult("values survive", passed=True, seconds=0.02)
    """

    check: str
    passed: bool | None
    """Whether the check passed; None: it was skipped."""
    detail: str = ""
    """What was wrong, or why the check was skipped."""
    seconds: float = 0.0


async def check_sandbox(sandbox: Sandbox, spec: SandboxSpec) -> list[ConformanceResult]:
    """Run every conformance check on an open sandbox, which stays open.

    ``spec`` is the specification that it was opened with.

    Example:
        results = await testing.check_sandbox(ramify.open_sandbox(spec), spec)
        assert [each for each in results if each.passed is False] == []
    """
    return [await check_one(sandbox, spec, check) for check in CHECKS]


async def check_one(
    sandbox: Sandbox, spec: SandboxSpec, check: ConformanceCheck
) -> ConformanceResult:
    """Run one conformance check on a sandbox, in new sessions.

    A check that needs a capability that the sandbox lacks is skipped.

    Example:
        result = await testing.check_one(sandbox, spec, testing.CHECKS[0])
    """
    missing = [name for name in check.needs if not getattr(sandbox.caps, name)]
    if missing:
        return ConformanceResult(check.name, None, f"does not claim {', '.join(missing)}")
    probe = SandboxUnderTest(sandbox, spec)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(CHECK_S):
            await check.test(probe)
        passed, detail = True, ""
    except Exception as error:  # noqa: BLE001  (any exception means that the check failed)
        passed, detail = False, f"{type(error).__name__}: {error}"
    finally:
        await probe.close()
    return ConformanceResult(check.name, passed, detail, time.perf_counter() - started)


async def _run_checks(spec: SandboxSpec) -> bool:
    sandbox = open_sandbox(spec)
    print(f"sandbox '{spec.provider}'   {msgspec.json.encode(sandbox.caps).decode()}")
    if sandbox.warning:
        print(sandbox.warning)
    is_good = True
    try:
        for check in CHECKS:
            result = await check_one(sandbox, spec, check)
            is_good = is_good and result.passed is not False
            mark = {True: "passed", False: "FAILED", None: "-"}[result.passed]
            print(f"{mark:<8}{result.seconds:6.2f} s  {check.name:<46}{result.detail}", flush=True)
    finally:
        await sandbox.close()
    return is_good


def main(arguments: list[str]) -> int:
    """Run all conformance checks from the command line, and print a report.

    Returns exit status 0 if no check failed, 1 if one did, and 2 for wrong arguments.
    """
    if len(arguments) > 1:
        print("usage: python -m ramify.testing sandbox [PROVIDER]", file=sys.stderr)
        return 2
    try:
        spec = SandboxSpec(
            provider=arguments[0] if arguments else SandboxSpec().provider, memory_bytes=512 << 20
        )
        return 0 if asyncio.run(_run_checks(spec)) else 1
    except RamifyError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
