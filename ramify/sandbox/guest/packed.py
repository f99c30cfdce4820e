"""A value on its own, as it lies in a file: a context, a blob of a store.

Decides its form, ``u32 header length | header | blobs``. Leaves out whose file it is (``sandbox/context.py``).
"""

from __future__ import annotations

from typing import Any

from .frames import U32, from_json, split_blobs, to_json
from .values import Buffer, Decoder, Encoder, ProtocolError


def pack_value(value: Any) -> tuple[list[Buffer], int]:
    """A value on its own (a context, a blob of a store): its buffers, to be written one after the other, and the
    characters of its strings. The form is ``u32 header length | header | blobs``."""
    encoder = Encoder()
    header: dict[str, Any] = {"value": encoder.encode(value), "chars": encoder.chars}
    if encoder.tags:
        header["tags"] = True
    if encoder.blobs:
        header["blobs"] = [len(blob) for blob in encoder.blobs]
    text = to_json(header).encode()
    return [U32.pack(len(text)), text, *encoder.blobs], encoder.chars


def unpack_value(data: Buffer) -> tuple[Any, int]:
    """The value that ``pack_value`` wrote, and its characters."""
    view = memoryview(data)
    if len(view) < 4:
        raise ProtocolError("an encoded value of less than 4 bytes")
    end = 4 + U32.unpack_from(view)[0]
    try:
        header = from_json(str(view[4:end], "utf-8"))
        blobs = split_blobs(view, end, header.get("blobs", ()))
        value = Decoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        return value, header["chars"]
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"an encoded value with a broken header: {error}") from None
