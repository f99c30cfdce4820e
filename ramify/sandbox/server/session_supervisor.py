"""The session supervisor: the first program in a container or on a cloud machine. It forks the
guest there and forwards its bytes.

Decides how one stream of a service (the command's standard input and output) carries both the
guest's bytes and the operations on its process: interrupt, kill, and the report of its end. So a
service only needs to start a command. Not here: the host's end (see ``providers/remote.py``) and
the guest (see ``guest/``). Runs remotely with the standard library only: it is sent together with
``guest/`` and ``forkserver.py``, and nothing is installed (see ``host/server_files.py``).

    packet = u8 kind | u32 length | bytes     as a line of base64 if the stream carries only text

    host:        data{to the guest}  interrupt{}  kill{}
    supervisor:  data{from the guest}  failed{why}
                 ended{i32 status, u64 offset of the output, output not yet read}
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import gc
import os
import queue
import random
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
from typing import Any

DATA, INTERRUPT, KILL, FAILED, ENDED = b"d", b"i", b"k", b"f", b"e"
HEAD = struct.Struct("<cI")
END = struct.Struct("<iQ")
UNKNOWN = -1000
"""Status of a guest that closed its connection but did not end."""
MAX_LEFTOVER_BYTES = 1 << 20
_CHUNK = 1 << 16
LINE_BYTES = 45_000
"""Number of bytes in one line of base64."""


def to_lines(data: bytes) -> bytes:
    """Encode ``data`` as lines of base64."""
    starts = range(0, len(data), LINE_BYTES)
    return b"".join(base64.b64encode(data[at : at + LINE_BYTES]) + b"\n" for at in starts)


class SupervisorChannel:
    """Packets over standard input and output."""

    def __init__(self, has_lines: bool) -> None:
        self._has_lines = has_lines
        self._in: Any = sys.stdin.buffer
        self._sending = threading.Lock()
        self._data = bytearray()

    def send(self, kind: bytes, data: bytes | memoryview = b"") -> None:
        packet = HEAD.pack(kind, len(data)) + data
        with self._sending:
            _write_all(to_lines(packet) if self._has_lines else packet)

    def receive(self) -> tuple[bytes, bytes]:
        """Return the next packet. Raises EOFError."""
        while True:
            if len(self._data) >= HEAD.size:
                kind, size = HEAD.unpack_from(self._data)
                end = HEAD.size + size
                if len(self._data) >= end:
                    body = bytes(self._data[HEAD.size : end])
                    del self._data[:end]
                    return kind, body
            chunk = self._in.readline() if self._has_lines else self._in.read1(_CHUNK)
            if not chunk:
                raise EOFError
            self._data += base64.b64decode(chunk) if self._has_lines else chunk


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


class SessionSupervisor:
    """Supervises one guest and forwards its bytes."""

    def __init__(self, wire: SupervisorChannel, pid: int, sock: socket.socket, spool: int) -> None:
        self._wire = wire
        self._pid = pid
        self._sock = sock
        self._spool = spool
        self._is_over = False
        self._reaping = threading.Lock()
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run(self) -> None:
        """Run until the guest has ended or the host is gone."""
        for work in (self._receive, self._deliver):
            threading.Thread(target=work, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := self._sock.recv(_CHUNK):
                self._wire.send(DATA, data)
        status = self._reap()
        start, output = self._leftover()
        self._wire.send(ENDED, END.pack(status, start) + output)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                kind, data = self._wire.receive()
                if kind == DATA:
                    self._inbox.put(data)
                elif kind == INTERRUPT:
                    self._signal(signal.SIGINT)
                elif kind == KILL:
                    self._signal(signal.SIGKILL)
        self._signal(signal.SIGKILL)  # the host is gone
        os._exit(0)

    def _deliver(self) -> None:
        """Forward data to the guest. Runs in a separate thread: a guest that does not read must not
        delay the detection of its end."""
        with contextlib.suppress(OSError):
            while True:
                self._sock.sendall(self._inbox.get())

    def _signal(self, number: int) -> None:
        with self._reaping:
            if not self._is_over:
                os.kill(self._pid, number)

    def _reap(self) -> int:
        """Reap the guest and return its exit status as ``subprocess`` gives it."""
        has_ended = self._wait(0.3)
        if not has_ended:
            self._signal(signal.SIGKILL)
            self._wait(5.0)
        with self._reaping:
            self._is_over = True
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status) if has_ended else UNKNOWN

    def _wait(self, seconds: float) -> bool:
        """Return True if the guest ends within ``seconds``. It is not reaped here."""
        fd = os.pidfd_open(self._pid)
        try:
            return bool(select.select([fd], [], [], seconds)[0])
        finally:
            os.close(fd)

    def _leftover(self) -> tuple[int, bytes]:
        size = os.fstat(self._spool).st_size
        start = max(size - MAX_LEFTOVER_BYTES, 0)
        return start, os.pread(self._spool, MAX_LEFTOVER_BYTES, start)


def _live(server: Any, config: dict[str, Any], sock: socket.socket, spool: int) -> None:
    """Run the guest in its process, until it ends."""
    guest: Any = sys.modules["ramify_guest.guest"]
    output: Any = sys.modules["ramify_guest.output"]
    (wire, spool), memory = server.enter(config["folder"], [sock.detach(), spool])
    random.seed(config["seed"])
    gc.enable()
    guest.Guest(
        wire,
        wire,
        output.FileOutputSpool(spool),
        max_output_bytes=config["max_output_bytes"],
        owns_process=True,
        memory_limits=memory,
    ).serve()
    os._exit(0)


def main(config: dict[str, Any], has_lines: bool) -> None:
    """Run the supervisor until the guest has ended. ``config``: seed, packages, memory_bytes,
    max_output_bytes."""
    forkserver: Any = sys.modules["ramify_server_forkserver"]
    wire = SupervisorChannel(has_lines)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    config["folder"] = tempfile.mkdtemp(prefix="ramify-")
    try:
        forkserver.preload([], (*forkserver.PRELOAD, *config["packages"]))
    except forkserver.PackageNotImportable as error:
        wire.send(FAILED, str(error).encode())
        return
    forkserver.settle()
    host_end, guest_end = socket.socketpair()
    spool = os.memfd_create("ramify-output", os.MFD_CLOEXEC)
    fcntl.fcntl(spool, fcntl.F_SETFL, fcntl.fcntl(spool, fcntl.F_GETFL) | os.O_APPEND)
    server = forkserver.ForkServer(None, config)
    pid = os.fork()
    if not pid:
        try:
            os.dup2(null, 0)
            _live(server, config, guest_end, spool)
        finally:
            os._exit(70)
    guest_end.close()
    SessionSupervisor(wire, pid, host_end, spool).run()
    shutil.rmtree(config["folder"], ignore_errors=True)
