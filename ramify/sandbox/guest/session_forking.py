"""Fork a session into two processes.

The new process is called a branch.

This module defines when a session cannot fork and what a branch receives: its own socket, output
file and shared memory buffers, and the random state of the session that it was forked from. The
kernel and the host decide whether a process may be created.

In the jail, all inherited descriptors are closed after the fork, and each of the two processes
receives a new socket, output file and buffers from the host (``GuestForkOperations.take_wire``). No
hook runs around the fork. Without a jail, those of the branch arrive with the host's request.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .channel import GuestChannel
from .notebook import GuestNotebook
from .output import FileOutputSpool, InProcessOutputSpool

with contextlib.suppress(ImportError):
    import resource

_os_fork: Any = getattr(os, "fork", None)
_getpid, _close, _dup2, _waitpid = os.getpid, os.close, os.dup2, os.waitpid
"""Functions of ``os``, saved before any cell runs so that a cell cannot replace them."""
_EPERM = 1


class GuestForkOperations(NamedTuple):
    """The functions that a session in the jail uses to fork and to reconnect to the host.

    The jail is a sandbox that the kernel enforces. After the fork, each of the two processes gets
    its own connection to the host.
    """

    fork: Callable[[], int]
    take_wire: Callable[..., None]
    """Close all descriptors, then receive those of a new private connection. The arguments are the
    descriptor numbers that they get."""
    settle: Callable[[], None]
    """Called once in the new branch after the fork. Without a process namespace, this makes the
    branch end together with the zygote, the process that forks sessions."""


class SessionForker:
    """Forks branches of a session: copies of its process that continue independently.

    A branch is a copy of the session's process that continues independently.
    """

    __slots__ = ("_apart", "_channel", "_notebook", "_pids", "_spool")

    def __init__(
        self,
        channel: GuestChannel,
        spool: FileOutputSpool | InProcessOutputSpool,
        notebook: GuestNotebook,
        apart: GuestForkOperations | None = None,
    ) -> None:
        self._channel = channel
        self._spool = spool
        self._notebook = notebook
        self._pids: list[int] = []
        self._apart = apart

    def fork(self, id: int) -> None:
        """Fork a branch from this process, and continue in both the session and the branch.

        The branch gets its own socket and output file, and then waits for the host's next message,
        as the session does.

        ``id`` is the id of the host's request, which may come with descriptors for the branch.
        """
        fds = self._channel.take_fds()  # none in a jail, where they follow after the fork
        reason, pid = self._cannot_fork(fds), -1
        if reason is None:
            try:
                pid = self._fork(fds) if self._apart is None else self._fork_apart(self._apart)
            except OSError as error:
                reason = f"no process for a branch: {error.strerror}"
        if not pid:
            self._channel.pid = _getpid()
            self._pids = []
            # The server kills the process group; the jail knows branches by their session id.
            os.setsid()
            self._channel.send({"op": "hello", "pid": self._channel.pid})
        elif reason is None:
            self._channel.send({"op": "ok", "id": id})
        else:
            for fd in fds:  # left open, they would refuse the next fork
                _close(fd)
            self._channel.send(
                {"op": "failed", "id": id, "kind": "SandboxError", "message": reason}
            )

    def _fork(self, fds: list[int]) -> int:
        random_state = _random_state()
        pid: int = _os_fork()
        if pid:
            self._pids.append(pid)
            for fd in fds:
                _close(fd)
            return pid
        with contextlib.suppress(Exception):
            random_state and random_state[0].setstate(random_state[1])
        self._replace_descriptors(*fds)
        return 0

    def _fork_apart(self, apart: GuestForkOperations) -> int:
        try:
            pid = apart.fork()
        except OSError as error:
            if error.errno != _EPERM:  # the host allowed it: the old socket is closed
                self._take_wire(apart)
            raise
        self._take_wire(apart)
        if not pid:
            apart.settle()
        return pid

    def _take_wire(self, apart: GuestForkOperations) -> None:
        """Receive new connections from the host, and replace the forked process's inherited ones.

        These are a socket, an output file and shared memory buffers. They replace the inherited
        ones under the same descriptor numbers.
        """
        assert isinstance(self._spool, FileOutputSpool)
        buffers = self._channel.shared_buffers
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The guest's descriptors have numbers above the limit for the cell's code.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            apart.take_wire(
                self._channel.write_fd, self._spool.fd, *([buffers.fd] if buffers else ())
            )
        except OSError:
            os._exit(71)  # the old socket is not connected any more
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._spool.at = 0
        self._channel.restart_reading()

    def _cannot_fork(self, fds: list[int]) -> str | None:
        """Return the reason why this process cannot fork now, or None.

        ``fds`` are the descriptors that came with the host's request.
        """
        assert isinstance(self._spool, FileOutputSpool)
        self.reap()  # a cell may fork many times, and the main loop reaps only between requests
        if len(sys._current_frames()) > 1:
            return (
                "threads are alive, which a branch would lack: wait for them, or use the batched "
                "calls instead"
            )
        loop = self._notebook.loop
        if loop is not None:
            if loop.is_running() or sys.modules["asyncio"].all_tasks(loop):
                return "an event loop has work: await its tasks first"
            # An idle loop has descriptors, which would be counted below.
            self._notebook.close_event_loop()
        own_fds = {*self._channel.descriptors(), self._spool.fd, *fds}
        count = sum(fd not in own_fds for fd in _open_descriptors())
        if count:
            return (
                f"files, pipes or sockets are open ({count}), which a branch would share: close "
                "them first"
            )
        has_buffers = self._channel.shared_buffers is not None
        # Socket, output file and buffers. The kernel drops those for which no number is free.
        num_expected = 0 if self._apart is not None else 3 if has_buffers else 2
        return None if len(fds) == num_expected else "no descriptor is free"

    def _replace_descriptors(self, wire: int, spool: int, shared_buffers: int = -1) -> None:
        """Replace the connections that this process has inherited in a fork with new ones.

        These are the socket, the output file and the shared memory buffers; they keep their
        descriptor numbers. The buffers are shared memory.
        """
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
        self._spool.redirect_output()
        self._channel.restart_reading()

    def reap(self) -> None:
        """Collect the exit status of branches that have ended, so that none remains a zombie."""
        for pid in self._pids[:]:
            with contextlib.suppress(OSError):
                if _waitpid(pid, os.WNOHANG)[0]:
                    self._pids.remove(pid)


def _random_state() -> Any:
    """Return Python's global random number generator and its current state.

    Python seeds the generator again after a fork; restoring the state lets the branch continue the
    sequence, so that a repeated run draws the same numbers.
    """
    generator = getattr(sys.modules.get("random"), "_inst", None)
    with contextlib.suppress(Exception):  # the session may have replaced it
        return generator and (generator, generator.getstate())
    return None


def _open_descriptors() -> list[int]:
    """Return the open file descriptors that the code of cells may have opened.

    These are the open ones from 3 up to the cell's limit.
    """
    poll = select.poll()
    numbers = range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024))
    for fd in numbers:
        poll.register(fd, 0)
    closed = {fd for fd, event in poll.poll(0) if event & select.POLLNVAL}
    return [fd for fd in numbers if fd not in closed]
