"""Read request bodies, and limit their total memory and how long each may take to arrive.

    async with uploads.received(http, caller) as body:      reads, or raises RequestRejected
        request = decode(body)
                                                            the body no longer counts

Bodies are held in memory. So before a body is read, its announced length is reserved from the
allowances of its caller and of the server. If the length exceeds the rest of an allowance, the
request gets status 429. Small bodies need no reservation, because the maximum number of connections
already limits them. The heads of requests are limited in ``connections.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from ramify.http_server.http_limits import HttpLimits
from ramify.http_server.rejections import RequestRejected

SMALL_BYTES = 64 << 10
"""Size in bytes of the largest body for which no memory has to be reserved."""


class LimitedBodyReader:
    """Reads the bodies of requests to a server, with limits on memory and time.

    The memory limit applies to all bodies together, and the time limit to each one.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.reserved: Counter[str] = Counter()
        """Caller -> number of bytes reserved."""

    @asynccontextmanager
    async def receive_body(self, http: web.Request, caller: str) -> AsyncIterator[bytes]:
        """Read the body of a caller's request.

        Its memory stays reserved until the ``async with`` block ends. Raises RequestRejected if the
        body is too large or too slow, or if too many bodies are in transfer.
        """
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestRejected("send the body without Content-Encoding", status=415)
        length = http.content_length or 0
        upload = _Upload(self, caller)
        try:
            upload.reserve(length)
            yield await upload.read(http)
        finally:
            upload.release()

    def _reserve(self, caller: str, num_bytes: int) -> None:
        limits = self.limits
        if self.reserved[caller] + num_bytes > limits.max_body_bytes:
            whose, most = "this key's", limits.max_body_bytes
        elif self.reserved.total() + num_bytes > limits.max_arriving_bytes:
            whose, most = "the", limits.max_arriving_bytes
        else:
            self.reserved[caller] += num_bytes
            return
        raise RequestRejected(
            f"{whose} request bodies in transfer exceed {most} bytes: try again later",
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=1,
        )

    def _release(self, caller: str, num_bytes: int) -> None:
        self.reserved[caller] -= num_bytes
        if not self.reserved[caller]:
            del self.reserved[caller]


class _Upload:
    """A request body that is being received, and the memory reserved for it."""

    def __init__(self, uploads: LimitedBodyReader, caller: str) -> None:
        self._uploads = uploads
        self._caller = caller
        self._reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory for a request body of ``num_bytes`` bytes.

        Memory that is already reserved for it counts. Raises RequestRejected if a limit would be
        exceeded.
        """
        most = self._uploads.limits.max_body_bytes
        if num_bytes > most:
            raise RequestRejected(
                f"the body has {num_bytes} bytes or more, but the maximum is {most}: send less",
                status=413,
            )
        if num_bytes > max(SMALL_BYTES, self._reserved):
            self._uploads._reserve(self._caller, num_bytes - self._reserved)
            self._reserved = num_bytes

    def release(self) -> None:
        if self._reserved:
            self._uploads._release(self._caller, self._reserved)

    async def read(self, http: web.Request) -> bytes:
        limits = self._uploads.limits
        begun, parts, num_bytes = time.monotonic(), list[bytes](), 0
        try:
            while not http.content.at_eof():
                left = begun + limits.body_s - time.monotonic()
                async with asyncio.timeout(min(limits.stall_s, left)):
                    part = await http.content.readany()
                num_bytes += len(part)
                self.reserve(num_bytes)  # a chunked body announces no length
                parts.append(part)
        except TimeoutError:
            raise RequestRejected(
                f"the body stopped after {num_bytes} bytes (no data for {limits.stall_s:g} s, or "
                f"not complete within {limits.body_s:g} s): send it again",
                status=408,
            ) from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestRejected(f"the body is not complete: {error}") from None
        return b"".join(parts)
