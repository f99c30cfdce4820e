"""The interface between the engine and a store of runs.

The engine uses it to record, read and continue runs.

    engine ── create, reopen ──> RunJournal ── append(event) …  close
           ── blobs ───────────> RunBlobs      contexts and long outputs, by content hash
    page, terminal, resume, replay, fork ── stored, events, load, runs ──> lines, ids, size

``Store`` (``folder_store.py``) keeps runs in a folder, and ``MemoryStore`` (``memory_store.py``) in
this process. Another store inherits from ``RunStore`` and implements the methods that have no body
here; the other methods are built on them. This module also defines how runs are named and looked
up. Checking, repairing and pruning runs and the call cache need a folder and belong to ``Store``
alone; replies that are still arriving are handled by ``live_replies.py``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ramify.errors import RunInUse, StoreError, UnknownRun
from ramify.nearest_name import nearest_name
from ramify.store.durable_files import Bytes
from ramify.store.journal import NOTHING_KEPT, read_events
from ramify.store.live_replies import LiveReplyFileWriter
from ramify.store.reviews import HumanRunReview
from ramify.store.stored_run import StoredRun, is_run_id
from ramify.types.event import AnyEvent, TrajectoryBuilder
from ramify.types.trajectory import Trajectory

if TYPE_CHECKING:
    from ramify.store.run_summary import RunSummary


class RunJournal(Protocol):
    """The journal of one run: its log of events, open for writing.

    Only one writer can have it open at a time. Safe for several threads.
    """

    id: str
    """Id of the run."""

    @property
    def trouble(self) -> StoreError | None:
        """The error, such as a full disk, that should make the run end soon, or None."""

    @property
    def is_empty(self) -> bool:
        """True if the journal has no events yet."""

    def append(self, event: AnyEvent) -> None:
        """Write ``event``, with secrets redacted, before the engine acts on it.

        Raises StoreError if the event cannot be written.

        Once the disk is full, all later events are refused too, because a journal with a gap cannot
        be resumed.
        """

    def close(self) -> None:
        """Close the journal, so that another writer can open it.

        Idempotent.
        """

    def live_text(self) -> LiveReplyFileWriter | None:
        """Return a writer that shows the run's replies as they arrive, or None if there is none."""


class RunBlobs(Protocol):
    """Stores contexts and long outputs as byte strings (blobs), each under the hash of its content.

    Safe for several threads.
    """

    def put(self, data: Bytes, digest: str | None = None) -> str:
        """Store ``data`` and return its SHA-256 hash as a hexadecimal string.

        A caller that already knows the hash passes it as ``digest`` to save time.
        """

    def get(self, digest: str) -> bytes:
        """Return the bytes with this SHA-256 hash.

        Raises StoreError if the store does not have them.
        """


@runtime_checkable
class RunStore(Protocol):
    """The base class of every store of runs.

    In its methods, ``run`` is a run's id, the unique beginning of an id, or ``"last"``. The methods
    raise UnknownRun if there is no such run.
    """

    blobs: RunBlobs

    def create(self, run_id: str, secrets: Mapping[str, str] | None = None) -> RunJournal:
        """Create the journal of a new run.

        ``secrets`` maps names to values that are redacted in the journal, in addition to the
        secrets in environment variables. Raises StoreError if the run already exists.
        """

    def reopen(self, run: str, secrets: Mapping[str, str] | None = None) -> RunJournal:
        """Reopen the journal of an earlier run so that the run can continue.

        Raises RunInUse while another process is writing the journal.
        """

    def check_free(self, run: str) -> None:
        """Raise RunInUse if a process is currently writing ``run``."""

    def ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""

    def lines(self, id: str, offset: int = 0) -> Iterable[bytes]:
        """Return the events of run ``id`` as encoded lines, oldest first.

        Raises UnknownRun.

        The lines start at byte ``offset``, which must be the start of a line or the end. Each line
        is what ``encode_line`` returned, with its newline. Another process may still be writing the
        run.
        """

    def size(self, id: str) -> int:
        """Return the size of run ``id`` in bytes, newlines included.

        Raises UnknownRun. The web viewer calls this often, so it should be fast.
        """

    def remove(self, run: str) -> int:
        """Delete a run, together with its stored contexts and outputs that no other run needs.

        Returns the number of bytes freed. Raises RunInUse while a process is writing the run.
        """

    def new_id(self, question: str) -> str:
        """Return a new unique run id, which is readable and sorts by time:
        ``20260301-142501-5gk0x7m-which-host-failed``.

        The time is in UTC, to the microsecond.
        """
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        fraction = _base32(int(now % 1 * 1e6), 4)
        unique = "".join(_DIGITS[byte % 32] for byte in os.urandom(3))
        words = re.findall(r"[a-z0-9]+", question.lower())[:4]
        return "-".join([stamp, fraction + unique, *(word[:16] for word in words)])

    def append(self, run: str, events: Iterable[AnyEvent]) -> None:
        """Append events to a run that has ended, such as a score that becomes known later
        (``ScoreAdded``).

        Raises RunInUse while a process is writing the run.
        """
        journal = self.reopen(run)
        try:
            for event in events:
                journal.append(event)
        finally:
            journal.close()

    def find(self, run: str) -> str:
        """Return the full id of the run to which ``run`` refers.

        It may be a complete id, the beginning of one, or ``"last"``. Raises UnknownRun.
        """
        return resolve_run_id(run, self.ids(), self)

    def stored(self, run: str) -> StoredRun:
        """Return a reader of the stored ``run``."""
        return FilelessStoredRun(self, self.find(run))

    def events(self, run: str) -> Iterator[AnyEvent]:
        """Yield the events of ``run``, oldest first.

        Another process may still be writing the run.
        """
        return read_events(self.stored(run))

    def load(self, run: str) -> Trajectory:
        """Read all events of ``run`` and return its trajectory, the complete tree of calls."""
        fold = TrajectoryBuilder()
        for event in self.events(run):
            fold.apply(event)
        return fold.trajectory

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        """Return summaries of the newest ``limit`` runs (default: all), newest first.

        Summaries are cached until their run grows.
        """
        from ramify.store.run_summary import summarise

        known = _summaries.setdefault(self, {})
        found = []
        for id in self.ids()[:limit]:
            run = self.stored(id)
            try:
                state = run.journal_version()
            except UnknownRun:  # deleted meanwhile
                continue
            if id not in known or known[id][0] != state:
                known[id] = state, summarise(run)
            review = run.reviews_by_run().get(id)
            found.append(replace(known[id][1], review=review, alive=run.has_active_writer()))
        return found

    def listing_state(self) -> object | None:
        """Return a value that changes whenever the list of runs might have changed.

        Computing it is cheap. None if the store cannot tell without reading the runs.
        """
        return None

    def review(self, run: str) -> HumanRunReview:
        """Return the review of ``run``: the labels, verdicts, note and corrected scores that people
        gave after its end.

        Empty if there is none.
        """
        return HumanRunReview()

    def write_review(self, run: str, review: HumanRunReview) -> HumanRunReview:
        """Replace the review of ``run``, and return it with the time of the change.

        Raises StoreError if it cannot be written.

        The base class keeps no reviews, so this method always raises unless a store overrides it.
        """
        raise StoreError(f"{self} does not store reviews, so run {run} cannot be reviewed")

    def finish(self, journal: RunJournal) -> None:
        """Close a run's journal, and delete the run if the journal is empty.

        Such a run failed before it started, so it need not be listed and cannot be resumed.
        """
        journal.close()
        if journal.is_empty:
            self.remove(journal.id)


class FilelessStoredRun(NamedTuple):
    """A run that is read from a store without files, such as a store in memory.

    Implements ``StoredRun``.
    """

    store: RunStore
    id: str

    @property
    def path(self) -> None:
        return None

    def __str__(self) -> str:
        return f"run {self.id} in {self.store}"

    def journal_version(self) -> tuple[int, int]:
        return 0, self.store.size(self.id)

    def has_active_writer(self) -> bool:
        try:
            self.store.check_free(self.id)
        except RunInUse:
            return True
        except UnknownRun:
            return False
        return False

    def lines(self, offset: int = 0) -> Iterator[bytes]:
        return (line[:-1] for line in self.store.lines(self.id, offset))

    def line_blocks(self, offset: int = 0) -> Iterator[bytes]:
        return iter(self.store.lines(self.id, offset))

    def lines_at(self, offsets: Iterable[int]) -> Iterator[bytes]:
        return (next(self.lines(offset), b"") for offset in offsets)

    def blob(self, digest: str) -> bytes:
        return self.store.blobs.get(digest)

    def is_run_in_store(self, id: str) -> bool:
        return id in self.store.ids()

    def reviews_by_run(self) -> Mapping[str, HumanRunReview]:
        review = self.store.review(self.id)
        return {} if review.is_empty() else {self.id: review}

    def write_review(self, id: str, review: HumanRunReview) -> HumanRunReview:
        return self.store.write_review(id, review)

    def damaged_line_advice(self, number: int) -> str:
        return "the events before it can be read" if number > 1 else NOTHING_KEPT


_summaries: WeakKeyDictionary[RunStore, dict[str, tuple[tuple[int, int], RunSummary]]] = (
    WeakKeyDictionary()
)
"""Cache of run summaries for each store. A store's dict maps a run id to the state of the run when
it was last read, and to the summary from that time."""
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 digits in ascending order, without letters that look alike."""


def check_run_id(run_id: str) -> None:
    """Raise StoreError if ``run_id`` is not in the form of a run id."""
    if not is_run_id(run_id):
        raise StoreError(
            f"{run_id!r} cannot name a run: use letters, digits, '-', '_' and '.', at most 128"
        )


def resolve_run_id(name: str, ids: Sequence[str], place: object) -> str:
    """Return the full run id to which ``name`` refers.

    It may be a complete id, the unique beginning of an id, or ``"last"``. Raises UnknownRun if no
    run or several runs match.

    ``ids`` are the ids of all runs, newest first. ``place`` says where the runs are stored, for
    error messages.
    """
    if name in ids:
        return name
    if name == "last" and ids:
        return ids[0]
    matches = [id for id in ids if id.startswith(name)] if name else []
    if len(matches) == 1:
        return matches[0]
    raise UnknownRun(_not_found(name, ids, matches, place))


def _not_found(name: str, ids: Sequence[str], matches: list[str], place: object) -> str:
    if matches:
        return (
            f"{len(matches)} runs begin with {name!r}, such as {matches[-1]}: give more of the id"
        )
    if not ids:
        return f"the store {place} has no runs"
    close = nearest_name(name, ["last"]) or nearest_name(name, ids, cutoff=0.4)
    hint = f"did you mean {close}? " if close else ""
    return f"found no run {name!r} in {place}: {hint}the last one is {ids[0]}"


def _base32(number: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        number, digit = divmod(number, 32)
        digits = _DIGITS[digit] + digits
    return digits
