"""A value on its own, as it lies in a file: a context, a blob of a store.

Decides its form, ``u32 header length | header | blobs``. Leaves out whose file it is
(``sandbox/context.py``). Also checks ahead of a frame whether a host will take a value.
"""

from __future__ import annotations

from typing import Any

from .bounds import LimitError
from .frames import U32, check_size, from_json, json_bytes, split_blobs, to_json
from .values import Buffer, CodecError, ProtocolError, ValueDecoder, ValueEncoder


def pack_value(value: Any) -> tuple[list[Buffer], int]:
    """A value on its own (a context, a blob of a store): its buffers, to be written one after the
    other, and the characters of its strings. The form is ``u32 header length | header | blobs``."""
    encoder = ValueEncoder()
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
        value = (
            ValueDecoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        )
        return value, header["chars"]
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"an encoded value with a broken header: {error}") from None


def portable_to_host(value: Any) -> Any:
    """A copy of ``value`` as the host would get it. Raises TypeError for what is not carried, and
    ValueError for a value that is over a limit of ``bounds.py``."""
    encoder = ValueEncoder(bounded=True)
    try:
        data = encoder.encode(value)
        check_size(json_bytes(data), encoder.blobs)
    except CodecError as error:
        raise TypeError(str(error)) from None
    except LimitError as error:
        raise ValueError(str(error)) from None
    return ValueDecoder(encoder.blobs).decode(data)
