"""Group commit: one thread per store that puts written files on the disk, so that no event loop waits for it.

append ── flush(fd) ──> due {fd: owner} ──> thread: fsync(fd), once however often it was asked for meanwhile
close ─── settle(owner): what is due is done here, what is under way is waited for
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

IDLE_S = 2.0


class Owner(Protocol):
    def flush_failed(self, error: OSError) -> None:
        """The bytes may not be on the disk."""
        ...

    def flushed(self, fd: int) -> None:
        """``fd`` is no longer needed by the flusher."""
        ...


class Flusher:
    """``fsync`` in the background, many requests for one file as one."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._due: dict[int, Owner] = {}
        self._busy: int | None = None
        self._busy_owner: Owner | None = None
        self._running = False

    def flush(self, fd: int, owner: Owner) -> None:
        with self._turn:
            self._due[fd] = owner
            if self._running:
                self._turn.notify_all()
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="ramify-flusher", daemon=True).start()
        except RuntimeError:  # the interpreter is going down: ``settle`` does the work
            self._running = False

    def settle(self, owner: Owner) -> None:
        """Returns when nothing of ``owner`` is due or under way."""
        with self._turn:
            mine = [fd for fd, other in self._due.items() if other is owner]
            for fd in mine:
                del self._due[fd]
            while self._busy_owner is owner:
                self._turn.wait()
        for fd in mine:
            _sync(fd, owner)

    def _run(self) -> None:
        while self._next():
            fd, owner = self._busy, self._busy_owner
            assert fd is not None
            assert owner is not None
            _sync(fd, owner)
            with self._turn:
                self._busy = self._busy_owner = None
                self._turn.notify_all()

    def _next(self) -> bool:
        """Take the oldest file that is due; False after an idle while, which ends the thread."""
        with self._turn:
            if not self._due:
                self._turn.wait_for(lambda: bool(self._due), IDLE_S)
            if not self._due:
                self._running = False
                return False
            self._busy = next(iter(self._due))
            self._busy_owner = self._due.pop(self._busy)
            return True


def _sync(fd: int, owner: Owner) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        owner.flush_failed(error)
    owner.flushed(fd)
