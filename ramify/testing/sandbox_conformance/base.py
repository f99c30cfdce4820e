"""Tools for writing conformance checks.

A check is a small test that every provider's sandbox must pass.

    >>> @check("a function sees updated globals")
    ... async def updated_globals(probe): ...

A check opens sessions through its ``SandboxUnderTest``, which closes them afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import HostCallError
from ramify.sandbox.base import Sandbox, SandboxSpec, Session
from ramify.types.trajectory import Cell


class SandboxUnderTest:
    """A wrapper for the sandbox that a conformance check tests.

    It keeps track of the sessions that the check opens, and closes them at the end.

    Example:
        probe = testing.SandboxUnderTest(sandbox, spec)
        (cell,) = await probe.cells("1 + 1")    # in a new session
    """

    def __init__(self, sandbox: Sandbox, spec: SandboxSpec) -> None:
        self.sandbox = sandbox
        self.spec = spec
        self._sessions: list[Session] = []

    async def open(self, **options: Any) -> Session:
        session = await self.sandbox.open(**options)
        self._sessions.append(session)
        return session

    async def cells(self, *codes: str, session: Session | None = None) -> list[Cell]:
        """Run code cells one after the other in a session of the tested sandbox, and return their
        results.

        By default, they run in a new session.
        """
        session = session or await self.open()
        return [(await session.run(code, answer=answer_host_call)).cell for code in codes]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


class ConformanceCheck(msgspec.Struct, frozen=True):
    """A named test of one guarantee that every sandbox must give.

    Example:
        ConformanceCheck("a branch sees its parent's names", test, needs=("fork",))
    """

    name: str
    test: Callable[[SandboxUnderTest], Awaitable[None]]
    needs: tuple[str, ...] = ()
    """Names of the ``SandboxCapabilities`` that the check needs."""


checks_by_module: dict[str, list[ConformanceCheck]] = {}
"""Module name -> the checks that it defines."""


def register_check(
    name: str, *needs: str
) -> Callable[
    [Callable[[SandboxUnderTest], Awaitable[None]]], Callable[[SandboxUnderTest], Awaitable[None]]
]:
    """Return a decorator that registers a function as a conformance check.

    ``needs`` names the ``SandboxCapabilities`` without which the check is skipped.
    """

    def add(
        test: Callable[[SandboxUnderTest], Awaitable[None]],
    ) -> Callable[[SandboxUnderTest], Awaitable[None]]:
        checks_by_module.setdefault(test.__module__, []).append(ConformanceCheck(name, test, needs))
        return test

    return add


class ConformanceError(AssertionError):
    """Raised if a sandbox fails a conformance check.

    Example:
        ConformanceError("value: expected '2', got '3'")
    """


def assert_same(got: Any, expected: Any, what: str = "") -> None:
    """Raise ConformanceError unless both values are equal and of the same type."""
    if got != expected or type(got) is not type(expected):
        raise ConformanceError(
            f"{what + ': ' if what else ''}expected {str(expected)[:500]!r}, got {str(got)[:500]!r}"
        )


def assert_true(fact: object, what: str) -> None:
    """Raise ConformanceError with the message ``what`` unless ``fact`` is true."""
    if not fact:
        raise ConformanceError(what)


async def answer_host_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Answer the calls that a tested session makes to its host.

    ``answer_host_call`` returns its argument, ``sleep`` waits, and ``fail`` raises an error.
    """
    if name == "sleep":
        await asyncio.sleep(args[0])
    if name == "fail":
        raise HostCallError(
            "SubcallError", "two failed", {"results": ["a", None], "failures": {1: "no"}}
        )
    return args[0] if args else dict(kwargs)


HOST = """
__all__ = ["host", "SessionHostCallError", "last_output"]
def host(name, *args, **kwargs):
    return call_host(name, *args, **kwargs)
"""


async def open_with_host(probe: SandboxUnderTest) -> Session:
    session = await probe.open()
    await session.install("host_names", HOST)
    return session


def assert_no_errors(cells: list[Cell]) -> list[Cell]:
    for cell in cells:
        assert_true(cell.error is None, f"{cell.code!r} failed: {cell.error}")
    return cells


def cell_values(cells: list[Cell]) -> list[str | None]:
    return [cell.value for cell in assert_no_errors(cells)]
