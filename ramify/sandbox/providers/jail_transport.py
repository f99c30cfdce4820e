"""The connection to a session in the jail.

It also handles the session's requests to create processes.

A session may send the host a descriptor only once, before it has run any code. Its requests to
create processes are answered by ``jail_limits.py``.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.host.process_transport import (
    BranchSessionTransport,
    ForkedSessionHandles,
    ForkedSessionTransport,
    pid_of_pidfd,
)
from ramify.sandbox.host.transport import SandboxConnectionState
from ramify.sandbox.providers.jail_fork_connections import JailForkInProgress
from ramify.sandbox.providers.jail_limits import ProcessCreationGate, kill_strays

_F_ADD_SEALS, _SEAL_WRITE = 1033, 0x8
_LATER_S = 0.5


class ForkableJailTransport(ForkedSessionTransport):
    """Base class of the connections to sessions and branches in the jail.

    Such a process can fork only with the host's help. Subclasses connect to sessions and to
    branches.
    """

    __slots__ = ("forking", "listener")

    def __init__(
        self,
        caps: SandboxCapabilities,
        buffers: SandboxConnectionState,
        process: ForkedSessionHandles,
    ) -> None:
        super().__init__(caps, buffers, process)
        self.listener: ProcessCreationGate | None = None
        self.forking: JailForkInProgress | None = None
        self.add_exit_callback(self._on_session_end)

    def fork_branch(self, frame: list[Any], moved: Callable[[], None]) -> JailBranchTransport:
        pid = pid_of_pidfd(self.pidfd)
        if self.listener is None or pid <= 0:
            raise SandboxError("the session cannot be forked: it has ended")
        fork = JailForkInProgress(self, pid, moved)
        transport = JailBranchTransport(self.caps, self.buffers, fork.branch_handles())
        try:
            self.listener.grant_one(pid, fork)
            # Not write, which would queue the request if the session does not read.
            self.stream.send_with_descriptors(frame, ())
        except BaseException:
            self.listener.withdraw(pid)
            transport.abandon()
            fork.close_unclaimed()
            raise
        self.forking = fork
        transport.set_origin(self.listener, pid)
        return transport

    def _on_session_end(self) -> None:
        """Report the loss of the connection if a session ends in the middle of a fork.

        The session may have no connection at that moment, so the host would not notice otherwise.
        """
        if self.forking is not None:
            self.forking.close_branch_connection()
            if not self.forking.old:
                self.stream.report_loss()

    def check_memory_isolated(self) -> None:
        """Make sure that a session and its branch share no memory, by sealing their old memory
        files.

        Both processes have inherited these files, which become read-only. The processes no longer
        use them. Raises SandboxError if a process has mapped one of them, because the two processes
        would then share memory.
        """
        old = self.forking.old if self.forking is not None else ()
        for fd in (fd for files in old for fd in files.descriptors()):
            try:
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_WRITE)
            except OSError as error:
                raise SandboxError(
                    "the session cannot be forked: it has mapped a file of its runtime "
                    f"({error.strerror}), which a branch "
                    "would share: unmap it first"
                ) from None

    def finish_forking(self, transport: BranchSessionTransport) -> None:
        """Finish a fork, and kill the new process if it has not connected to the host.

        If a process was created but has not connected, kill it.
        """
        fork, self.forking = self.forking, None
        if fork is not None:
            fork.close_unclaimed()
        if self.listener is None:
            return
        assert isinstance(transport, JailBranchTransport)
        was_used = not self.listener.withdraw(transport.origin)
        if was_used and transport.pidfd < 0:
            if fork is not None:
                # Otherwise it would be spared below.
                self.listener.branches.discard(fork.taker)
            kill = functools.partial(kill_strays, transport.origin, self.listener.branches)
            kill()
            asyncio.get_running_loop().call_later(_LATER_S, kill)  # one just being created
        elif transport.pidfd >= 0 and not transport.has_ended:
            with contextlib.suppress(SandboxError):
                self.channel.send({"op": "adopt", "pid": transport.pid})

    def close(self) -> None:
        listener, self.listener = self.listener, None
        super().close()
        if listener is not None:
            listener.release()


class JailTransport(ForkableJailTransport):
    """The connection to a session in the jail.

    Implements ``GuestTransport``.
    """

    __slots__ = ("_counts", "_is_frozen")

    def __init__(
        self,
        caps: SandboxCapabilities,
        buffers: SandboxConnectionState,
        process: ForkedSessionHandles,
        counts: bool,
    ) -> None:
        """Create a connection to a session that has just been forked in the jail.

        ``counts``: use the kernel's count of a process's open descriptors, if this kernel reports
        it.
        """
        super().__init__(caps, buffers, process)
        self._is_frozen = False
        self._counts = counts

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock.fileno(), self._receive_first_byte, received, lost)

    def _receive_first_byte(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        """Receive a session's first byte, which confirms that the session is confined.

        It comes with the descriptor at which the session's requests to create processes will
        arrive.
        """
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        fds = [
            fd
            for _, _, packed in ancillary
            for fd in array.array("i", packed[: len(packed) // 4 * 4])
        ]
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        if data and len(fds) == 1:
            self.listener = ProcessCreationGate(fds[0], counts=self._counts)
            self.stream.start_reading(received, lost)
            return
        for fd in fds:
            os.close(fd)
        lost()

    async def prepare_branch(self) -> None:
        """Make the session's private folder read-only, because its branch will share it.

        Raises SandboxError if a file in it is open for writing.
        """
        if not self._is_frozen:
            try:
                await self.channel.ask({"op": "freeze", "pid": self._pid})
            except SandboxError as error:
                raise SandboxError(
                    f"the session cannot be forked: {error}; close the files that it has open for "
                    "writing"
                ) from None
            self._is_frozen = True


class JailBranchTransport(ForkableJailTransport, BranchSessionTransport):
    """The host's connection to a branch, which was forked from a running session in the jail.

    Its requests to create processes arrive at the same listener as the session's. Implements
    ``GuestTransport``.
    """

    __slots__ = ("origin",)

    def set_origin(self, listener: ProcessCreationGate, pid: int) -> None:
        """Record the process this branch was forked from, and the gate that decides on its
        requests."""
        self.listener, self.origin = listener, pid
        listener.add_holder()

    def accept_process(self, pid: int) -> bool:
        """Accept a process as the branch only if it has received the branch's connection."""
        assert self.listener is not None
        self.add_exit_callback(functools.partial(self.listener.branches.discard, pid))
        return pid != self.origin and pid in self.listener.branches and super().accept_process(pid)

    async def prepare_branch(self) -> None:
        """Do nothing, because a branch's files are read-only from the start."""
