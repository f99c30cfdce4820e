"""Unpacking of compressed replies, with a limit on what they unpack to.

    gzip, deflate   unpacked; damage is an error that another attempt may not have
    br, zstd, …     an error at once: the next reply would be compressed in the same way

Ramify asks for no compression, but some gateways compress anyway. Not here: TLS connections, whose
library unpacks replies itself (see ``https.py``).
"""

from __future__ import annotations

import zlib

from ramify.errors import BadReply


def unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Unpack ``body``, compressed as its header Content-Encoding says, to at most ``max_bytes``.

    Raises BadReply.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        error = BadReply(f"the reply is compressed ({encoding[:40]}), which was not asked for")
        error.transient = False
        raise error
    decoder = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # recognizes gzip and zlib
    try:
        unpacked = decoder.decompress(body, max_bytes + 1)
    except zlib.error as failure:
        raise BadReply(f"the reply is not valid {encoding}: {failure}") from None
    if len(unpacked) > max_bytes:
        raise too_long(max_bytes)
    if not decoder.eof:
        raise BadReply(f"the reply is not valid {encoding}: it is incomplete")
    return unpacked


def too_long(max_bytes: int) -> BadReply:
    """The error for a body of more than ``max_bytes``. It is not transient: another attempt would
    cost as much and be as long."""
    error = BadReply(f"the reply is longer than {max_bytes} bytes; lower max_tokens")
    error.transient = False
    return error
