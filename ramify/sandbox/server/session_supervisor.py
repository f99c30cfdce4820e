"""The session supervisor, the first program in a container or on a cloud machine.

It forks the guest, the code that runs cells, and forwards its bytes.

The command's standard input and output carry the guest's bytes. They also carry requests to
interrupt or kill its process, and the message that reports its end. So a service only needs to
start a command. The host's end is ``providers/remote.py``. The supervisor runs remotely with the
standard library only: it is sent together with ``guest/`` and ``forkserver.py``, and nothing is
installed (see ``host/guest_module_files.py``).

    host:        data + {bytes to the guest}    interrupt  kill
    supervisor:  data + {bytes from the guest}  failed{message}
                 ended{status, start} + {output from byte ``start`` that was not yet read}

Each message is a frame, as a line of base64 if the stream carries only text. The guest's own frames
travel as the bytes of ``data``, so that it cannot forge a message of its supervisor.
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import gc
import json
import os
import queue
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.sandbox.guest import guest, message_frames, output
    from ramify.sandbox.guest.value_encoding import Buffer
    from ramify.sandbox.server import forkserver
else:
    import ramify_server_forkserver as forkserver
    from ramify_guest import guest, message_frames, output

MAX_LEFTOVER_BYTES = 1 << 20
_CHUNK = 1 << 16


class SupervisorHostChannel:
    """The supervisor's connection to the host over standard input and output.

    It carries messages in both directions.
    """

    def __init__(self, has_lines: bool) -> None:
        self._has_lines = has_lines
        self._in: Any = sys.stdin.buffer
        self._reader = message_frames.MessageFrameReader()
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], blob: Buffer = b"") -> None:
        parts = message_frames.frame(message_frames.json_bytes(header), [blob])
        if self._has_lines:
            parts = [message_frames.to_base64_lines(b"".join(parts))]
        with self._sending:
            message_frames.write_all(1, parts)

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Wait for the next message from the host, and return its header and its data.

        Raises EOFError if the host has closed the stream.
        """
        while (view := self._reader.next()) is None:
            chunk = self._in.readline() if self._has_lines else self._in.read1(_CHUNK)
            if not chunk:
                raise EOFError
            self._reader.feed(binascii.a2b_base64(chunk) if self._has_lines else chunk)
        text, end = message_frames.split_frame(view)
        return json.loads(bytes(text)), view[end:]


class SessionSupervisor:
    """The supervisor of one remote session's process.

    It forwards bytes between the host and the guest, and controls the guest's process.
    """

    def __init__(
        self, wire: SupervisorHostChannel, pid: int, sock: socket.socket, spool: int
    ) -> None:
        self._wire = wire
        self._pid = pid
        self._sock = sock
        self._spool = spool
        self._is_over = False
        self._reaping = threading.Lock()
        self._inbox: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def run(self) -> None:
        """Forward data between host and guest until the guest ends or the host disconnects."""
        for work in (self._receive, self._deliver):
            threading.Thread(target=work, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := self._sock.recv(_CHUNK):
                self._wire.send({"op": "data"}, data)
        status = self._reap()
        start, output = self._read_leftover_output()
        self._wire.send({"op": "ended", "status": status, "start": start}, output)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                header, data = self._wire.receive()
                if header["op"] == "data":
                    self._inbox.put(data)
                elif header["op"] == "interrupt":
                    self._signal(signal.SIGINT)
                elif header["op"] == "kill":
                    self._signal(signal.SIGKILL)
        self._signal(signal.SIGKILL)  # the host is gone
        os._exit(0)

    def _deliver(self) -> None:
        """Forward data from the host to the session's process, until the connection breaks.

        This runs in a separate thread, so that the guest's end is noticed even if the guest does
        not read.
        """
        with contextlib.suppress(OSError):
            while True:
                self._sock.sendall(self._inbox.get())

    def _signal(self, number: int) -> None:
        with self._reaping:
            if not self._is_over:
                os.kill(self._pid, number)

    def _reap(self) -> int | None:
        """Wait until the session's process has ended or been killed, and return its exit status.

        The status has the form that ``subprocess`` uses. Returns None if the guest closed its
        connection but had to be killed.
        """
        has_ended = self._wait(0.3)
        if not has_ended:
            self._signal(signal.SIGKILL)
            self._wait(5.0)
        with self._reaping:
            self._is_over = True
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status) if has_ended else None

    def _wait(self, seconds: float) -> bool:
        """Return True if the session's process ends within the given number of seconds.

        Its exit status is left for ``_reap`` to collect.
        """
        fd = os.pidfd_open(self._pid)
        try:
            return bool(select.select([fd], [], [], seconds)[0])
        finally:
            os.close(fd)

    def _read_leftover_output(self) -> tuple[int, bytes]:
        size = os.fstat(self._spool).st_size
        start = max(size - MAX_LEFTOVER_BYTES, 0)
        return start, os.pread(self._spool, MAX_LEFTOVER_BYTES, start)


def _run_guest(server: Any, config: dict[str, Any], sock: socket.socket, spool: int) -> None:
    """Set up this forked process as a remote session, and run the session until it ends."""
    (wire, spool), memory = server.set_up_session_process(config["folder"], [sock.detach(), spool])
    random.seed(config["seed"])
    gc.enable()
    guest.SandboxGuest(
        wire,
        wire,
        output.FileOutputSpool(spool),
        max_output_bytes=config["max_output_bytes"],
        owns_process=True,
        memory_limits=memory,
    ).serve()
    os._exit(0)


def main(config: dict[str, Any], has_lines: bool) -> None:
    """Run the supervisor until the guest has ended.

    ``config`` has the keys seed, packages, memory_bytes and max_output_bytes. With ``has_lines``,
    the streams carry only text, as lines of base64.
    """
    wire = SupervisorHostChannel(has_lines)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    config["folder"] = tempfile.mkdtemp(prefix="ramify-")
    try:
        forkserver.preload([], (*forkserver.PRELOAD, *config["packages"]))
    except forkserver.PackageNotImportable as error:
        wire.send({"op": "failed", "message": str(error)})
        return
    forkserver.prepare_first_fork()
    host_end, guest_end = socket.socketpair()
    spool = os.memfd_create("ramify-output", os.MFD_CLOEXEC)
    fcntl.fcntl(spool, fcntl.F_SETFL, fcntl.fcntl(spool, fcntl.F_GETFL) | os.O_APPEND)
    server = forkserver.ForkServer(None, config)  # type: ignore[arg-type]  # it only sets up
    pid = os.fork()
    if not pid:
        try:
            os.dup2(null, 0)
            _run_guest(server, config, guest_end, spool)
        finally:
            os._exit(70)
    guest_end.close()
    SessionSupervisor(wire, pid, host_end, spool).run()
    shutil.rmtree(config["folder"], ignore_errors=True)
