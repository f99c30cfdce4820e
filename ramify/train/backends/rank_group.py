"""Ranks that work together, and what is done when one of them does not.

    rank 0, the run's own process                        rank 1, 2, …
    call(verb) ── verb, arguments ─────────────────────> follow: carry it out, all at the same time
               <─ value, or error ──────────────────────
    watch      ── "ping", each second ─────────────────> watch: answers from a thread of its own
               <─ how often it got on, what it is doing

The one loop of training runs in rank 0 and knows of no ranks: it would otherwise have to run
everywhere, with the same rollouts, the same clock and the same decisions on each. Others carry
verbs out, and hold nothing that a run decides.

A rank that ends is noticed by its connection, one that stands still by this: nobody gets on for
``timeout_s`` while a verb is carried out. Then every rank's stack is asked for; those that wait
inside torch.distributed wait for another one, and the others are named. Whoever waits for a rank
that is gone is released, since all others are ended, and with them their connections. What is sent
here is pickled, between processes that one user started and that prove it with a key.
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
from typing import Any, NamedTuple, NoReturn, Protocol

from ramify.errors import RamifyError, TrainError
from ramify.progress import heartbeat

_GRACE_S = 5.0
"""How long others are waited for once something is wrong."""
_DISTRIBUTED = os.path.join("torch", "distributed")


class RemoteRankError(TrainError):
    """This rank stops because another one has a reason to, which that one tells."""


class RankHeartbeat:
    """How far this rank is, for those who watch it."""

    def __init__(self) -> None:
        self.count = 0
        self.verb = ""
        """What it carries out; empty while it waits for work."""
        self.thread = 0
        self.waits = False
        """Whether it has done its part, and waits for what others say."""

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
        """Where the thread is that carries out the verb, outermost call first."""
        frame = sys._current_frames().get(self.thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class RankConnection(NamedTuple):
    """Rank 0's connections to another rank."""

    rank: int
    talk: Connection
    watch: Connection
    where: str
    """Host and process id, for people."""


class RankProcess(Protocol):
    """A rank that this process started."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class RankResult(NamedTuple):
    """How a rank carried a verb out."""

    value: Any = None
    said: RamifyError | None = None
    """An error that every rank has, after which work may go on."""
    broke: str = ""
    """Any other, after which it may not."""


class RankGroup:
    """All ranks, as rank 0 has them."""

    def __init__(
        self,
        own: Any,
        pulse: RankHeartbeat,
        links: Sequence[RankConnection],
        processes: Sequence[RankProcess],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        """``own``: the object whose methods are the verbs, on this rank. ``stacks``: a folder for
        the stacks of ranks when one stands still."""
        self.size = 1 + len(links)
        self._own, self._pulse, self._links, self.processes = own, pulse, links, processes
        self._lock = threading.Lock()
        self._watch = _Watch(pulse, links, processes, timeout_s, stacks)

    def call(
        self, verb: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Carry ``verb`` out on every rank, with ``shared`` arguments and after them those that
        ``each`` has for a rank. The values, by rank. Raises what the ranks raise; TrainError, from
        then on always, where one is lost."""
        with self._lock:
            self._watch.check()
            with self._pulse.doing(verb):
                for link in self._links:
                    with contextlib.suppress(OSError):  # the watch finds out why
                        link.talk.send_bytes(
                            pickle.dumps((verb, (*shared, *(each[link.rank] if each else ()))))
                        )
                try:
                    ended = [carried_out(self._own, verb, (*shared, *(each[0] if each else ())))]
                except Exception as error:  # noqa: BLE001 (another rank may be the cause)
                    self._watch.lose(_told(verb, error), rank=0, grace_s=_GRACE_S)
                self._pulse.waits = True
                ended += [self._watch.ended(link) for link in self._links]
        return self._values(ended)

    def stacks(self) -> str:
        """Where the other ranks are, as text."""
        return self._watch.stacks()

    def close(self) -> None:
        """Let the other ranks end, and see to it that they do."""
        self._watch.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.talk.send_bytes(pickle.dumps(None))
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            if process.poll() is None:
                process.kill()
            process.wait()
        for link in self._links:
            link.talk.close()
            link.watch.close()

    def _values(self, ended: Sequence[RankResult]) -> list[Any]:
        said = [each.said for each in ended if each.said is not None]
        if said:
            raise next((error for error in said if not isinstance(error, RemoteRankError)), said[0])
        return [each.value for each in ended]


class _Watch:
    """Looks after the ranks, in a thread of its own, until something is wrong or it is closed."""

    def __init__(
        self,
        pulse: RankHeartbeat,
        links: Sequence[RankConnection],
        processes: Sequence[RankProcess],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        self._pulse, self._links, self._processes = pulse, links, processes
        self._timeout_s, self._stacks = timeout_s, stacks
        self._beat_s = min(1.0, timeout_s / 10)
        self._reason = ""
        """Why the team is no more."""
        self._guard = threading.Lock()
        self._counts = [0] * (1 + len(links))
        self._inbox: dict[int, list[RankResult]] = {link.rank: [] for link in links}
        """What ranks said and nobody has taken yet."""
        self._answers: dict[int, str] = {}
        """Rank -> its stack, once it was asked for."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ramify-ranks", daemon=True)
        if links:
            self._thread.start()

    def check(self) -> None:
        """Raises TrainError where a rank was lost."""
        if self._reason:
            raise TrainError(self._reason)

    def lose(self, why: str, rank: int, grace_s: float = 0.0) -> NoReturn:
        """Rank ``rank`` is lost; within ``grace_s`` it may turn out that another one was the cause.
        Ends all others."""
        until = time.monotonic() + grace_s
        while not self._reason and time.monotonic() < until and self._links:
            if other := self._told() or self._dead():
                rank, why = other
                break
            time.sleep(0.02)
        self._give_up(f"rank {rank}{self._place(rank)} is lost: {why}")
        raise TrainError(self._reason)

    def ended(self, link: RankConnection) -> RankResult:
        """How the rank ended its verb, once it has. Raises TrainError where a rank was lost."""
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
        if self._links:
            self._thread.join()

    def _run(self) -> None:
        last, quiet_s = list(self._counts), 0.0
        while not self._closing.wait(self._beat_s) and not self._reason:
            quiet_s += (
                self._beat_s
            )  # counted in waits, so that a process that was stopped for a while has not waited
            for link in self._links:
                self._send(link, "ping")
            self._read()
            if (dead := self._dead()) is not None and not self._closing.is_set():
                rank, why = self._told() or dead
                self._give_up(f"rank {rank}{self._place(rank)} is lost: {why}")
                return
            self._counts[0] = self._pulse.count
            if self._counts != last:
                heartbeat()
            if self._counts != last or not self._pulse.verb:
                last, quiet_s = list(self._counts), 0.0
            elif quiet_s > self._timeout_s:
                self._stalled()
                return

    def stacks(self) -> str:
        """Of the other ranks; what one does not tell in time is said to be missing."""
        self._answers.clear()
        for link in self._links:
            self._send(link, "stack")
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and any(self._may_answer(link.rank) for link in self._links):
            time.sleep(0.05)  # the watching thread reads
        found = [
            (link.rank, self._answers.get(link.rank, "it did not answer\n")) for link in self._links
        ]
        return "\n".join(f"rank {rank}{self._place(rank)}\n{stack}" for rank, stack in found)

    def _send(self, link: RankConnection, word: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            link.watch.send_bytes(pickle.dumps(word))

    def _read(self) -> None:
        for link in self._links:
            with contextlib.suppress(EOFError, OSError):
                while link.watch.poll():
                    kind, value = pickle.loads(link.watch.recv_bytes())
                    if kind == "count":
                        self._counts[link.rank] = value
                    else:
                        self._answers[link.rank] = value

    def _dead(self) -> tuple[int, str] | None:
        """A rank whose process or connection has ended, and how."""
        for link in self._links:
            code = self._processes[link.rank - 1].poll() if self._processes else None
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
                return link.rank, f"its process ended ({how})"
            if not self._processes and _is_closed(link.watch):
                return link.rank, "its process ended"
        return None

    def _told(self) -> tuple[int, str] | None:
        """A rank that has said what broke it."""
        for link in self._links:
            self._receive(link)
            for ended in self._inbox[link.rank]:
                if ended.broke:
                    return link.rank, ended.broke
        return None

    def _stalled(self) -> None:
        """Nobody gets on: find out for whom the others wait."""
        verb = self._pulse.verb
        for link in self._links:
            self._send(link, "stack")
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and any(self._may_answer(link.rank) for link in self._links):
            time.sleep(0.05)
            self._read()
        stacks = {0: self._pulse.stack(), **self._answers}
        zero_variance = [link.rank for link in self._links if link.rank not in stacks]
        waits = {
            rank
            for rank, stack in stacks.items()
            if _waits(stack) or (self._pulse.waits and not rank)
        }
        working = [rank for rank in stacks if rank not in waits]
        least = min(self._counts)
        behind = [rank for rank, count in enumerate(self._counts) if count == least]
        named = zero_variance or (working if waits and working else behind)
        path = self._write(stacks, zero_variance)
        told = "; ".join(
            f"rank {rank}{self._place(rank)} {self._state(rank, stacks.get(rank, ''))}"
            for rank in named
        )
        self._give_up(
            f"no rank got on for {self._timeout_s:g} s in '{verb}'. {told}. The stacks of all "
            f"ranks are in {path}",
            named,
        )

    def _may_answer(self, rank: int) -> bool:
        return rank not in self._answers and "(stopped)" not in _process_state(self._pid(rank))

    def _state(self, rank: int, stack: str) -> str:
        if stack:
            return f"stands at {' '.join(stack.splitlines()[-2].split())}"
        return f"does not answer{_process_state(self._pid(rank))}; what it could tell of its stack is on stderr"

    def _write(self, stacks: dict[int, str], zero_variance: Sequence[int]) -> Path:
        self._stacks.mkdir(parents=True, exist_ok=True)
        path = self._stacks / "stalled-ranks.txt"
        parts = [
            f"rank {rank}, {self._counts[rank]} ticks\n{stack}"
            for rank, stack in sorted(stacks.items())
        ]
        parts += [
            f"rank {rank} did not answer{_process_state(self._pid(rank))}\n"
            for rank in zero_variance
        ]
        path.write_text("\n".join(parts))
        return path

    def _give_up(self, reason: str, culprits: Sequence[int] = ()) -> None:
        """End the others, so that who waits for them waits no longer."""
        with self._guard:
            if self._reason:
                return
            self._reason = reason
        for link in self._links:
            self._send(link, f"end: {reason}")
        for process in self._processes:
            process.kill()
            process.wait()
        for link in self._links:
            for connection in (link.talk, link.watch):
                _shut(connection)
        if 0 in culprits:  # nobody else can end what this process does
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._pulse.thread), ctypes.py_object(TrainError)
            )

    def _pid(self, rank: int) -> int:
        return self._processes[rank - 1].pid if self._processes and rank else 0

    def _place(self, rank: int) -> str:
        return f" ({self._links[rank - 1].where})" if rank else " (this process)"


def carried_out(own: Any, verb: str, arguments: tuple[Any, ...]) -> RankResult:
    try:
        return RankResult(getattr(own, verb)(*arguments))
    except RamifyError as error:
        return RankResult(said=error)


def _told(verb: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"in '{verb}', {type(error).__name__}: {first}"


def follow(
    own: Any, pulse: RankHeartbeat, talk: Connection, watch: Connection, rank: int, timeout_s: float
) -> None:
    """Carry out what rank 0 says, until it says that this was all. A process whose rank 0 is gone
    ends."""
    stop = threading.Event()
    answering = threading.Thread(
        target=_answer, args=(pulse, watch, rank, timeout_s, stop), daemon=True
    )
    answering.start()
    try:
        while True:
            try:
                told = pickle.loads(talk.recv_bytes())
            except (EOFError, OSError):
                _end(rank, "rank 0 is gone")
            if told is None:
                return
            verb, arguments = told
            with pulse.doing(verb):
                try:
                    ended = carried_out(own, verb, arguments)
                except Exception as error:  # noqa: BLE001 (told to rank 0, and raised there)
                    traceback.print_exc()
                    ended = RankResult(broke=_told(verb, error))
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
        # Written by a thread without the interpreter, where something keeps this one from it
        faulthandler.dump_traceback_later(timeout_s, file=sys.stderr)
        try:
            if not watch.poll(beat_s):
                quiet += beat_s  # counted in waits, so that a machine that slept has not waited
                if quiet > timeout_s:
                    _end(rank, f"rank 0 has not been heard of for {timeout_s:g} s")
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
    """End the process, whatever its other threads are in the middle of."""
    print(f"ramify: rank {rank} ends: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _waits(stack: str) -> bool:
    """Whether a rank is inside a collective: its innermost call is one of torch.distributed."""
    places = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return bool(places) and _DISTRIBUTED in places[-1]


def _process_state(pid: int) -> str:
    """`` (State: T (stopped))``; nothing where it cannot be known."""
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
    """Wake whoever reads or writes it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.shutdown(socket.SHUT_RDWR)
