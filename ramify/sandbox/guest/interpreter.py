"""The interpreter state that cells share with the guest.

Decides what is restored after each cell, so that no cell can break the next one or the guest, and
how much memory a cell may use. Not here: the session's own names (see ``notebook.py``).
"""

from __future__ import annotations

import builtins
import contextlib
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from .output import CellOutput

with contextlib.suppress(ImportError):
    import resource

_SIGINT = int(signal.SIGINT)
_signal: Any = sys.modules["_signal"]
"""The C functions behind ``signal``, which spends microseconds of every cell on creating enums."""


class InterpreterState:
    """The interpreter state at the guest's start, to which it is restored."""

    __slots__ = ("_builtins", "_recursion_limit")

    def __init__(self) -> None:
        self._builtins = dict(vars(builtins))
        self._recursion_limit = sys.getrecursionlimit()

    def mend_builtins(self) -> None:
        if vars(builtins) != self._builtins:
            vars(builtins).update(self._builtins)

    def mend_process(
        self, main: types.ModuleType, output: CellOutput, on_interrupt: Callable[..., None]
    ) -> None:
        """Restore process-wide state; the guest must own the process. ``main``: the module to use
        as ``__main__``."""
        output.spool.attach()
        sys.stdout = sys.__stdout__ = output.stdout  # type: ignore[misc,assignment]
        sys.stderr = sys.__stderr__ = output.stderr  # type: ignore[misc,assignment]
        sys.modules["__main__"] = main
        if sys.gettrace() is not None:
            sys.settrace(None)
        if sys.getprofile() is not None:
            sys.setprofile(None)
        if sys.getrecursionlimit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        if _signal.getsignal(_SIGINT) != on_interrupt:
            _signal.signal(_SIGINT, on_interrupt)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGINT,))


class MemoryLimit:
    """Limits of address space: one for cells, and a slightly larger one for the guest, so that it
    can still report when a cell has used up its memory."""

    __slots__ = ("_limits",)

    def __init__(self, limits: tuple[int, int] | None) -> None:
        """``limits``: bytes for a cell and for the guest; None for no limits."""
        self._limits = limits

    def allow_cell(self) -> None:
        """Apply the limit for cells from now on."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, self._limits)

    def allow_guest(self) -> None:
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self._limits[1], self._limits[1]))


def complete_builtins() -> None:
    """Add the builtins that ``site`` defines and that a server without ``site`` lacks."""

    def exit(code: Any = None) -> None:
        """End the cell."""
        raise SystemExit(code)

    added = vars(builtins)
    added.setdefault("exit", exit)
    added.setdefault("quit", exit)
    if "help" not in added:
        from _sitebuiltins import _Helper

        added["help"] = _Helper()
