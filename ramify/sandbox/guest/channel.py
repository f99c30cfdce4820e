"""The guest's end of the wire: whole frames to the host from any thread, and the host's frames as
they come.

Decides what of a frame lies on the shelf, that frames do not mix, and whose the wire is: not a
forked process's, and a running cell's only while it is open. Leaves out who waits for which frame
(``inbox.py``).
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
"""As it was when no cell had run yet."""


class GuestChannel:
    """Two descriptors, and the shelf beside them where host and guest share one."""

    __slots__ = ("_poll", "_reader", "is_open", "pid", "sending", "shared_buffers", "write_fd")

    def __init__(
        self, read_fd: int, write_fd: int, *, takes_fds: bool, shared_buffers: Any
    ) -> None:
        """``takes_fds``: it is a socket over which the host may hand descriptors. ``shelf``: a
        ``shelf.SharedMemoryBuffers``."""
        self._reader = FrameReader(read_fd, _receiver(read_fd) if takes_fds else None)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)
        self.write_fd = write_fd
        self.shared_buffers = shared_buffers
        self.sending = threading.Lock()
        """Held by whoever writes, and by whoever must know what was written."""
        self.pid = _getpid()
        """The session's process."""
        self.is_open = False
        """A cell runs: what it prints and calls goes to the host."""

    def is_ours(self) -> bool:
        """Whether this process is the session, and not one that a cell has forked."""
        return _getpid() == self.pid

    def descriptors(self) -> set[int]:
        own = {self._reader.fd, self.write_fd}
        return own if self.shared_buffers is None else {*own, self.shared_buffers.fd}

    def renew(self) -> None:
        """Begin anew on the same descriptors, which lead elsewhere now."""
        if self.shared_buffers is not None:
            self.shared_buffers = type(self.shared_buffers)(self.shared_buffers.fd, is_host=False)
        self._reader = FrameReader(self._reader.fd, self._reader.receive)

    # -- to the host

    def frame(
        self, header: dict[str, Any], encoder: ValueEncoder | None, blobs: Sequence[Buffer] = ()
    ) -> list[Buffer]:
        """The buffers of a frame, of which long ones may be on the shelf already. Raises
        LimitError."""
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
            if shared_buffers.told != shared_buffers.got:
                header["got"] = shared_buffers.told = shared_buffers.got
        text = json_bytes(header)
        try:
            check_size(text, blobs)
        except LimitError:
            if shared_buffers is not None:
                shared_buffers.told = -1  # the host has not been told
            raise
        return frame(text, blobs)

    def send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        parts = self.frame(header, encoder)
        with self.sending:
            write_all(self.write_fd, parts)

    def write(self, parts: list[Buffer]) -> None:
        """Send frames; ``sending`` is held."""
        write_all(self.write_fd, parts)

    # -- from the host

    def next(self) -> tuple[dict[str, Any], list[memoryview]] | None:
        """A header and its blobs, or None where more must be read first."""
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
        """What we put on the shelf the host has read when it answers, or asks for the next thing; a
        fork is asked for at any time."""
        if op != "fork" and (op not in ("ret", "err") or id == self.shared_buffers.key):
            self.shared_buffers.is_free = True

    def value_of(self, header: dict[str, Any], blobs: list[memoryview]) -> Any:
        return (
            ValueDecoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        )

    def take_fds(self) -> list[int]:
        """The descriptors that came along; they are the caller's."""
        fds, self._reader.fds = self._reader.fds, []
        return fds

    def has_part(self) -> bool:
        """Whether the beginning of a frame was read."""
        return self._reader.have > 0

    def poll(self) -> None:
        """Until there is something to read."""
        self._poll.poll()

    def fill(self) -> None:
        """Read once. Raises EOFError at the end of the stream."""
        self._reader.fill()


def _receiver(fd: int) -> Any:
    """``recvmsg`` of the socket ``fd``, which stays open as long as the process."""
    import socket

    end = socket.socket(fileno=fd)
    return end.recvmsg
