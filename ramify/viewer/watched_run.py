"""One run while it is looked at: its tree so far, brought up to date by reading what its journal
gained.

    journal ── bytes from where the last look ended ──> glances (event_glances.py) ──> Tree (run_tree.py)
                    └── the lines of one call, when it is opened ──> Whole (call_detail.py)

The rest of a half-written line is waited for. A line that is damaged, or that does not follow from
those before it, is left out, and the page says so. A journal that was cut or replaced is read from
its beginning. A run of a file of trajectories is read once and does not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import writer
from ramify.store.journal_reader import blocks
from ramify.types.event import RunStarted
from ramify.types.trajectory import SCHEMA_VERSION, Trajectory
from ramify.viewer.call_detail import CallDetail, CallDetails
from ramify.viewer.event_glances import DamagedLine, glances
from ramify.viewer.run_kinds import LocatedRun, kind_of, newer
from ramify.viewer.run_tree import RunTree


class WatchedRun:
    """The run at ``found``. ``refresh`` reads on; nothing here waits or runs by itself."""

    def __init__(self, found: LocatedRun) -> None:
        self.key, self.path, self.line = found.key, found.path, found.line
        self.problem = ""
        """Why nothing more is read; empty while all is well. Tried again when the file changes."""
        self.damage = ""
        """The first line that was left out and how many more; empty where none was."""
        self.torn = ""
        """What a writer that was killed left at the end of the journal; empty where all lines are
        whole."""
        self.is_alive = False
        """Whether a process writes it now."""
        self.tree = RunTree()
        self.offset = 0
        """Bytes that were read."""
        self.generation = 0
        """How often the reading began: again for a file that was cut or replaced."""
        self._num_damaged, self._first_damage = 0, ""
        self._suspect = -1
        """Where a damaged line begins that is read once more, since its writer may have been at
        work there."""
        self._seen: tuple[int, int] | None = None
        """Inode and size of the file when it was last read; None where it is to be read again."""
        self._inode = 0
        self._stamp: tuple[int, int] | None = None
        self._wholes = CallDetails(self.path)

    @property
    def version(self) -> int:
        return self.tree.version

    def size_changed(self) -> bool:
        """Whether there is something new to read; one system call."""
        try:
            return self.line is None and _inode_and_size(self.path) != self._seen
        except OSError:
            return False

    def is_stale(self) -> bool:
        """Whether the file of trajectories is not the one that was read. A journal is read anew by
        ``refresh``."""
        if self.line is None:
            return False
        try:
            stat = self.path.stat()
        except OSError:
            return self._stamp is not None
        return self._stamp not in (None, (stat.st_ino, stat.st_mtime_ns))

    def whole(self, id: str) -> CallDetail:
        """Call ``id`` in full. Raises StoreError where the run has no such call, or it cannot be
        read."""
        node = self.tree.nodes.get(id)
        if node is None:
            raise StoreError(f"run {self.tree.run.id or self.key} has no call {id!r}")
        if self.line is not None:
            return CallDetail(self.tree.run.calls[node.index])
        return self._wholes.of(self.tree, node)

    def refresh(self) -> set[int]:
        """Read what is new; the indices of the calls that changed."""
        if self.line is not None:
            return set() if self.version else self._read_line(self.line)
        self.is_alive = (
            writer(self.path) is not None
        )  # asked first: what its last act wrote is read below
        changed: set[int] = set()
        try:
            seen = _inode_and_size(self.path)
        except OSError as error:
            self.problem, self._seen = f"cannot read {self.path}: {error.strerror}", None
            return changed
        if self._inode not in (0, seen[0]) or seen[1] < self.offset:
            self._begin_again()
        elif self.problem and seen == self._seen:
            return changed
        self._inode, self._seen, self.problem, self.torn = seen[0], seen, "", ""
        if not self.offset and not self.is_alive and (problem := self._not_a_journal()):
            self.problem = problem
            return changed
        try:
            self._read_on(changed)
        except StoreError as error:
            self.problem = str(error)
            if isinstance(error.__cause__, OSError):
                self._seen = None  # it may pass
        if not self.problem and not self.is_alive:
            self._look_at_the_end()
        return changed

    def _begin_again(self) -> None:
        self.tree, self._wholes = RunTree(), CallDetails(self.path)
        self.offset, self.damage, self._num_damaged, self._suspect = 0, "", 0, -1
        self.generation += 1

    def _read_on(self, changed: set[int]) -> None:
        apply, add, offset = self.tree.apply, changed.add, self.offset
        try:
            for block in blocks(self.path, offset):
                for event, size in glances(block, self.path):
                    if isinstance(event, DamagedLine):
                        if self._is_read_once_more(offset):
                            return
                        self._leave_out(offset, f"is damaged and left out: {event.reason}")
                    elif not offset and not isinstance(event, RunStarted):
                        raise StoreError(
                            f"{self.path} is not a run: its first line is no RunStarted"
                        )
                    else:
                        try:
                            node = apply(event, offset)
                        except (KeyError, IndexError) as error:
                            self._leave_out(
                                offset,
                                f"does not follow from those before it and is left out: no {error}",
                            )
                        else:
                            if node is not None:
                                add(node.index)
                    offset += size
        finally:
            self.offset = offset

    def _is_read_once_more(self, offset: int) -> bool:
        """Whether a damaged line at ``offset`` is met for the first time while its writer lives."""
        is_new = self.is_alive and self._suspect != offset
        if is_new:
            self._suspect, self._seen = offset, None
        return is_new

    def _leave_out(self, offset: int, why: str) -> None:
        self._num_damaged += 1
        number = self.tree.version + 1
        self.tree.skip(offset)
        if self._num_damaged == 1:
            self._first_damage = f"{self.path}, line {number} {why}"
        more = (
            f"; {self._num_damaged - 1:,} more are left out after it"
            if self._num_damaged > 1
            else ""
        )
        self.damage = self._first_damage + more

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
        self.torn = (
            f"{self.path} ends in the middle of a line ({rest:,} bytes): its writer was killed"
            if rest
            else ""
        )

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


def _inode_and_size(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size


def nth_line(path: Path, number: int) -> bytes:
    """Line ``number``, from 1, with its newline. Raises StoreError where there are fewer."""
    with path.open("rb") as file:
        for index, line in enumerate(file, start=1):
            if index == number:
                return line
    raise StoreError(f"{path} has no line {number}")
