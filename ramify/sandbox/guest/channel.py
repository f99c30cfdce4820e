"""The guest's end of the connection: sends complete frames to the host from any thread, and reads
the host's frames.

Decides which part of a frame goes into the shared memory buffers, and that frames are never
interleaved. Only the session's process may use the channel, not a process that it forked; a cell
may use it only while it runs. Not here: which thread waits for which frame (see ``inbox.py``).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Any

from .bounds import LimitError, check_blobs
from .frames import (
    FrameReader,
    check_size,
    frame,
    from_json,
    json_bytes,
    open_frame,
    split_blobs,
    write_all,
)
from .values import Buffer, ValueDecoder, ValueEncoder, encoded

_getpid = os.getpid
"""Saved before any cell has run."""


class GuestChannel:
    """Two descriptors, and the shared memory buffers if host and guest share them."""

    __slots__ = ("_poll", "_reader", "is_open", "pid", "sending", "shared_buffers", "write_fd")

    def __init__(
        self, read_fd: int, write_fd: int, *, takes_fds: bool, shared_buffers: Any
    ) -> None:
        """``takes_fds``: the connection is a socket over which the host may send descriptors.
        ``shared_buffers``: a ``SharedMemoryBuffers`` or None."""
        self._reader = FrameReader(read_fd, _receiver(read_fd) if takes_fds else None)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)
        self.write_fd = write_fd
        self.shared_buffers = shared_buffers
        self.sending = threading.Lock()
        """Held while writing, and while a caller must know what has been written."""
        self.pid = _getpid()
        """The session's process id."""
        self.is_open = False
        """True while a cell runs: its prints and calls go to the host."""

    def is_ours(self) -> bool:
        """Return True if this process is the session, and not one that a cell has forked."""
        return _getpid() == self.pid

    def descriptors(self) -> set[int]:
        own = {self._reader.fd, self.write_fd}
        return own if self.shared_buffers is None else {*own, self.shared_buffers.fd}

    def renew(self) -> None:
        """Start again on the same descriptors, which now lead to a new connection."""
        if self.shared_buffers is not None:
            self.shared_buffers = type(self.shared_buffers)(self.shared_buffers.fd, is_host=False)
        self._reader = FrameReader(self._reader.fd, self._reader.receive)

    # -- to the host

    def frame(
        self, header: dict[str, Any], encoder: ValueEncoder | None, blobs: Sequence[Buffer] = ()
    ) -> list[Buffer]:
        """Build the buffers of a frame; long blobs may already be in the shared memory buffers.
        Raises LimitError."""
        if encoder is not None:
            blobs = encoder.blobs
            if encoder.tags:
                header["tags"] = True
            check_blobs(len(blobs))
            if blobs:
                header["blobs"] = [len(blob) for blob in blobs]
        shared_buffers = self.shared_buffers
        if shared_buffers is not None:
            if encoder is not None and blobs and shared_buffers.put(blobs, header["id"]):
                header["shelved"], blobs = True, ()
            elif encoder is not None and encoder.defers:
                blobs = encoded(blobs)
            if shared_buffers.reported != shared_buffers.got:
                header["got"] = shared_buffers.reported = shared_buffers.got
        text = json_bytes(header)
        try:
            check_size(text, blobs)
        except LimitError:
            if shared_buffers is not None:
                shared_buffers.reported = -1  # this frame is not sent: report ``got`` again
            raise
        return frame(text, blobs)

    def send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        parts = self.frame(header, encoder)
        with self.sending:
            write_all(self.write_fd, parts)

    def write(self, parts: list[Buffer]) -> None:
        """Send frames; the caller holds ``sending``."""
        write_all(self.write_fd, parts)

    # -- from the host

    def next(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """Return the next header and its blobs, or None if more must be read first."""
        view = self._reader.next()
        if view is None:
            return None
        text, end = open_frame(view)
        header = from_json(str(text, "utf-8"))
        blobs: list[memoryview] = []
        if "blobs" in header:
            blobs = (
                self.shared_buffers.take(header["blobs"])
                if "shelved" in header
                else split_blobs(view, end, header["blobs"])
            )
        if self.shared_buffers is not None:
            self._note_read(header["op"], header["id"])
        return header, blobs

    def _note_read(self, op: str, id: int) -> None:
        """Mark the shared buffers as free once the host has read them: when it answers the call, or
        sends its next request. A fork can be requested at any time, so it says nothing."""
        if op != "fork" and (op not in ("ret", "err") or id == self.shared_buffers.key):
            self.shared_buffers.is_free = True

    def value_of(self, header: dict[str, Any], blobs: list[memoryview]) -> Any:
        return (
            ValueDecoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        )

    def take_fds(self) -> list[int]:
        """Return the descriptors that were received; the caller owns them."""
        fds, self._reader.fds = self._reader.fds, []
        return fds

    def has_part(self) -> bool:
        """Return True if the beginning of a frame was read."""
        return self._reader.have > 0

    def poll(self) -> None:
        """Wait until there is something to read."""
        self._poll.poll()

    def fill(self) -> None:
        """Read once. Raises EOFError at the end of the stream."""
        self._reader.fill()


def _receiver(fd: int) -> Any:
    """Return ``recvmsg`` of the socket ``fd``, which stays open as long as the process."""
    import socket

    end = socket.socket(fileno=fd)
    return end.recvmsg
