"""The interpreter that cells share with the guest.

Decides what of it is put back after each cell, so that none can break the next one or us, and how
much memory a cell may have. Leaves out the session's own names (``notebook.py``).
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

_signal: Any = sys.modules["_signal"]
"""The functions under ``signal``'s, which spend microseconds of every cell on making enums."""


class InterpreterState:
    """As it was when the guest was made, to which it returns."""

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
        """What belongs to a process, which must be the guest's own. ``main``: what is ``__main__``
        in it."""
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
        _signal.signal(signal.SIGINT, on_interrupt)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


class MemoryLimit:
    """Address space: what a cell may have, and the little more that the guest has for itself, so
    that it can still speak when a cell has used up its own."""

    __slots__ = ("_limits",)

    def __init__(self, limits: tuple[int, int] | None) -> None:
        """``limits``: bytes for a cell and for the guest; None for no limit of either."""
        self._limits = limits

    def allow_cell(self) -> None:
        """From now on no more than a cell may have."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, self._limits)

    def allow_guest(self) -> None:
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self._limits[1], self._limits[1]))


def complete_builtins() -> None:
    """What ``site`` adds to an interpreter and a server without it lacks."""

    def exit(code: Any = None) -> None:
        """End the cell."""
        raise SystemExit(code)

    added = vars(builtins)
    added.setdefault("exit", exit)
    added.setdefault("quit", exit)
    if "help" not in added:
        from _sitebuiltins import _Helper

        added["help"] = _Helper()
