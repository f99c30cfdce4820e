"""Calls from a cell's code to the host.

Decides that any thread of a running cell may call, what it receives, and that it never waits with
half a frame sent. Not here: which functions can be called; the host decides that.
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


HostError.__module__ = "builtins"  # so that a traceback shows the name without a module


class HostCalls:
    """Sends the calls of one session, numbered, and waits for the answers."""

    __slots__ = ("_channel", "_inbox", "_interrupts", "_last_id", "_output")

    def __init__(
        self,
        channel: GuestChannel,
        inbox: FrameInbox,
        interrupts: GuestInterrupts,
        output: CellOutput,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._interrupts = interrupts
        self._output = output
        self._last_id = 0

    def call_host(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the host from any thread of a running cell. Raises HostError; TypeError for
        arguments that the codec does not support; and ValueError for arguments over a limit."""
        if not self._channel.is_ours():
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
            raise HostError(
                header["kind"], header["message"], self._channel.value_of(header, blobs)
            )
        return self._channel.value_of(header, blobs)

    def _post(self, name: str, arguments: Any, ticket: FrameTicket) -> None:
        channel = self._channel
        encoder = ValueEncoder(defers=channel.shared_buffers is not None, bounded=True)
        value = encoder.encode(arguments)
        with channel.sending:
            if not channel.is_open:
                raise HostError("RuntimeError", f"{name}() was called after its cell had ended")
            self._last_id += 1
            parts = channel.frame(
                {"op": "call", "id": self._last_id, "name": name, "value": value}, encoder
            )
            self._inbox.expect(self._last_id, ticket)
            channel.write(parts)
