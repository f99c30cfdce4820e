"""Limits of one server: how much its clients may send at a time, and how long that may take."""

from __future__ import annotations

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on connections, heads and bodies."""

    max_body_bytes: int = 64 << 20
    """Bytes of one body, and of all bodies of one key that are arriving."""
    max_connections: int | None = None
    """Open connections; None for a third of the descriptors that the process may open."""
    head_s: float = 15.0
    """Seconds from the first byte of a head to its end."""
    idle_s: float = 75.0
    """Seconds without a request on an open connection; proxies keep theirs for 60 s."""
    body_s: float = 300.0
    """Seconds for a body to arrive."""
    stall_s: float = 15.0
    """Seconds without a byte of a body."""

    @property
    def max_arriving_bytes(self) -> int:
        """Bytes of all bodies that are arriving, of all keys."""
        return self.max_body_bytes + self.max_body_bytes // 2
