"""Session of one call: opened while the first request is in flight, and rebuilt if it dies in a
cell.

    execute(code) ── session.run ──> CellResult            the cell is added to the history
                          └─ SessionDied ──> new session, rerun the history
                                             ──> CellResult with what was printed, and the reason

This file decides what a session starts with (prelude, tools, the setup of a task) and what the
model learns about a session that died. Not here: when a rerun counts as identical (see
``cell_history.py``) and how the cell's calls are answered (see ``host.py``).
"""

from __future__ import annotations

import asyncio
import functools
from importlib import resources

import msgspec

from ramify.engine import observe
from ramify.engine.call import LiveCall
from ramify.engine.cell_history import CellHistory
from ramify.engine.host import CellHost
from ramify.engine.run_state import RunState
from ramify.errors import SessionDied
from ramify.logging import RoomLogger
from ramify.sandbox.base import CellResult, Session
from ramify.types.trajectory import Cell

_log = RoomLogger("engine")
MAX_DEATHS = 3
"""Number of sessions that one call may lose before it ends with an error."""


class Notebook:
    """Live namespace of one call, independent of the session that currently holds it."""

    def __init__(self, run: RunState, call: LiveCall) -> None:
        self.run = run
        self.call = call
        self.num_deaths = 0
        self._session: Session | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._cell_history = CellHistory()

    def take_over(self, previous: Notebook) -> None:
        """Take over the session of ``previous``, the notebook of the previous question."""
        self._session, previous._session = previous._session, None
        opening, previous._opening = previous._opening, None
        failed = (
            opening is not None
            and opening.done()
            and (opening.cancelled() or opening.exception() is not None)
        )
        self._opening = None if failed else opening
        self._cell_history = previous._cell_history
        if self._session is not None:
            self.run.keep(self._session)

    async def fork(self, call: LiveCall) -> Notebook:
        """Return a second notebook for ``call`` that continues from the current state. Raises
        SandboxError if sessions cannot be forked."""
        fork = Notebook(self.run, call)
        fork._session = await (await self.session()).fork()
        fork._cell_history = self._cell_history.copy()
        self.run.keep(fork._session)
        return fork

    def begin_to_open(self) -> None:
        """Start opening a session. While the first request is in flight, this costs no time."""
        if self._session is None and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._new_session())

    async def session(self) -> Session:
        """Return the session, opening one if necessary."""
        if self._session is None:
            self.begin_to_open()
            assert self._opening is not None
            self._session, self._opening = await asyncio.shield(self._opening), None
            self.run.keep(self._session)
        return self._session

    async def execute(self, code: str, host: CellHost, *, died: bool = False) -> CellResult:
        """Run ``code`` and pass its calls to ``host``.

        If the session dies in the cell, ``CellResult.cell.died`` is set and the next cell gets a
        new session. ``died`` means that the recorded cell lost its session, so this one must too.
        """
        session = await self.session()
        reason = None
        try:
            ran = await session.run(code, answer=host.answer, timeout_s=self.run.cell_s)
        except SessionDied as death:
            reason = str(death)
            ran = CellResult(Cell(code, death.stdout, stdout_chars=len(death.stdout)))
        if host.fatal is not None:
            raise host.fatal
        was_rolled_back = ran.interrupted == "killed"
        if reason is None and not was_rolled_back and not died:
            self._cell_history.add(ran, host.answered)
            return ran
        self.num_deaths += 1
        died_of = reason or ("it was rolled back" if was_rolled_back else "as when it was recorded")
        _log.warning(
            "session_died",
            f"call {self.call.id}: the session died: {died_of}",
            call=self.call.id,
            turn=self.call.turn,
            deaths=self.num_deaths,
        )
        error = (
            ran.cell.error
            if was_rolled_back
            else await self._replace(reason or "as when this was recorded")
        )
        return CellResult(msgspec.structs.replace(ran.cell, value=None, error=error, died=True))

    async def _replace(self, reason: str) -> str:
        """Replace the session that died; returns the error for the model."""
        await self.close()
        text = f"SessionDied: {reason}"
        if self.num_deaths >= MAX_DEATHS or self.run.closing is not None:  # no cell will follow
            self._cell_history = CellHistory()
            return text
        problem = await self._rebuild()
        if len(self._cell_history):
            return f"{text}\n{observe.REBUILT}"
        return f"{text}\n{observe.STARTED_ANEW}{f' ({problem})' if problem else ''}"

    async def _rebuild(self) -> str | None:
        """Rerun the history in a new session. If that fails, clear the history and return the
        reason."""
        if not len(self._cell_history):
            return None
        problem: str | None = "it was cut off"
        try:
            problem = await self._cell_history.rerun(await self.session(), self.run.cell_s)
        finally:
            if problem is not None:
                self._cell_history = CellHistory()
                await self.close()
        count = (
            "1 cell was"
            if len(self._cell_history) == 1
            else f"{len(self._cell_history)} cells were"
        )
        result = (
            f"could not be rebuilt: {problem}" if problem else f"was rebuilt: {count} run again"
        )
        self.run.note(self.call, f"the session died and {result}")
        return problem

    async def _new_session(self) -> Session:
        run, call = self.run, self.call
        session = await run.open_session(call)
        try:
            await session.install("prelude", _prelude(run.scaffold.max_output_chars))
            tools = run.tools_at(call.depth)
            if tools.functions:
                await session.install("tools", tools.source())
            for name, value in tools.values.items():
                await session.set(name, value, reserved=True)
            if run.on_session is not None:
                await run.on_session(session)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End the session, also one that is still being opened. The notebook stays usable and then
        opens a new session."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
        session, self._session = self._session, None
        if session is not None:
            self.run.drop(session)
            await session.close()


@functools.cache
def _prelude(max_output_chars: int) -> str:
    source = resources.files("ramify.engine").joinpath("prelude.py").read_text("utf-8")
    return f"{source}\n_CONTROL['max_output_chars'] = {max_output_chars}\n"
