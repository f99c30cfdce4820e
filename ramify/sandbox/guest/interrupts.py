"""When an interrupt may rise in the guest's thread: while a cell runs, and never with half a frame
on the wire.

Decides where KeyboardInterrupt waits and where it comes through. Leaves out who sends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_get_ident = threading.get_ident


class GuestInterrupts:
    """Those of the thread that it is made in. Between ``enter`` and ``leave`` they wait."""

    __slots__ = ("_depth", "_main", "_pending", "is_live")

    def __init__(self) -> None:
        self._main = _get_ident()
        self.is_live = False
        """Whether a cell runs."""
        self._depth = 0
        self._pending = False

    def may_rise(self) -> bool:
        """Whether KeyboardInterrupt may rise now; if it must wait, it will rise later."""
        if self.is_live and self._depth:
            self._pending = True
            return False
        return self.is_live

    def enter(self) -> int:
        """The depth before, for ``leave``. Levels are set, not counted, so that no interrupt can
        unbalance them."""
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
        """Call something that holds nothing and may block: here an interrupt rises."""
        if _get_ident() != self._main:
            blocking()
            return
        before = self._depth
        try:
            self.leave(0)
            blocking()
        finally:
            self._depth = before

    def reset(self) -> None:
        """Forget what an interrupted stretch has left behind."""
        self._depth = 0
        self._pending = False
