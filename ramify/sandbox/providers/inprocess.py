"""The sandbox provider ``inprocess``, which runs sessions in threads of the host process, without
isolation, so that breakpoints work.

The output of a cell goes to its session, and an interrupt is an exception that is set in the
session's thread. Most other guarantees of a session do not hold: a cell cannot be killed, code
blocked in C (``time.sleep``) cannot be interrupted, memory is not limited, ``random`` is the
host's, output of other processes and of C code goes to the host's terminal, and
``sys.modules["__main__"]`` remains the host's.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import functools
import io
import os
import socket
import sys
import threading
import types
from typing import Any, TextIO

from ramify.errors import ConfigError, SandboxError
from ramify.sandbox.base import (
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
    SharedContextValue,
)
from ramify.sandbox.guest.guest import SandboxGuest
from ramify.sandbox.guest.message_frames import HostGuestSharedMemory
from ramify.sandbox.guest.output import InProcessOutputSpool
from ramify.sandbox.host.importable_packages import locate
from ramify.sandbox.host.running_cell import limits_of
from ramify.sandbox.host.session import GuestSessionProxy, SessionLifecycleHooks
from ramify.sandbox.host.transport import SandboxConnectionState, SocketStream

WARNING = (
    "sandbox 'inprocess': code runs inside this process, with access to everything in it, and "
    "cannot always be stopped. It is for debugging; do not run code in it that you would not run "
    "yourself."
)


class InprocessSandbox:
    """A sandbox whose sessions are threads of the host process.

    Implements ``base.Sandbox``.
    """

    warning: str | None = WARNING

    def __init__(self, spec: SandboxSpec) -> None:
        self.caps = SandboxCapabilities(interrupt=True)
        self._spec = spec
        self._sessions: set[GuestSessionProxy] = set()
        self._buffers = SandboxConnectionState()
        self._is_closed = False
        locate(spec.packages)

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> GuestSessionProxy:
        if self._is_closed:
            raise SandboxError("the sandbox is closed: it opens no more sessions")
        if context is not None and not isinstance(context, SharedContextValue):
            raise ConfigError(
                f"a context must be a SharedContextValue, not {type(context).__name__}"
            )
        transport = ThreadSessionTransport(self.caps, self._buffers, self._spec.max_output_bytes)
        session = GuestSessionProxy(
            transport, limits_of(self._spec), SessionLifecycleHooks(self._sessions.discard)
        )
        self._sessions.add(session)
        await session.wait_ready()
        if context is not None:
            parts = context.in_memory_copy().parts
            await session.set_context(parts, self._spec.packages)
        return session

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(session.close() for session in [*self._sessions]))


class ThreadSessionTransport:
    """The host's connection to a session that runs in a thread of this process."""

    shared_buffers: HostGuestSharedMemory | None = None
    has_same_python = True

    def __init__(
        self, caps: SandboxCapabilities, buffers: SandboxConnectionState, max_output_bytes: int
    ) -> None:
        self.caps = caps
        self._sock, guest_end = socket.socketpair()
        self._stream = SocketStream(self._sock, buffers)
        self.start_reading = self._stream.start_reading
        self.write = self._stream.write
        self.pause = self._stream.pause
        self.resume = self._stream.resume
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._guest: SandboxGuest | None = None
        self._thread = threading.Thread(
            target=self._run_guest,
            args=(guest_end.detach(), max_output_bytes),
            name="ramify session",
            daemon=True,
        )
        self._thread.start()

    def _run_guest(self, fd: int, max_output_bytes: int) -> None:
        guest = SandboxGuest(
            fd, fd, InProcessOutputSpool(), max_output_bytes=max_output_bytes, owns_process=False
        )
        guest.notebook.builtins = _builtins_for(guest)
        self._guest = guest
        try:
            with _RoutedPrints(guest), contextlib.suppress(OSError):
                guest.serve()
        finally:
            os.close(fd)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note_end)

    def _note_end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def interrupt(self) -> None:
        if (
            self._guest is not None
            and self._thread.ident is not None
            and self._guest.interrupts.may_raise()
        ):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
            )

    def kill(self) -> None:
        """Close the session's socket.

        A thread cannot be killed: it ends when it next waits for the host.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def unsent_output(self, start: int) -> bytes:
        return b""

    async def exit_reason(self) -> str:
        return (
            "its thread ended"
            if self._ended.done()
            else "its thread cannot be stopped and was left running"
        )

    async def close(self) -> None:
        self.kill()
        self._stream.close()
        await asyncio.wait((self._ended,), timeout=2.0)


# ------------------------------------------------------------------------------------------------
# printing


class _Router(io.TextIOBase):
    """A stream that writes each ``print`` to the session whose thread prints.

    It replaces ``sys.stdout`` or ``sys.stderr``. It sends each print to the session whose thread
    prints. Prints of other threads go to the host's stream.
    """

    def __init__(self, host: TextIO, name: str) -> None:
        self.host = host
        self._name = name

    def _target_stream(self) -> Any:
        guest = _guests.get(threading.get_ident())
        return self.host if guest is None else getattr(guest.output, self._name)

    @property
    def buffer(self) -> Any:
        return self._target_stream().buffer

    def write(self, text: str) -> int:
        return int(self._target_stream().write(text))

    def flush(self) -> None:
        self._target_stream().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def close(self) -> None:
        """Do nothing, because the host's output stream must stay open."""


_guests: dict[int, SandboxGuest] = {}
_lock = threading.Lock()


class _RoutedPrints:
    """A context manager that redirects the prints of this thread to the thread's session.

    The first session replaces ``sys.stdout`` and ``sys.stderr``, and the last one restores them.
    """

    def __init__(self, guest: SandboxGuest) -> None:
        self._guest = guest

    def __enter__(self) -> None:
        with _lock:
            if not _guests:
                sys.stdout, sys.stderr = (
                    _Router(sys.stdout, "stdout"),
                    _Router(sys.stderr, "stderr"),
                )
            _guests[threading.get_ident()] = self._guest

    def __exit__(self, *_: object) -> None:
        with _lock:
            _guests.pop(threading.get_ident(), None)
            if not _guests:
                if isinstance(sys.stdout, _Router):
                    sys.stdout = sys.stdout.host
                if isinstance(sys.stderr, _Router):
                    sys.stderr = sys.stderr.host


def _builtins_for(guest: SandboxGuest) -> types.ModuleType:
    """Return a copy of Python's ``builtins`` module that is adapted to one session.

    Its ``print`` writes to the session from every thread that runs the session's code. Its
    ``import`` finds the modules that were installed in the session.
    """
    own = types.ModuleType("builtins")
    own.__dict__.update(vars(builtins))

    @functools.wraps(print)
    def session_print(*values: Any, file: Any = None, **options: Any) -> None:
        # The cell itself may have replaced sys.stdout: then print there.
        is_host = file is None and not isinstance(sys.stdout, _Router)
        print(*values, file=file if file is not None or is_host else guest.output.stdout, **options)

    @functools.wraps(__import__)
    def session_import(name: str, *options: Any, **named: Any) -> Any:
        return guest.notebook.modules.get(name) or __import__(name, *options, **named)

    own.__dict__.update(print=session_print, exit=_exit, quit=_exit, __import__=session_import)
    return own


def _exit(code: Any = None) -> None:
    """End the cell."""
    raise SystemExit(code)


def open_provider(spec: SandboxSpec) -> InprocessSandbox:
    """Open a sandbox whose sessions are threads of this process.

    ``base.open_sandbox`` calls this function.
    """
    return InprocessSandbox(spec)
