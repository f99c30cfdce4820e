"""Decompress HTTP responses as they arrive, with a limit on the decompressed size.

    gzip, deflate   unpacked; damaged data is an error that is retried
    br, zstd, …     an error that is not retried: the next reply would be compressed in the same way

Ramify asks for no compression, but some gateways compress anyway.
"""

from __future__ import annotations

import zlib

from ramify.errors import MalformedResponse


class HttpBodyDecompressor:
    """A streaming decompressor for the body of one response.

    Decompressed data beyond the size limit is an error.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """Create a decompressor for a response body with the Content-Encoding ``encoding``.

        Raises MalformedResponse for an unsupported encoding.
        """
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
        """Decompress the next bytes of the response body.

        Raises MalformedResponse if they are damaged or the body exceeds the size limit.
        """
        try:
            # One byte more shows that there is too much; a limit of 0 would mean none.
            unpacked = self._zlib.decompress(data, self._left + 1)
        except zlib.error as failure:
            raise MalformedResponse(f"the reply is not valid {self._encoding}: {failure}") from None
        self._left -= len(unpacked)
        if self._left < 0:
            raise body_too_long_error(self._max_bytes)
        return unpacked

    def check_complete(self) -> None:
        """Check that the compressed body is complete, once the response has ended.

        Raises MalformedResponse if it is not.
        """
        if not self._zlib.eof:
            raise MalformedResponse(f"the reply is not valid {self._encoding}: it is incomplete")


def body_too_long_error(max_bytes: int) -> MalformedResponse:
    """Return the error for a body of more than ``max_bytes`` bytes.

    It is not transient, because another attempt would cost as much and yield a response of the same
    length.
    """
    error = MalformedResponse(f"the reply is longer than {max_bytes} bytes; lower max_tokens")
    error.transient = False
    return error
