"""When an interrupt may be raised in the guest's thread: only while a cell runs, and never with
half a frame sent.

Decides when KeyboardInterrupt is delayed and when it is raised. Not here: the sender of the
interrupt (see ``guest.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_get_ident = threading.get_ident


class GuestInterrupts:
    """Interrupts of the thread that created this object. They are delayed between ``enter`` and
    ``leave``."""

    __slots__ = ("_depth", "_main", "_pending", "is_live")

    def __init__(self) -> None:
        self._main = _get_ident()
        self.is_live = False
        """True while a cell runs."""
        self._depth = 0
        self._pending = False

    def may_raise(self) -> bool:
        """Return True if KeyboardInterrupt may be raised now; if it must wait, it is raised
        later."""
        if self.is_live and self._depth:
            self._pending = True
            return False
        return self.is_live

    def enter(self) -> int:
        """Begin a section without interrupts. Returns the depth before it, for ``leave``. Depths
        are set, not counted, so that no interrupt can unbalance them."""
        if _get_ident() != self._main:
            return -1
        before = self._depth
        self._depth = before + 1
        return before

    def leave(self, before: int) -> None:
        if before < 0:
            return
        self._depth = before
        if self._pending and not before:
            self._pending = False
            raise KeyboardInterrupt

    def wait(self, blocking: Callable[[], object]) -> None:
        """Call a function that may block and holds no resources: an interrupt may be raised
        there."""
        if _get_ident() != self._main:
            blocking()
            return
        previous_depth = self._depth
        try:
            self.leave(0)
            blocking()
        finally:
            self._depth = previous_depth

    def reset(self) -> None:
        """Forget the state of a section that was interrupted."""
        self._depth = 0
        self._pending = False
