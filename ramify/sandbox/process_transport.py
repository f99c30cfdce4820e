"""The way to one forked session: its socket, its process, and the files of memory that it shares
with the host.

Decides how a session is signalled without ever hitting another process, how a branch's process is
known, and how the output of a killed session is still had. Leaves out what it is forked from
(``process.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.context import anonymous_file
from ramify.sandbox.forkserver_channel import ForkServerChannel
from ramify.sandbox.shared_buffers import ScratchBuffer, SharedMemoryBuffers, make_file
from ramify.sandbox.transport import ReadBuffers, SocketStream, how_it_ended

_MAX_LEFTOVER_BYTES = 16 << 20
_SCM_CREDENTIALS = 2


class SessionMemoryFiles:
    """The files of memory that the host shares with one session."""

    __slots__ = ("shared_buffers", "spool")

    def __init__(self, spool: int, shared_buffers: SharedMemoryBuffers | None) -> None:
        self.spool = spool
        """What the session prints; the host keeps it, so that a killed session's output is not
        lost."""
        self.shared_buffers = shared_buffers
        """Where long strings lie on their way."""

    @classmethod
    def make(cls, scratch: ScratchBuffer) -> SessionMemoryFiles:
        spool = anonymous_file("ramify-output")
        fcntl.fcntl(spool, fcntl.F_SETFL, fcntl.fcntl(spool, fcntl.F_GETFL) | os.O_APPEND)
        try:
            shared_buffers = make_file()
        except BaseException:
            os.close(spool)
            raise
        return cls(
            spool,
            SharedMemoryBuffers(shared_buffers, is_host=True, scratch=scratch)
            if shared_buffers >= 0
            else None,
        )

    def given(self) -> tuple[int, ...]:
        """The descriptors that the session gets."""
        return (
            (self.spool,) if self.shared_buffers is None else (self.spool, self.shared_buffers.fd)
        )

    def close(self) -> None:
        os.close(self.spool)
        self.spool = -1
        if self.shared_buffers is not None:
            self.shared_buffers.close()


class ProcessTransport:
    """The way to one forked session."""

    __slots__ = (
        "_exited",
        "_files",
        "_pid",
        "buffers",
        "caps",
        "link",
        "pause",
        "pidfd",
        "resume",
        "shared_buffers",
        "stream",
        "write",
    )

    def __init__(
        self,
        caps: SandboxCapabilities,
        sock: socket.socket,
        buffers: ReadBuffers,
        link: ForkServerChannel,
        pid: int,
        pidfd: int,
        files: SessionMemoryFiles,
    ) -> None:
        self.caps = caps
        self.stream = SocketStream(sock, buffers.stream)
        self.write, self.pause, self.resume = (
            self.stream.write,
            self.stream.pause,
            self.stream.resume,
        )
        self.link, self._pid, self.pidfd, self._files = link, pid, pidfd, files
        self.shared_buffers = files.shared_buffers
        self.buffers = buffers
        self._exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if pid >= 0:
            link.on_exit(pid, self._note_exit)

    def attach(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        self.stream.attach(received, lost)

    async def prepare_branch(self) -> None:
        """Whatever must be waited for before ``begin_branch``."""

    def check_apart(self) -> None:
        """Nothing keeps processes without a jail apart."""

    def begin_branch(self, frame: list[Any], moved: Callable[[], None]) -> BranchTransport:
        sock, files = self.send_branch(frame)
        return BranchTransport(self.caps, sock, self.buffers, self.link, files)

    def send_branch(self, frame: list[Any]) -> tuple[socket.socket, SessionMemoryFiles]:
        """Send ``frame`` with a socket and files for a branch; our ends of them."""
        ours, theirs, files = self.branch_ends()
        with theirs:
            try:
                self.stream.write_with(frame, (theirs.fileno(), *files.given()))
            except BaseException:
                ours.close()
                files.close()
                raise
        return ours, files

    def branch_ends(self) -> tuple[socket.socket, socket.socket, SessionMemoryFiles]:
        """Our end and the branch's of its socket, and its files. Raises SandboxError."""
        try:
            ours, theirs = socket.socketpair()
            try:
                ours.setsockopt(
                    socket.SOL_SOCKET, socket.SO_PASSCRED, 1
                )  # before the branch can speak
                return ours, theirs, SessionMemoryFiles.make(self.buffers.shared_buffers)
            except BaseException:
                ours.close()
                theirs.close()
                raise
        except OSError as error:
            raise SandboxError(
                f"the session cannot be forked: nothing to reach a branch by: {error}"
            ) from None

    def end_branch(self, transport: BranchTransport) -> None:
        """The branch is there, or will not come."""
        if transport.pidfd >= 0:
            with contextlib.suppress(SandboxError):
                self.link.tell({"op": "adopt", "pid": transport.pid})

    def move(self, sock: socket.socket, files: SessionMemoryFiles) -> SessionMemoryFiles:
        """From here on the session is reached by these. Returns the files that it had."""
        self.stream = self.stream.successor(sock)
        self.write, self.pause, self.resume = (
            self.stream.write,
            self.stream.pause,
            self.stream.resume,
        )
        old, self._files = self._files, files
        self.shared_buffers = files.shared_buffers
        return old

    def on_exit(self, call: Callable[[], None]) -> None:
        """Call when the process has ended."""
        self._exited.add_done_callback(lambda _: call())

    def _note_exit(self, status: int | None) -> None:
        if not self._exited.done():
            self._exited.set_result(status)

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._exited.done():
            return
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, number)
        else:  # the server is the parent: it knows whether the number still is this process
            with contextlib.suppress(SandboxError):
                self.link.tell({"op": "signal", "pid": self._pid, "signal": int(number)})

    def leftover(self, start: int) -> bytes:
        spool = self._files.spool
        if spool < 0:
            return b""
        size = os.fstat(spool).st_size
        start = start if start <= size else 0  # it was emptied since
        return os.pread(spool, _MAX_LEFTOVER_BYTES, max(size - _MAX_LEFTOVER_BYTES, start))

    async def exit_reason(self) -> str:
        await asyncio.wait((self._exited,), timeout=0.5)
        if not self._exited.done():
            return "it closed its connection to the host"
        status = self._exited.result()
        return "its process ended" if status is None else how_it_ended(status)

    async def close(self) -> None:
        if self._files.spool < 0:
            return
        self.kill()
        self.stream.close()
        self._files.close()
        await asyncio.wait((self._exited,), timeout=5.0)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class BranchTransport(ProcessTransport):
    """The way to a session that another one became by forking. Its process is known once the kernel
    has told who spoke first on its socket; its end shows on the descriptor of its process, for its
    parent is not the server."""

    __slots__ = ("_sock",)

    def __init__(
        self,
        caps: SandboxCapabilities,
        sock: socket.socket,
        buffers: ReadBuffers,
        link: ForkServerChannel,
        files: SessionMemoryFiles,
    ) -> None:
        super().__init__(caps, sock, buffers, link, -1, -1, files)
        self._sock = sock

    @property
    def pid(self) -> int:
        """Among the processes that the host sees, or -1."""
        return self._pid

    def attach(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._first, received, lost)

    def _first(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(12))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        asyncio.get_running_loop().remove_reader(self._sock)
        pid = next(
            (
                struct.unpack("3i", packed)[0]
                for _, kind, packed in ancillary
                if kind == _SCM_CREDENTIALS
            ),
            0,
        )
        if not data or not self.is_proven(pid):
            lost()
            return
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        asyncio.get_running_loop().add_reader(self.pidfd, self._gone)
        received(memoryview(data))
        self.stream.attach(received, lost)

    def is_proven(self, pid: int) -> bool:
        """Take ``pid`` for the branch, if it can be."""
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(pid) if pid > 0 else -1
        self._pid = pid
        return self.pidfd >= 0

    def abandon(self) -> None:
        """There will be no branch, and nobody waits for it."""
        self._sock.close()
        self._files.close()
        self._note_exit(None)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        with contextlib.suppress(SandboxError):
            self.link.tell({"op": "disown", "pid": self._pid})
        self._note_exit(None)

    async def close(self) -> None:
        if self.pidfd < 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._note_exit(None)
        await super().close()
