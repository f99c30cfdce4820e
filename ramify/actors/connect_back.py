"""Lets a process connect back to the run that started it.

    run      with Listener() as listener:
                 start(command, stdin=listener.ticket("worker 3"))
                 channel, name = listener.accept(str, 60.0, look)
    process  channel = connect_back()

The process reads its ticket (the address, the key and its name) from its standard input, which is
an inherited pipe. So the key appears neither in its environment nor on its command line. A
connected process sends heartbeats (``beat``). If they stop for too long, for any reason, it counts
as lost (``HeartbeatDeadline``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import msgspec

from ramify.actors.run_channel import Channel, ChannelListener, connect
from ramify.actors.run_messages import decode, encode

BEAT_S = 1.0
"""Seconds between heartbeats."""


class ConnectBackTicket(msgspec.Struct, frozen=True):
    """What a started process needs to connect back."""

    address: str
    key: bytes
    name: str
    """Name of the process, which it sends as the first message of its channel."""


class ConnectBackListener(ChannelListener):
    """Accepts the channels of processes that were started with this listener's tickets."""

    def ticket(self, name: str) -> bytes:
        """Encode a ticket, to be the standard input of a process that calls ``connect_back``."""
        return encode(ConnectBackTicket(self.address, self.key, name))


def read_ticket() -> ConnectBackTicket:
    """Read the ticket of this process from standard input."""
    ticket: ConnectBackTicket = decode(sys.stdin.buffer.read(), ConnectBackTicket)
    return ticket


def connect_back() -> Channel:
    """Connect to the listener whose ticket this process was started with."""
    ticket = read_ticket()
    return connect(ticket.address, ticket.key, ticket.name)


def beat(send: Callable[[], None], stop: threading.Event) -> None:
    """Call ``send`` every second, in a separate thread, until ``stop`` is set."""

    def run() -> None:
        while not stop.wait(BEAT_S):
            send()

    threading.Thread(target=run, daemon=True, name="ramify heartbeats").start()


class HeartbeatDeadline:
    """Detects that a process has not sent a heartbeat for too long. It counts its own checks, not
    time, so that no process is overdue after this one was stopped, or its machine suspended."""

    def __init__(self, limit_s: float, look_s: float) -> None:
        """``look_s`` is the number of seconds between calls of ``is_overdue``."""
        self.limit_s = limit_s
        self._look_s = look_s
        self._quiet_s = 0.0

    def heard(self) -> None:
        """Record that the process sent a message. May be called in any thread."""
        self._quiet_s = 0.0

    def is_overdue(self) -> bool:
        """Return True if no message has arrived for more than ``limit_s`` seconds. Each call counts
        as one interval between checks, so call this at regular intervals."""
        self._quiet_s += self._look_s
        return self._quiet_s > self.limit_s
