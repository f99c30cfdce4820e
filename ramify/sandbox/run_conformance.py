"""What every provider must keep before it is documented, as a suite that ships: ``python -m
ramify.sandbox.run_conformance NAME``.

Decides how the promises (``promises/``) are put to a sandbox and reported. A promise that rests on
something the provider does not claim to have (``SandboxCapabilities``) is skipped, and says so.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from ramify.errors import RamifyError
from ramify.sandbox.base import Sandbox, SandboxSpec, open_sandbox
from ramify.sandbox.conformance import PROMISES, ConformanceCheck, SandboxProbe

CHECK_S = 60.0
"""Most time for one promise."""


class ConformanceResult(msgspec.Struct, frozen=True):
    """What came of one promise."""

    check: str
    kept: bool | None
    """None: skipped."""
    detail: str = ""
    """What was wrong, or why it was skipped."""
    seconds: float = 0.0


async def check(sandbox: Sandbox, spec: SandboxSpec) -> list[ConformanceResult]:
    """Put every promise to ``sandbox``, which ``spec`` describes. It stays open."""
    return [await check_one(sandbox, spec, check) for check in PROMISES]


async def check_one(
    sandbox: Sandbox, spec: SandboxSpec, check: ConformanceCheck
) -> ConformanceResult:
    """Put one promise to ``sandbox``, with sessions of its own."""
    missing = [name for name in check.needs if not getattr(sandbox.caps, name)]
    if missing:
        return ConformanceResult(check.name, None, f"does not claim {', '.join(missing)}")
    probe = SandboxProbe(sandbox, spec)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(CHECK_S):
            await check.test(probe)
        kept, detail = True, ""
    except Exception as error:  # noqa: BLE001  (a finding, whatever it was)
        kept, detail = False, f"{type(error).__name__}: {error}"
    finally:
        await probe.close()
    return ConformanceResult(check.name, kept, detail, time.perf_counter() - started)


async def _report(spec: SandboxSpec) -> bool:
    sandbox = open_sandbox(spec)
    print(f"sandbox '{spec.provider}'   {msgspec.json.encode(sandbox.caps).decode()}")
    if sandbox.warning:
        print(sandbox.warning)
    is_good = True
    try:
        for check in PROMISES:
            finding = await check_one(sandbox, spec, check)
            is_good = is_good and finding.kept is not False
            mark = {True: "kept", False: "BROKEN", None: "-"}[finding.kept]
            print(
                f"{mark:<8}{finding.seconds:6.2f} s  {check.name:<46}{finding.detail}", flush=True
            )
    finally:
        await sandbox.close()
    return is_good


def main(arguments: list[str]) -> int:
    """Exit status 0 if all that is claimed is kept, 1 if not, 2 for a wrong call."""
    if len(arguments) > 1:
        print("usage: python -m ramify.sandbox.run_conformance [PROVIDER]", file=sys.stderr)
        return 2
    try:
        spec = SandboxSpec(
            provider=arguments[0] if arguments else SandboxSpec().provider, memory_bytes=512 << 20
        )
        return 0 if asyncio.run(_report(spec)) else 1
    except RamifyError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
