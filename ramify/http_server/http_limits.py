"""Limits of a server: how much its clients may send at once, and how long they may take."""

from __future__ import annotations

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the connections to a server and on the size and speed of requests."""

    max_body_bytes: int = 64 << 20
    """Maximum bytes of one request body, and of all bodies that are being received at once with the
    same key."""
    max_connections: int | None = None
    """Maximum number of open connections. None means a third of the descriptors that the process
    may open."""
    head_s: float = 15.0
    """Maximum seconds from the first byte of a request's head to its last."""
    idle_s: float = 75.0
    """Seconds after which a connection without a request is closed. This exceeds the 60 s for which
    proxies keep connections."""
    body_s: float = 300.0
    """Maximum seconds in which a whole request body must arrive."""
    stall_s: float = 15.0
    """Maximum pause in seconds between two parts of a body."""

    @property
    def max_arriving_bytes(self) -> int:
        """The maximum number of bytes of request bodies that may be arriving at the same time.

        It applies to all API keys together.
        """
        return self.max_body_bytes + self.max_body_bytes // 2
