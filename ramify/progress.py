"""How far long work is: said by whoever does it, heard by whoever shows it.

    with doing("reading", unit="bytes") as work:        any floor says it: loading, tokenising, evaluating, a stage of training
        work.at(12_000, note="server.log")
    with heard(listener): …                             a face hears it: ``cli/progress_screen.py``
    moved()                                             a part of it too small to be told, as a batch of a step, is done
    with felt(pulse): …                                 for who must know that nothing stands still: ``train/watchdog.py``

It is for the whole process, as logging is, so that no floor passes a listener on to the next. Where
nobody listens it costs an attribute and a comparison, and whoever works need not count calls: a
listener thins out what it is told. What happens in a run (``types/event.py``) and what a step of
training measures (``train/metrics.py``) have streams of their own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import msgspec

_ids = itertools.count()
_listeners: tuple[Listener, ...] = ()
_pulses: tuple[Callable[[], object], ...] = ()


class ProgressState(msgspec.Struct, frozen=True):
    """How far one piece of work is."""

    id: int
    """Of the piece of work, in order of beginning."""
    what: str
    """``reading``, ``evaluating test``"""
    done: float
    """In ``unit``."""
    total: float | None
    """In ``unit``; None where it is not known before the end."""
    unit: str
    """``bytes``, ``steps``, …; empty for work that is not counted."""
    note: str
    """What it is at, or what came of it so far: a file's name, an average."""
    is_over: bool = False
    first: float = 0.0
    """What ``done`` began with, where work goes on that was stopped before; in ``unit``."""


Listener = Callable[[ProgressState], None]
"""Called in whichever thread the work is done; must be quick."""


class ProgressTask:
    """One piece of work, for whoever does it."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        note: str = "",
        first: float = 0.0,
    ) -> None:
        self.id, self.what, self.total, self.unit, self.note = next(_ids), what, total, unit, note
        self.done = self.first = first

    def at(self, done: float, note: str | None = None) -> None:
        """It is ``done`` far; ``note``, where given, replaces the last one."""
        self.done = done
        if note is not None:
            self.note = note
        if _listeners:
            self._tell()

    def more(self, num: float = 1, note: str | None = None) -> None:
        """``num`` more is done."""
        self.at(self.done + num, note)

    def _tell(self, is_over: bool = False) -> None:
        now = ProgressState(
            self.id, self.what, self.done, self.total, self.unit, self.note, is_over, self.first
        )
        for listener in _listeners:
            listener(now)


@contextlib.contextmanager
def report_progress(
    what: str, total: float | None = None, unit: str = "", note: str = "", first: float = 0.0
) -> Iterator[ProgressTask]:
    """A piece of work that lasts as long as the block, however it ends; ``first`` of it was done
    before."""
    work = ProgressTask(what, total, unit, note, first)
    work._tell()
    try:
        yield work
    finally:
        work._tell(is_over=True)


@contextlib.contextmanager
def subscribe(listener: Listener) -> Iterator[None]:
    """``listener`` is told of all work, in any thread, as long as the block lasts."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(each for each in _listeners if each is not listener)


def heartbeat() -> None:
    """Long work gets on, in any thread."""
    for pulse in _pulses:
        pulse()


@contextlib.contextmanager
def on_heartbeat(pulse: Callable[[], object]) -> Iterator[None]:
    """``pulse`` is called whenever something ``heartbeat``, as long as the block lasts; it must be
    quick."""
    global _pulses
    _pulses = (*_pulses, pulse)
    try:
        yield
    finally:
        at = _pulses.index(pulse)
        _pulses = _pulses[:at] + _pulses[at + 1 :]
