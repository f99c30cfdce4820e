"""The host's connection to a fork server, the process from which sessions are forked.

This module sends the server its configuration and handles its control socket.

It matches replies, which may carry descriptors, to their requests. The server's process is started
by ``forkserver_process.py``, requests are made by ``providers/process.py``, and they are executed
by ``server/forkserver.py``.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ramify.errors import SandboxError
from ramify.sandbox.base import anonymous_file
from ramify.sandbox.guest.message_frames import frame, split_frame
from ramify.sandbox.host.forkserver_process import (
    StartedForkServer,
    start_process,
    take_prestarted_server,
)
from ramify.sandbox.host.transport import MessageFrameAssembler
from ramify.session_module_compiler import compiled_module

START_S = 60.0
MODULES = ("guest", "server/process_setup", "server/forkserver")


class ForkServerChannel:
    """The control connection to a fork server, or to a template process forked from it.

    A template is a process that was forked from the server and from which sessions are forked in
    turn.
    """

    def __init__(self, sock: socket.socket, complaints: int | None = None) -> None:
        sock.setblocking(False)
        self._complaints = complaints
        """File with the server's standard error output, which explains a failed start."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._assembler = MessageFrameAssembler()
        self._fds: list[int] = []
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._exits: dict[int, Callable[[int], None]] = {}
        # Few at a time, so that requests normally fit into the socket's buffer (see ``send``).
        self._room = asyncio.Semaphore(32)
        self.modules: dict[str, str] = {}
        """Modules that the server's next sessions have from the start: name -> source."""
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, self._on_readable)

    async def wait_ready(self) -> dict[str, Any]:
        """Wait until the fork server is ready, and return its startup report.

        Raises SandboxError with the reason if the server ends before that, or is not ready in time.
        """
        await asyncio.wait(
            (self.ready, self.gone), timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not self.ready.done():
            why = (
                "ended before it was ready"
                if self.gone.done()
                else f"was not ready after {START_S:g} s"
            )
            words = self._last_words() or f": {sys.executable} said nothing"
            raise SandboxError(f"the fork server {why}{words}")
        ready: dict[str, Any] = self.ready.result()
        return ready

    def _last_words(self) -> str:
        if self._complaints is None:
            return ""
        lines = (
            os.pread(self._complaints, 1 << 16, 0).decode("utf-8", "replace").strip().splitlines()
        )
        return f": {lines[-1]}" if lines else ""

    async def ask(
        self, header: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request to the fork server, and return its reply and any file descriptors sent
        with it.

        The caller must close them. Raises SandboxError if the server refuses or has ended.
        """
        async with self._room:
            self._last_id += 1
            id = header["id"] = self._last_id
            reply = self._replies[id] = self._loop.create_future()
            try:
                self.send(header, fds)
                answer: tuple[dict[str, Any], list[int]] = await reply
                return answer
            finally:
                self._replies.pop(id, None)

    async def preinstall_module(self, module: str, source: str) -> None:
        """Install a module in all sessions that are forked from now on.

        A failure changes nothing, because each session then installs the module itself and reports
        the problem.
        """
        code = compiled_module(module, source).hex()
        with contextlib.suppress(SandboxError):
            await self.ask({"op": "install", "module": module, "source": source, "code": code})
            self.modules = {**self.modules, module: source}

    def send(self, header: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send the fork server a message to which it does not reply.

        Messages are small and few, so they normally fit into the socket's buffer.
        """
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
        """Send the remaining bytes of a message that was too long for the socket's buffer.

        The server reads promptly, so this blocks only briefly.
        """
        self._sock.setblocking(True)
        try:
            self._sock.settimeout(10.0)
            self._sock.sendall(data)
        finally:
            self._sock.setblocking(False)

    def add_child_exit_callback(self, pid: int, call: Callable[[int], None]) -> None:
        """Register a function that is called once when a forked process has ended.

        It gets the exit status as ``subprocess`` reports it.
        """
        self._exits[pid] = call

    def _on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for _, _, packed in ancillary:
            self._fds += array.array("i", packed[: len(packed) // 4 * 4])
        if not data:
            self._lose_connection()
            return
        for view in self._assembler.feed(memoryview(data)):
            header = msgspec.json.decode(split_frame(view)[0])
            count = header.get("fds", 0)
            fds, self._fds = self._fds[:count], self._fds[count:]
            self._handle_message(header, fds)

    def _handle_message(self, header: dict[str, Any], fds: list[int]) -> None:
        if header["op"] == "exited":
            call = self._exits.pop(header["pid"], None)
            if call is not None:
                call(header["status"])
            return
        if header["op"] == "walls":  # for a host that waits for nothing else; ``ready`` has it too
            return
        reply = self._replies.get(header["id"]) if "id" in header else self.ready
        if reply is None or reply.done():
            # The caller is gone; the process will see its socket closed.
            for fd in fds:
                os.close(fd)
        elif header["op"] == "failed":
            reply.set_exception(SandboxError(header["message"]))
            reply.exception()  # its caller may have been cancelled
        elif "id" in header:
            reply.set_result((header, fds))
        else:
            reply.set_result(header)

    def _lose_connection(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if not self.gone.done():
            self.gone.set_result(None)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(SandboxError(f"the fork server ended{self._last_words()}"))
                reply.exception()  # its caller may have been cancelled
        for call in [*self._exits.values()]:
            # The kernel kills the server's sessions with it (see tie_to_parent).
            call(-9)
        self._exits.clear()

    async def close(self) -> None:
        """Close the control socket and wait for the server to end.

        The server first ends all processes that it has forked.
        """
        if self._sock.fileno() < 0:  # the server has ended before
            self.release_resources()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait((self.gone,), timeout=5.0)
        if not self.gone.done():
            self._lose_connection()
        self.release_resources()

    def release_resources(self) -> None:
        """Release this connection's resources after the fork server has ended."""
        if self._complaints is not None:
            os.close(self._complaints)
            self._complaints = None
        futures: list[asyncio.Future[Any]] = [self.ready, *self._replies.values()]
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # mark it as retrieved


def start_server(
    config: dict[str, Any],
    modules: Sequence[str] = MODULES,
) -> StartedForkServer:
    """Start a fork server in a separate process and send it its configuration.

    This needs no event loop.

    ``modules``: the modules that the process loads; the ``main`` function of the last one runs the
    server. If a process was started in advance with the same modules, that process is used.
    """
    data = b"".join(frame(msgspec.json.encode(config)))
    server = take_prestarted_server(tuple(modules))
    if server is not None:
        server.folder = config["folder"]
        try:
            server.control.sendall(data)
            return server
        except OSError:  # it was killed
            server.discard()
    server = start_process(tuple(modules), anonymous_file("ramify-errors"))
    server.folder = config["folder"]
    server.control.sendall(data)
    return server
