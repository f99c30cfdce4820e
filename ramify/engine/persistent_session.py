"""Manage the Python session in which a call's cells (pieces of code) run.

If a cell kills the session, a new one is brought to the same state by running the earlier cells
again.

A session is opened while the first model request is in flight.

    execute(code) ── session.run ──> CellResult            the cell is added to the history
                          └─ SessionDied ──> new session, rerun the history
                                             ──> CellResult with what was printed, and the reason

This module decides what a session starts with (prelude, tools, the setup of a task) and what the
model learns about a session that died. A session is rebuilt from its history:

    cell 1   x = llm_query("…")        asks; the host answers "blue"      history: [cell 1: "blue"]
    cell 2   os.abort()                the session is lost
    rerun    cell 1 in a new session   gets "blue", no model is called    x is defined again

A rerun counts as identical if each cell makes the same calls with the same arguments, gets the same
answers, and prints, echoes and raises the same. A cell that was stopped at its time limit only has
to be stopped again. The history is kept only in memory, because a resumed run executes its cells
again and so restores it. The calls that a cell makes to models and tools are answered by
``session_host_calls.py``.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine import observation_messages
from ramify.engine.live_call import LiveCall
from ramify.engine.shared_run_state import SharedRunState
from ramify.errors import HostCallError, ReplayDiverged, SessionDied
from ramify.logging import ComponentLogger
from ramify.sandbox.base import Answer, CellResult, Session
from ramify.session_module_compiler import compile_in_advance, read_module_source
from ramify.step_time_accounting import WallTimer
from ramify.types.trajectory import Cell

_log = ComponentLogger("engine")
MAX_DEATHS = 3
"""Number of sessions that one call may lose before it fails."""
_LEAST_S = 2.0
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
"""Pattern of a memory address in the ``repr`` of an object. It differs in each session."""
_FEW = 64
"""Maximum size of a collection that is hashed item by item."""


class RecoverableSession:
    """The Python session of one call, which is rebuilt if its process dies.

    It outlives the process that holds it: if a session dies, the notebook opens another one and
    runs the earlier cells again.
    """

    def __init__(self, run: SharedRunState, call: LiveCall) -> None:
        self.run = run
        self.call = call
        self.num_deaths = 0
        self._session: Session | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._cell_history = CellHistory()

    def adopt_previous_session(self, previous: RecoverableSession) -> None:
        """Take over the session and the cell history of the conversation's previous question."""
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
            self.run.ending.register_session(self._session)

    async def fork(self, call: LiveCall) -> RecoverableSession:
        """Fork this session and its cell history for ``call``, and return the fork.

        Raises SandboxError if the session cannot be forked.
        """
        fork = RecoverableSession(self.run, call)
        fork._session = await (await self.session()).fork()
        fork._cell_history = self._cell_history.copy()
        self.run.ending.register_session(fork._session)
        return fork

    def open_in_background(self) -> None:
        """Start to open a session in the background, unless there is one.

        This is called before the first model request, so that the session is ready by the time the
        reply arrives.
        """
        if self._session is None and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._new_session())

    async def session(self) -> Session:
        """Return the current session, and open one first if there is none."""
        if self._session is None:
            self.open_in_background()
            assert self._opening is not None
            # A cancelled wait must not cancel the opening: the session may still be used, and
            # ``close`` ends it.
            self._session, self._opening = await asyncio.shield(self._opening), None
            self.run.ending.register_session(self._session)
        return self._session

    async def execute(
        self, code: str, answer: Callable[[], Answer], *, died: bool = False
    ) -> CellResult:
        """Run ``code`` in the session and return its result.

        ``answer`` returns the function that answers the code's calls to models and tools. It is
        called once for each such call.

        If the session dies in the cell, ``CellResult.cell.died`` is set and the next cell gets a
        new session. Pass ``died=True`` to repeat a recorded cell that lost its session: this
        session is then discarded as well.
        """
        session = await self.session()
        answers = _RecordingHost(answer)
        reason = None
        try:
            ran = await session.run(code, answer=answers.answer, timeout_s=self.run.cell_timeout_s)
        except SessionDied as death:
            reason = str(death)
            ran = CellResult(Cell(code, death.stdout, stdout_chars=len(death.stdout)))
        # The cell's code may have caught this error, but it must end the run.
        if answers.fatal is not None:
            raise answers.fatal
        was_rolled_back = ran.interrupted == "killed"
        if reason is None and not was_rolled_back and not died:
            self._cell_history.add(ran, answers.given)
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

    def truncate_cell_output(self, ran: CellResult, note: dict[str, Any]) -> Cell:
        """Truncate the output of a cell, and return its result as it is recorded and shown to the
        model.

        Long output is truncated, and its full text is stored separately.
        """
        cell, most = ran.cell, self.run.setup.scaffold_at(self.call.depth).max_output_chars
        digest = None
        if cell.stdout_chars > most and self.run.setup.blobs is not None:
            digest = self.run.setup.blobs.put(cell.stdout.encode("utf-8", "backslashreplace"))
        # The guest keeps this much; see sandbox.base.SandboxSpec.
        most_kept = 16 * self.run.setup.sandbox.max_output_bytes
        where = f"in outputs[{note['cell']}]" if type(note.get("cell")) is int else "lost"
        if cell.stdout_chars > most_kept:
            where = f"not kept; {most_kept >> 20} MB of it, head and tail, are {where}"
        error = (
            observation_messages.cut(cell.error, most, len(cell.error), "not kept")
            if cell.error is not None
            else None
        )
        value = (
            observation_messages.cut(cell.value, most, len(cell.value), "in _")
            if cell.value is not None
            else None
        )
        stdout = observation_messages.cut(cell.stdout, most, cell.stdout_chars, where)
        return msgspec.structs.replace(
            cell,
            stdout=stdout,
            value=value,
            error=error,
            seconds=round(cell.seconds, 6),
            stdout_digest=digest,
        )

    def prefer_recorded_result(self, cell: Cell, recorded: Cell) -> Cell:
        """Return the recorded result of a rerun cell, and note in the run if the new output
        differs.

        The recorded output is shown to the model because its recorded replies refer to it.
        """
        if (cell.stdout, cell.value, cell.error) != (
            recorded.stdout,
            recorded.value,
            recorded.error,
        ):
            self.run.note(
                self.call,
                "a cell that was run again gave another output than it did when it was recorded",
            )
        return recorded

    async def _replace(self, reason: str) -> str:
        """Replace a dead session with a new one, in which the earlier cells are run again.

        Returns the error message for the model.
        """
        await self.close()
        text = f"SessionDied: {reason}"
        is_last = self.num_deaths >= MAX_DEATHS or self.run.ending.closing is not None
        if is_last:  # no cell will follow
            self._cell_history = CellHistory()
            return text
        problem = await self._rebuild()
        if len(self._cell_history):
            return f"{text}\n{observation_messages.REBUILT}"
        return f"{text}\n{observation_messages.STARTED_ANEW}{f' ({problem})' if problem else ''}"

    async def _rebuild(self) -> str | None:
        """Restore the state of a dead session by rerunning its cells in a new one.

        Returns None on success. Otherwise, clears the history and returns the reason.
        """
        if not len(self._cell_history):
            return None
        # Remains the reason if the rerun is cancelled.
        problem: str | None = "it was cut off"
        try:
            problem = await self._cell_history.rerun(await self.session(), self.run.cell_timeout_s)
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
        with WallTimer("sessions"):
            return await self._open_session()

    async def _open_session(self) -> Session:
        run, call = self.run, self.call
        tools = run.tools_at(call.depth)
        prelude = _prelude(run.setup.scaffold_at(call.depth).max_output_chars)
        sources = {"prelude": prelude, **tools.module_sources()}
        compile_in_advance(sources)  # the first session's sandbox is still being started
        run.expect_module("prelude", prelude)
        session = await run.open_session(call)
        try:
            if run.recording is None:
                tools.warm_up()
            for module, source in sources.items():
                await session.install(module, source)
            for name, value in tools.values.items():
                await session.set(name, value, reserved=True)
            if run.prepare_session is not None:
                await run.prepare_session(session)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End the session, even if it is still being opened.

        The notebook remains usable, and opens a new session when one is needed.
        """
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()
        session, self._session = self._session, None
        if session is not None:
            self.run.ending.unregister_session(session)
            await session.close()


@functools.cache
def _prelude(max_output_chars: int) -> str:
    source = read_module_source(Path(__file__).with_name("prelude.py"))
    if f'"max_output_chars": {max_output_chars:_},' in source:  # as the file has it
        return source
    return f"{source}\n_CONTROL['max_output_chars'] = {max_output_chars}\n"


class RecordedHostCall(msgspec.Struct, frozen=True):
    """A function call that a cell made to the host, recorded with its result or error.

    A host call is a function call from the session to the host, such as a question to a model.
    """

    arguments_hash: int
    """Hash of the function and its arguments, from ``host_call_hash``."""
    value: Any = None
    error: HostCallError | None = None


class _Cell(msgspec.Struct, frozen=True):
    code: str
    outcome: int
    """Hash of the cell's visible output, from ``host_call_hash``."""
    seconds: float
    interrupted: str | None
    answers: tuple[RecordedHostCall, ...]


class CellHistory:
    """The pieces of code (cells) that a model has run in one session, in order.

    Running them again brings a new session to the same state.
    """

    def __init__(self, cells: Sequence[_Cell] = ()) -> None:
        self._cells = list(cells)

    def __len__(self) -> int:
        return len(self._cells)

    def copy(self) -> CellHistory:
        """Return an independent copy of the history, for a fork of the session."""
        return CellHistory(self._cells)

    def add(self, ran: CellResult, answers: Sequence[RecordedHostCall]) -> None:
        """Add a cell, that is, a piece of code that has been run, to the history of the session.

        ``answers`` holds the results of its calls to models and tools, in the order in which they
        were given.
        """
        cell = _Cell(
            ran.cell.code, _hash_outcome(ran), ran.cell.seconds, ran.interrupted, tuple(answers)
        )
        self._cells.append(cell)

    async def rerun(self, session: Session, cell_s: float) -> str | None:
        """Run all cells again in ``session``, and check that each does the same as before.

        Each cell may take three times its original time, or 2 seconds if that is longer, but never
        more than ``cell_s`` seconds.

        Returns None on success. If a cell fails or differs, the state of the session is unreliable,
        and the reason is returned.
        """
        for number, cell in enumerate(self._cells, 1):
            host = _RecordedHost(cell.answers)
            limit_s = cell_s if cell.interrupted else min(cell_s, max(_LEAST_S, 3 * cell.seconds))
            try:
                ran = await session.run(cell.code, answer=host.answer, timeout_s=limit_s)
            except SessionDied as died:
                return f"cell {number}, run again, ended the session: {died}"
            problem = host.problem() or _difference(cell, ran)
            if problem is not None:
                return f"cell {number}, run again, {problem}"
        return None


def _difference(cell: _Cell, ran: CellResult) -> str | None:
    if ran.interrupted != cell.interrupted:
        return (
            f"was stopped ({ran.interrupted})"
            if ran.interrupted
            else "was not stopped as it had been"
        )
    if cell.interrupted is None and _hash_outcome(ran) != cell.outcome:
        return "gave another output than before"
    return None


def _hash_outcome(ran: CellResult) -> int:
    texts = (ran.cell.stdout, ran.cell.value, ran.cell.error)
    return hash((ran.cell.stdout_chars, *(text and _ADDRESS.sub("0x…", text) for text in texts)))


class _RecordingHost:
    """Forwards the calls of session code to models and tools, and records each answer.

    With the record, the code can be run again without calling anything.
    """

    def __init__(self, answer: Callable[[], Answer]) -> None:
        self._answer = answer
        self.given: list[RecordedHostCall] = []
        """Answers that the host has given to the cell's calls so far, in order."""
        self.fatal: ReplayDiverged | None = None
        """An error that ends the run even if the model's code catches it."""

    async def answer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer one function call of the cell, and record the answer or the error.

        A ReplayDiverged error is also kept in ``fatal``, because it must end the run even if the
        cell's code catches it.
        """
        arguments_hash = host_call_hash(name, args, kwargs)
        try:
            value = await self._answer()(name, args, kwargs)
        except HostCallError as error:
            self.given.append(RecordedHostCall(arguments_hash, error=error))
            raise
        except ReplayDiverged as error:
            self.fatal = error
            raise HostCallError("RuntimeError", str(error)) from error
        self.given.append(RecordedHostCall(arguments_hash, value))
        return value


class _RecordedHost:
    """Answers the host calls of a rerun cell with the answers recorded in its first run.

    The calls may come in any order, for example from several threads.
    """

    def __init__(self, answers: Sequence[RecordedHostCall]) -> None:
        self._answers: dict[int, deque[RecordedHostCall]] = defaultdict(deque)
        for answer in answers:
            self._answers[answer.arguments_hash].append(answer)
        self._unknown: str | None = None

    async def answer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the recorded answer to a function call of the cell, or raise the recorded error.

        Raises HostCallError if the record has no such call.
        """
        answers = self._answers.get(host_call_hash(name, args, kwargs))
        if not answers:
            self._unknown = name
            raise HostCallError("RuntimeError", f"{name}: this was not asked before")
        recorded = answers.popleft()
        if recorded.error is not None:
            raise HostCallError(recorded.error.kind, str(recorded.error), recorded.error.data)
        return recorded.value

    def problem(self) -> str | None:
        if self._unknown is not None:
            return f"asked something of {self._unknown} that it had not asked before"
        return "did not ask all that it had asked before" if any(self._answers.values()) else None


def host_call_hash(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return a hash of a function call that session code makes to the host.

    It is valid only in this process. Hashing takes about a millisecond per megabyte of text, and
    does not copy the text.
    """
    try:
        return hash((name, _hash_value(list(args)), _hash_value(dict(kwargs))))
    except Exception:  # noqa: BLE001 -- a lone surrogate, more than 64 bits, nested too deeply
        return hash((name, len(args), *sorted(kwargs)))


def _hash_value(value: Any) -> int:
    match value:
        case str() | bytes():
            return hash(value)
        case list() if len(value) <= _FEW or all(type(item) is str for item in value):
            return hash(tuple(map(_hash_value, value)))
        case dict() if len(value) <= _FEW:
            return hash(tuple((key, _hash_value(item)) for key, item in value.items()))
        case _:
            return hash(msgspec.msgpack.encode(value, enc_hook=repr))
