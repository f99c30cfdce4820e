"""How a session goes on in two processes.

Decides when it cannot, and what a branch has of its own: a wire, a spool, a shelf, and the random numbers of the session
that it came from. Leaves out whether a process may be made, which is the kernel's and the host's.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any

from .line import Line
from .notebook import Notebook
from .spools import FileSpool, MemorySpool

with contextlib.suppress(ImportError):
    import resource

_os_fork: Any = getattr(os, "fork", None)
_getpid, _close, _dup2, _waitpid = os.getpid, os.close, os.dup2, os.waitpid
"""As they were when no cell had run yet."""


class Branches:
    """Those of one session, and the way to one more."""

    __slots__ = ("_line", "_notebook", "_pids", "_spool")

    def __init__(self, line: Line, spool: FileSpool | MemorySpool, notebook: Notebook) -> None:
        self._line = line
        self._spool = spool
        self._notebook = notebook
        self._pids: list[int] = []

    def fork(self, id: int) -> None:
        """Go on in two processes from here; the branch has a wire and a spool of its own, and waits for what we wait
        for. ``id``: of the host's request, with which descriptors came along."""
        fds = self._line.take_fds()
        reason, pid = self._cannot_fork(fds), -1
        drawn = _random_state()
        if reason is None:
            try:
                pid = _os_fork()
            except OSError as error:
                reason = f"no process for a branch: {error.strerror}"
        if not pid:
            with contextlib.suppress(Exception):
                drawn and drawn[0].setstate(drawn[1])
            self._become_branch(*fds)
            return
        for fd in fds:
            _close(fd)
        if reason is None:
            self._pids.append(pid)
            self._line.send({"op": "ok", "id": id})
        else:
            self._line.send({"op": "failed", "id": id, "kind": "SandboxError", "message": reason})

    def _cannot_fork(self, fds: list[int]) -> str | None:
        assert isinstance(self._spool, FileSpool)
        self.bury()
        if len(sys._current_frames()) > 1:
            return "threads are alive, which a branch would lack: wait for them, or use the batched calls instead"
        loop = self._notebook.loop
        if loop is not None:
            if loop.is_running() or sys.modules["asyncio"].all_tasks(loop):
                return "an event loop has work: await its tasks first"
            self._notebook.end_loop()
        known = {*self._line.descriptors(), self._spool.fd, *fds}
        count = sum(fd not in known for fd in _open_descriptors())
        if count:
            return f"files, pipes or sockets are open ({count}), which a branch would share: close them first"
        return None if len(fds) == (2 if self._line.shelf is None else 3) else "no descriptor is free"

    def _become_branch(self, wire: int, spool: int, shelf: int = -1) -> None:
        self._line.pid = _getpid()
        self._pids = []
        os.setsid()
        assert isinstance(self._spool, FileSpool)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # they are above what code may open
        places = [(wire, self._line.write_fd), (spool, self._spool.fd)]
        if self._line.shelf is not None:
            places.append((shelf, self._line.shelf.fd))
        for fd, place in places:
            _dup2(fd, place, inheritable=False)
            _close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._spool.at = 0
        self._spool.attach()
        self._line.renew()
        self._line.send({"op": "hello", "pid": self._line.pid})

    def bury(self) -> None:
        """Those that have ended."""
        for pid in self._pids[:]:
            with contextlib.suppress(OSError):
                if _waitpid(pid, os.WNOHANG)[0]:
                    self._pids.remove(pid)


def _random_state() -> Any:
    """The generator of ``random`` and where it is. A fork seeds it anew; a branch draws on from here, so that a run that
    is repeated draws the same."""
    generator = getattr(sys.modules.get("random"), "_inst", None)
    with contextlib.suppress(Exception):  # the session may have put anything there
        return generator and (generator, generator.getstate())
    return None


def _open_descriptors() -> list[int]:
    """From 3 to the most that code may open."""
    poll = select.poll()
    numbers = range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024))
    for fd in numbers:
        poll.register(fd, 0)
    closed = {fd for fd, event in poll.poll(0) if event & select.POLLNVAL}
    return [fd for fd in numbers if fd not in closed]
