"""Look up which user owns the other end of a local TCP connection.

The user is found in the kernel's table of TCP sockets. Callers use ``listener_user_id`` to check
who listens at an address before they send a key there. This works on Linux only; on other systems
nothing is known.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENING = 10
"""Kernel code for a socket that accepts connections."""
_ANYWHERE = {"0.0.0.0", "::"}
Address = tuple[str, int]


class TcpSocketTableEntry(NamedTuple):
    """An entry of the kernel's TCP socket table, which describes one socket of this machine."""

    local: Address
    remote: Address
    state: int
    user: int
    """Id of the user whose process opened the socket."""
    inode: int
    """Inode number, which ``/proc/PID/fd`` shows for the socket."""


def tcp_sockets() -> list[TcpSocketTableEntry]:
    """Return the TCP sockets of all users on this machine."""
    found = []
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                fields = line.split()
                ends = _parse_address(fields[1]), _parse_address(fields[2])
                state, user, inode = int(fields[3], 16), int(fields[7]), int(fields[9])
                found.append(TcpSocketTableEntry(*ends, state, user, inode))
    return found


def listener_user_id(host: str, port: int) -> int | None:
    """Return the id of the user who listens on a local address, or None if it is unknown."""
    places = {host, *_ANYWHERE}
    return next(
        (
            each.user
            for each in tcp_sockets()
            if each.state == LISTENING and each.local[1] == port and each.local[0] in places
        ),
        None,
    )


def _parse_address(text: str) -> Address:
    """Decode an address from the kernel's socket table, such as ``0100007F:A51D``.

    The example is 127.0.0.1, port 42269. An IPv4 address in IPv6 form is converted to IPv4.
    """
    host, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    if raw.startswith(b"\0" * 10 + b"\xff\xff"):
        raw = raw[12:]
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)
