"""One run while it is looked at: its tree so far, brought up to date by reading what its journal gained.

    journal ── bytes from where the last look ended ──> glances (glance.py) ──> Tree (tree.py)
                    └── the lines of one call, when it is opened ──> Whole (whole.py)

A line that cannot be read ends the reading; what came before it stays, with the problem. A run of a file of trajectories
is read once and does not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import writer
from ramify.store.reading import blocks
from ramify.types.event import RunStarted
from ramify.types.trajectory import SCHEMA_VERSION, Trajectory
from ramify.viewer.glance import glances
from ramify.viewer.kinds import Found, kind_of, newer
from ramify.viewer.tree import Tree
from ramify.viewer.whole import Whole, Wholes


class Watched:
    """The run at ``found``. ``refresh`` reads on; nothing here waits or runs by itself."""

    def __init__(self, found: Found) -> None:
        self.key, self.path, self.line = found.key, found.path, found.line
        self.problem = ""
        """Why reading ended early; empty while all is well."""
        self.torn = ""
        """What a writer that was killed left at the end of the journal; empty where all lines are whole."""
        self.is_alive = False
        """Whether a process writes it now."""
        self.tree = Tree()
        self.offset = 0
        """Bytes that were read."""
        self._stamp: tuple[int, int] | None = None
        self._wholes = Wholes(self.path)

    @property
    def version(self) -> int:
        return self.tree.version

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

    def whole(self, id: str) -> Whole:
        """Call ``id`` in full. Raises StoreError where the run has no such call, or it cannot be read."""
        node = self.tree.nodes.get(id)
        if node is None:
            raise StoreError(f"run {self.tree.run.id or self.key} has no call {id!r}")
        if self.line is not None:
            return Whole(self.tree.run.calls[node.index])
        return self._wholes.of(self.tree, node)

    def refresh(self) -> set[int]:
        """Read what is new; the indices of the calls that changed."""
        if self.line is not None:
            return set() if self.version else self._read_line(self.line)
        if self.problem:
            return set()
        self.is_alive = writer(self.path) is not None  # asked first: what its last act wrote is read below
        changed: set[int] = set()
        if not self.offset and not self.is_alive and (problem := self._not_a_journal()):
            self.problem = problem
            return changed
        try:
            self._read_on(changed)
        except StoreError as error:
            self.problem = str(error)
        except (KeyError, IndexError) as error:
            self.problem = f"{self.path}, line {self.version + 1} does not follow from those before it: no {error}"
        if not self.problem and not self.is_alive:
            self._look_at_the_end()
        return changed

    def _read_on(self, changed: set[int]) -> None:
        tree, apply, add, offset = self.tree, self.tree.apply, changed.add, self.offset
        try:
            for block in blocks(self.path, offset):
                for event, size in glances(block, self.path, tree.version + 1):
                    if not offset and not isinstance(event, RunStarted):
                        raise StoreError(f"{self.path} is not a run: its first line is no RunStarted")
                    node = apply(event, offset)
                    offset += size
                    if node is not None:
                        add(node.index)
        finally:
            self.offset = offset

    def _not_a_journal(self) -> str:
        try:
            kind = kind_of(self.path)
        except OSError as error:
            return f"cannot read {self.path}: {error.strerror}"
        if kind == "trajectory":
            return f"{self.path} holds trajectories, one a line: name one, as {self.path.name}:1"
        if kind == "evaluation":
            return f"{self.path} is an evaluation's record: the page of evaluations shows it"
        return "" if kind == "journal" else kind

    def _look_at_the_end(self) -> None:
        try:
            rest = self.path.stat().st_size - self.offset
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
            return
        self.torn = f"{self.path} ends in the middle of a line ({rest:,} bytes): its writer was killed" if rest else ""

    def _read_line(self, number: int) -> set[int]:
        try:
            stat = self.path.stat()
            self._stamp = (stat.st_ino, stat.st_mtime_ns)
            line = nth_line(self.path, number)
            version = msgspec.json.decode(line, type=dict[str, Any]).get("schema_version", 0)
            if version > SCHEMA_VERSION:
                raise StoreError(newer(self.path, number, version))
            self.tree.take(msgspec.json.decode(line, type=Trajectory))
        except StoreError as error:
            self.problem = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            self.problem = f"{self.path}, line {number} is damaged: {error}"
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
        self.tree.version = 1
        return set(range(len(self.tree.order)))


def nth_line(path: Path, number: int) -> bytes:
    """Line ``number``, from 1, with its newline. Raises StoreError where there are fewer."""
    with path.open("rb") as file:
        for index, line in enumerate(file, start=1):
            if index == number:
                return line
    raise StoreError(f"{path} has no line {number}")
