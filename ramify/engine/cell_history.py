"""History of a session, from which it can be rebuilt: the cells that ran and the host's answers.

    cell 1   x = llm_query("…")        asks; the host answers "blue"      history: [cell 1: "blue"]
    cell 2   os.abort()                the session is lost
    rerun    cell 1 in a new session   gets "blue", no model is called    x is defined again

A rerun counts as identical if each cell makes the same calls with the same arguments, gets the same
answers, and prints, echoes and raises the same. A cell that was stopped at its time limit only has
to be stopped again.

Not here: when a session is rebuilt and what the model learns about it (see ``call_notebook.py``).
The history is kept in memory, because a resumed run executes its cells again anyway.
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
"""Memory address in the repr of an object, which differs each time."""
_FEW = 64
"""Maximum size of a collection that is hashed item by item."""


class RecordedHostCall(msgspec.Struct, frozen=True):
    """The host's answer to one call of a cell."""

    arguments_hash: int
    """``fingerprint`` of the call."""
    value: Any = None
    error: HostCallError | None = None


class _Cell(msgspec.Struct, frozen=True):
    code: str
    outcome: int
    """``fingerprint`` of the cell's visible output."""
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
        """Return a copy for a fork of the session."""
        return CellHistory(self._cells)

    def add(self, ran: CellResult, answers: Sequence[RecordedHostCall]) -> None:
        """Add a finished cell; ``answers`` are in the order in which they were given."""
        cell = _Cell(
            ran.cell.code, _outcome(ran), ran.cell.seconds, ran.interrupted, tuple(answers)
        )
        self._cells.append(cell)

    async def rerun(self, session: Session, cell_s: float) -> str | None:
        """Run the cells in ``session``, each for at most ``cell_s`` seconds of work or three times
        its original time.

        Returns the reason if a cell failed or differed, in which case the state of the session is
        unreliable; otherwise None.
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
    if cell.interrupted is None and _outcome(ran) != cell.outcome:
        return "gave another output than before"
    return None


def _outcome(ran: CellResult) -> int:
    texts = (ran.cell.stdout, ran.cell.value, ran.cell.error)
    return hash((ran.cell.stdout_chars, *(text and _ADDRESS.sub("0x…", text) for text in texts)))


class _RecordedHost:
    """Answers a cell's calls with the recorded answers, in whatever order its threads make them."""

    def __init__(self, answers: Sequence[RecordedHostCall]) -> None:
        self._answers: dict[int, deque[RecordedHostCall]] = defaultdict(deque)
        for answer in answers:
            self._answers[answer.arguments_hash].append(answer)
        self._unknown: str | None = None

    async def answer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The cell's ``sandbox.base.Answer``."""
        answers = self._answers.get(fingerprint(name, args, kwargs))
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


def fingerprint(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Hash of a call from a session, valid in this process only. Takes a millisecond per megabyte
    of text and copies none of it."""
    try:
        return hash((name, _hashed(list(args)), _hashed(dict(kwargs))))
    except Exception:  # noqa: BLE001 -- a lone surrogate, more than 64 bits, nested too deeply
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
