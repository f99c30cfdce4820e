"""Forking: how a session continues in two processes.

Decides when a session cannot fork, and what a branch gets: its own socket, output file and shared
memory buffers, and the random state of its origin. Not here: whether a process may be created. The
kernel and the host decide that.

In the jail, both processes get these from the host after the fork (``take_wire``), each its own,
and the inherited ones are no longer connected. So code that runs around a fork cannot keep what
belongs to the other process. Without a jail, those of the branch arrive with the request.
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
"""Saved before any cell has run."""


class GuestBranches:
    """The branches of one session."""

    __slots__ = ("_channel", "_notebook", "_pids", "_spool", "_take_wire")

    def __init__(
        self,
        channel: GuestChannel,
        spool: FileOutputSpool | MemoryOutputSpool,
        notebook: GuestNotebook,
        take_wire: Any = None,
    ) -> None:
        self._channel = channel
        self._spool = spool
        self._notebook = notebook
        self._pids: list[int] = []
        self._take_wire = take_wire

    def fork(self, id: int) -> None:
        """Continue in two processes from here. The branch gets its own socket and output file, and
        waits for the same frame as the origin. ``id``: id of the host's request, which may carry
        descriptors."""
        fds = self._channel.take_fds()
        reason, pid = self._cannot_fork(fds), -1
        random_state = _random_state()
        if reason is None:
            try:
                pid = _os_fork()
            except OSError as error:
                reason = f"no process for a branch: {error.strerror}"
            if self._take_wire is not None:
                fds = self._take_descriptors(pid)
        if not pid:
            with contextlib.suppress(Exception):
                random_state and random_state[0].setstate(random_state[1])
            self._become_branch(*fds)
            return
        if self._take_wire is None:
            for fd in fds:
                _close(fd)
        elif fds:
            self._move(*fds)
        if reason is None:
            self._pids.append(pid)
            self._channel.send({"op": "ok", "id": id})
        else:
            self._channel.send(
                {"op": "failed", "id": id, "kind": "SandboxError", "message": reason}
            )

    def _cannot_fork(self, fds: list[int]) -> str | None:
        assert isinstance(self._spool, FileOutputSpool)
        self.reap()
        if len(sys._current_frames()) > 1:
            return (
                "threads are alive, which a branch would lack: wait for them, or use the batched "
                "calls instead"
            )
        loop = self._notebook.loop
        if loop is not None:
            if loop.is_running() or sys.modules["asyncio"].all_tasks(loop):
                return "an event loop has work: await its tasks first"
            self._notebook.end_loop()
        own_fds = {*self._channel.descriptors(), self._spool.fd, *fds}
        count = sum(fd not in own_fds for fd in _open_descriptors())
        if count:
            return (
                f"files, pipes or sockets are open ({count}), which a branch would share: close "
                "them first"
            )
        num_expected = (
            0 if self._take_wire is not None else 2 if self._channel.shared_buffers is None else 3
        )
        return None if len(fds) == num_expected else "no descriptor is free"

    def _take_descriptors(self, pid: int) -> list[int]:
        """Get a socket, an output file and shared buffers for this process alone. Returns an empty
        list if the fork was refused; the old ones remain in use then."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            wire = self._take_wire()
        except OSError:
            if pid >= 0:
                os._exit(71)  # the socket that it inherited is not connected any more
            return []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with socket.socket(fileno=wire) as end:
            _, ancillary, _, _ = end.recvmsg(1, socket.CMSG_SPACE(2 * 4))
            end.detach()
        return [wire, *(fd for _, _, packed in ancillary for fd in array.array("i", packed))]

    def _become_branch(self, wire: int, spool: int, shared_buffers: int = -1) -> None:
        self._channel.pid = _getpid()
        self._pids = []
        os.setsid()
        self._move(wire, spool, shared_buffers)
        self._channel.send({"op": "hello", "pid": self._channel.pid})

    def _move(self, wire: int, spool: int, shared_buffers: int = -1) -> None:
        """Use these descriptors from now on, under the numbers of the old ones."""
        assert isinstance(self._spool, FileOutputSpool)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The guest's descriptors have numbers above the limit for the cell's code.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        places = [(wire, self._channel.write_fd), (spool, self._spool.fd)]
        if self._channel.shared_buffers is not None:
            places.append((shared_buffers, self._channel.shared_buffers.fd))
        for fd, place in places:
            _dup2(fd, place, inheritable=False)
            _close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._spool.at = 0
        self._spool.attach()
        self._channel.renew()
        if self._take_wire is not None:
            self._close_others(self._spool.fd)

    def _close_others(self, spool: int) -> None:
        """Close the descriptors that code opened during the fork: both processes would have
        them."""
        start = 3
        for fd in sorted({*self._channel.descriptors(), spool}):
            _closerange(start, fd)
            start = fd + 1
        _closerange(start, 1 << 20)

    def reap(self) -> None:
        """Reap branches that have ended."""
        for pid in self._pids[:]:
            with contextlib.suppress(OSError):
                if _waitpid(pid, os.WNOHANG)[0]:
                    self._pids.remove(pid)


def _random_state() -> Any:
    """Return the generator of ``random`` and its state. Python seeds it again after a fork;
    restoring it makes the branch continue the sequence, so that a repeated run draws the same
    numbers."""
    generator = getattr(sys.modules.get("random"), "_inst", None)
    with contextlib.suppress(Exception):  # the session may have replaced it
        return generator and (generator, generator.getstate())
    return None


def _open_descriptors() -> list[int]:
    """Return the open descriptors from 3 to the highest number that code may open."""
    poll = select.poll()
    numbers = range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024))
    for fd in numbers:
        poll.register(fd, 0)
    closed = {fd for fd, event in poll.poll(0) if event & select.POLLNVAL}
    return [fd for fd in numbers if fd not in closed]
