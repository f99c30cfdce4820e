"""The host's frames, and the threads that wait for them.

Decides which thread reads: one of the waiting threads reads for all, and passes the role on when it
has its own frame. Not here: what frames mean, except for a fork request. The thread that reads it
executes it at once, whatever other frames are awaited.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from .channel import GuestChannel
from .interrupts import GuestInterrupts

DROPPED: Any = object()
"""Marks a ticket whose frame will never arrive."""


class FrameTicket:
    """A thread that waits for a frame. ``wake`` is released when the frame has arrived, or when it
    is this thread's turn to read."""

    __slots__ = ("frame", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.frame: Any = None
        """Header and blobs."""

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            self.wake.release()


class FrameInbox:
    """All threads that wait for a frame: callers of the host, each for its answer, and the thread
    that handles the host's requests."""

    __slots__ = (
        "_calls",
        "_channel",
        "_command",
        "_ends_process",
        "_fork",
        "_interrupts",
        "_leading",
    )

    def __init__(
        self,
        channel: GuestChannel,
        interrupts: GuestInterrupts,
        fork: Callable[[int], None],
        *,
        ends_process: bool,
    ) -> None:
        """``fork``: called with the id of a fork request. ``ends_process``: end the process when
        the stream ends."""
        self._channel = channel
        self._interrupts = interrupts
        self._fork = fork
        self._ends_process = ends_process
        self._leading = threading.Lock()
        self._command = FrameTicket()
        self._calls: dict[int, FrameTicket] = {}

    def next_command(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the host's next request. Raises EOFError or OSError at the end of the stream."""
        self.wait(self._command)
        command: tuple[dict[str, Any], list[memoryview]] = self._command.frame
        self._command.frame = None
        return command

    def expect(self, id: int, ticket: FrameTicket) -> None:
        """Register ``ticket`` for the answer to call ``id``, which is about to be sent."""
        self._calls[id] = ticket

    def forget(self, ticket: FrameTicket) -> None:
        """Remove a ticket whose thread waits no more."""
        if ticket.frame is None:  # interrupted
            for id, other in list(self._calls.items()):
                if other is ticket:
                    self._calls.pop(id, None)
            self._pass_on()

    def drop_calls(self) -> None:
        """Release all waiting callers: they will get no answer."""
        for ticket in list(self._calls.values()):
            ticket.frame = DROPPED
            ticket.rouse()
        self._calls.clear()

    def wait(self, ticket: FrameTicket) -> None:
        """Wait until ``ticket`` has its frame."""
        while ticket.frame is None:
            if not self._leading.acquire(blocking=False):
                self._interrupts.wait(ticket.wake.acquire)
                continue
            try:
                while ticket.frame is None:
                    self._read_step(ticket)
            finally:
                self._leading.release()
                self._pass_on()

    def _read_step(self, own_ticket: FrameTicket) -> None:
        message = self._channel.next()
        if message is not None:
            self._dispatch(*message, own_ticket)
            return
        if self._interrupts.is_live and not self._channel.has_part():
            self._interrupts.wait(self._channel.poll)
        try:
            self._channel.fill()
        except (EOFError, OSError):
            if self._ends_process:
                os._exit(0)  # the host is gone
            raise

    def _dispatch(
        self, header: dict[str, Any], blobs: list[memoryview], own_ticket: FrameTicket
    ) -> None:
        if header["op"] == "fork":
            self._fork(header["id"])
            return
        ticket: FrameTicket | None = self._command
        if header["op"] in ("ret", "err"):
            ticket = self._calls.pop(header["id"], None)  # None: its caller was interrupted
        if ticket is not None:
            ticket.frame = (header, blobs)
            if ticket is not own_ticket:
                ticket.rouse()

    def _pass_on(self) -> None:
        """Let another waiting thread read the stream."""
        for ticket in [*self._calls.values(), self._command]:
            if ticket.frame is None:
                ticket.rouse()
                return
