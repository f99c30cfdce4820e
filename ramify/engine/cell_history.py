"""What a session holds, as a way to have it back: the cells that ran in it, and what the host
answered them.

    cell 1   x = llm_query("…")         asks, is answered "blue"            past: [cell 1: "blue"]
    cell 2   os.abort()                 the session is gone
    again    cell 1 in a new session    is answered "blue", asks nobody     x is there

Decides what counts as the same: each cell makes the calls that it made, with the same arguments, is
answered as it was, and prints, echoes and raises what it did. A cell that was stopped for its time
is only stopped again. Leaves out when a session is rebuilt and what the model is told
(``rlm_loop.py``). All of it is in memory: a run that is resumed goes through its cells anyway.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import HostCallError, SessionDied
from ramify.sandbox.base import CellResult, Session

_LEAST_S = 2.0
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
"""Of an object in memory, as its repr shows it: another one each time."""
_FEW = 64
"""Items up to which a collection is gone through one by one."""


class RecordedHostCall(msgspec.Struct, frozen=True):
    """What the host answered one call of a cell."""

    asked: int
    """``fingerprint`` of the call."""
    value: Any = None
    error: HostCallError | None = None


class _Cell(msgspec.Struct, frozen=True):
    code: str
    outcome: int
    """``fingerprint`` of all that it showed."""
    seconds: float
    interrupted: str | None
    answers: tuple[RecordedHostCall, ...]


class CellHistory:
    """The cells of one session, in order."""

    def __init__(self, cells: Sequence[_Cell] = ()) -> None:
        self._cells = list(cells)

    def __len__(self) -> int:
        return len(self._cells)

    def copy(self) -> CellHistory:
        """For a fork of the session."""
        return CellHistory(self._cells)

    def add(self, ran: CellResult, answers: Sequence[RecordedHostCall]) -> None:
        """A cell has ended; ``answers`` in the order in which they were given."""
        cell = _Cell(
            ran.cell.code, _outcome(ran), ran.cell.seconds, ran.interrupted, tuple(answers)
        )
        self._cells.append(cell)

    async def again(self, session: Session, cell_s: float) -> str | None:
        """Run the cells in ``session``, each for at most ``cell_s`` seconds of work, or three times
        what it took.

        What made it impossible, where something did: then the session holds what nobody should rely
        on."""
        for number, cell in enumerate(self._cells, 1):
            told = _RecordedHost(cell.answers)
            limit_s = cell_s if cell.interrupted else min(cell_s, max(_LEAST_S, 3 * cell.seconds))
            try:
                ran = await session.run(cell.code, answer=told.answer, timeout_s=limit_s)
            except SessionDied as died:
                return f"cell {number}, run again, ended the session: {died}"
            problem = told.problem() or _difference(cell, ran)
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
    if cell.interrupted is None and _outcome(ran) != cell.outcome:
        return "gave another output than before"
    return None


def _outcome(ran: CellResult) -> int:
    texts = (ran.cell.stdout, ran.cell.value, ran.cell.error)
    return hash((ran.cell.stdout_chars, *(text and _ADDRESS.sub("0x…", text) for text in texts)))


class _RecordedHost:
    """Answers a cell's calls with what they were answered before, in whatever order its threads
    ask."""

    def __init__(self, answers: Sequence[RecordedHostCall]) -> None:
        self._left: dict[int, deque[RecordedHostCall]] = defaultdict(deque)
        for answer in answers:
            self._left[answer.asked].append(answer)
        self._unknown: str | None = None

    async def answer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The ``sandbox.base.Answer`` of the cell."""
        left = self._left.get(fingerprint(name, args, kwargs))
        if not left:
            self._unknown = name
            raise HostCallError("RuntimeError", f"{name}: this was not asked before")
        answered = left.popleft()
        if answered.error is not None:
            raise HostCallError(answered.error.kind, str(answered.error), answered.error.data)
        return answered.value

    def problem(self) -> str | None:
        if self._unknown is not None:
            return f"asked something of {self._unknown} that it had not asked before"
        return "did not ask all that it had asked before" if any(self._left.values()) else None


def fingerprint(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of a call from a session, for this process alone. Takes a millisecond for a megabyte of text,
    and copies none."""
    try:
        return hash((name, _hashed(list(args)), _hashed(dict(kwargs))))
    except Exception:  # noqa: BLE001 -- half a surrogate pair, more than 64 bits, nested without end
        return hash((name, len(args), *sorted(kwargs)))


def _hashed(value: Any) -> int:
    match value:
        case str() | bytes():
            return hash(value)
        case list() if len(value) <= _FEW or all(type(item) is str for item in value):
            return hash(tuple(map(_hashed, value)))
        case dict() if len(value) <= _FEW:
            return hash(tuple((key, _hashed(item)) for key, item in value.items()))
        case _:
            return hash(msgspec.msgpack.encode(value, enc_hook=repr))
