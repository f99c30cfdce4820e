"""Connections of a run's processes back to it: each must prove that it has the run's key, within a
time limit.

    run      with Listener() as listener:
                 start(command, listener.environment("worker 3"))
                 connection, name = listener.accept(60.0, look)
    process  connection = connect_back()

A peer that is silent or has another key is rejected, and the next one is accepted: a port scanner
can neither block a start nor end it. A connected process sends heartbeats (``beat``); without them
it counts as lost, whatever holds it up (``HeartbeatDeadline``).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

_AT, _KEY, _NAME = "RAMIFY_CONNECT_TO", "RAMIFY_CONNECT_KEY", "RAMIFY_CONNECT_NAME"
BEAT_S = 1.0
"""Seconds between heartbeats."""
PROOF_S = 10.0
"""Time limit for each message of the handshake, in seconds."""
_LOOK_S = 0.5


class Listener:
    """Accepts connections of processes that have its key."""

    def __init__(self, address: str = "127.0.0.1", backlog: int = 1) -> None:
        self.key = secrets.token_bytes(32)
        self._server = socket.create_server((address, 0), backlog=backlog)
        self.address: tuple[str, int] = self._server.getsockname()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    def environment(self, name: str) -> dict[str, str]:
        """Environment variables with which a process can ``connect_back``."""
        return {_AT: "{}:{}".format(*self.address), _KEY: self.key.hex(), _NAME: name}

    def accept(
        self, wait_s: float, look: Callable[[], None] = lambda: None
    ) -> tuple[Connection, Any]:
        """(the next connection of a process with the key, its first message).

        ``look`` is called while waiting, and raises if the process has ended. Raises TimeoutError
        after ``wait_s``.
        """
        until = time.monotonic() + wait_s
        while True:
            self._server.settimeout(max(0.0, min(_LOOK_S, until - time.monotonic())))
            try:
                peer, _ = self._server.accept()
            except (TimeoutError, BlockingIOError):
                look()
                if time.monotonic() >= until:
                    raise TimeoutError(f"no connection within {wait_s:g} s") from None
                continue
            if joined := authenticate(peer, self.key):
                return joined


def connect_back() -> Connection:
    """Connect to the ``Listener`` whose environment this process has."""
    host, _, port = os.environ[_AT].rpartition(":")
    return connect((host, int(port)), bytes.fromhex(os.environ.pop(_KEY)), os.environ[_NAME])


def connect(address: tuple[str, int], key: bytes, first: object) -> Connection:
    """Connect to a ``Listener`` with its ``key``, and send the ``first`` message."""
    connection = Client(address, authkey=key)
    connection.send(first)
    return connection


def authenticate(
    peer: socket.socket, key: bytes, wait_s: float = PROOF_S
) -> tuple[Connection, Any] | None:
    """Authenticate ``peer``, which is consumed. Returns (connection, its first message) after both
    sides have proved that they have ``key``; None if that fails, or takes more than ``wait_s`` per
    message."""
    peer.setblocking(True)
    connection = Connection(peer.detach())
    try:
        _limit(connection, wait_s)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        message = connection.recv()
        _limit(connection, 0.0)
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        return None
    return connection, message


def _limit(connection: Connection, seconds: float) -> None:
    """Limit how long a single read or write may block; 0: no limit."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def beat(send: Callable[[], None], stop: threading.Event) -> None:
    """Call ``send`` every second, in a separate thread, until ``stop`` is set."""

    def run() -> None:
        while not stop.wait(BEAT_S):
            send()

    threading.Thread(target=run, daemon=True, name="ramify heartbeats").start()


class HeartbeatDeadline:
    """Whether a process has sent no heartbeat for too long. Counts looks, not time, so that no
    process is overdue after this one was stopped, or its machine suspended."""

    def __init__(self, limit_s: float, look_s: float) -> None:
        """``look_s``: seconds between calls of ``is_overdue``."""
        self.limit_s = limit_s
        self._look_s = look_s
        self._quiet_s = 0.0

    def heard(self) -> None:
        """Record a message of the process. May be called in any thread."""
        self._quiet_s = 0.0

    def is_overdue(self) -> bool:
        """Count a look; returns whether none was heard in the last ``limit_s``."""
        self._quiet_s += self._look_s
        return self._quiet_s > self.limit_s
