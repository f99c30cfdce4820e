"""Decompression of HTTP responses as they arrive, with a limit on the decompressed size.

    gzip, deflate   unpacked; damaged data is an error that is retried
    br, zstd, …     an error that is not retried: the next reply would be compressed in the same way

Ramify asks for no compression, but some gateways compress anyway.
"""

from __future__ import annotations

import zlib

from ramify.errors import MalformedResponse


class HttpBodyDecompressor:
    """A decompressor for the body of one response, used piece by piece. A body that would exceed
    the size limit is an error."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """Create a decompressor for a body with this Content-Encoding. Raises MalformedResponse if
        the encoding is not supported."""
        if encoding not in ("gzip", "x-gzip", "deflate"):
            error = MalformedResponse(
                f"the reply is compressed ({encoding[:40]}), which was not asked for"
            )
            error.transient = False
            raise error
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._zlib = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # recognizes gzip and zlib

    def feed(self, data: bytes) -> bytes:
        """Return the decompressed form of the next bytes of the body. Raises MalformedResponse if
        the bytes are damaged, or if the body exceeds the size limit."""
        try:
            unpacked = self._zlib.decompress(data, self._left + 1)
        except zlib.error as failure:
            raise MalformedResponse(f"the reply is not valid {self._encoding}: {failure}") from None
        self._left -= len(unpacked)
        if self._left < 0:
            raise too_long(self._max_bytes)
        return unpacked

    def end(self) -> None:
        """Raise MalformedResponse if the compressed body is incomplete. Call this once the response
        has ended."""
        if not self._zlib.eof:
            raise MalformedResponse(f"the reply is not valid {self._encoding}: it is incomplete")


def too_long(max_bytes: int) -> MalformedResponse:
    """Return the error for a body of more than ``max_bytes`` bytes. The error is not transient:
    another attempt would cost as much, and its response would be as long."""
    error = MalformedResponse(f"the reply is longer than {max_bytes} bytes; lower max_tokens")
    error.transient = False
    return error
