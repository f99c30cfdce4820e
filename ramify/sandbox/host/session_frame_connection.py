"""The message connection of one session.

Frames from the guest are received in order, checked and decoded, without delaying other sessions.

Every frame from a guest must be treated as hostile until it has been checked here. This module
defines the schema of frames from a guest, how much data of a session the event loop handles at
once, what is decoded in a thread, and when frames to the guest have to wait. Which frames may
arrive when is checked by ``session.py``; the layout of frames and values, with their limits, is in
``guest/``.

    transport ──> frames ──small──────────────> received ──> session
                    └─large─> thread ─────────────┘   (later frames wait)
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ramify.sandbox.guest.message_frames import (
    MAX_FRAME_OUTPUT,
    MAX_HEADER,
    MAX_NESTING,
    HostGuestSharedMemory,
    check_blob_count,
    check_json_complexity,
    frame,
    slice_blobs,
    split_frame,
)
from ramify.sandbox.guest.value_encoding import (
    REFERRING_CALL,
    VALUE_CHARS,
    ProtocolError,
    ValueDecoder,
    ValueEncoder,
    ValueLimitError,
    encode_text_blobs,
)
from ramify.sandbox.host.transport import (
    SCRATCH_BYTES,
    GuestTransport,
    MessageFrameAssembler,
    do_nothing,
)

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Shown = Annotated[str, msgspec.Meta(max_length=VALUE_CHARS + 100)]
"""Text that the guest has shortened to ``VALUE_CHARS`` characters, with a note of how much was
cut."""
Name = Annotated[str, msgspec.Meta(max_length=1000)]
NO_VALUE = msgspec.Raw(b"null")


class _Frame(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, gc=False, kw_only=True):
    got: Count = 0
    """Number of times the guest has read the shared memory buffers."""


class GuestReadyFrame(_Frame, tag="hello"):
    """The first message from a session, which reports that the session is ready."""

    pid: Count


class CellOutputFrame(_Frame, tag="out"):
    """A message with output of the running cell.

    Its only binary part holds the printed bytes.
    """

    skip: Count
    """Number of bytes that were dropped just before the binary part."""
    chars: Count
    """Number of characters printed so far."""
    upto: Count
    """Offset in the output file up to which everything was sent."""
    blobs: list[Count]


class HostCallFrame(_Frame, tag="call"):
    """A message in which the running cell calls a function on the host."""

    id: Count
    name: Name
    value: msgspec.Raw
    """The arguments, encoded as ``[args, kwargs]``."""
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class CellDoneFrame(_Frame, tag="done"):
    """The message that reports the end of the running cell."""

    id: Count
    value: Shown | None
    error: Shown | None
    restored: Annotated[list[Name], msgspec.Meta(max_length=1000)]
    note: msgspec.Raw
    """What the session's ``after_cell`` hooks returned: a dict of results by module, or None."""
    chars: Count
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class OkReplyFrame(_Frame, tag="ok"):
    id: Count


class ValueReplyFrame(_Frame, tag="value"):
    id: Count
    value: msgspec.Raw
    tags: bool = False
    blobs: list[Count] = []
    shelved: bool = False


class FailedReplyFrame(_Frame, tag="failed"):
    id: Count
    kind: Name
    message: Shown


FromGuest = (
    GuestReadyFrame
    | CellOutputFrame
    | HostCallFrame
    | CellDoneFrame
    | OkReplyFrame
    | ValueReplyFrame
    | FailedReplyFrame
)
LARGE_HEADER, LARGE_BLOBS = 1 << 13, 1 << 23
"""Sizes in bytes of a frame's header and of its binary parts. A frame that exceeds either of them
is decoded in a thread."""
_PIECE_BYTES = 1 << 15
"""Bytes of JSON decoded at once. Between two pieces, other threads can run."""
_DECODE_S = 2.0
"""Maximum CPU time for decoding one value, in seconds."""
_decoder = msgspec.json.Decoder(FromGuest)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_dict_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def is_large(view: memoryview) -> bool:
    """Return True if decoding this message could take long enough to delay other sessions."""
    if len(view) <= LARGE_HEADER:
        return False
    header = len(split_frame(view)[0])
    return header > LARGE_HEADER or len(view) - header > LARGE_BLOBS


def parse(
    view: memoryview,
    shared_buffers: HostGuestSharedMemory | None = None,
    *,
    is_later: bool = False,
) -> tuple[FromGuest, list[memoryview]]:
    """Decode a frame and return the message with its binary parts.

    Raises ProtocolError if the frame is malformed or over a limit.

    ``is_later``: leave binary parts in the shared buffers, because the caller will read them later
    and then call ``release_read_buffers``.
    """
    header, end = split_frame(view)
    if len(header) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(header):,} bytes, where {MAX_HEADER:,} are allowed")
    try:
        # A shorter header cannot exceed any limit. A longer one is checked before it is decoded.
        if len(header) > MAX_NESTING:
            check_json_complexity(bytes(header))
        message: FromGuest = _decoder.decode(header)
        check_blob_count(len(getattr(message, "blobs", ())))
    except ValueLimitError as error:
        raise ProtocolError(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"invalid frame: {str(error)[:200]}") from None
    lengths = getattr(message, "blobs", ())
    if getattr(message, "shelved", False):
        if end != len(view):
            raise ProtocolError("blobs twice")
        return message, [] if is_later else shared_blobs(message, shared_buffers)
    if not is_later:
        release_read_buffers(message, shared_buffers)
    if not lengths:
        if end != len(view):
            raise ProtocolError(f"{len(view) - end:,} bytes after a frame without blobs")
        return message, []
    return message, slice_blobs(view, end, lengths)


def release_read_buffers(message: FromGuest, shared_buffers: HostGuestSharedMemory | None) -> None:
    """Mark the shared memory as free if a message confirms that the session has read its
    contents."""
    if message.got and shared_buffers is not None and message.got == shared_buffers.put_count:
        shared_buffers.is_free = True


def shared_blobs(
    message: FromGuest, shared_buffers: HostGuestSharedMemory | None
) -> list[memoryview]:
    """Read the binary parts that a session has put into shared memory for a message.

    Raises ProtocolError if they are missing, or if the guest wrote to the buffers before its
    previous message was answered.
    """
    release_read_buffers(message, shared_buffers)
    if shared_buffers is None:
        raise ProtocolError("a frame with blobs in shared memory, but none is shared")
    if shared_buffers.owed is not None:
        raise ProtocolError("new blobs in a shared buffer whose previous blobs were not read yet")
    shared_buffers.owed = getattr(message, "id", 0)
    try:
        return shared_buffers.take(getattr(message, "blobs", ()))
    except (ValueError, OSError) as error:
        raise ProtocolError(str(error)) from None


def decode_value(
    message: HostCallFrame | CellDoneFrame | ValueReplyFrame,
    data: msgspec.Raw,
    blobs: list[memoryview],
) -> Any:
    """Decode a value that is part of a message from a guest.

    Raises ProtocolError if it is malformed.
    """
    try:
        value = _decode_json(data, time.thread_time() + _DECODE_S)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"invalid value: {str(error)[:200]}") from None
    if not message.tags:
        return value
    refers = type(message) is HostCallFrame and message.name == REFERRING_CALL
    return ValueDecoder(blobs, bounded=True, refers=refers).decode(value)


def _decode_json(data: msgspec.Raw, deadline: float) -> Any:
    """Decode JSON from a session, in several steps if it is long.

    Raises ProtocolError if it takes too much CPU time.
    """
    if len(data) <= _PIECE_BYTES:
        return msgspec.json.decode(data)
    if time.thread_time() > deadline:
        raise ProtocolError(f"a value that takes more than {_DECODE_S:g} s to decode")
    first = bytes(memoryview(data)[:1])
    if first == b"{":
        return {
            key: _decode_json(item, deadline) for key, item in _dict_decoder.decode(data).items()
        }
    if first != b"[":
        return msgspec.json.decode(data)
    items: list[Any] = []
    for piece in _group_short_items(_list_decoder.decode(data)):
        if time.thread_time() > deadline:
            raise ProtocolError(f"a value that takes more than {_DECODE_S:g} s to decode")
        if isinstance(piece, list):
            items += msgspec.json.decode(b"[%b]" % b",".join(map(bytes, piece)))
        else:
            items.append(_decode_json(piece, deadline))
    return items


def _group_short_items(items: list[msgspec.Raw]) -> Iterator[list[msgspec.Raw] | msgspec.Raw]:
    """Group a list's short JSON items, so that many of them are decoded in one step.

    Yields each group, and each long item separately.
    """
    group: list[msgspec.Raw] = []
    size = 0
    for item in items:
        if group and size + len(item) > _PIECE_BYTES:
            yield group
            group, size = [], 0
        if len(item) > _PIECE_BYTES:  # too long to decode at once: the caller divides it
            yield item
        else:
            group.append(item)
            size += len(item) + 1
    if group:
        yield group


def build_request_frame(
    header: dict[str, Any],
    encoder: ValueEncoder | None = None,
    shared_buffers: HostGuestSharedMemory | None = None,
) -> list[Any]:
    """Build a frame for a guest and return it as a list of buffers.

    Long binary data goes into the shared buffers if there is room.
    """
    blobs: list[Any] = []
    if encoder is not None and encoder.blobs:
        blobs = encoder.blobs
        header.setdefault("blobs", [len(blob) for blob in blobs])
        if shared_buffers is not None and shared_buffers.try_put(blobs, 0):
            header["shelved"], blobs = True, []
        elif encoder.defers:
            blobs = encode_text_blobs(blobs)
    if encoder is not None and encoder.tags:
        header["tags"] = True
    return frame(_encoder.encode(header), blobs)


_TURN_S = 0.005
"""Maximum time in seconds for handling frames in one turn of the event loop. The remaining frames
wait for the next turn."""
_WEIGHT_OF_JSON = 16
"""Estimated memory per byte of JSON, since small Python values are much larger than their JSON."""
_EMPTY = memoryview(b"")
_decoding: list[ThreadPoolExecutor] = []
"""The thread pool that decodes large frames of all sessions, created when first needed."""


def run_in_codec_pool(call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Run a function in the threads that encode and decode large values.

    The result is a future.
    """
    if not _decoding:
        from concurrent.futures import ThreadPoolExecutor  # few runs have such values

        _decoding.append(ThreadPoolExecutor(2, "ramify-values"))
    return asyncio.get_running_loop().run_in_executor(_decoding[0], call, *arguments)


FrameTaker = Callable[[FromGuest, Any, int], None]
"""Called with a frame, its decoded content, and the estimated memory of both in bytes. May raise
ProtocolError."""


class GuestFrameConnection:
    """The message connection to one guest.

    It sends frames, and receives, checks and decodes the guest's frames.
    """

    __slots__ = (
        "_assembler",
        "_decoder",
        "_decoding_bytes",
        "_failed",
        "_held_frames",
        "_holds",
        "_is_only_active",
        "_received",
        "last_id",
        "read_at_once",
        "seed",
        "transport",
        "upto",
    )

    def __init__(self, transport: GuestTransport) -> None:
        self.transport = transport
        self._is_only_active: Callable[[], bool | None] = getattr(
            transport, "is_only_active", do_nothing
        )
        self.read_at_once: Callable[[], None] = getattr(
            transport, "busy_wait_for_answer", do_nothing
        )
        """Function that handles the guest's next frame right away if it arrives within
        microseconds and the transport supports this. It is called last, after a request or an
        answer was sent."""
        self.last_id = 0
        self.seed: str | None = None
        """Seed that the next request will carry, since a separate frame would wake the guest twice.
        """
        self.upto = 0
        """Offset in the output file up to which data was received."""
        self._assembler = MessageFrameAssembler()
        self._holds: set[str] = set()
        """Reasons for which the handling of frames is paused at the moment, such as
        ``decoding``."""
        self._decoding_bytes = 0
        self._decoder: asyncio.Task[None] | None = None
        self._held_frames: list[tuple[dict[str, Any], ValueEncoder | None]] | None = None
        """Frames that wait while the session forks. They are sent afterwards, possibly over a new
        socket."""

    def start_reading(
        self,
        received: FrameTaker,
        failed: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        """Start to receive messages from the session.

        ``received`` is called with each decoded frame. ``failed`` is called with the reason if the
        guest violates the protocol, after which it is not trusted. ``lost`` is called at the end of
        the stream.
        """
        self._received = received
        self._failed = failed
        self.transport.start_reading(self._feed, lost)

    # -- from the guest

    def _feed(self, data: memoryview) -> None:
        if self._holds:  # a service delivers what it had received before ``pause``
            self._assembler.hold_until_feed(data)
            return
        try:
            if len(data) <= LARGE_HEADER and self._assembler.is_single_frame(data):
                self._decode_small_frame(data[4:])
                return
            until = time.perf_counter() + _TURN_S
            frames = self._assembler.feed(data)
            while not self._holds and (view := next(frames, None)) is not None:
                if is_large(view):
                    self.pause_receiving("decoding")
                    # A shorter frame may lie in the read buffer, which all sessions share.
                    held = view if len(view) > SCRATCH_BYTES else memoryview(bytes(view))
                    self._decoder = asyncio.ensure_future(self._decode_large_frame(held))
                else:
                    self._decode_small_frame(view)
                if time.perf_counter() > until:
                    self.pause_receiving("turn")
                    asyncio.get_running_loop().call_soon(self.resume_receiving, "turn")
            # At once, not when it is freed: closing it makes the assembler keep the rest.
            frames.close()
        except ProtocolError as error:
            self._failed(f"it broke the protocol: {error}")

    def _decode_small_frame(self, view: memoryview) -> None:
        """Decode a small message from the session and pass it on at once."""
        message, blobs = parse(view, self.transport.shared_buffers)
        if type(message) is CellDoneFrame and message.note == NO_VALUE:
            self._received(message, None, 0)
        else:
            self._received(message, *_decode_frame_value(message, blobs, len(view)))

    async def _decode_large_frame(self, view: memoryview) -> None:
        """Decode a large message in a thread, so that other sessions are not delayed."""
        self._decoding_bytes = len(view) + _WEIGHT_OF_JSON * len(split_frame(view)[0])
        try:
            parsing = functools.partial(parse, view, is_later=True)
            message, blobs = await run_in_codec_pool(parsing)
            release_read_buffers(message, self.transport.shared_buffers)
            if getattr(message, "shelved", False):
                shared = shared_blobs(message, self.transport.shared_buffers)
                # Copied, because those of other sessions are read into the same memory meanwhile.
                blobs = [memoryview(bytes(blob)) for blob in shared]
            self._received(
                message, *await run_in_codec_pool(_decode_frame_value, message, blobs, len(view))
            )
        except ProtocolError as error:
            self._failed(f"it broke the protocol: {error}")
        self._decoding_bytes = 0
        self.resume_receiving("decoding")

    def pause_receiving(self, reason: str) -> None:
        """Pause the handling of the session's messages, for the given reason.

        It continues after ``resume_receiving`` with the same reason. Several reasons can be active
        at once.
        """
        if not self._holds:
            self.transport.pause()
        self._holds.add(reason)

    def resume_receiving(self, reason: str) -> None:
        if reason not in self._holds:
            return
        self._holds.discard(reason)
        if not self._holds:
            self._feed(_EMPTY)
        if not self._holds:
            self.transport.resume()

    def held_bytes(self) -> int:
        """Return how many bytes of memory hold messages that are incomplete or being decoded."""
        return self._assembler.held_bytes() + self._decoding_bytes

    def clear_pause_reasons(self) -> None:
        """Clear all reasons for pausing this connection, so that its remaining messages are
        read."""
        self._holds.clear()
        self.transport.resume()

    def close(self) -> Awaitable[None] | None:
        """End the session, and ignore any further messages from it.

        Returns an awaitable if the caller must wait for the guest to end, otherwise None.
        """
        if self._decoder is not None:
            self._decoder.cancel()
        waits = self.transport.close()
        self._received = self._failed = do_nothing
        return waits

    # -- to the guest

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        if self._held_frames is not None:
            self._held_frames.append((header, encoder))
            return
        if self.seed is not None:
            header["seed"], self.seed = self.seed, None
        # The guest then polls for a moment before it sleeps (see guest/busy_wait.py).
        if self._is_only_active():
            header["soon"] = True
        shared_buffers = self.transport.shared_buffers
        if shared_buffers is not None and (
            header["op"] not in ("ret", "err", "fork") or header["id"] == shared_buffers.owed
        ):
            # The message allows the guest to write there again.
            shared_buffers.owed = None
        try:
            parts = build_request_frame(header, encoder, shared_buffers)
        except UnicodeEncodeError:
            # The code has lone surrogates: replace them, so that Python reports them in the cell.
            replaced = {
                k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v
                for k, v in header.items()
            }
            parts = build_request_frame(replaced, encoder, shared_buffers)
        self.transport.write(parts)

    def hold_sending(self) -> None:
        """Hold back all messages to the session until ``send_held`` is called."""
        self._held_frames = []

    def send_held(self) -> None:
        frames, self._held_frames = self._held_frames, None
        for header, encoder in frames or ():
            self.send(header, encoder)


def _decode_frame_value(message: FromGuest, blobs: list[memoryview], size: int) -> tuple[Any, int]:
    """Decode the value in a message from the session.

    Returns it with an estimate of the memory that it uses, in bytes. ``size`` is the size of the
    frame in bytes. The estimate limits the calls that wait for an answer, so it is 0 for output and
    for the end of a cell.
    """
    kind = type(message)
    if kind is CellDoneFrame:
        note = message.note  # type: ignore[union-attr]
        return (None if note == NO_VALUE else decode_value(message, note, blobs)), 0  # type: ignore[arg-type]
    if kind is CellOutputFrame:
        if len(blobs) != 1 or len(blobs[0]) > MAX_FRAME_OUTPUT:
            raise ProtocolError(
                f"invalid output: {sum(map(len, blobs)):,} bytes in {len(blobs)} blobs"
            )
        return bytes(blobs[0]), 0
    if kind is HostCallFrame or kind is ValueReplyFrame:
        long = sum(map(len, blobs))
        # Blobs in the shared buffers are not part of the frame.
        short = size if message.shelved else size - long  # type: ignore[union-attr]
        value = decode_value(message, message.value, blobs)  # type: ignore[arg-type,union-attr]
        return value, long + _WEIGHT_OF_JSON * short
    return None, 0
