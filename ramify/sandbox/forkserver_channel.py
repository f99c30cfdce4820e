"""The host's end of a fork server: requests and replies over its control socket.

Decides how a server process is started (an empty environment, one descriptor) and how replies,
which may carry descriptors, find who asked. Leaves out what is asked for (``process.py``) and how
it is done (``forkserver.py``).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ramify.errors import SandboxError
from ramify.sandbox.context import anonymous_file
from ramify.sandbox.guest.frames import frame, open_frame
from ramify.sandbox.guest_files import FOLDER, LOADER
from ramify.sandbox.host_frames import FrameAssembler

_BOOT = f"""{LOADER}
load(sys.argv[1], sys.argv[2:-1]).main(int(sys.argv[-1]))
"""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All that a session sees of an environment. Sets have one order in every session; large heaps fork
fast (huge pages); threads do not each reserve address space; and no library starts threads before
the fork."""
START_S = 60.0


class StartedForkServer(NamedTuple):
    """A fork server that was started, and what its ``ForkServerChannel`` is made of."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    complaints: int
    folder: str


class ForkServerChannel:
    """One control socket: of the fork server, or of a template."""

    def __init__(self, sock: socket.socket, complaints: int | None = None) -> None:
        sock.setblocking(False)
        self._complaints = complaints
        """A file with what a server that did not start wrote to its standard error."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._assembler = FrameAssembler()
        self._fds: list[int] = []
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._exits: dict[int, Callable[[int], None]] = {}
        self._room = asyncio.Semaphore(32)
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, self._readable)

    async def wait_ready(self) -> None:
        """Until the server serves. Raises SandboxError with its reason if it does not."""
        await asyncio.wait(
            (self.ready, self.gone), timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not self.ready.done():
            why = (
                "ended before it was ready"
                if self.gone.done()
                else f"was not ready after {START_S:g} s"
            )
            raise SandboxError(f"the fork server {why}: {self._last_words()}")
        self.ready.result()

    def _last_words(self) -> str:
        if self._complaints is None:
            return "no reason given"
        lines = (
            os.pread(self._complaints, 1 << 16, 0).decode("utf-8", "replace").strip().splitlines()
        )
        return lines[-1] if lines else f"{sys.executable} said nothing"

    async def ask(
        self, header: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request; the reply and its descriptors, which are the caller's. Raises
        SandboxError for a refusal."""
        async with self._room:
            self._last_id += 1
            id = header["id"] = self._last_id
            reply = self._replies[id] = self._loop.create_future()
            try:
                self.tell(header, fds)
                answer: tuple[dict[str, Any], list[int]] = await reply
                return answer
            finally:
                self._replies.pop(id, None)

    def tell(self, header: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send what has no reply. Requests are small, and few at once: the socket holds them."""
        if fds:
            header["fds"] = len(fds)
        data = b"".join(frame(msgspec.json.encode(header)))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([data], rights)
            if sent < len(data):
                self._send_rest(data[sent:])
        except OSError as error:
            raise SandboxError(f"the fork server is gone: {error}") from None

    def _send_rest(self, data: bytes) -> None:
        """A long request (a module's source): the server reads it at once, so that blocking is
        short."""
        self._sock.setblocking(True)
        try:
            self._sock.settimeout(10.0)
            self._sock.sendall(data)
        finally:
            self._sock.setblocking(False)

    def on_exit(self, pid: int, call: Callable[[int], None]) -> None:
        """Call once with the exit status of ``pid``, as ``subprocess`` gives it."""
        self._exits[pid] = call

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for _, _, packed in ancillary:
            self._fds += array.array("i", packed[: len(packed) // 4 * 4])
        if not data:
            self._lose()
            return
        for view in self._assembler.feed(memoryview(data)):
            header = msgspec.json.decode(open_frame(view)[0])
            count = header.get("fds", 0)
            fds, self._fds = self._fds[:count], self._fds[count:]
            self._take(header, fds)

    def _take(self, header: dict[str, Any], fds: list[int]) -> None:
        if header["op"] == "exited":
            call = self._exits.pop(header["pid"], None)
            if call is not None:
                call(header["status"])
            return
        reply = self._replies.get(header["id"]) if "id" in header else self.ready
        if (
            reply is None or reply.done()
        ):  # nobody waits any more; the process sees its socket closed
            for fd in fds:
                os.close(fd)
        elif header["op"] == "failed":
            reply.set_exception(SandboxError(header["message"]))
        elif "id" in header:
            reply.set_result((header, fds))
        else:
            reply.set_result(None)

    def _lose(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if not self.gone.done():
            self.gone.set_result(None)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(SandboxError("the fork server ended"))
        for call in [*self._exits.values()]:
            call(-9)
        self._exits.clear()

    async def close(self) -> None:
        """Close the control socket: the server ends all that it forked, and itself."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait((self.gone,), timeout=5.0)
        if not self.gone.done():
            self._lose()
        self.abandon()

    def abandon(self) -> None:
        """Let go of what nobody waits for any more."""
        if self._complaints is not None:
            os.close(self._complaints)
            self._complaints = None
        futures: list[asyncio.Future[Any]] = [self.ready, *self._replies.values()]
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # seen


def start_server(
    config: dict[str, Any], modules: Sequence[str] = ("shared_buffers", "guest", "forkserver")
) -> StartedForkServer:
    """A fork server in a process of its own, which gets no more of the host than one descriptor.
    Needs no event loop.

    ``modules``: what it loads (``guest_files.py``); the last one's ``main`` is its life."""
    ours, theirs = socket.socketpair()
    complaints = anonymous_file("ramify-errors")
    with theirs:
        command = [
            sys.executable,
            "-s",
            "-S",
            "-P",
            "-c",
            _BOOT,
            str(FOLDER),
            *modules,
            str(theirs.fileno()),
        ]
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            cwd="/",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
    ours.sendall(b"".join(frame(msgspec.json.encode(config))))
    return StartedForkServer(process, ours, complaints, config["folder"])
