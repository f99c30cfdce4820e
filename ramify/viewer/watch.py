"""One run while it is looked at: its tree so far, brought up to date by reading what its journal gained.

    journal ── bytes from where the last look ended ──> events ──> Fold (the tree) + what a picture needs beside it

What a tree does not keep, and a picture needs, is noted here: when each request was sent and answered, what is being
asked now, retries and notes. A line that cannot be read ends the reading; what came before it stays, with the problem.
A run of a file of trajectories is read once and does not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import writer
from ramify.store.reading import decode_line, lines
from ramify.types.event import (
    AnyEvent,
    Attempted,
    CallEnded,
    CallStarted,
    Fold,
    Noted,
    Replied,
    Requested,
    RunEnded,
    RunStarted,
    ToolAnswered,
)
from ramify.types.message import Message
from ramify.types.trajectory import SCHEMA_VERSION, Call, Stop, Trajectory
from ramify.viewer.library import Found, kind_of, newer


class Pending(msgspec.Struct, frozen=True):
    """A request that has no reply yet."""

    turn: int
    reused: int
    prompt: tuple[Message, ...]
    at_s: float


class Note(msgspec.Struct, frozen=True):
    """Something worth telling that happened in a call."""

    at_s: float
    turn: int
    kind: str
    """``attempt`` for a request that failed, ``note`` for the rest."""
    text: str


class CallWatch(msgspec.Struct):
    """What is known of a call beside its part of the tree."""

    index: int
    """In ``Trajectory.calls``."""
    spans: list[float] = msgspec.field(default_factory=list)
    """Sent, answered, sent, answered …: seconds since the run began; odd in number while a request is out."""
    pending: Pending | None = None
    notes: list[Note] = msgspec.field(default_factory=list)
    last_word: Stop | None = None
    is_running: bool = False
    """It has a reply whose code runs."""
    version: int = 0
    """Of the run when this call last changed."""


class Watched:
    """The run at ``found``. ``refresh`` reads on; nothing here waits or runs by itself."""

    def __init__(self, found: Found) -> None:
        self.key, self.path, self.line = found.key, found.path, found.line
        self.problem = ""
        """Why reading ended early; empty while all is well."""
        self.at_s = 0.0
        """Seconds since the run began, at its last event."""
        self.is_alive = False
        """Whether a process writes it now."""
        self.calls: dict[str, CallWatch] = {}
        self.version = 0
        """Counts up with every event."""
        self._fold = Fold()
        self.offset = self._number = 0
        self._is_read = False

    @property
    def trajectory(self) -> Trajectory:
        return self._fold.trajectory

    @property
    def is_over(self) -> bool:
        return self.trajectory.stop is not None

    def size_changed(self) -> bool:
        """Whether there is something new to read; one system call."""
        try:
            return self.line is None and not self.problem and self.path.stat().st_size > self.offset
        except OSError:
            return False

    def is_stale(self) -> bool:
        """Whether the file is not the one that was read: shorter, replaced, or another line's."""
        try:
            stat = self.path.stat()
        except OSError:
            return self._stamp is not None
        if self.line is not None:
            return self._stamp not in (None, (stat.st_ino, stat.st_mtime_ns))
        return stat.st_size < self.offset or bool(self.problem)

    _stamp: tuple[int, int] | None = None

    def refresh(self) -> set[int]:
        """Read what is new; the indices of the calls that changed."""
        if self.line is not None:
            return set() if self._is_read else self._read_line()
        if self.problem:
            return set()
        self.is_alive = writer(self.path) is not None  # asked first: what its last act wrote is read below
        changed: set[int] = set()
        if not self.offset and not self.is_alive and (kind := self._kind()) != "journal":
            self.problem = kind
            return changed
        try:
            for line in lines(self.path, self.offset):
                self._number += 1
                self._apply(decode_line(line, self.path, self._number), changed)
                self.offset += len(line) + 1
        except StoreError as error:
            self.problem = str(error)
        except (KeyError, IndexError) as error:
            self.problem = f"{self.path}, line {self._number} does not follow from those before it: no {error}"
        except ValueError as error:
            self.problem = f"{self.path}, line {self._number} is damaged: {error}; the events before it are shown"
        if not self.problem and not self.is_alive:
            self._look_at_the_end()
        return changed

    def _kind(self) -> str:
        try:
            kind = kind_of(self.path)
        except OSError as error:
            return f"cannot read {self.path}: {error.strerror}"
        return (
            f"{self.path} holds trajectories, one a line: name one, as {self.path.name}:1"
            if kind == "trajectory"
            else kind
        )

    @property
    def torn(self) -> str:
        """What a writer that was killed left at the end of the journal; empty where all lines are whole."""
        return self._torn

    _torn = ""

    def _look_at_the_end(self) -> None:
        try:
            rest = self.path.stat().st_size - self.offset
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
            return
        self._torn = f"{self.path} ends in the middle of a line ({rest:,} bytes): its writer was killed" if rest else ""

    def _apply(self, event: AnyEvent, changed: set[int]) -> None:
        if not self._number - 1 and not isinstance(event, RunStarted):
            raise StoreError(f"{self.path} is not a run: its first line is a {type(event).__name__}, not a RunStarted")
        self._fold.apply(event)
        self.at_s = max(self.at_s, event.at_s)
        self.version += 1
        if isinstance(event, RunStarted | RunEnded | ToolAnswered):
            return
        if isinstance(event, Noted) and event.call not in self.calls:
            return
        if isinstance(event, CallStarted):
            call = self.calls[event.id] = CallWatch(len(self.trajectory.calls) - 1)
        elif isinstance(event, CallEnded):
            call = self.calls[event.id]
            call.pending, call.is_running = None, False
            if len(call.spans) % 2:
                call.spans.append(event.at_s)
        else:
            call = self.calls[event.call]
            self._follow(call, event)
        call.version = self.version
        changed.add(call.index)

    def _follow(self, call: CallWatch, event: AnyEvent) -> None:
        match event:
            case Requested():
                call.pending = Pending(event.turn, event.reused, event.prompt, event.at_s)
                call.spans.append(event.at_s)
                call.last_word, call.is_running = event.last_word, False
            case Replied():
                call.pending, call.is_running = None, True
                call.spans.append(event.at_s)
            case Attempted():
                call.notes.append(Note(event.at_s, event.turn, "attempt", event.error))
            case Noted():
                turn = call.pending.turn if call.pending else len(self.trajectory.calls[call.index].turns)
                call.notes.append(Note(event.at_s, turn, "note", event.text))

    def _read_line(self) -> set[int]:
        self._is_read = True
        try:
            stat = self.path.stat()
            self._stamp = (stat.st_ino, stat.st_mtime_ns)
            line = _nth_line(self.path, self.line or 1)
            version = msgspec.json.decode(line, type=dict[str, Any]).get("schema_version", 0)
            if version > SCHEMA_VERSION:
                raise StoreError(newer(self.path, self.line or 1, version))
            self._fold.trajectory = msgspec.json.decode(line, type=Trajectory)
        except StoreError as error:
            self.problem = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            self.problem = f"{self.path}, line {self.line} is damaged: {error}"
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
        for index, call in enumerate(self.trajectory.calls):
            self.calls[call.id] = CallWatch(index)
            self.at_s = max(self.at_s, call.ended_s or 0.0)
        self.at_s = max(self.at_s, self.trajectory.seconds)
        self.version += 1
        return set(range(len(self.trajectory.calls)))

    def call(self, id: str) -> tuple[Call, CallWatch]:
        """Raises StoreError where the run has no such call."""
        watch = self.calls.get(id)
        if watch is None:
            raise StoreError(f"run {self.trajectory.id or self.key} has no call {id!r}")
        return self.trajectory.calls[watch.index], watch


def _nth_line(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        for index, line in enumerate(file, start=1):
            if index == number:
                return line
    raise StoreError(f"{path} has no line {number}")
