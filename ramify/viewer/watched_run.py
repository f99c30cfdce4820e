"""One run that a page shows, and its call tree so far.

The tree is updated from the lines that were added to the run's journal.

    journal ─┬─ new bytes since the last refresh ──> short events ──> RunCallTree (run_call_tree.py)
             └─ lines of one call, when it is opened ──> CallDetail (run_call_tree.py)

An incomplete last line is read once it is complete. A line that is damaged, or inconsistent with
earlier lines, is skipped, and the page says so. A journal that was truncated or replaced is read
again from the start. A run in a file of trajectories is read once and does not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import StoreError
from ramify.store.line_checksums import ChecksumChain
from ramify.store.reviews import HumanRunReview
from ramify.store.textless_events import DamagedJournalLine, decode_event_outlines
from ramify.types.event import CallEnded, CallStarted, RunStarted
from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import SCHEMA_VERSION, Trajectory
from ramify.viewer.run_call_tree import (
    CallDetail,
    CallDetailReader,
    RunCallTree,
    journal_events,
)
from ramify.viewer.run_lookup import LocatedRun, detect_file_kind, newer_schema_error


class WatchedRun:
    """The current state of a run that the viewer follows.

    The file is read only when ``refresh`` is called, and nothing runs in the background.
    """

    def __init__(self, located: LocatedRun) -> None:
        self.key = located.key
        self.source = located.run
        self.line = located.line
        self.problem = ""
        """Why reading stopped. Empty if it did not stop. The file is read again when it changes."""
        self.damage = ""
        """Description of the first line that was skipped, with the number of further ones. Empty
        if no line was skipped.
        """
        self.torn = ""
        """Description of an incomplete last line, left by a writer that was killed. Empty if there
        is none.
        """
        self.is_alive = False
        """True if a process is writing the journal now."""
        self.tree = RunCallTree()
        self.offset = 0
        """Number of bytes read."""
        self.generation = 0
        """How many times the file was read from the start again, because it was truncated or
        replaced.
        """
        self._num_damaged = 0
        self._first_damage = ""
        self._suspect_offset = -1
        """Offset of a damaged line to read once more, because its writer may not have finished
        it."""
        self._read_state: tuple[int, int] | None = None
        """Inode and size of the file when it was last read. None: read it again."""
        self._inode = 0
        self._stamp: tuple[int, int] | None = None
        self._details = CallDetailReader(self.source)
        self._chain = ChecksumChain()
        """Running checksum of the journal lines that were read."""

    @property
    def version(self) -> int:
        return self.tree.version

    @property
    def human_review(self) -> HumanRunReview:
        """Labels, note and corrected scores from people's reviews.

        Raises StoreError if they cannot be read.
        """
        return self.source.reviews_by_run().get(self.review_key, HumanRunReview())

    @property
    def review_key(self) -> str:
        """The key under which this run's reviews are stored in the reviews file."""
        return self.source.id if self.line is None else self.tree.run_data.id

    @property
    def journal_path(self) -> Path | None:
        """Path of the journal.

        None if the run is a line in a file of trajectories, or if its store has no files.
        """
        return self.source.path if self.line is None else None

    def size_changed(self) -> bool:
        """Return True if the run has changed since it was last read.

        For a file, this costs only one system call.
        """
        try:
            return self.line is None and self.source.journal_version() != self._read_state
        except StoreError:
            return False

    def num_unread_bytes(self) -> int:
        """Return the number of unread bytes in the journal."""
        try:
            return self.source.journal_version()[1] - self.offset
        except StoreError:
            return 0

    def is_replaced(self) -> bool:
        """Return True if the run's trajectory file was replaced after it was read.

        Always False for a journal, because ``refresh`` reads a replaced journal again.
        """
        if self.line is None:
            return False
        try:
            stat = self._file.stat()
        except OSError:
            return self._stamp is not None
        return self._stamp not in (None, (stat.st_ino, stat.st_mtime_ns))

    @property
    def _file(self) -> Path:
        assert self.source.path is not None
        return self.source.path

    def call_detail(self, id: str) -> CallDetail:
        """Return the complete call ``id`` of this run.

        Raises StoreError if it does not exist or cannot be read.
        """
        node = self.tree.nodes.get(id)
        if node is None:
            raise StoreError(f"run {self.tree.run_data.id or self.key} has no call {id!r}")
        if self.line is not None:
            return CallDetail(self.tree.run_data.calls[node.index])
        return self._details.read_call(self.tree, node)

    def call_question_and_answer(self, node: RunCallNode) -> tuple[str, Any]:
        """Return a call's full question and answer, read from its first and last journal lines.

        Raises StoreError if they cannot be read.
        """
        if self.line is not None:
            call = self.tree.run_data.calls[node.index]
            return call.question, call.answer
        lines, question, answer = self.tree.lines_of(node), "", None
        for event in journal_events(self.source, [lines[0], *lines[-3:]]):
            if isinstance(event, CallStarted):
                question = event.question
            elif isinstance(event, CallEnded):
                answer = event.answer
        return question, answer

    def refresh(self) -> set[int]:
        """Read the lines that were added to the journal.

        Returns the indices of the calls that changed.
        """
        if self.line is not None:
            return set() if self.version else self._read_line(self.line)
        # Checked before reading, so that the last lines of a writer that ends now are not missed.
        self.is_alive = self.source.has_active_writer()
        changed: set[int] = set()
        try:
            state = self.source.journal_version()
        except StoreError as error:
            self.problem, self._read_state = str(error), None
            return changed
        if self._inode not in (0, state[0]) or state[1] < self.offset:
            self._begin_again()
        elif self.problem and state == self._read_state:
            return changed
        self._inode, self._read_state, self.problem, self.torn = state[0], state, "", ""
        if not self.offset and not self.is_alive and (problem := self._not_a_journal()):
            self.problem = problem
            return changed
        try:
            self._read_on(changed)
        except StoreError as error:
            self.problem = str(error)
            if isinstance(error.__cause__, OSError):
                self._read_state = None  # an I/O error may be temporary
        if not self.problem and not self.is_alive:
            self._check_end()
        return changed

    def _begin_again(self) -> None:
        self.tree, self._details = RunCallTree(), CallDetailReader(self.source)
        self._chain = ChecksumChain()
        self.offset, self.damage, self._num_damaged, self._suspect_offset = 0, "", 0, -1
        self.generation += 1

    def _read_on(self, changed: set[int]) -> None:
        apply, add, offset = self.tree.apply, changed.add, self.offset
        try:
            for block in self.source.line_blocks(offset):
                for event, size in decode_event_outlines(block, self.source, self._chain):
                    if isinstance(event, DamagedJournalLine):
                        if self._should_retry(offset):
                            return
                        self._skip_line(offset, f"is damaged and was skipped: {event.reason}")
                    elif not offset and not isinstance(event, RunStarted):
                        raise StoreError(
                            f"{self.source} is not a run: its first line is not a RunStarted"
                        )
                    else:
                        try:
                            node = apply(event, offset)
                        except (KeyError, IndexError) as error:
                            self._skip_line(
                                offset,
                                f"is inconsistent with earlier lines and was skipped: no {error}",
                            )
                        else:
                            if node is not None:
                                add(node.index)
                    offset += size
        finally:
            self.offset = offset
            changed.update(self.tree.take_changed_calls())

    def _should_retry(self, offset: int) -> bool:
        """Return True if a damaged line should be read again.

        That is so the first time, if the writer is still alive and may not have finished the line.
        """
        is_new = self.is_alive and self._suspect_offset != offset
        if is_new:
            self._suspect_offset, self._read_state = offset, None
        return is_new

    def _skip_line(self, offset: int, why: str) -> None:
        self._num_damaged += 1
        number = self.tree.version + 1
        self.tree.record_unreadable_line(offset)
        if self._num_damaged == 1:
            self._first_damage = f"{self.source}, line {number} {why}"
        more = (
            f"; {self._num_damaged - 1:,} more were skipped after it"
            if self._num_damaged > 1
            else ""
        )
        self.damage = self._first_damage + more

    def _not_a_journal(self) -> str:
        path = self.source.path
        if path is None:
            return ""
        try:
            kind = detect_file_kind(path)
        except OSError as error:
            return f"cannot read {path}: {error.strerror}"
        if kind == "trajectory":
            return f"{path} holds trajectories, one per line: give one as {path.name}:1"
        if kind == "evaluation":
            return f"{path} is the record of an evaluation: open the Evaluations page"
        return "" if kind == "journal" else kind

    def _check_end(self) -> None:
        try:
            rest = self.source.journal_version()[1] - self.offset
        except StoreError as error:
            self.problem = str(error)
            return
        self.torn = (
            f"{self.source} ends in the middle of a line ({rest:,} bytes): its writer was killed"
            if rest
            else ""
        )

    def _read_line(self, number: int) -> set[int]:
        path = self._file
        try:
            stat = path.stat()
            self._stamp = (stat.st_ino, stat.st_mtime_ns)
            line = nth_line(path, number)
            version = msgspec.json.decode(line, type=dict[str, Any]).get("schema_version", 0)
            if version > SCHEMA_VERSION:
                raise StoreError(newer_schema_error(path, number, version))
            self.tree.load_trajectory(msgspec.json.decode(line, type=Trajectory))
        except StoreError as error:
            self.problem = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            self.problem = f"{path}, line {number} is damaged: {error}"
        except OSError as error:
            self.problem = f"cannot read {path}: {error.strerror}"
        self.tree.version = 1
        return set(range(len(self.tree.order)))


def nth_line(path: Path, number: int) -> bytes:
    """Return line ``number`` of a file, counted from 1, with its newline.

    Raises StoreError if the file has fewer lines.
    """
    with path.open("rb") as file:
        for index, line in enumerate(file, start=1):
            if index == number:
                return line
    raise StoreError(f"{path} has no line {number}")
