"""Monitor the ranks of a group from rank 0 to detect lost and stalled ones.

    watch      ── Ping, every half second ──────────> watch: answers from a separate thread
               <─ HeartbeatEcho, or RankStackTrace ──────

A rank that exits is noticed by its connection. A rank is stuck if no rank makes progress for
``timeout_s`` during a method call. Then every rank is asked for its stack: ranks that wait inside
torch.distributed wait for another one, and the error names the others. If a rank is lost, all
others are killed, which closes their connections and releases every wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from ramify.actors.child_process import ProcessHandle
from ramify.actors.run_channel import AuthenticatedChannel
from ramify.errors import TrainError
from ramify.progress import heartbeat

GRACE_S = 5.0
"""Seconds to wait for the other ranks after an error."""
_DISTRIBUTED = os.path.join("torch", "distributed")


class RankProgress:
    """Records the progress of this rank, so that rank 0 can detect when the rank is stuck."""

    def __init__(self) -> None:
        self.count = 0
        self.verb = ""
        """Name of the method that is running; empty while waiting for work."""
        self.thread = 0
        self.waits = False
        """Whether this rank has done its part, and waits for other ranks' results."""

    def tick(self) -> None:
        self.count += 1

    @contextlib.contextmanager
    def track_method(self, verb: str) -> Iterator[None]:
        self.verb, self.thread, self.waits = verb, threading.get_ident(), False
        self.tick()
        try:
            yield
        finally:
            self.verb = ""
            self.tick()

    def stack_trace(self) -> str:
        """Return the stack trace of the thread that runs the current method, with the outermost
        call first.

        Returns an empty string if there is no such thread.
        """
        frame = sys._current_frames().get(self.thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class RankConnection(NamedTuple):
    """The connection from rank 0 to another rank: one channel for method calls, one for
    heartbeats."""

    rank: int
    talk: AuthenticatedChannel
    watch: AuthenticatedChannel
    where: str
    """Host and process id, for error messages."""


class NonfatalRankError(msgspec.Struct, frozen=True):
    """An error of a rank's method call after which the group of ranks can continue."""

    kind: str
    """Class name of the error."""
    text: str


class RankMethodResult(msgspec.Struct, frozen=True):
    """The result of a method call on one rank, as that rank sends it to rank 0."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Result, encoded as the method's return type."""
    error: NonfatalRankError | None = None
    broke: str = ""
    """Text of a fatal error; empty if there is none."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """A message with which rank 0 asks another rank for its heartbeat count."""


class RankStackTraceRequest(msgspec.Struct, tag="StackRequest", frozen=True):
    """A message in which rank 0 asks another rank for its stack trace."""


class ExitRankRequest(msgspec.Struct, tag=True, frozen=True):
    """A message in which rank 0 orders another rank to exit at once."""

    reason: str


class HeartbeatEcho(msgspec.Struct, tag=True, frozen=True):
    count: int


class RankStackTrace(msgspec.Struct, tag="RankStack", frozen=True):
    text: str


WatchRequest = Ping | RankStackTraceRequest | ExitRankRequest
WatchAnswer = HeartbeatEcho | RankStackTrace


class RankMonitor:
    """Monitors the other ranks from a thread of rank 0, until a rank fails or ``close`` is
    called."""

    def __init__(
        self,
        pulse: RankProgress,
        connections: Sequence[RankConnection],
        processes: Sequence[ProcessHandle],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        self._pulse = pulse
        self._connections = connections
        self._processes = processes
        self._timeout_s = timeout_s
        self._stacks = stacks
        self._beat_s = min(0.5, timeout_s / 10)
        self._reason = ""
        """Why the group has ended; empty while it works."""
        self._guard = threading.Lock()
        self._counts = [0] * (1 + len(connections))
        self._inbox: dict[int, list[RankMethodResult]] = {link.rank: [] for link in connections}
        """Results received from ranks and not yet returned."""
        self._answers: dict[int, str] = {}
        """Rank -> text of the stack trace that it sent on request."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ramify-ranks", daemon=True)
        if connections:
            self._thread.start()

    def raise_if_rank_lost(self) -> None:
        """Raise TrainError if a rank has been lost.

        The group cannot be used afterwards.
        """
        if self._reason:
            raise TrainError(self._reason)

    def declare_rank_lost(self, why: str, rank: int, grace_s: float = 0.0) -> NoReturn:
        """Declare a rank lost, end all other ranks, and raise TrainError.

        If another rank turns out to be the cause within ``grace_s`` seconds, the error names that
        rank instead.
        """
        until = time.monotonic() + grace_s
        while not self._reason and time.monotonic() < until and self._connections:
            if other := self._reported_failure() or self._find_dead_rank():
                rank, why = other
                break
            time.sleep(0.02)
        self._give_up(f"rank {rank}{self._rank_location(rank)} is lost: {why}")
        raise TrainError(self._reason)

    def wait_for_result(self, link: RankConnection) -> RankMethodResult:
        """Wait until a rank finishes the current method, and return its result.

        Raises TrainError if any rank is lost in the meantime.
        """
        while True:
            self.raise_if_rank_lost()
            with contextlib.suppress(OSError):
                link.talk.poll(0.2)
            self._receive(link)
            if self._inbox[link.rank]:
                ended = self._inbox[link.rank].pop(0)
                if ended.broke:
                    self.declare_rank_lost(ended.broke, link.rank)
                return ended
            if link.talk.is_ended:
                self.declare_rank_lost("its process ended", link.rank, grace_s=GRACE_S)

    def _receive(self, link: RankConnection) -> None:
        with self._guard, contextlib.suppress(EOFError, OSError):
            while link.talk.poll():
                self._inbox[link.rank].append(link.talk.receive(RankMethodResult))

    def close(self) -> None:
        self._closing.set()
        if self._connections:
            self._thread.join()

    def _run(self) -> None:
        last, quiet_s = list(self._counts), 0.0
        while not self._closing.wait(self._beat_s) and not self._reason:
            # Counts waits, not time, so that a process that was suspended does not time out.
            quiet_s += self._beat_s
            for link in self._connections:
                self._send(link, Ping())
            self._read()
            if (dead := self._find_dead_rank()) is not None and not self._closing.is_set():
                rank, why = self._reported_failure() or dead
                self._give_up(f"rank {rank}{self._rank_location(rank)} is lost: {why}")
                return
            self._counts[0] = self._pulse.count
            if self._counts != last:
                heartbeat()
            if self._counts != last or not self._pulse.verb:
                last, quiet_s = list(self._counts), 0.0
            elif quiet_s > self._timeout_s:
                self._report_stall()
                return

    def rank_stack_traces(self) -> str:
        """Return the stack traces of the other ranks as text.

        The text also names the ranks that did not answer in time.
        """
        self._answers.clear()
        self._ask_stacks(lambda: None)  # the watch thread reads the answers
        answers = [
            (link.rank, self._answers.get(link.rank, "it did not answer\n"))
            for link in self._connections
        ]
        return "\n".join(
            f"rank {rank}{self._rank_location(rank)}\n{stack}" for rank, stack in answers
        )

    def _send(self, link: RankConnection, request: WatchRequest) -> None:
        with contextlib.suppress(OSError):
            link.watch.send(request)

    def _read(self) -> None:
        for link in self._connections:
            with contextlib.suppress(EOFError, OSError):
                while link.watch.poll():
                    answer: WatchAnswer = link.watch.receive(WatchAnswer)
                    if isinstance(answer, HeartbeatEcho):
                        self._counts[link.rank] = answer.count
                    else:
                        self._answers[link.rank] = answer.text

    def _find_dead_rank(self) -> tuple[int, str] | None:
        """Find a rank whose process or connection has ended.

        Returns its number and how it ended, or None if all ranks are alive.
        """
        for link in self._connections:
            process = self._processes[link.rank - 1] if self._processes else None
            if process is not None and process.poll() is not None:
                return link.rank, f"it {process.exit_reason()}"
            if not self._processes and link.watch.is_ended:
                return link.rank, "its process ended"
        return None

    def _reported_failure(self) -> tuple[int, str] | None:
        """Find a rank that has reported a fatal error.

        Returns its number and the error, or None if there is no such rank.
        """
        for link in self._connections:
            self._receive(link)
            for ended in self._inbox[link.rank]:
                if ended.broke:
                    return link.rank, ended.broke
        return None

    def _ask_stacks(self, read: Callable[[], None]) -> None:
        """Ask the other ranks for their stack traces, and wait a few seconds for the replies.

        Stopped processes are skipped, because they cannot reply.
        """
        for link in self._connections:
            self._send(link, RankStackTraceRequest())
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(
            self._may_answer(link.rank) for link in self._connections
        ):
            time.sleep(0.05)
            read()

    def _report_stall(self) -> None:
        """Report that no rank is making progress, and end the group.

        The error names the ranks that block the others.
        """
        verb = self._pulse.verb
        self._ask_stacks(self._read)
        stacks = {0: self._pulse.stack_trace(), **self._answers}
        unresponsive = [link.rank for link in self._connections if link.rank not in stacks]
        waits = {
            rank
            for rank, stack in stacks.items()
            if _is_in_collective(stack) or (self._pulse.waits and not rank)
        }
        working = [rank for rank in stacks if rank not in waits]
        least = min(self._counts)
        behind = [rank for rank, count in enumerate(self._counts) if count == least]
        # Blame ranks that do not answer, else those that work while others wait, else the slowest.
        named = unresponsive or (working if waits and working else behind)
        path = self._write(stacks, unresponsive)
        description = "; ".join(
            f"rank {rank}{self._rank_location(rank)} "
            f"{self._describe_rank_state(rank, stacks.get(rank, ''))}"
            for rank in named
        )
        self._give_up(
            f"no rank made progress for {self._timeout_s:g} s in '{verb}'. {description}. The "
            f"stacks of all ranks are in {path}",
            named,
        )

    def _may_answer(self, rank: int) -> bool:
        return rank not in self._answers and "(stopped)" not in _process_state(self._pid(rank))

    def _describe_rank_state(self, rank: int, stack: str) -> str:
        if stack:
            return f"is at {' '.join(stack.splitlines()[-2].split())}"
        return f"does not answer{_process_state(self._pid(rank))}; its stack may be on stderr"

    def _write(self, stacks: dict[int, str], unresponsive: Sequence[int]) -> Path:
        self._stacks.mkdir(parents=True, exist_ok=True)
        path = self._stacks / "stalled-ranks.txt"
        parts = [
            f"rank {rank}, {self._counts[rank]} ticks\n{stack}"
            for rank, stack in sorted(stacks.items())
        ]
        parts += [
            f"rank {rank} did not answer{_process_state(self._pid(rank))}\n"
            for rank in unresponsive
        ]
        path.write_text("\n".join(parts))
        return path

    def _give_up(self, reason: str, culprits: Sequence[int] = ()) -> None:
        """End the other ranks because the group has failed, and record the reason.

        This also releases every thread that waits for one of them.
        """
        with self._guard:
            if self._reason:
                return
            self._reason = reason
        for link in self._connections:
            self._send(link, ExitRankRequest(reason))
        for process in self._processes:
            process.end(0.0)
        for link in self._connections:
            for channel in (link.talk, link.watch):
                channel.shutdown()
        if 0 in culprits:  # only an exception can stop this process's own verb
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._pulse.thread), ctypes.py_object(TrainError)
            )

    def _pid(self, rank: int) -> int:
        return self._processes[rank - 1].pid if self._processes and rank else 0

    def _rank_location(self, rank: int) -> str:
        return f" ({self._connections[rank - 1].where})" if rank else " (this process)"


def _is_in_collective(stack: str) -> bool:
    """Return True if a rank is waiting for others in a collective operation.

    That is the case if the innermost call of its stack is in torch.distributed.
    """
    places = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return bool(places) and _DISTRIBUTED in places[-1]


def _process_state(pid: int) -> str:
    """Describe the state of a process for an error message, such as `` (State: T (stopped))``.

    Returns an empty string if the state is unknown.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines() if pid else ():
            if line.startswith("State:"):
                return f" ({' '.join(line.split())})"
    return ""
