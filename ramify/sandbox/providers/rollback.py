"""A session that survives a killed cell by rolling back to a fork.

It continues from a fork that was made before the cell.

This module decides when the fork is made and what the caller sees. If a session cannot be forked at
the moment, for example because threads are alive, it runs its cell without a fork. If that cell is
killed, the error says why the session was not rolled back. Forking itself is done by
``host/session.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import Answer, CellResult, SandboxCapabilities
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.types.trajectory import Cell


class RollbackSession:
    """A session that survives a killed cell, because it is forked before each cell.

    If the cell must be killed, the session is rolled back to the fork. Implements ``base.Session``.
    """

    def __init__(self, session: GuestSessionProxy) -> None:
        self._session = session
        self.caps: SandboxCapabilities = session.caps

    @property
    def pid(self) -> int:
        return self._session.pid

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        fork = await self._try_fork()
        if isinstance(fork, str):
            with _explain_no_rollback(fork):
                return await self._session.run(code, answer=answer, timeout_s=timeout_s)
        unused_fork: GuestSessionProxy | None = fork
        try:
            ran = await self._session.run(code, answer=answer, timeout_s=timeout_s)
        except SessionDied as died:
            await self._session.close()
            self._session, unused_fork = fork, None
            error = f"SessionDied: {died}\nThe session is as it was before this cell."
            cell = Cell(code=code, stdout=died.stdout, error=error, stdout_chars=len(died.stdout))
            return CellResult(cell, None, "killed")
        finally:
            if unused_fork is not None:
                await unused_fork.close()
        return ran

    async def _try_fork(self) -> GuestSessionProxy | str:
        """Fork the session, or return the reason why it cannot be forked now."""
        try:
            return await self._session.fork()
        except SessionDied:
            raise
        except SandboxError as error:
            return str(error)

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        with _explain_no_rollback("a branch that ends a cell has no state before that cell"):
            return await self._session.resume(answer=answer, timeout_s=timeout_s)

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        await self._session.set(name, value, reserved=reserved)

    async def get(self, name: str) -> Any:
        return await self._session.get(name)

    async def install(self, module: str, source: str) -> None:
        await self._session.install(module, source)

    async def fork(self) -> RollbackSession:
        return RollbackSession(await self._session.fork())

    async def close_tree(self) -> None:
        with contextlib.suppress(SessionDied):
            await self._session.close_tree()

    def interrupt(self, reason: str) -> None:
        self._session.interrupt(reason)

    async def close(self) -> None:
        await self._session.close()


@contextlib.contextmanager
def _explain_no_rollback(why: str) -> Iterator[None]:
    """Add to each SessionDied error the reason why the session was not rolled back.

    It applies to errors raised in the ``with`` block.
    """
    try:
        yield
    except SessionDied as died:
        raise SessionDied(f"{died}; it was not rolled back: {why}", died.stdout) from None
