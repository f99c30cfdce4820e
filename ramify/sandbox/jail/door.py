"""The way to one session of the jail: a door of a process, and its requests for processes.

Decides when descriptors are taken from a session: once, before it has run any code. Leaves out the answers
(``notify.py``).
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable

from ramify.sandbox.base import Caps
from ramify.sandbox.jail.notify import Listener
from ramify.sandbox.link import Link
from ramify.sandbox.process import ProcessDoor


class JailDoor(ProcessDoor):
    """A ``Door``."""

    __slots__ = ("_sock", "listener")

    def __init__(
        self, caps: Caps, sock: socket.socket, scratch: bytearray, link: Link, pid: int, pidfd: int, spool: int
    ) -> None:
        super().__init__(caps, sock, scratch, link, pid, pidfd, spool)
        self._sock = sock
        self.listener: Listener | None = None

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

    async def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        await super().close()
