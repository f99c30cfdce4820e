"""Call a method on all ranks of a process group at once, and handle the failure of any rank.

    rank 0, the run's own process                     rank 1, 2, …
    call(verb) ── RankMethodCall ───────────────────> follow: run it, all at the same time
               <─ RankMethodResult ──────────────────

The training loop runs only in rank 0 and does not use ranks itself: otherwise it would have to run
everywhere, with the same rollouts, clock and decisions. The other ranks run verbs, and hold no
state that a run decides on.

A verb is a method that rank 0 may call on all ranks. Its annotations declare the types of its
arguments and of its result; nothing else can be sent. ``rank_monitor.py`` finds which rank is lost
or stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import traceback
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from ramify import errors
from ramify.actors.child_process import ProcessHandle, wait_then_kill
from ramify.actors.message_encoding import decode, encode
from ramify.actors.rank_monitor import (
    GRACE_S,
    ExitRankRequest,
    HeartbeatEcho,
    NonfatalRankError,
    RankConnection,
    RankMethodResult,
    RankMonitor,
    RankProgress,
    RankStackTrace,
    RankStackTraceRequest,
    WatchRequest,
)
from ramify.actors.run_channel import AuthenticatedChannel
from ramify.errors import RamifyError, TrainError
from ramify.logging import ComponentLogger

_log = ComponentLogger("train")


class RankMethodCall(msgspec.Struct, tag=True, frozen=True):
    """A message from rank 0 that asks another rank to run a method with the given arguments."""

    verb: str
    arguments: list[msgspec.Raw]
    """Arguments of the call, each encoded as the declared type of its parameter."""


class EndRankGroupRequest(msgspec.Struct, tag="EndGroupRequest", frozen=True):
    """A message from rank 0 that ends the group of ranks.

    No method call follows it.
    """


RankRequest = RankMethodCall | EndRankGroupRequest


class PeerRankFailedError(TrainError):
    """Raised on a rank that stops because another rank has failed.

    The other rank reports the actual error.
    """


class RankGroup:
    """Lets rank 0 call a method on all ranks, including itself, and collect the results.

    All ranks run the method at the same time.
    """

    def __init__(
        self,
        own: Any,
        pulse: RankProgress,
        connections: Sequence[RankConnection],
        processes: Sequence[ProcessHandle],
        timeout_s: float,
        stacks: Path,
    ) -> None:
        """Create the group of ranks on rank 0, and start to monitor the other ranks.

        ``own`` is rank 0's own object, whose methods run on all ranks together. If no rank makes
        progress for ``timeout_s`` seconds, the group is stuck. The stack traces of its ranks are
        then saved in the folder ``stacks``.
        """
        self.size = 1 + len(connections)
        self._own = own
        self._pulse = pulse
        self.connections = connections
        self.processes = processes
        self._lock = threading.Lock()
        self._watch = RankMonitor(pulse, connections, processes, timeout_s, stacks)

    def call(
        self, verb: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Run a method on every rank, and return the results in the order of the ranks.

        Each rank gets the ``shared`` arguments, followed by the arguments in its entry of ``each``.

        If ranks raise an error that does not break the group, that error is raised here. If a rank
        is lost, this call and all later ones raise TrainError.
        """
        with self._lock:
            self._watch.raise_if_rank_lost()
            with self._pulse.track_method(verb):
                for connection in self.connections:
                    own = each[connection.rank] if each else ()
                    arguments = [msgspec.Raw(encode(value)) for value in (*shared, *own)]
                    with contextlib.suppress(OSError):  # the watch thread reports why
                        connection.talk.send(RankMethodCall(verb, arguments))
                try:
                    first = _carried_out(self._own, verb, (*shared, *(each[0] if each else ())))
                except Exception as error:  # noqa: BLE001 (another rank may be the cause)
                    self._watch.declare_rank_lost(_describe(verb, error), rank=0, grace_s=GRACE_S)
                # From here on rank 0 only waits, so the monitor does not blame it for a stall.
                self._pulse.waits = True
                others = [
                    self._watch.wait_for_result(connection) for connection in self.connections
                ]
        _, kind = _method_types(self._own.__class__, verb)
        return _values_or_raise([first, *(_decode_outcome(each, kind) for each in others)])

    def rank_stack_traces(self) -> str:
        """Return the stack traces of the other ranks as text."""
        return self._watch.rank_stack_traces()

    def close(self) -> None:
        """Shut down the group's other ranks, and kill those that do not exit in time."""
        # First, because ranks that exit as they are asked to would be reported as lost.
        self._watch.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.talk.send(EndRankGroupRequest())
        wait_then_kill(self.processes, GRACE_S)
        for connection in self.connections:
            connection.talk.close()
            connection.watch.close()


class _Outcome(NamedTuple):
    """The result or error of a method called on one rank."""

    value: Any = None
    error: RamifyError | None = None


def _carried_out(own: Any, verb: str, arguments: Sequence[Any]) -> _Outcome:
    try:
        return _Outcome(getattr(own, verb)(*arguments))
    except RamifyError as error:
        # Methods raise such errors on all ranks or on none, so none waits for another afterwards.
        return _Outcome(error=error)


def _decode_outcome(result: RankMethodResult, kind: Any) -> _Outcome:
    """Decode the result or the error that another rank has sent.

    ``kind`` is the return type of the called method.
    """
    if result.error is None:
        return _Outcome(decode(result.value, kind))
    return _Outcome(error=_ERRORS.get(result.error.kind, TrainError)(result.error.text))


def _values_or_raise(ended: Sequence[_Outcome]) -> list[Any]:
    errors = [each.error for each in ended if each.error is not None]
    if errors:
        raise next(
            (error for error in errors if not isinstance(error, PeerRankFailedError)), errors[0]
        )
    return [each.value for each in ended]


_KINDS: tuple[type[RamifyError], ...] = (
    errors.ConfigError,
    errors.StoreError,
    errors.SourceError,
    TrainError,
    PeerRankFailedError,
)
_ERRORS = {kind.__name__: kind for kind in _KINDS}
"""Errors that keep their class when a rank reports them. Any other Ramify error becomes a
TrainError."""


@functools.cache
def _method_types(kind: Any, verb: str) -> tuple[list[Any], Any]:
    """Return the annotated types of a method's parameters, and its return type."""
    hints = typing.get_type_hints(getattr(kind, verb))
    value = hints.pop("return")
    return list(hints.values()), value


def _run_called_method(own: Any, call: RankMethodCall) -> RankMethodResult:
    """Run the method that rank 0 has called, and return its result as a message."""
    parameters, _ = _method_types(own.__class__, call.verb)
    # Not strict, because rank 0 need not pass arguments that have defaults.
    arguments = [decode(data, kind) for data, kind in zip(call.arguments, parameters, strict=False)]
    ended = _carried_out(own, call.verb, arguments)
    if ended.error is not None:
        return RankMethodResult(
            error=NonfatalRankError(type(ended.error).__name__, str(ended.error))
        )
    return RankMethodResult(value=msgspec.Raw(encode(ended.value)))


def _describe(verb: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"in '{verb}', {type(error).__name__}: {first}"


def serve_rank_zero(
    own: Any,
    pulse: RankProgress,
    talk: AuthenticatedChannel,
    watch: AuthenticatedChannel,
    rank: int,
    timeout_s: float,
) -> None:
    """Run the methods that rank 0 calls, until rank 0 ends the group.

    If rank 0 is gone, or a method fails with an unexpected error, exit this process.
    """
    stop = threading.Event()
    answering = threading.Thread(
        target=_answer_watch_requests, args=(pulse, watch, rank, timeout_s, stop), daemon=True
    )
    answering.start()
    try:
        while True:
            try:
                request: RankRequest = talk.receive(RankRequest)
            except (EOFError, OSError):
                _exit_rank(rank, "rank 0 is gone")
            if isinstance(request, EndRankGroupRequest):
                return
            with pulse.track_method(request.verb):
                try:
                    ended = _run_called_method(own, request)
                except Exception as error:  # noqa: BLE001 (sent to rank 0, and raised there)
                    traceback.print_exc()
                    ended = RankMethodResult(broke=_describe(request.verb, error))
            talk.send(ended)
            # Others may wait for this rank in a collective operation, so the group cannot continue.
            if ended.broke:
                _exit_rank(rank, ended.broke)
    finally:
        stop.set()
        faulthandler.cancel_dump_traceback_later()


def _answer_watch_requests(
    pulse: RankProgress,
    watch: AuthenticatedChannel,
    rank: int,
    timeout_s: float,
    stop: threading.Event,
) -> None:
    """Answer rank 0's heartbeat and stack-trace requests until ``stop`` is set.

    Exit this process if rank 0 asks for it, is gone, or is silent for ``timeout_s`` seconds.
    """
    beat_s = min(1.0, timeout_s / 10)
    quiet = 0.0
    while not stop.is_set():
        # If this thread cannot run, since another holds the GIL, a native thread writes the stack.
        faulthandler.dump_traceback_later(timeout_s, file=sys.stderr)
        try:
            if not watch.poll(beat_s):
                quiet += beat_s  # counts waits, so that a suspended machine does not time out
                if quiet > timeout_s:
                    _exit_rank(rank, f"no message from rank 0 for {timeout_s:g} s")
                continue
            request: WatchRequest = watch.receive(WatchRequest)
            if isinstance(request, ExitRankRequest):
                _exit_rank(rank, request.reason)
            asks_stack = isinstance(request, RankStackTraceRequest)
            watch.send(
                RankStackTrace(pulse.stack_trace()) if asks_stack else HeartbeatEcho(pulse.count)
            )
        except (EOFError, OSError):
            # Rank 0 may have ended the group, which the thread that runs its methods then sees.
            if stop.wait(GRACE_S):
                return
            _exit_rank(rank, "rank 0 is gone")
        quiet = 0.0


def _exit_rank(rank: int, why: str) -> NoReturn:
    """Log the reason and exit this process at once, whatever its other threads are doing."""
    text = f"rank {rank} ends: {why}"
    _log.error("rank_ended", text, rank=rank)
    print(f"ramify: {text}", file=sys.stderr, flush=True)
    os._exit(1)
