"""Connect a newly started process back to the run that started it, with authentication.

    run      with ConnectBackListener() as listener:
                 start(command, stdin=listener.ticket("worker 3"))
                 channel, name = listener.accept(str, 60.0, look)
    process  channel = connect_back()

The process reads its ticket (the address, the key and its name) from its standard input, which is
an inherited pipe. So the key appears neither in its environment nor on its command line. A
connected process sends heartbeats (``start_heartbeat_thread``). If they stop for too long, for any
reason, the process counts as lost (``MissedHeartbeatDetector``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import msgspec

from ramify.actors.message_encoding import decode, encode
from ramify.actors.run_channel import AuthenticatedChannel, ChannelListener, connect

BEAT_S = 1.0
"""Seconds between the heartbeats that a process sends to show that it is still running."""


class WorkerConnectInfo(msgspec.Struct, frozen=True):
    """The data that a new process needs to connect back to its run.

    It holds the run's address, the run's key and the name of the process.
    """

    address: str
    key: bytes
    name: str
    """Name of the process, which it sends as its first message."""


class ConnectBackListener(ChannelListener):
    """Accepts connections from new processes that present a ticket issued by this listener.

    A ticket holds the listener's address, a secret key, and the name of the process.
    """

    def create_ticket(self, name: str) -> bytes:
        """Return a ticket for a new process, as bytes to pass on its standard input.

        The ticket holds the run's address and key. The process then calls ``connect_back``.
        """
        return encode(WorkerConnectInfo(self.address, self.key, name))


def read_ticket() -> WorkerConnectInfo:
    """Read the ticket, which holds the run's address and key, from the standard input of this
    process."""
    ticket: WorkerConnectInfo = decode(sys.stdin.buffer.read(), WorkerConnectInfo)
    return ticket


def connect_back() -> AuthenticatedChannel:
    """Connect this process to the run that started it.

    The run's address and key are read from the ticket on standard input.
    """
    ticket = read_ticket()
    return connect(ticket.address, ticket.key, ticket.name)


def start_heartbeat_thread(send: Callable[[], None], stop: threading.Event) -> None:
    """Send a heartbeat every second from a background thread until ``stop`` is set.

    ``send`` sends one heartbeat.
    """

    def run() -> None:
        while not stop.wait(BEAT_S):
            send()

    threading.Thread(target=run, daemon=True, name="ramify heartbeats").start()


class MissedHeartbeatDetector:
    """Detects that a process has sent no message for too long.

    It counts its own checks instead of reading a clock. So no process seems overdue after this
    process was stopped or its machine was suspended.
    """

    def __init__(self, limit_s: float, look_s: float) -> None:
        """Create a detector that reports a process after ``limit_s`` seconds without a message.

        The caller must then call ``count_silent_interval`` every ``look_s`` seconds.
        """
        self.limit_s = limit_s
        self._look_s = look_s
        self._quiet_s = 0.0

    def record_message(self) -> None:
        """Record that the process has sent a message.

        Any thread may call this.
        """
        self._quiet_s = 0.0

    def count_silent_interval(self) -> bool:
        """Return True if no message has arrived for more than the limit.

        Call this at regular intervals, because each call counts as one interval of silence.
        """
        self._quiet_s += self._look_s
        return self._quiet_s > self.limit_s
