"""Calls from a cell's code to the host.

Decides that any thread of a running cell may call, what it gets, and that it waits without half a
frame on the wire. Leaves out what can be called: that is the host's.
"""

from __future__ import annotations

from typing import Any

from .bounds import LimitError
from .channel import GuestChannel
from .inbox import DROPPED, FrameInbox, FrameTicket
from .interrupts import GuestInterrupts
from .output import CellOutput
from .values import CodecError, ValueEncoder


class HostError(Exception):
    """What a call to the host raises. ``kind`` names the class that the host meant; ``data`` holds
    its attributes."""

    def __init__(self, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = data or {}


HostError.__module__ = "builtins"  # so that a traceback shows the bare name


class HostCalls:
    """Those of one session, numbered."""

    __slots__ = ("_inbox", "_interrupts", "_last_id", "_line", "_output")

    def __init__(
        self, line: GuestChannel, inbox: FrameInbox, interrupts: GuestInterrupts, output: CellOutput
    ) -> None:
        self._line = line
        self._inbox = inbox
        self._interrupts = interrupts
        self._output = output
        self._last_id = 0

    def call_host(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the host from any thread of a running cell. Raises HostError, TypeError for
        arguments that are not carried, and ValueError for those that are over a limit."""
        if not self._line.is_ours():
            raise HostError(
                "RuntimeError",
                f"{name}() was called in a forked process; call it in the session itself",
            )
        self._output.flush()
        ticket = FrameTicket()
        before = self._interrupts.enter()
        try:
            self._post(name, [list(args), kwargs], ticket)
            self._inbox.wait(ticket)
        except CodecError as error:
            raise TypeError(str(error)) from None
        except LimitError as error:
            raise ValueError(f"{name}: {error}") from None
        finally:
            self._inbox.forget(ticket)
            self._interrupts.leave(before)
        if ticket.frame is DROPPED:
            raise HostError("RuntimeError", f"{name}() was still waiting when its cell ended")
        header, blobs = ticket.frame
        if header["op"] == "err":
            raise HostError(header["kind"], header["message"], self._line.value_of(header, blobs))
        return self._line.value_of(header, blobs)

    def _post(self, name: str, arguments: Any, ticket: FrameTicket) -> None:
        line = self._line
        encoder = ValueEncoder(defers=line.shared_buffers is not None, bounded=True)
        value = encoder.encode(arguments)
        with line.sending:
            if not line.is_open:
                raise HostError("RuntimeError", f"{name}() was called after its cell had ended")
            self._last_id += 1
            parts = line.frame(
                {"op": "call", "id": self._last_id, "name": name, "value": value}, encoder
            )
            self._inbox.expect(self._last_id, ticket)
            line.write(parts)
