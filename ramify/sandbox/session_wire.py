"""The frames of one session: in order, checked, decoded, and never at the expense of other
sessions.

Decides how much of a guest's data the event loop handles at once, what is decoded in a thread, and
when frames to the guest have to wait. Not here: which frames may arrive when (see ``session.py``),
their layout and limits (see ``host_frames.py``).

    transport ──> frames ──small──────────────> received ──> session
                    └─large─> thread ─────────────┘   (later frames wait)
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ramify.sandbox import host_frames
from ramify.sandbox.guest.frames import open_frame
from ramify.sandbox.guest.output import MAX_FRAME_BYTES
from ramify.sandbox.guest.values import ProtocolError, ValueEncoder
from ramify.sandbox.transport import SCRATCH_BYTES, Transport

_TURN_S = 0.005
"""Time after which the frames that have arrived wait for the next turn of the event loop."""
_WEIGHT_OF_JSON = 16
"""Memory per byte of JSON: small Python values take many times the size of their JSON."""
_EMPTY = memoryview(b"")
_NO_VALUE = host_frames.NO_VALUE
_decoding: list[ThreadPoolExecutor] = []
"""The threads that decode large frames, of all sessions; created for the first such frame."""


def in_thread(call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Run ``call`` in one of the threads for large values."""
    if not _decoding:
        _decoding.append(ThreadPoolExecutor(2, "ramify-values"))
    return asyncio.get_running_loop().run_in_executor(_decoding[0], call, *arguments)


FrameTaker = Callable[[host_frames.FromGuest, Any, int], None]
"""Gets a frame with its decoded value, note or output, and an estimate of the memory that it uses,
in bytes. May raise ProtocolError."""


class SessionWire:
    """Frames from and to one guest."""

    __slots__ = (
        "_assembler",
        "_decoder",
        "_decoding_bytes",
        "_failed",
        "_held_frames",
        "_holds",
        "_received",
        "last_id",
        "transport",
    )

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.last_id = 0
        self._assembler = host_frames.FrameAssembler()
        self._holds: set[str] = set()
        """Reasons not to handle more frames now."""
        self._decoding_bytes = 0
        self._decoder: asyncio.Task[None] | None = None
        self._held_frames: list[tuple[dict[str, Any], ValueEncoder | None]] | None = None
        """Frames that wait while the session forks. They are sent afterwards, possibly over a new
        socket."""

    def attach(
        self,
        received: FrameTaker,
        failed: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        """``received``: called with each frame. ``failed``: called with the reason why the guest
        cannot be trusted any more."""
        self._received = received
        self._failed = failed
        self.transport.attach(self._feed, lost)

    # -- from the guest

    def _feed(self, data: memoryview) -> None:
        if self._holds:  # a service delivers what it had received before ``pause``
            self._assembler.keep(data)
            return
        until = time.perf_counter() + _TURN_S
        try:
            frames = self._assembler.feed(data)
            while not self._holds and (view := next(frames, None)) is not None:
                if host_frames.is_large(view):
                    self.hold("decoding")
                    held = view if len(view) > SCRATCH_BYTES else memoryview(bytes(view))
                    self._decoder = asyncio.ensure_future(self._decode(held))
                else:
                    message, blobs = host_frames.parse(view, self.transport.shared_buffers)
                    self._received(message, *_opened(message, blobs, len(view)))
                if time.perf_counter() > until:
                    self.hold("turn")
                    asyncio.get_running_loop().call_soon(self.release, "turn")
            frames.close()
        except ProtocolError as error:
            self._failed(f"it broke the protocol: {error}")

    async def _decode(self, view: memoryview) -> None:
        """Decode a large frame while other sessions are served."""
        self._decoding_bytes = len(view) + _WEIGHT_OF_JSON * len(open_frame(view)[0])
        try:
            parsing = functools.partial(host_frames.parse, view, is_later=True)
            message, blobs = await in_thread(parsing)
            host_frames.note_read(message, self.transport.shared_buffers)
            if getattr(message, "shelved", False):
                shared = host_frames.shared_blobs(message, self.transport.shared_buffers)
                blobs = [memoryview(bytes(blob)) for blob in shared]
            self._received(message, *await in_thread(_opened, message, blobs, len(view)))
        except ProtocolError as error:
            self._failed(f"it broke the protocol: {error}")
        self._decoding_bytes = 0
        self.release("decoding")

    def hold(self, reason: str) -> None:
        """Handle no frames until ``release``."""
        if not self._holds:
            self.transport.pause()
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        if reason not in self._holds:
            return
        self._holds.discard(reason)
        if not self._holds:
            self._feed(_EMPTY)
        if not self._holds:
            self.transport.resume()

    def held_bytes(self) -> int:
        """Return the memory that unfinished frames use, and the one that is being decoded."""
        return self._assembler.held_bytes() + self._decoding_bytes

    def drain(self) -> None:
        """Read to the end of the stream, whatever there was to wait for."""
        self._holds.clear()
        self.transport.resume()

    async def close(self) -> None:
        if self._decoder is not None:
            self._decoder.cancel()
        await self.transport.close()

    # -- to the guest

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        if self._held_frames is not None:
            self._held_frames.append((header, encoder))
            return
        shared_buffers = self.transport.shared_buffers
        if shared_buffers is not None and (
            header["op"] not in ("ret", "err", "fork") or header["id"] == shared_buffers.owed
        ):
            shared_buffers.owed = None
        try:
            parts = host_frames.request(header, encoder, shared_buffers)
        except UnicodeEncodeError:
            # The code has lone surrogates: replace them, so that Python reports them in the cell.
            replaced = {
                k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v
                for k, v in header.items()
            }
            parts = host_frames.request(replaced, encoder, shared_buffers)
        self.transport.write(parts)

    def hold_sending(self) -> None:
        """Let frames wait until ``send_held``."""
        self._held_frames = []

    def send_held(self) -> None:
        frames, self._held_frames = self._held_frames, None
        for header, encoder in frames or ():
            self.send(header, encoder)


def _opened(message: host_frames.FromGuest, blobs: list[memoryview], size: int) -> tuple[Any, int]:
    """Return the value of a frame of ``size`` bytes, and an estimate of the memory it uses."""
    kind = type(message)
    if kind is host_frames.CellDoneFrame:
        note = message.note  # type: ignore[union-attr]
        return (None if note == _NO_VALUE else host_frames.value_of(message, note, blobs)), 0  # type: ignore[arg-type]
    if kind is host_frames.OutputFrame:
        if len(blobs) != 1 or len(blobs[0]) > MAX_FRAME_BYTES:
            raise ProtocolError(f"output of {sum(map(len, blobs)):,} bytes in {len(blobs)} blobs")
        return bytes(blobs[0]), 0
    if kind is host_frames.HostCallFrame or kind is host_frames.ValueFrame:
        long = sum(map(len, blobs))
        short = size if message.shelved else size - long  # type: ignore[union-attr]
        value = host_frames.value_of(message, message.value, blobs)  # type: ignore[arg-type,union-attr]
        return value, long + _WEIGHT_OF_JSON * short
    return None, 0
