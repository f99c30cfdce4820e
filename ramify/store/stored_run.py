"""What is read of one run, wherever a store keeps it.

    StoredRun ─┬─ JournalFile   the file of a run         (journal.py)
               └─ StoredLines   through a store's lines   (base.py)

The page, listings, searches and replays read runs through it. A page that follows a run without a
file shows a reply only once it is complete; the rest is the same. Not here: writing (see base.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ramify.store.reviews import RunReview

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_run_id(name: str) -> bool:
    """Whether ``name`` can name a run."""
    return _ID.fullmatch(name) is not None


class StoredRun(Protocol):
    """One run, to be read. Its text names it in messages. Each line is one event, and an offset is
    a number of bytes of its lines, newlines included."""

    @property
    def id(self) -> str: ...

    @property
    def path(self) -> Path | None:
        """Its file; None if its store has no files."""

    def state(self) -> tuple[int, int]:
        """A number that changes if the run is replaced, and its size in bytes. Raises StoreError if
        it does not exist."""

    def is_written(self) -> bool:
        """Whether a process is writing it now."""

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        """The complete lines from ``offset``, without their newlines. Raises StoreError."""

    def blocks(self, offset: int = 0) -> Iterator[bytes]:
        """The same lines with their newlines, one or more at a time."""

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """The line that begins at each of ``offsets``, without its newline."""

    def blob(self, digest: str) -> bytes:
        """The bytes with this digest in the same place. Raises StoreError if there are none."""

    def has_neighbor(self, id: str) -> bool:
        """Whether run ``id`` is kept in the same place."""

    def reviews(self) -> Mapping[str, RunReview]:
        """Id -> review of each run that is kept with it, so at most itself in a journal. Raises
        StoreError."""

    def write_review(self, id: str, review: RunReview) -> RunReview:
        """Replace the review of run ``id``, and return it with its time. Raises StoreError."""

    def remedy(self, number: int) -> str:
        """What can be done if line ``number`` is the first damaged one."""
