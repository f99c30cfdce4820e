"""Packed values: a single value as it is stored in a file, such as a context or a blob of a store.

Decides the format, ``u32 header length | header | blobs``. Not here: the files themselves (see
``sandbox/context.py``). Also checks in advance whether a host will accept a value.
"""

from __future__ import annotations

from typing import Any

from .bounds import LimitError
from .frames import U32, check_size, from_json, json_bytes, split_blobs, to_json
from .values import Buffer, CodecError, ProtocolError, ValueDecoder, ValueEncoder


def pack_value(value: Any) -> tuple[list[Buffer], int]:
    """Encode a single value. Returns its buffers, to be written one after the other, and the number
    of characters in its strings. The format is ``u32 header length | header | blobs``."""
    encoder = ValueEncoder()
    header: dict[str, Any] = {"value": encoder.encode(value), "chars": encoder.chars}
    if encoder.tags:
        header["tags"] = True
    if encoder.blobs:
        header["blobs"] = [len(blob) for blob in encoder.blobs]
    text = to_json(header).encode()
    return [U32.pack(len(text)), text, *encoder.blobs], encoder.chars


def unpack_value(data: Buffer) -> tuple[Any, int]:
    """Decode the output of ``pack_value``: the value and its number of characters."""
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
    """Return a copy of ``value`` as the host would receive it. Raises TypeError if the codec does
    not support it, and ValueError if it is over a limit of ``bounds.py``."""
    encoder = ValueEncoder(bounded=True)
    try:
        data = encoder.encode(value)
        check_size(json_bytes(data), encoder.blobs)
    except CodecError as error:
        raise TypeError(str(error)) from None
    except LimitError as error:
        raise ValueError(str(error)) from None
    return ValueDecoder(encoder.blobs).decode(data)
