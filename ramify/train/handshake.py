"""Processes of a run that connect back to it: each proves that it has the run's key, and nobody is
waited for without end.

Whoever connects and is silent, or has another key, is turned away, and the next one is heard: a
port scanner neither stops a start nor ends it.
"""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

PROOF_S = 10.0
"""How long one may take to prove itself."""


def authenticate(
    peer: socket.socket, key: bytes, wait_s: float = PROOF_S
) -> tuple[Connection, Any] | None:
    """(the connection to ``peer``, what it says first), once both sides have shown that they have
    ``key``; None where that is not so within ``wait_s`` at each answer. ``peer`` is used up."""
    peer.setblocking(True)
    connection = Connection(peer.detach())
    try:
        _limit(connection, wait_s)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        said = connection.recv()
        _limit(connection, 0.0)
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        return None
    return connection, said


def _limit(connection: Connection, seconds: float) -> None:
    """How long one read or write may wait; 0: as long as it takes."""
    told = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, told)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, told)
