"""The interface for reading one stored run, regardless of the kind of store.

    StoredRun ─┬─ FileStoredRun       the file of a run         (journal.py)
               └─ FilelessStoredRun   through a store's lines   (base.py)

The viewer, listings, searches and replays read runs through this interface. If the store of a live
run has no files, the viewer shows a reply only once it is complete. Writing is done through the
interfaces in ``base.py``.
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
    """One stored run, opened for reading.

    Each line is one event.

    Byte offsets include the newlines. ``str()`` of the object names the run in messages.
    """

    @property
    def id(self) -> str: ...

    @property
    def path(self) -> Path | None:
        """Path of the run's journal file, or None if the store has no files."""

    def journal_version(self) -> tuple[int, int]:
        """Return the storage number and the size of the run, which change whenever the run does.

        The size is in bytes. The number changes if the run is replaced by another. Raises
        StoreError if the run does not exist.
        """

    def has_active_writer(self) -> bool:
        """Return True if a process is writing the run now."""

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        """Yield the complete lines from byte ``offset`` on, without their newlines.

        Raises StoreError if they cannot be read.
        """

    def line_blocks(self, offset: int = 0) -> Iterator[bytes]:
        """Yield the complete lines from byte ``offset`` on, with their newlines, in blocks of one
        or more lines."""

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines that begin at the given byte offsets, without their newlines."""

    def blob(self, digest: str) -> bytes:
        """Return the stored context or output with this hash.

        Raises StoreError if it does not exist.
        """

    def is_run_in_store(self, id: str) -> bool:
        """Return True if the store of this run also holds a run with the given id."""

    def reviews_by_run(self) -> Mapping[str, HumanRunReview]:
        """Return the reviews of all runs in the same store, by run id.

        Raises StoreError if they cannot be read.

        A journal outside a store has at most its own review.
        """

    def write_review(self, id: str, review: HumanRunReview) -> HumanRunReview:
        """Replace the review of run ``id``, and return it with the time of the change.

        Raises StoreError if it cannot be written.
        """

    def damaged_line_advice(self, number: int) -> str:
        """Return advice on how to repair a journal whose first damaged line is ``number``.

        Lines are counted from 1.
        """
