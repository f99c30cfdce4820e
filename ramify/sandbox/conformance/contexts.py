"""Conformance checks: contexts, including shared ones."""

from __future__ import annotations

from ramify.sandbox.conformance.base import (
    SandboxProbe,
    check,
    clean,
    same,
    true,
)
from ramify.sandbox.context import SharedContext


@check("a context is bound, reserved and complete", "full_python")
async def contexts(probe: SandboxProbe) -> None:
    for value in (
        "short é\ud800",
        {"a": [1, (2, "b")], 3: "c"},
        ["line é"] * 300_000,
        "long é " * 400_000,
    ):
        context = SharedContext(value)
        session = await probe.open(context=context)
        same(await session.get("context"), value)
        ran = await probe.cells("context = None", "type(context).__name__", session=session)
        same((ran[0].restored, ran[1].value), (("context",), repr(type(value).__name__)))
        same(SharedContext.decode(context.buffer()).digest, context.digest)


@check("sessions over a context share its memory", "shares_context")
async def shared_context(probe: SandboxProbe) -> None:
    context = SharedContext("some text of some length " * 2_000_000)
    sessions = [await probe.open(context=context) for _ in range(3)]
    code = """
def private():
    try:
        lines = open('/proc/self/smaps_rollup')
        return sum(int(line.split()[1]) for line in lines if line.startswith('Private')) * 1024
    except OSError: return 0
context.count('text'), private()
"""
    for session in sessions:
        [cell] = clean(await probe.cells(code, session=session))
        count, private = (int(part) for part in (cell.value or "").strip("()").split(","))
        true(count == 2_000_000 and private < 20 << 20, f"{private:,} private bytes")
