"""The host's side of one fork in the jail.

After the fork, each of the two processes gets its own connection to the host.

Whether a process may ask for a connection is decided in ``jail_limits.py``. A fork is begun and
ended by ``jail_transport.py``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from ramify.errors import SandboxError
from ramify.sandbox.host.process_transport import (
    ForkedSessionHandles,
    ForkedSessionTransport,
    SessionSharedMemory,
)


class JailForkInProgress:
    """A fork of a session in the jail, from the host's request to the new connections.

    The session and its branch each get a new connection.

    fork request ──> begin: old wire closed ──fork──┬─> origin asks: gets its new wire, moved
                                                    └─> branch asks: gets its wire, hello
    """

    __slots__ = ("_branch", "_is_begun", "_moved", "_new", "_origin", "old", "pid", "taker")

    def __init__(self, origin: ForkedSessionTransport, pid: int, moved: Callable[[], None]) -> None:
        self.pid = pid
        self._origin = origin
        self._moved = moved
        self._is_begun = False
        self.taker = -1
        """Id of the process that has taken the branch's connection; -1 if none has."""
        self.old: list[SessionSharedMemory] = []
        """The memory files that both processes inherited."""
        self._branch = _private_ends(origin)
        try:
            self._new = _private_ends(origin)
        except BaseException:
            _close(self._branch)
            raise
        self._new[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)

    def branch_handles(self) -> ForkedSessionHandles:
        """Return the handles for the branch's new process: its connection and its shared files."""
        host_end, _, files = self._branch
        return ForkedSessionHandles(host_end, files, self._origin.channel)

    def close_origin_connection(self) -> None:
        """Close the host's old connection to a session that is about to fork.

        After the fork, two processes would share it. The process that is about to fork is blocked
        until this returns.
        """
        if not self._is_begun:
            self._is_begun = True
            self._origin.stream.read_available()
            self._origin.stream.close()

    def wire_for(self, pid: int) -> int:
        """Return the descriptor of a forked process's new connection, or -1 if it gets none.

        The files that the process needs were already sent over that socket.
        """
        if pid != self.pid and self.taker >= 0:
            return -1
        return (self._new if pid == self.pid else self._branch)[1].fileno()

    def record_taken(self, pid: int) -> None:
        """Record that a forked process has received its new connection."""
        if pid != self.pid:
            self.taker = pid
            self._branch[1].close()  # otherwise the end of its stream would not show
        elif not self.old:
            self._new[1].close()
            self.old.append(self._origin.switch_connection(self._new[0], self._new[2]))
            self._moved()

    def close_branch_connection(self) -> None:
        """Close the connection that was made for a branch that will not use it.

        The host then sees the end of its stream.
        """
        self._branch[1].close()

    def close_unclaimed(self) -> None:
        """Close the new connections and files that neither process has received."""
        self.close_branch_connection()
        self._new[1].close()
        for files in self.old:
            files.close()
        if not self.old:
            self._new[0].close()
            self._new[2].close()


_Ends = tuple[socket.socket, socket.socket, SessionSharedMemory]
"""The host's end of a connection, the other end, and the shared files."""


def _private_ends(origin: ForkedSessionTransport) -> _Ends:
    """Create the new connection and files for one of the two processes of a fork.

    The files are its standard input, output and buffers. Each process gets a separate standard
    input, because processes that share an open file description also share its flags. Raises
    SandboxError if that fails.
    """
    ends = origin.make_branch_ends()
    spool, *buffers = ends[2].descriptors()
    try:
        with open(os.devnull, "rb", 0) as null:
            socket.send_fds(ends[0], [b"\0"], [null.fileno(), spool, spool, *buffers])
    except OSError as error:
        _close(ends)
        raise SandboxError(
            f"the session cannot be forked: nothing to reach a branch by: {error}"
        ) from None
    return ends


def _close(ends: _Ends) -> None:
    for end in ends:
        end.close()
