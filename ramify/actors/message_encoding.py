"""Encode and decode typed messages between the processes of a run, using MessagePack.

Pickle is never used, because decoding it can run code.

    encode(RolloutRequest(…))             bytes
    decode(data, RolloutRequest)          the message, or MsgspecError for anything else

A message is a ``msgspec.Struct``, a tagged union of several, or a container of them. Arrays and
tensors are sent as their type, shape and bytes, and may be in fields of any type.
``run_channel.py`` authenticates the senders.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_ARRAY, _TENSOR = 1, 2
"""Codes of the MessagePack extension types for arrays and for tensors."""
_Array = tuple[str, tuple[int, ...], memoryview]
"""Encoding of an array or tensor: element type, shape and bytes."""


def encode(message: Any) -> bytes:
    """Encode a message as MessagePack.

    Raises TypeError if the message contains an unsupported value.
    """
    return msgspec.msgpack.encode(message, enc_hook=_encode_extension)


def decode(data: Any, kind: type[T] | Any) -> T:
    """Decode a message of the declared type ``kind``.

    Raises MsgspecError if the data does not match that type.
    """
    found: T = msgspec.msgpack.decode(data, type=kind, ext_hook=_decode_extension)
    return found


def _encode_extension(value: Any) -> Any:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        header = value.dtype.str, value.shape
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((*header, flat.data)))
    if torch is not None and isinstance(value, torch.Tensor):
        header = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((*header, flat.data)))
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} cannot be sent in a message: {value!r:.80}")


def _decode_extension(code: int, data: memoryview) -> Any:
    """Decode the array or tensor in a MessagePack extension.

    Raises MsgspecError if it is malformed.
    """
    name, shape, flat = msgspec.msgpack.decode(data, type=_Array)
    try:
        if code == _ARRAY:
            import numpy

            kind = numpy.dtype(name)
            # The bytes of an array of objects would be read as memory addresses.
            if kind.hasobject:
                raise ValueError("its elements are objects")
            # Copied, because the buffer of a message is read-only.
            return numpy.frombuffer(flat, kind).reshape(shape).copy()
        if code == _TENSOR:
            import torch

            element = getattr(torch, name)
            if not isinstance(element, torch.dtype):
                raise ValueError(f"{name} is not an element type")
            if not len(flat):
                return torch.empty(shape, dtype=element)
            return torch.frombuffer(bytearray(flat), dtype=element).view(shape)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise msgspec.ValidationError(f"an array cannot be read: {error}") from None
    raise msgspec.ValidationError(f"an extension of the unknown type {code}")
