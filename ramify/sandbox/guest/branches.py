"""How a session goes on in two processes.

Decides when it cannot, and what a branch has of its own: a wire, a spool, a shelf, and the random
numbers of the session that it came from. Not here: whether a process may be made, which is the
kernel's and the host's.

In the jail both processes get these from the host (``take_wire``) after the fork, each its own, and
what both inherited leads nowhere any more. So code that runs around a fork cannot keep what belongs
to the other one. Without a jail the branch's come with the request.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import sys
from typing import Any

from .channel import GuestChannel
from .notebook import GuestNotebook
from .spools import FileOutputSpool, MemoryOutputSpool

with contextlib.suppress(ImportError):
    import resource

_os_fork: Any = getattr(os, "fork", None)
_getpid, _close, _dup2, _waitpid, _closerange = (
    os.getpid,
    os.close,
    os.dup2,
    os.waitpid,
    os.closerange,
)
"""As they were when no cell had run yet."""


class GuestBranches:
    """Those of one session, and the way to one more."""

    __slots__ = ("_line", "_notebook", "_pids", "_spool", "_take_wire")

    def __init__(
        self,
        line: GuestChannel,
        spool: FileOutputSpool | MemoryOutputSpool,
        notebook: GuestNotebook,
        take_wire: Any = None,
    ) -> None:
        self._line = line
        self._spool = spool
        self._notebook = notebook
        self._pids: list[int] = []
        self._take_wire = take_wire

    def fork(self, id: int) -> None:
        """Go on in two processes from here; the branch has a wire and a spool of its own, and waits
        for what we wait for. ``id``: of the host's request, with which descriptors came along."""
        fds = self._line.take_fds()
        reason, pid = self._cannot_fork(fds), -1
        drawn = _random_state()
        if reason is None:
            try:
                pid = _os_fork()
            except OSError as error:
                reason = f"no process for a branch: {error.strerror}"
            if self._take_wire is not None:
                fds = self._taken(pid)
        if not pid:
            with contextlib.suppress(Exception):
                drawn and drawn[0].setstate(drawn[1])
            self._become_branch(*fds)
            return
        if self._take_wire is None:
            for fd in fds:
                _close(fd)
        elif fds:
            self._move(*fds)
        if reason is None:
            self._pids.append(pid)
            self._line.send({"op": "ok", "id": id})
        else:
            self._line.send({"op": "failed", "id": id, "kind": "SandboxError", "message": reason})

    def _cannot_fork(self, fds: list[int]) -> str | None:
        assert isinstance(self._spool, FileOutputSpool)
        self.reap()
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
        wanted = 0 if self._take_wire is not None else 2 if self._line.shared_buffers is None else 3
        return None if len(fds) == wanted else "no descriptor is free"

    def _taken(self, pid: int) -> list[int]:
        """A wire, a spool and a shelf for this process alone; none if the fork was refused, and the
        old ones serve."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            wire = self._take_wire()
        except OSError:
            if pid >= 0:
                os._exit(71)  # the wire that it inherited leads nowhere
            return []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with socket.socket(fileno=wire) as end:
            _, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(2 * 4))
            end.detach()
        return [wire, *(fd for _, _, packed in ancillary for fd in array.array("i", packed))]

    def _become_branch(self, wire: int, spool: int, shared_buffers: int = -1) -> None:
        self._line.pid = _getpid()
        self._pids = []
        os.setsid()
        self._move(wire, spool, shared_buffers)
        self._line.send({"op": "hello", "pid": self._line.pid})

    def _move(self, wire: int, spool: int, shared_buffers: int = -1) -> None:
        """From here on use these descriptors, where the old ones are."""
        assert isinstance(self._spool, FileOutputSpool)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard, hard)
        )  # they are above what code may open
        places = [(wire, self._line.write_fd), (spool, self._spool.fd)]
        if self._line.shared_buffers is not None:
            places.append((shared_buffers, self._line.shared_buffers.fd))
        for fd, place in places:
            _dup2(fd, place, inheritable=False)
            _close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._spool.at = 0
        self._spool.attach()
        self._line.renew()
        if self._take_wire is not None:
            self._close_others(self._spool.fd)

    def _close_others(self, spool: int) -> None:
        """Descriptors that code opened while we forked: both processes would have them."""
        start = 3
        for fd in sorted({*self._line.descriptors(), spool}):
            _closerange(start, fd)
            start = fd + 1
        _closerange(start, 1 << 20)

    def reap(self) -> None:
        """Those that have ended."""
        for pid in self._pids[:]:
            with contextlib.suppress(OSError):
                if _waitpid(pid, os.WNOHANG)[0]:
                    self._pids.remove(pid)


def _random_state() -> Any:
    """The generator of ``random`` and where it is. A fork seeds it anew; a branch draws on from
    here, so that a run that is repeated draws the same."""
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
