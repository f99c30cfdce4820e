"""Restores interpreter state that cells share with the guest, and limits a cell's memory.

This module decides what is restored after each cell, so that no cell can break the next one or the
guest. The session's own names are restored by ``notebook.py``.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from .output import CellOutputSender

with contextlib.suppress(ImportError):
    import resource

_SIGINT = int(signal.SIGINT)
_signal: Any = sys.modules["_signal"]
"""The C module behind ``signal``. The functions of ``signal`` itself create enums, which costs
microseconds per cell."""


def _version_of(mapping: dict[str, Any]) -> Any:
    """Return a view of the counter that CPython increments whenever a dict changes.

    CPython has this counter before version 3.13.
    """
    return ctypes.c_uint64.from_address(id(mapping) + 24)


def _counts_changes() -> bool:
    """Return True if this interpreter counts the changes of each dict, as CPython did before
    3.13."""
    if sys.implementation.name != "cpython":
        return False
    probe: dict[str, Any] = {}
    field = _version_of(probe)
    seen = {field.value}
    for value in (1, 2):
        probe["name"] = value
        seen.add(field.value)
    del probe["name"]
    return len({*seen, field.value}) == 4


_VERSION: Any = _version_of(vars(builtins)) if _counts_changes() else None
_taken: tuple[int, dict[str, Any]] = (-1, {})


def _snapshot() -> tuple[int, dict[str, Any]]:
    """Return a copy of Python's builtins and the version number of the dict it was copied from.

    A forked session reuses its server's copy. Making another would write to the reference counts of
    all builtins, which are spread over a hundred memory pages.
    """
    global _taken
    if _VERSION is None:
        return -1, dict(vars(builtins))
    if _taken[0] != _VERSION.value:
        _taken = (_VERSION.value, dict(vars(builtins)))
    return _taken


class BuiltinsSnapshot:
    """A snapshot of Python's builtins from before the first cell, used to restore them after each
    cell.

    It consists of the builtins and the recursion limit.
    """

    __slots__ = ("_builtins", "_recursion_limit", "_seen")

    def __init__(self) -> None:
        self._seen, self._builtins = _snapshot()
        self._recursion_limit = sys.getrecursionlimit()

    def mend_builtins(self) -> None:
        if _VERSION is not None and _VERSION.value == self._seen:
            return
        if vars(builtins) != self._builtins:
            vars(builtins).update(self._builtins)
        if _VERSION is not None:
            self._seen = _VERSION.value

    def mend_streams(self, main: types.ModuleType, output: CellOutputSender) -> None:
        """Restore the standard streams and other interpreter settings that a cell may have changed.

        The other settings are ``__main__``, the trace and profile functions, and the recursion
        limit. Call this only if the guest is the only user of its process.
        """
        sys.stdout = sys.__stdout__ = output.stdout  # type: ignore[misc,assignment]
        sys.stderr = sys.__stderr__ = output.stderr  # type: ignore[misc,assignment]
        sys.modules["__main__"] = main
        if sys.gettrace() is not None:
            sys.settrace(None)
        if sys.getprofile() is not None:
            sys.setprofile(None)
        if sys.getrecursionlimit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)

    def restore_fds_and_sigint(
        self, output: CellOutputSender, on_interrupt: Callable[..., None]
    ) -> None:
        """Restore the session's output descriptors and SIGINT handler after a cell.

        Call this once the host has the result of the cell.
        """
        output.spool.redirect_output()
        if _signal.getsignal(_SIGINT) != on_interrupt:
            _signal.signal(_SIGINT, on_interrupt)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGINT,))


class AddressSpaceLimits:
    """A memory limit for cells, and a slightly higher one for the guest itself.

    Both limit the process's address space. The difference lets the guest report that a cell has run
    out of memory.
    """

    __slots__ = ("limits",)

    def __init__(self, limits: tuple[int, int] | None) -> None:
        """Set the address space limits, in bytes, for the cells and for the guest itself.

        None means no limits.
        """
        self.limits = limits

    def apply_cell_limit(self) -> None:
        """Apply the memory limit for cells from now on."""
        if self.limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, self.limits)

    def lift_cell_limit(self) -> None:
        if self.limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.limits[1], self.limits[1]))


def complete_builtins() -> None:
    """Add the builtins ``exit``, ``quit`` and ``help`` if they are missing.

    The module ``site`` defines them, but the server may have been started without it.
    """

    def exit(code: Any = None) -> None:
        """End the cell."""
        raise SystemExit(code)

    added = vars(builtins)
    added.setdefault("exit", exit)
    added.setdefault("quit", exit)
    if "help" not in added:
        from _sitebuiltins import _Helper

        added["help"] = _Helper()
