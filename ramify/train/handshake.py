"""Authentication of a run's processes that connect back to it: each must prove that it has the
run's key, within a time limit.

A peer that is silent or has another key is rejected, and the next one is accepted: a port scanner
can neither block a start nor end it.
"""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

PROOF_S = 10.0
"""Time limit for each message of the handshake, in seconds."""


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
