"""The way to one session of the jail: a door of a process, and its requests for processes.

Decides when descriptors are taken from a session: once, before it has run any code. Leaves out the answers
(``notify.py``).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from ramify.errors import SandboxError
from ramify.sandbox.base import Caps
from ramify.sandbox.door import Buffers
from ramify.sandbox.jail.notify import Listener, children_of, parent_of, pid_of
from ramify.sandbox.link import Link
from ramify.sandbox.process_door import BranchDoor, Files, ProcessDoor


class JailDoor(ProcessDoor):
    """A ``Door``."""

    __slots__ = ("_sock", "is_frozen", "listener")

    def __init__(
        self, caps: Caps, sock: socket.socket, buffers: Buffers, link: Link, pid: int, pidfd: int, files: Files
    ) -> None:
        super().__init__(caps, sock, buffers, link, pid, pidfd, files)
        self._sock = sock
        self.listener: Listener | None = None
        self.is_frozen = False

    def attach(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._first, received, lost)

    def _first(self, received: Callable[[memoryview], None], lost: Callable[[], None]) -> None:
        """The listener comes with the first byte, which the confined process sends before it is a guest."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        fds = [fd for _, _, packed in ancillary for fd in array.array("i", packed[: len(packed) // 4 * 4])]
        asyncio.get_running_loop().remove_reader(self._sock)
        if data and len(fds) == 1:
            self.listener = Listener(fds[0])
            self.stream.attach(received, lost)
            return
        for fd in fds:
            os.close(fd)
        lost()

    async def prepare_branch(self) -> None:
        await self._freeze()

    async def _freeze(self) -> None:
        """Files would be shared with the branch: from now on they cannot be written."""
        if not self.is_frozen:
            try:
                await self.link.ask({"op": "freeze", "pid": self._pid})
            except SandboxError as error:
                raise SandboxError(f"the session cannot be forked: {error}; close the files that it writes") from None
            self.is_frozen = True

    def begin_branch(self, frame: list[Any]) -> JailBranchDoor:
        return begin_branch(self, frame)

    def end_branch(self, door: BranchDoor) -> None:
        end_branch(self, door)

    async def close(self) -> None:
        listener, self.listener = self.listener, None
        await super().close()
        if listener is not None:
            listener.drop()


class JailBranchDoor(BranchDoor):
    """A ``Door`` to a branch. Its requests for processes arrive where its origin's do."""

    __slots__ = ("listener", "origin")

    def __init__(self, caps: Caps, sock: socket.socket, buffers: Buffers, link: Link, files: Files) -> None:
        super().__init__(caps, sock, buffers, link, files)
        self.listener: Listener | None = None
        self.origin = -1
        """The process that was asked to fork."""

    def comes_from(self, listener: Listener, pid: int) -> None:
        self.listener, self.origin = listener, pid
        listener.hold()

    def is_proven(self, pid: int) -> bool:
        """Only a child of the session that was asked to fork is its branch."""
        return pid != self.origin and parent_of(pid) == self.origin and super().is_proven(pid)

    async def prepare_branch(self) -> None:
        """Its files are read-only since it was made."""

    def begin_branch(self, frame: list[Any]) -> JailBranchDoor:
        return begin_branch(self, frame)

    def end_branch(self, door: BranchDoor) -> None:
        end_branch(self, door)

    async def close(self) -> None:
        listener, self.listener = self.listener, None
        await super().close()
        if listener is not None:
            listener.drop()


def begin_branch(origin: JailDoor | JailBranchDoor, frame: list[Any]) -> JailBranchDoor:
    pid = pid_of(origin.pidfd)
    if origin.listener is None or pid <= 0:
        raise SandboxError("the session cannot be forked: it has ended")
    sock, files = origin.send_branch(frame)
    door = JailBranchDoor(origin.caps, sock, origin.buffers, origin.link, files)
    door.comes_from(origin.listener, pid)
    origin.listener.grant_one(pid)
    return door


def end_branch(origin: JailDoor | JailBranchDoor, door: BranchDoor) -> None:
    """Where the grant was used and no branch has come of it, whatever was made is ended."""
    if origin.listener is None:
        return
    assert isinstance(door, JailBranchDoor)
    was_used = not origin.listener.withdraw(door.origin)
    if was_used and door.pidfd < 0:
        for pid in children_of(door.origin):
            if pid not in origin.listener.branches:
                _kill(pid)
    elif door.pidfd >= 0:
        origin.listener.branches.add(door.pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
