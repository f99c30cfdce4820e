"""What a session is made with, what it can do next, and the result of its cells.

Decides the states of a session. Not here: its requests and frames (see ``session.py``).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.sandbox import host_frames
from ramify.sandbox.base import CellResult, SandboxSpec
from ramify.sandbox.guest.source import marshalled
from ramify.sandbox.running_cell import RunningCell
from ramify.types.trajectory import Cell

if TYPE_CHECKING:
    from ramify.sandbox.session import GuestSession


class SessionLimits(NamedTuple):
    """Limits of one session, as in ``SandboxSpec``."""

    cell_s: float
    grace_s: float
    max_output_bytes: int


def limits_of(spec: SandboxSpec) -> SessionLimits:
    return SessionLimits(spec.cell_s, spec.grace_s, spec.max_output_bytes)


class SessionHooks(NamedTuple):
    """What a provider wants to know of its sessions."""

    on_close: Callable[[GuestSession], None] = lambda session: None
    on_fork: Callable[[GuestSession], None] = lambda session: None
    """Called with each new branch."""


compiled_module = functools.lru_cache(64)(marshalled)
"""Compiles a module once for all sessions."""
NO_HOOKS = SessionHooks()


class SessionState(enum.Enum):
    """What a session can do next."""

    IDLE = "idle"
    BUSY = "busy"
    """A cell or a request is in progress."""
    SUSPENDED = "suspended"
    """A branch that was forked in the middle of a cell: ``resume`` continues it."""
    ENDED = "ended"


def result_of(cell: RunningCell, done: host_frames.CellDoneFrame, note: Any) -> CellResult:
    """Return the result of a cell that has ended."""
    shown = Cell(
        code=cell.code,
        stdout=cell.output.text(cell.chars),
        value=done.value,
        error=done.error,
        seconds=cell.clock.worked_s,
        stdout_chars=done.chars,
        restored=tuple(done.restored),
    )
    return CellResult(shown, note, cell.stopped)


class GuestRefused(Exception):
    """The guest could not fulfil a request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
