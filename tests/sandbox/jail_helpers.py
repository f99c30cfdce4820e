"""What the tests of the jail share."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jail_tiers as tiers

from ramify.sandbox.base import JailSpec
from ramify.sandbox.providers.jail import JailSandbox

SPIN = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass"


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return args


def with_jail(test: Callable[[JailSandbox], Awaitable[None]], tier: str = "A", **spec: Any) -> None:
    async def main() -> None:
        sandbox = tiers.open_jail(JailSpec(tier=tier, **spec))
        try:
            await test(sandbox)
        finally:
            await sandbox.close()

    asyncio.run(main())


async def value(session: Any, code: str) -> Any:
    cell = (await session.run(code, answer=answer)).cell
    assert cell.error is None, cell.error
    return cell.value


async def error(session: Any, code: str) -> str:
    cell = (await session.run(code, answer=answer)).cell
    assert cell.error is not None, cell.value
    return str(cell.error.splitlines()[-1])


def descendants(pid: int) -> set[int]:
    """Living descendants of ``pid``."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found |= {child} | descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
