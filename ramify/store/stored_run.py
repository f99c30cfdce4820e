"""The interface for reading one run, in whichever store it is.

    StoredRun ─┬─ FileStoredRun       the file of a run         (journal.py)
               └─ FilelessStoredRun   through a store's lines   (base.py)

The viewer, listings, searches and replays read runs through it. If the store of a live run has no
files, the viewer shows a reply only once it is complete. Not here: writing (see base.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ramify.store.reviews import HumanRunReview

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def is_run_id(name: str) -> bool:
    """Return True if ``name`` has the form of a run's id."""
    return _ID.fullmatch(name) is not None


class StoredRun(Protocol):
    """One run of a store, for reading. ``str()`` of it names the run in messages. Each line is one
    event. An offset counts the bytes of the lines, newlines included."""

    @property
    def id(self) -> str: ...

    @property
    def path(self) -> Path | None:
        """The file of the run; None if its store has no files."""

    def state(self) -> tuple[int, int]:
        """Return (a number that changes if the run is replaced, size of the run in bytes). Raises
        StoreError if the run does not exist."""

    def is_written(self) -> bool:
        """Return True if a process is writing the run now."""

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        """Yield the complete lines from ``offset``, without their newlines. Raises StoreError."""

    def blocks(self, offset: int = 0) -> Iterator[bytes]:
        """Yield the complete lines from byte ``offset`` on, with their newlines, in blocks of one
        or more lines."""

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """Yield the line that begins at each of ``offsets``, without its newline."""

    def blob(self, digest: str) -> bytes:
        """Return the blob with this digest from the store of the run. Raises StoreError if it does
        not exist."""

    def has_neighbor(self, id: str) -> bool:
        """Return True if the same store has a run ``id``."""

    def reviews(self) -> Mapping[str, HumanRunReview]:
        """Return the reviews of the runs in the same store by run id. A journal that is in no store
        has at most its own review. Raises StoreError."""

    def write_review(self, id: str, review: HumanRunReview) -> HumanRunReview:
        """Replace the review of run ``id``, and return it with its time. Raises StoreError."""

    def remedy(self, number: int) -> str:
        """Return what a user can do if line ``number`` is the first damaged one."""
