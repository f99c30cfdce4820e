"""The connection to a session forked on this machine: its socket, process and memory files.

The session shares its memory files with the host. This module sends signals to a session and makes
sure that no other process receives them. It also identifies the process of a branch (a copy of a
session, made by forking it), and recovers the output of a killed session. The process that sessions
are forked from is managed by ``providers/process.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities, anonymous_file
from ramify.sandbox.guest.message_frames import (
    HostGuestSharedMemory,
    ReusableBuffer,
    create_shared_memory_file,
)
from ramify.sandbox.host.forkserver_channel import ForkServerChannel
from ramify.sandbox.host.transport import SandboxConnectionState, SocketStream, how_it_ended

_MAX_LEFTOVER_BYTES = 16 << 20
_SCM_CREDENTIALS = 2


def read_proc(path: str) -> bytes:
    """Return the first 4 kB of a file in /proc, using only three system calls.

    Raises OSError if that fails.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def pid_of_pidfd(pidfd: int) -> int:
    """Return the process id behind a process descriptor (pidfd), as the host sees it.

    Returns -1 if the process has ended.
    """
    try:
        found = read_proc(f"/proc/self/fdinfo/{pidfd}").partition(b"\nPid:")[2].split(None, 1)
        return int(found[0]) if found else -1
    except OSError:
        return -1


class SessionSharedMemory:
    """The memory files that the host shares with one session: its output file and its shared
    buffers."""

    __slots__ = ("shared_buffers", "spool")

    def __init__(self, spool: int, shared_buffers: HostGuestSharedMemory | None) -> None:
        self.spool = spool
        """The session's output file. The host holds it too, so the output survives if the session
        is killed."""
        self.shared_buffers = shared_buffers
        """Buffers through which long strings are passed."""

    @classmethod
    def make(cls, scratch: ReusableBuffer) -> SessionSharedMemory:
        spool = anonymous_file("ramify-output")
        # The guest truncates it, after which output would otherwise continue at the old offset.
        fcntl.fcntl(spool, fcntl.F_SETFL, os.O_APPEND)
        try:
            buffers_fd = create_shared_memory_file()
        except BaseException:
            os.close(spool)
            raise
        return cls(
            spool,
            HostGuestSharedMemory(buffers_fd, is_host=True, scratch=scratch)
            if buffers_fd >= 0
            else None,
        )

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the shared files, which must be passed to the session."""
        return (
            (self.spool,) if self.shared_buffers is None else (self.spool, self.shared_buffers.fd)
        )

    def close(self) -> None:
        os.close(self.spool)
        self.spool = -1
        if self.shared_buffers is not None:
            self.shared_buffers.close()


class ForkedSessionHandles(NamedTuple):
    """The host's handles for one forked session, such as its socket and its process id.

    The handles also include the shared files.
    """

    sock: socket.socket
    files: SessionSharedMemory
    channel: ForkServerChannel
    """The control connection to the server that forked this process."""
    pid: int = -1
    """Process id as the server sees it; -1 for a branch that has not connected yet."""
    pidfd: int = -1


class ForkedSessionTransport:
    """The connection to one forked session on this machine."""

    has_same_python = True
    """True if the session can load bytecode that this Python has compiled."""

    __slots__ = (
        "_clock_id",
        "_exited",
        "_files",
        "_pid",
        "_sock",
        "buffers",
        "caps",
        "channel",
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
        buffers: SandboxConnectionState,
        process: ForkedSessionHandles,
    ) -> None:
        self.caps = caps
        self._sock, self._files, self.channel, self._pid, self.pidfd = process
        self.stream = SocketStream(self._sock, buffers)
        self.write, self.pause, self.resume = (
            self.stream.write,
            self.stream.pause,
            self.stream.resume,
        )
        self._clock_id: int | None = None
        """The kernel's clock for the process's CPU time, once it is known."""
        self.shared_buffers = self._files.shared_buffers
        self.buffers = buffers
        self._exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if self._pid >= 0:
            self.channel.add_child_exit_callback(self._pid, self._note_exit)

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self.stream.start_reading(received, lost)

    def is_only_active(self) -> bool:
        return self.stream.is_only_active()

    def busy_wait_for_answer(self) -> None:
        self.stream.busy_wait_for_answer()

    async def prepare_branch(self) -> None:
        """Do nothing, because a session without a jail can fork at once."""

    def check_memory_isolated(self) -> None:
        """Do nothing, because without a jail a branch need not be isolated from its session's
        memory."""

    def fork_branch(self, frame: list[Any], moved: Callable[[], None]) -> BranchSessionTransport:
        branch = ForkedSessionHandles(*self.request_fork(frame), self.channel)
        return BranchSessionTransport(self.caps, self.buffers, branch)

    def request_fork(self, frame: list[Any]) -> tuple[socket.socket, SessionSharedMemory]:
        """Ask the session to fork, and send it a socket and shared files for the branch.

        Returns the host's ends of that socket and those files.
        """
        host_end, branch_end, files = self.make_branch_ends()
        with branch_end:
            try:
                self.stream.send_with_descriptors(
                    frame, (branch_end.fileno(), *files.descriptors())
                )
            except BaseException:
                host_end.close()
                files.close()
                raise
        return host_end, files

    def make_branch_ends(self) -> tuple[socket.socket, socket.socket, SessionSharedMemory]:
        """Create a socket pair and the shared files for a new branch of the session.

        Returns the host's end of the socket, the branch's end, and the files. Raises SandboxError
        if the system refuses.
        """
        try:
            host_end, branch_end = socket.socketpair()
            try:
                host_end.setsockopt(
                    socket.SOL_SOCKET, socket.SO_PASSCRED, 1
                )  # before the branch can speak
                return host_end, branch_end, SessionSharedMemory.make(self.buffers.shared_buffers)
            except BaseException:
                host_end.close()
                branch_end.close()
                raise
        except OSError as error:
            raise SandboxError(
                "the session cannot be forked: no connection to the branch could be opened: "
                f"{error}"
            ) from None

    def finish_forking(self, transport: BranchSessionTransport) -> None:
        """Finish a fork by registering a branch that has started with the fork server.

        Call this once the branch has started, or certainly will not start.
        """
        if transport.pidfd >= 0:
            with contextlib.suppress(SandboxError):
                self.channel.send({"op": "adopt", "pid": transport.pid})

    def switch_connection(
        self, sock: socket.socket, files: SessionSharedMemory
    ) -> SessionSharedMemory:
        """Switch the session to a new socket and new shared files, and return the old shared
        files."""
        self.stream = self.stream.move_to_socket(sock)
        self.write, self.pause, self.resume = (
            self.stream.write,
            self.stream.pause,
            self.stream.resume,
        )
        old, self._files = self._files, files
        self.shared_buffers = files.shared_buffers
        return old

    @property
    def server_pid(self) -> int:
        """The session's process id in the fork server's PID namespace."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        return self._exited.done()

    def add_exit_callback(self, call: Callable[[], None]) -> None:
        """Register a function to call once the session's process has ended."""
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
        else:  # the server is the parent: it knows whether the pid still belongs to this process
            with contextlib.suppress(SandboxError):
                self.channel.send({"op": "signal", "pid": self._pid, "signal": int(number)})

    def cpu_s(self) -> float:
        """Return the CPU time of the session's process in seconds, summed over its threads.

        Returns 0 if it is unknown.
        """
        if self._clock_id is None:
            pid = pid_of_pidfd(self.pidfd)
            # As ``clock_getcpuclockid`` computes it, which Python does not offer.
            self._clock_id = (~pid << 3) | 2 if pid > 0 else 0
        try:
            return time.clock_gettime(self._clock_id) if self._clock_id else 0.0
        except OSError:  # it has ended
            return 0.0

    def unsent_output(self, start: int) -> bytes:
        spool = self._files.spool
        if spool < 0:
            return b""
        size = os.fstat(spool).st_size
        start = start if start <= size else 0  # the file was truncated meanwhile
        return os.pread(spool, _MAX_LEFTOVER_BYTES, max(size - _MAX_LEFTOVER_BYTES, start))

    def file_bytes(self) -> int:
        """Return the memory in bytes that the session's shared files use."""
        if self._files.spool < 0:
            return 0
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._files.descriptors())

    async def exit_reason(self) -> str:
        await asyncio.wait((self._exited,), timeout=0.5)
        if not self._exited.done():
            return "it closed its connection to the host"
        status = self._exited.result()
        return "its process ended" if status is None else how_it_ended(status)

    def close(self) -> None:
        if self._files.spool < 0:
            return
        self.kill()
        self.stream.close_without_callback()
        self._files.close()
        ending = asyncio.ensure_future(self._wait_for_exit())
        self.buffers.endings.add(ending)
        ending.add_done_callback(self.buffers.endings.discard)

    async def _wait_for_exit(self) -> None:
        await asyncio.wait((self._exited,), timeout=5.0)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class BranchSessionTransport(ForkedSessionTransport):
    """The host's connection to a branch, which is a forked copy of a session.

    The kernel reports which process sent the first message on the socket, which identifies the
    branch. The fork server is not its parent, so the host notices its exit through a process
    descriptor (pidfd).
    """

    __slots__ = ()

    @property
    def pid(self) -> int:
        """The process id of the branch on the host, or -1 if it is not known yet."""
        return self._pid

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock.fileno(), self._receive_first_message, received, lost)

    def _receive_first_message(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(12))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        pid = next(
            (
                struct.unpack("3i", packed)[0]
                for _, kind, packed in ancillary
                if kind == _SCM_CREDENTIALS
            ),
            0,
        )
        if not data or not self.accept_process(pid):
            lost()
            return
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        asyncio.get_running_loop().add_reader(self.pidfd, self._on_process_exit)
        received(memoryview(data))
        self.stream.start_reading(received, lost)

    def accept_process(self, pid: int) -> bool:
        """Accept the process with this id as the branch's process, and open a pidfd for it.

        Returns False if there is no such process.
        """
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(pid) if pid > 0 else -1
        self._pid = pid
        return self.pidfd >= 0

    def abandon(self) -> None:
        """Release the resources of a branch whose process will not start."""
        self._sock.close()
        self._files.close()
        self._note_exit(None)

    def _on_process_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        with contextlib.suppress(SandboxError):
            self.channel.send({"op": "disown", "pid": self._pid})
        self._note_exit(None)

    def close(self) -> None:
        if self.pidfd < 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._note_exit(None)
        super().close()
