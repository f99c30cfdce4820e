"""A group of ranks that work together, and how it handles a rank that fails.

    rank 0, the run's own process                     rank 1, 2, …
    call(verb) ── verb, arguments ──────────────────> follow: run it, all at the same time
               <─ value, or error ───────────────────
    watch      ── "ping", every second ─────────────> watch: answers from a separate thread
               <─ heartbeat count, or stack ─────────

The training loop runs only in rank 0 and does not use ranks itself: otherwise it would have to run
everywhere, with the same rollouts, clock and decisions. The other ranks run verbs, and hold no
state that a run decides on.

A rank that exits is noticed by its connection. A rank is stuck if no rank makes progress for
``timeout_s`` during a verb. Then every rank is asked for its stack: ranks that wait inside
torch.distributed wait for another one, and the error names the others. If a rank is lost, all
others are killed, which closes their connections and releases every wait. Messages are pickled:
they pass only between processes that one user started and that authenticate with a key.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ramify.actors.child_process import Process, end_when_done
from ramify.errors import RamifyError, TrainError
from ramify.logging import RoomLogger
from ramify.progress import heartbeat

_log = RoomLogger("train")
_GRACE_S = 5.0
"""How long in seconds to wait for other ranks after an error."""
_DISTRIBUTED = os.path.join("torch", "distributed")


class RemoteRankError(TrainError):
    """This rank stops because another rank has an error, which that rank reports."""


class RankHeartbeat:
    """Progress of this rank, for those who watch it."""

    def __init__(self) -> None:
        self.count = 0
        self.verb = ""
        """The verb that is running; empty while waiting for work."""
        self.thread = 0
        self.waits = False
        """Whether this rank has done its part, and waits for other ranks' results."""

    def tick(self) -> None:
        self.count += 1

    @contextlib.contextmanager
    def doing(self, verb: str) -> Iterator[None]:
        self.verb, self.thread, self.waits = verb, threading.get_ident(), False
        self.tick()
        try:
            yield
        finally:
            self.verb = ""
            self.tick()

    def stack(self) -> str:
        """Stack of the thread that runs the verb, outermost call first."""
        frame = sys._current_frames().get(self.thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class RankConnection(NamedTuple):
    """Rank 0's connections to another rank."""

    rank: int
    talk: Connection
    watch: Connection
    where: str
    """Host and process id, for error messages."""


class RankResult(NamedTuple):
    """A rank's result of one verb."""

    value: Any = None
    error: RamifyError | None = None
    """An error that every rank has, after which work may continue."""
    broke: str = ""
    """Any other error, after which it may not."""


class RankGroup:
    """All ranks, as seen from rank 0."""

    def __init__(
        self,
        own: Any,
        pulse: RankHeartbeat,
        connections: Sequence[RankConnection],
        processes: Sequence[Process],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        """``own``: the object whose methods are the verbs, on this rank. ``stacks``: a folder for
        the stacks of stuck ranks."""
        self.size = 1 + len(connections)
        self._own = own
        self._pulse = pulse
        self._connections = connections
        self.processes = processes
        self._lock = threading.Lock()
        self._watch = _Watch(pulse, connections, processes, timeout_s, stacks)

    def call(
        self, verb: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Run ``verb`` on every rank, with the ``shared`` arguments followed by the rank's own from
        ``each``. Returns the values by rank. Raises the ranks' error; TrainError if a rank is lost,
        in this call and all later ones."""
        with self._lock:
            self._watch.check()
            with self._pulse.doing(verb):
                for connection in self._connections:
                    with contextlib.suppress(OSError):  # the watch thread reports why
                        connection.talk.send_bytes(
                            pickle.dumps(
                                (verb, (*shared, *(each[connection.rank] if each else ())))
                            )
                        )
                try:
                    ended = [carried_out(self._own, verb, (*shared, *(each[0] if each else ())))]
                except Exception as error:  # noqa: BLE001 (another rank may be the cause)
                    self._watch.lose(_describe(verb, error), rank=0, grace_s=_GRACE_S)
                self._pulse.waits = True
                ended += [self._watch.ended(connection) for connection in self._connections]
        return self._values(ended)

    def stacks(self) -> str:
        """Stacks of the other ranks, as text."""
        return self._watch.stacks()

    def close(self) -> None:
        """Shut down the other ranks; kill those that do not exit in time."""
        self._watch.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.talk.send_bytes(pickle.dumps(None))
        end_when_done(self.processes, _GRACE_S)
        for connection in self._connections:
            connection.talk.close()
            connection.watch.close()

    def _values(self, ended: Sequence[RankResult]) -> list[Any]:
        errors = [result.error for result in ended if result.error is not None]
        if errors:
            raise next(
                (error for error in errors if not isinstance(error, RemoteRankError)), errors[0]
            )
        return [result.value for result in ended]


class _Watch:
    """Watches the ranks from a separate thread, until an error or ``close``."""

    def __init__(
        self,
        pulse: RankHeartbeat,
        connections: Sequence[RankConnection],
        processes: Sequence[Process],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        self._pulse = pulse
        self._connections = connections
        self._processes = processes
        self._timeout_s = timeout_s
        self._stacks = stacks
        self._beat_s = min(1.0, timeout_s / 10)
        self._reason = ""
        """Why the group has ended; empty while it works."""
        self._guard = threading.Lock()
        self._counts = [0] * (1 + len(connections))
        self._inbox: dict[int, list[RankResult]] = {link.rank: [] for link in connections}
        """Results received from ranks and not yet returned."""
        self._answers: dict[int, str] = {}
        """Rank -> its stack, after it was requested."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ramify-ranks", daemon=True)
        if connections:
            self._thread.start()

    def check(self) -> None:
        """Raise TrainError if a rank was lost."""
        if self._reason:
            raise TrainError(self._reason)

    def lose(self, why: str, rank: int, grace_s: float = 0.0) -> NoReturn:
        """Report that rank ``rank`` is lost, and end all others. Within ``grace_s`` another rank
        may turn out to be the cause."""
        until = time.monotonic() + grace_s
        while not self._reason and time.monotonic() < until and self._connections:
            if other := self._reported_failure() or self._dead():
                rank, why = other
                break
            time.sleep(0.02)
        self._give_up(f"rank {rank}{self._place(rank)} is lost: {why}")
        raise TrainError(self._reason)

    def ended(self, link: RankConnection) -> RankResult:
        """The rank's result, once it has finished its verb. Raises TrainError if a rank was
        lost."""
        while True:
            self.check()
            with contextlib.suppress(OSError):
                link.talk.poll(0.2)
            self._receive(link)
            if self._inbox[link.rank]:
                ended = self._inbox[link.rank].pop(0)
                if ended.broke:
                    self.lose(ended.broke, link.rank)
                return ended
            if link.talk.closed or _is_closed(link.talk):
                self.lose("its process ended", link.rank, grace_s=_GRACE_S)

    def _receive(self, link: RankConnection) -> None:
        with self._guard, contextlib.suppress(EOFError, OSError):
            while link.talk.poll():
                self._inbox[link.rank].append(pickle.loads(link.talk.recv_bytes()))

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
                self._send(link, "ping")
            self._read()
            if (dead := self._dead()) is not None and not self._closing.is_set():
                rank, why = self._reported_failure() or dead
                self._give_up(f"rank {rank}{self._place(rank)} is lost: {why}")
                return
            self._counts[0] = self._pulse.count
            if self._counts != last:
                heartbeat()
            if self._counts != last or not self._pulse.verb:
                last, quiet_s = list(self._counts), 0.0
            elif quiet_s > self._timeout_s:
                self._report_stall()
                return

    def stacks(self) -> str:
        """Stacks of the other ranks; says so if a rank does not answer in time."""
        self._answers.clear()
        for link in self._connections:
            self._send(link, "stack")
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and any(
            self._may_answer(link.rank) for link in self._connections
        ):
            time.sleep(0.05)  # the watch thread reads the answers
        answers = [
            (link.rank, self._answers.get(link.rank, "it did not answer\n"))
            for link in self._connections
        ]
        return "\n".join(f"rank {rank}{self._place(rank)}\n{stack}" for rank, stack in answers)

    def _send(self, link: RankConnection, word: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            link.watch.send_bytes(pickle.dumps(word))

    def _read(self) -> None:
        for link in self._connections:
            with contextlib.suppress(EOFError, OSError):
                while link.watch.poll():
                    kind, value = pickle.loads(link.watch.recv_bytes())
                    if kind == "count":
                        self._counts[link.rank] = value
                    else:
                        self._answers[link.rank] = value

    def _dead(self) -> tuple[int, str] | None:
        """A rank whose process or connection has ended, and how."""
        for link in self._connections:
            process = self._processes[link.rank - 1] if self._processes else None
            if process is not None and process.poll() is not None:
                return link.rank, f"it {process.exit_reason()}"
            if not self._processes and _is_closed(link.watch):
                return link.rank, "its process ended"
        return None

    def _reported_failure(self) -> tuple[int, str] | None:
        """A rank that reported a fatal error, and the error."""
        for link in self._connections:
            self._receive(link)
            for ended in self._inbox[link.rank]:
                if ended.broke:
                    return link.rank, ended.broke
        return None

    def _report_stall(self) -> None:
        """No rank makes progress: find out which one the others wait for."""
        verb = self._pulse.verb
        for link in self._connections:
            self._send(link, "stack")
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and any(
            self._may_answer(link.rank) for link in self._connections
        ):
            time.sleep(0.05)
            self._read()
        stacks = {0: self._pulse.stack(), **self._answers}
        unresponsive = [link.rank for link in self._connections if link.rank not in stacks]
        waits = {
            rank
            for rank, stack in stacks.items()
            if _waits(stack) or (self._pulse.waits and not rank)
        }
        working = [rank for rank in stacks if rank not in waits]
        least = min(self._counts)
        behind = [rank for rank, count in enumerate(self._counts) if count == least]
        named = unresponsive or (working if waits and working else behind)
        path = self._write(stacks, unresponsive)
        description = "; ".join(
            f"rank {rank}{self._place(rank)} {self._state(rank, stacks.get(rank, ''))}"
            for rank in named
        )
        self._give_up(
            f"no rank made progress for {self._timeout_s:g} s in '{verb}'. {description}. The "
            f"stacks of all ranks are in {path}",
            named,
        )

    def _may_answer(self, rank: int) -> bool:
        return rank not in self._answers and "(stopped)" not in _process_state(self._pid(rank))

    def _state(self, rank: int, stack: str) -> str:
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
        """End the other ranks, which also releases everything that waits for them."""
        with self._guard:
            if self._reason:
                return
            self._reason = reason
        for link in self._connections:
            self._send(link, f"end: {reason}")
        for process in self._processes:
            process.end(0.0)
        for link in self._connections:
            for connection in (link.talk, link.watch):
                _shut(connection)
        if 0 in culprits:  # only an exception can stop this process's own verb
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._pulse.thread), ctypes.py_object(TrainError)
            )

    def _pid(self, rank: int) -> int:
        return self._processes[rank - 1].pid if self._processes and rank else 0

    def _place(self, rank: int) -> str:
        return f" ({self._connections[rank - 1].where})" if rank else " (this process)"


def carried_out(own: Any, verb: str, arguments: tuple[Any, ...]) -> RankResult:
    try:
        return RankResult(getattr(own, verb)(*arguments))
    except RamifyError as error:
        return RankResult(error=error)


def _describe(verb: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"in '{verb}', {type(error).__name__}: {first}"


def follow(
    own: Any, pulse: RankHeartbeat, talk: Connection, watch: Connection, rank: int, timeout_s: float
) -> None:
    """Run the verbs that rank 0 sends, until it sends the end. Exit the process if rank 0 is
    gone."""
    stop = threading.Event()
    answering = threading.Thread(
        target=_answer, args=(pulse, watch, rank, timeout_s, stop), daemon=True
    )
    answering.start()
    try:
        while True:
            try:
                message = pickle.loads(talk.recv_bytes())
            except (EOFError, OSError):
                _end(rank, "rank 0 is gone")
            if message is None:
                return
            verb, arguments = message
            with pulse.doing(verb):
                try:
                    ended = carried_out(own, verb, arguments)
                except Exception as error:  # noqa: BLE001 (sent to rank 0, and raised there)
                    traceback.print_exc()
                    ended = RankResult(broke=_describe(verb, error))
            talk.send_bytes(pickle.dumps(ended))
            if ended.broke:
                _end(rank, ended.broke)
    finally:
        stop.set()
        faulthandler.cancel_dump_traceback_later()


def _answer(
    pulse: RankHeartbeat, watch: Connection, rank: int, timeout_s: float, stop: threading.Event
) -> None:
    beat_s = min(1.0, timeout_s / 10)
    quiet = 0.0
    while not stop.is_set():
        # A native thread writes the stack if this one is blocked from running.
        faulthandler.dump_traceback_later(timeout_s, file=sys.stderr)
        try:
            if not watch.poll(beat_s):
                quiet += beat_s  # counts waits, so that a suspended machine does not time out
                if quiet > timeout_s:
                    _end(rank, f"no message from rank 0 for {timeout_s:g} s")
                continue
            word = pickle.loads(watch.recv_bytes())
            if word.startswith("end: "):
                _end(rank, word.removeprefix("end: "))
            watch.send_bytes(
                pickle.dumps(
                    ("stack", pulse.stack()) if word == "stack" else ("count", pulse.count)
                )
            )
        except (EOFError, OSError):
            if stop.wait(_GRACE_S):
                return
            _end(rank, "rank 0 is gone")
        quiet = 0.0


def _end(rank: int, why: str) -> NoReturn:
    """End the process, whatever its other threads are doing."""
    text = f"rank {rank} ends: {why}"
    _log.error("rank_ended", text, rank=rank)
    print(f"ramify: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _waits(stack: str) -> bool:
    """Whether a rank is inside a collective operation: its innermost call is in
    torch.distributed."""
    places = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return bool(places) and _DISTRIBUTED in places[-1]


def _process_state(pid: int) -> str:
    """`` (State: T (stopped))``; empty if it is not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines() if pid else ():
            if line.startswith("State:"):
                return f" ({' '.join(line.split())})"
    return ""


def _is_closed(connection: Connection) -> bool:
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as peer:
            return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shut(connection: Connection) -> None:
    """Wake all readers and writers of the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.shutdown(socket.SHUT_RDWR)
