"""The host's frames, and the threads that wait for them.

Decides who reads: one of those who wait reads for all, and when it has its own frame it hands over.
Leaves out what frames are about, but for a fork, which is obeyed by whoever reads it, whatever else
is waited for.
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
"""In a ticket whose frame will not come any more."""


class FrameTicket:
    """Someone waiting for a frame. ``wake`` is released when the frame is there, or when it is
    their turn to read."""

    __slots__ = ("frame", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.frame: Any = None
        """Header and blobs."""

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # roused already
            self.wake.release()


class FrameInbox:
    """Everyone who waits for a frame: callers of the host, each for its answer, and whoever obeys
    the host's requests."""

    __slots__ = ("_calls", "_command", "_ends_process", "_fork", "_interrupts", "_leading", "_line")

    def __init__(
        self,
        line: GuestChannel,
        interrupts: GuestInterrupts,
        fork: Callable[[int], None],
        *,
        ends_process: bool,
    ) -> None:
        """``fork``: called with the number of a request to fork. ``ends_process``: with the
        stream's end."""
        self._line = line
        self._interrupts = interrupts
        self._fork = fork
        self._ends_process = ends_process
        self._leading = threading.Lock()
        self._command = FrameTicket()
        self._calls: dict[int, FrameTicket] = {}

    def next_command(self) -> tuple[dict[str, Any], list[memoryview]]:
        """The host's next request. Raises EOFError or OSError at the end of the stream."""
        self.wait(self._command)
        command: tuple[dict[str, Any], list[memoryview]] = self._command.frame
        self._command.frame = None
        return command

    def expect(self, id: int, ticket: FrameTicket) -> None:
        """``ticket`` is for the answer to call ``id``, which is about to be sent."""
        self._calls[id] = ticket

    def forget(self, ticket: FrameTicket) -> None:
        """Its owner waits no more."""
        if ticket.frame is None:  # interrupted
            for id, other in list(self._calls.items()):
                if other is ticket:
                    self._calls.pop(id, None)
            self._pass_on()

    def drop_calls(self) -> None:
        """Nobody gets an answer any more."""
        for ticket in list(self._calls.values()):
            ticket.frame = DROPPED
            ticket.rouse()
        self._calls.clear()

    def wait(self, ticket: FrameTicket) -> None:
        """Until ``ticket`` has its frame."""
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

    def _read_step(self, mine: FrameTicket) -> None:
        message = self._line.next()
        if message is not None:
            self._dispatch(*message, mine)
            return
        if self._interrupts.is_live and not self._line.has_part():
            self._interrupts.wait(self._line.poll)
        try:
            self._line.fill()
        except (EOFError, OSError):
            if self._ends_process:
                os._exit(0)  # the host is gone
            raise

    def _dispatch(self, header: dict[str, Any], blobs: list[memoryview], mine: FrameTicket) -> None:
        if header["op"] == "fork":
            self._fork(header["id"])
            return
        ticket: FrameTicket | None = self._command
        if header["op"] in ("ret", "err"):
            ticket = self._calls.pop(header["id"], None)  # None: its caller was interrupted
        if ticket is not None:
            ticket.frame = (header, blobs)
            if ticket is not mine:
                ticket.rouse()

    def _pass_on(self) -> None:
        """Let someone else who waits read the stream."""
        for ticket in [*self._calls.values(), self._command]:
            if ticket.frame is None:
                ticket.rouse()
                return
