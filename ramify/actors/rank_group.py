"""A group of ranks that work together, and how it handles a rank that fails.

    rank 0, the run's own process                     rank 1, 2, …
    call(verb) ── verb, arguments ──────────────────> follow: run it, all at the same time
               <─ value, or error ───────────────────

The training loop runs only in rank 0 and does not use ranks itself: otherwise it would have to run
everywhere, with the same rollouts, clock and decisions. The other ranks run verbs, and hold no
state that a run decides on.

``rank_watch.py`` finds which rank is lost or stuck. Messages are pickled: they pass only between
processes that one user started and that authenticate with a key.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from ramify.actors.child_process import Process, end_when_done
from ramify.actors.rank_watch import GRACE_S, RankConnection, RankHeartbeat, RankResult, RankWatch
from ramify.errors import RamifyError, TrainError
from ramify.logging import RoomLogger

_log = RoomLogger("train")


class RemoteRankError(TrainError):
    """This rank stops because another rank has an error, which that rank reports."""


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
        self._watch = RankWatch(pulse, connections, processes, timeout_s, stacks)

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
                    self._watch.lose(_describe(verb, error), rank=0, grace_s=GRACE_S)
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
        end_when_done(self.processes, GRACE_S)
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
            if stop.wait(GRACE_S):
                return
            _end(rank, "rank 0 is gone")
        quiet = 0.0


def _end(rank: int, why: str) -> NoReturn:
    """End the process, whatever its other threads are doing."""
    text = f"rank {rank} ends: {why}"
    _log.error("rank_ended", text, rank=rank)
    print(f"ramify: {text}", file=sys.stderr, flush=True)
    os._exit(1)
