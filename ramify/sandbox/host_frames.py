"""Frames from a guest, as the host reads them: every frame is hostile until it has been checked
here.

Decides the schema and the size limits of frames from a guest. Not here: the order in which they may
arrive (see ``session.py``), and the layout of frames and values (see ``guest/``, whose format this
module checks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from ramify.sandbox.guest.bounds import MAX_NESTING, LimitError, check_blobs, check_header
from ramify.sandbox.guest.frames import MAX_FRAME, MAX_HEADER, frame, open_frame, split_blobs
from ramify.sandbox.guest.values import ProtocolError, ValueDecoder, ValueEncoder, encoded
from ramify.sandbox.shared_buffers import SharedMemoryBuffers

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Frame(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, gc=False, kw_only=True):
    got: Count = 0
    """Number of times that the guest has read from the shared memory buffers."""


class HelloFrame(_Frame, tag="hello"):
    """The guest is ready."""

    pid: Count


class OutputFrame(_Frame, tag="out"):
    """The running cell printed the frame's only blob."""

    skip: Count
    """Number of bytes just before the blob that are not sent to the host."""
    chars: Count
    """Number of characters printed so far."""
    upto: Count
    """Offset in the output file from which data was not sent yet."""
    blobs: list[Count]


class HostCallFrame(_Frame, tag="call"):
    """The running cell calls the host."""

    id: Count
    name: str
    value: Any
    """[args, kwargs]"""
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class CellDoneFrame(_Frame, tag="done"):
    """The running cell has ended."""

    id: Count
    value: str | None
    error: str | None
    restored: list[str]
    note: dict[str, Any] | None
    chars: Count
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class OkFrame(_Frame, tag="ok"):
    id: Count


class ValueFrame(_Frame, tag="value"):
    id: Count
    value: Any
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class FailedFrame(_Frame, tag="failed"):
    id: Count
    kind: str
    message: str


FromGuest = (
    HelloFrame | OutputFrame | HostCallFrame | CellDoneFrame | OkFrame | ValueFrame | FailedFrame
)
_decoder = msgspec.json.Decoder(FromGuest)
_encoder = msgspec.json.Encoder()


class FrameAssembler:
    """Turns bytes from a guest into complete frames: views that are valid until the next
    ``feed``."""

    __slots__ = ("_held", "_need")

    def __init__(self) -> None:
        self._held: bytearray | None = None
        self._need = 0

    def feed(self, data: memoryview) -> Iterator[memoryview]:
        if self._held is not None:
            self._held += data
            if len(self._held) < self._need:
                return
            data, self._held = memoryview(self._held), None
        at, end = 0, len(data)
        while end - at >= 4:
            size = int.from_bytes(data[at : at + 4], "little")
            if not 5 <= size <= MAX_FRAME:
                raise ProtocolError(
                    f"a frame of {size:,} bytes, where 5 to {MAX_FRAME:,} are allowed"
                )
            if end - at < 4 + size:
                self._need = 4 + size
                break
            yield data[at + 4 : at + 4 + size]
            at += 4 + size
        else:
            self._need = 4
        if at < end:
            self._held = bytearray(data[at:])


def parse(
    view: memoryview, shared_buffers: SharedMemoryBuffers | None = None
) -> tuple[FromGuest, list[memoryview]]:
    """Decode a frame and return it with its blobs. Raises ProtocolError."""
    header, end = open_frame(view)
    if len(header) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(header):,} bytes, where {MAX_HEADER:,} are allowed")
    try:
        if len(header) > MAX_NESTING:
            check_header(bytes(header))
        message: FromGuest = _decoder.decode(header)
        check_blobs(len(getattr(message, "blobs", ())))
    except LimitError as error:
        raise ProtocolError(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"a frame that is none: {str(error)[:200]}") from None
    if message.got and shared_buffers is not None and message.got == shared_buffers.put_count:
        shared_buffers.is_free = True
    lengths = getattr(message, "blobs", ())
    if getattr(message, "shelved", False):
        return message, _shared_blobs(message, lengths, len(view) - end, shared_buffers)
    if not lengths:
        if end != len(view):
            raise ProtocolError(f"{len(view) - end:,} bytes after a frame without blobs")
        return message, []
    return message, split_blobs(view, end, lengths)


def _shared_blobs(
    message: FromGuest,
    lengths: Sequence[int],
    remaining: int,
    shared_buffers: SharedMemoryBuffers | None,
) -> list[memoryview]:
    if shared_buffers is None or remaining:
        raise ProtocolError(
            "a frame with its blobs on a shelf, but no shelf exists"
            if shared_buffers is None
            else "blobs twice"
        )
    if shared_buffers.owed is not None:
        raise ProtocolError("blobs on a shelf that was not free")
    shared_buffers.owed = getattr(message, "id", 0)
    try:
        return shared_buffers.take(lengths)
    except (ValueError, OSError) as error:
        raise ProtocolError(str(error)) from None


def value_of(
    message: HostCallFrame | CellDoneFrame | ValueFrame, data: Any, blobs: list[memoryview]
) -> Any:
    """Decode ``data``, a part of a message. Raises ProtocolError."""
    return ValueDecoder(blobs, bounded=True).decode(data) if message.tags else data


def request(
    header: dict[str, Any],
    encoder: ValueEncoder | None = None,
    shared_buffers: SharedMemoryBuffers | None = None,
) -> list[Any]:
    """Build a frame for a guest; long blobs go into ``shared_buffers`` if there is room."""
    blobs: list[Any] = []
    if encoder is not None and encoder.blobs:
        blobs = encoder.blobs
        header["blobs"] = [len(blob) for blob in blobs]
        if shared_buffers is not None and shared_buffers.put(blobs, 0):
            header["shelved"], blobs = True, []
        elif encoder.defers:
            blobs = encoded(blobs)
    if encoder is not None and encoder.tags:
        header["tags"] = True
    return frame(_encoder.encode(header), blobs)
