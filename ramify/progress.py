"""Progress reporting for long tasks.

The code that does the work reports its progress, and front ends display it.

    with track_progress("reading", unit="bytes") as task:    loading, tokenizing, evaluating, …
        task.at(12_000, note="server.log")
    with subscribe(listener): …              a front end displays it: ``cli/progress_display.py``
    heartbeat()                              a small part is done, such as one batch of a step
    with on_heartbeat(callback): …           detects work that hangs: ``train/stall_watchdog.py``
    report_reply_text(run, call, turn, …)    a part of a model's reply has arrived
    with watch_reply_text(run, listener): …  a front end shows it, before the reply is recorded

Progress is global to the process, as logging is, so listeners are not passed down through the
layers. Without a listener, a report costs one attribute and one comparison. Code that reports
progress need not throttle its calls, since listeners do that. With ``RAMIFY_LOG=progress=info``,
each task writes a log record at its beginning, every ten seconds, and at its end.

The events of a run are in ``types/event.py``, and the metrics of a training step in
``train/metrics.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from logging import INFO

import msgspec

from ramify.logging import ComponentLogger

_log = ComponentLogger("progress")
_RECORD_EVERY_S = 10.0
_ids = itertools.count()
_listeners: tuple[Listener, ...] = ()
_pulses: tuple[Callable[[], object], ...] = ()


class ProgressState(msgspec.Struct, frozen=True):
    """The progress of one long task at one moment, as passed to progress listeners."""

    id: int
    """Number of the task, in order of creation."""
    what: str
    """Description of the work, such as ``reading`` or ``evaluating test``."""
    done: float
    """Amount of work done so far, in ``unit``."""
    total: float | None
    """Total amount of work in ``unit``, or None if it is not known in advance."""
    unit: str
    """Unit of the amounts, such as ``bytes`` or ``steps``. Empty if the work is not counted."""
    note: str
    """Current item or latest result, such as a file name or an average."""
    is_over: bool = False
    first: float = 0.0
    """Initial value of ``done`` if earlier work is resumed, in ``unit``."""


class ReplyTextDelta(msgspec.Struct, frozen=True):
    """A piece of a model's reply that has just arrived.

    The run's journal records only complete replies.
    """

    run: str
    call: str
    turn: int
    text: str
    reasoning: str
    is_first: bool
    """True for the first piece of an attempt. Text of earlier attempts must then be discarded."""


TextListener = Callable[[ReplyTextDelta], None]
"""Callback for pieces of replies. It is called in the run's event loop and must return quickly."""
_text_listeners: dict[str, tuple[TextListener, ...]] = {}
"""Run id -> listeners of that run's replies."""
Listener = Callable[[ProgressState], None]
"""Callback for progress. It is called in the thread that does the work and must return quickly."""


class ProgressReporter:
    """A handle for reporting the progress of one task."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        note: str = "",
        first: float = 0.0,
    ) -> None:
        self.id = next(_ids)
        self.what = what
        self.total = total
        self.unit = unit
        self.note = note
        self.done = first
        self.first = first
        self._recorded_at = -math.inf

    def set_progress(self, done: float, note: str | None = None) -> None:
        """Report how much of the work on a long task is done.

        If ``note`` is given, it replaces the previous note.
        """
        self.done = done
        if note is not None:
            self.note = note
        if _listeners or _log.is_enabled_for(INFO):
            self._notify()

    def advance(self, num: float = 1) -> None:
        """Add to the amount of work that is done."""
        self.set_progress(self.done + num)

    def _notify(self, is_over: bool = False) -> None:
        state = ProgressState(
            self.id, self.what, self.done, self.total, self.unit, self.note, is_over, self.first
        )
        if _log.is_enabled_for(INFO):
            self._record(is_over)
        for listener in _listeners:
            listener(state)

    def _record(self, is_over: bool) -> None:
        now = time.monotonic()
        if is_over or now - self._recorded_at >= _RECORD_EVERY_S:
            self._recorded_at = now
            amount = f"{self.done:g}" if self.total is None else f"{self.done:g} of {self.total:g}"
            text = f"{self.what}: {amount} {self.unit}".rstrip()
            _log.info(
                "progress", text, done=self.done, total=self.total, note=self.note, over=is_over
            )


@contextlib.contextmanager
def track_progress(
    what: str, total: float | None = None, unit: str = "", note: str = "", first: float = 0.0
) -> Iterator[ProgressReporter]:
    """Report the progress of a task while a ``with`` block runs.

    The task ends with the block, even after an error. ``total`` is the amount of work in ``unit``,
    of which ``first`` was done before.
    """
    task = ProgressReporter(what, total, unit, note, first)
    task._notify()
    try:
        yield task
    finally:
        task._notify(is_over=True)


@contextlib.contextmanager
def subscribe(listener: Listener) -> Iterator[None]:
    """Call a listener for every progress update, of any task in any thread, during a ``with``
    block.

    Example:
        with ramify.subscribe(lambda state: print(state.what, state.done, state.unit)):
            ramify.load("logs/")
    """
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(other for other in _listeners if other is not listener)


def heartbeat() -> None:
    """Report that long work is still making progress, so that a watchdog does not consider it hung.

    May be called from any thread.
    """
    for pulse in _pulses:
        pulse()


@contextlib.contextmanager
def on_heartbeat(pulse: Callable[[], object]) -> Iterator[None]:
    """Call a function at every ``heartbeat()`` while a ``with`` block runs.

    The function must return quickly.
    """
    global _pulses
    _pulses = (*_pulses, pulse)
    try:
        yield
    finally:
        at = _pulses.index(pulse)
        _pulses = _pulses[:at] + _pulses[at + 1 :]


def report_reply_text(
    run: str, call: str, turn: int, text: str, reasoning: str, is_first: bool
) -> None:
    """Send a piece of a model's reply to the listeners of its run."""
    for listener in _text_listeners.get(run, ()):
        listener(ReplyTextDelta(run, call, turn, text, reasoning, is_first))


@contextlib.contextmanager
def watch_reply_text(run: str, listener: TextListener) -> Iterator[None]:
    """Call a listener with the text of a run's replies as it arrives, while a ``with`` block
    runs."""
    _text_listeners[run] = (*_text_listeners.get(run, ()), listener)
    try:
        yield
    finally:
        rest = tuple(other for other in _text_listeners[run] if other is not listener)
        if rest:
            _text_listeners[run] = rest
        else:
            del _text_listeners[run]
