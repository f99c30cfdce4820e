"""Keeps runs in the memory of this process.

Nothing is written to disk, and all runs are lost when the process ends.

Such a run can be resumed, replayed and forked, which is not possible without a store. Its events
are kept as the lines that a file would contain, with secrets redacted, so reading them back gives
the same result as with files. The runs are shown in the page of this process (``ramify.view``).
Replies from a cache (``cache=True``), checking, repairing and pruning need the files of a
``Store``.
"""

from __future__ import annotations

import bisect
import hashlib
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import msgspec

from ramify.errors import RunInUse, StoreError, UnknownRun
from ramify.secret_redaction import SecretRedactor
from ramify.store.base import RunStore, check_run_id, resolve_run_id
from ramify.store.durable_files import Bytes
from ramify.store.journal import encode_line
from ramify.store.reviews import HumanRunReview
from ramify.types.event import AnyEvent


class MemoryStore(RunStore):
    """A store that keeps runs in the memory of this process.

    Safe for several threads.

    >>> rlm = ramify.RLM("openai:gpt-5-mini", store=ramify.MemoryStore())
    """

    def __init__(self) -> None:
        self.blobs = MemoryBlobs()
        self._lines: dict[str, list[bytes]] = {}
        """Id of a run -> its events, in the order in which the runs were created."""
        self._starts: dict[str, list[int]] = {}
        self._reviews: dict[str, HumanRunReview] = {}
        self._written: set[str] = set()
        """Ids of the runs whose journals are open."""
        self._lock = threading.Lock()

    def create(self, run_id: str, secrets: Mapping[str, str] | None = None) -> MemoryJournal:
        check_run_id(run_id)
        with self._lock:
            if run_id in self._lines:
                raise StoreError(
                    f"run {run_id} already exists in {self}: resume it, or use another id"
                )
            self._lines[run_id] = []
            self._written.add(run_id)
        return self._journal(run_id, secrets)

    def reopen(self, run: str, secrets: Mapping[str, str] | None = None) -> MemoryJournal:
        with self._lock:
            id = self._resolve_free_run(run)
            self._written.add(id)
        return self._journal(id, secrets)

    def check_free(self, run: str) -> None:
        with self._lock:
            self._resolve_free_run(run)

    def ids(self) -> list[str]:
        with self._lock:
            return [*self._lines][::-1]

    def lines(self, id: str, offset: int = 0) -> Iterator[bytes]:
        with self._lock:
            starts = self._offsets(id)
            return iter(self._lines[id][bisect.bisect_left(starts, offset) :])

    def size(self, id: str) -> int:
        with self._lock:
            return self._offsets(id)[-1]

    def review(self, run: str) -> HumanRunReview:
        return self._reviews.get(self.find(run), HumanRunReview())

    def write_review(self, run: str, review: HumanRunReview) -> HumanRunReview:
        id, review = self.find(run), msgspec.structs.replace(review, changed_at=time.time())
        self._reviews[id] = review
        return review

    def remove(self, run: str) -> int:
        """Delete a run and return the number of bytes freed.

        Blobs that no other run refers to are deleted too.

        Blobs are deleted only while no run is being written, because a run stores a blob just
        before it refers to it.
        """
        with self._lock:
            id = self._resolve_free_run(run)
            self._reviews.pop(id, None)
            self._starts.pop(id, None)
            freed = sum(map(len, self._lines.pop(id)))
            if not self._written:
                freed += self.blobs.keep_only(
                    {digest for lines in self._lines.values() for digest in _digests(lines)}
                )
        return freed

    def _journal(self, id: str, secrets: Mapping[str, str] | None) -> MemoryJournal:
        return MemoryJournal(id, self._lines[id], SecretRedactor(secrets), self._release)

    def _release(self, id: str) -> None:
        with self._lock:
            self._written.discard(id)

    def _offsets(self, id: str) -> list[int]:
        """Return the byte offset of each line of a run, followed by the offset of the run's end."""
        if id not in self._lines:
            raise UnknownRun(f"found no run {id!r} in {self}: it was deleted")
        starts = self._starts.setdefault(id, [0])
        for line in self._lines[id][len(starts) - 1 :]:
            starts.append(starts[-1] + len(line))
        return starts

    def _resolve_free_run(self, run: str) -> str:
        id = resolve_run_id(run, [*self._lines][::-1], self)
        if id in self._written:
            raise RunInUse(f"run {id} is being written in this process: wait for it, or cancel it")
        return id

    def __repr__(self) -> str:
        return "this process's memory"


class MemoryJournal:
    """A journal of a ``MemoryStore``, open for writing.

    Safe for several threads.
    """

    trouble: StoreError | None = None

    def __init__(
        self,
        id: str,
        lines: list[bytes],
        secrets: SecretRedactor,
        on_close: Callable[[str], object],
    ) -> None:
        """Create the journal of run ``id``.

        ``lines`` has its events so far, and receives the new ones.
        """
        self.id = id
        self._lines = lines
        self._secrets = secrets
        self._on_close = on_close
        self._lock = threading.Lock()
        self._closed = False

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def append(self, event: AnyEvent) -> None:
        with self._lock:
            if self._closed:
                raise StoreError(
                    f"the journal of run {self.id} is closed: open it again with "
                    f"store.reopen({self.id!r})"
                )
            self._lines.append(encode_line(event, self._secrets))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._on_close(self.id)

    def live_text(self) -> None:
        """Return None, because this store does not show replies as they arrive.

        The web page therefore shows only complete replies.
        """


class MemoryBlobs:
    """A store in memory of contexts and long outputs, each under the hash of its content.

    Safe for several threads.
    """

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def put(self, data: Bytes, digest: str | None = None) -> str:
        digest = digest or hashlib.sha256(data).hexdigest()
        if digest not in self._data:
            self._data[digest] = bytes(data)
        return digest

    def get(self, digest: str) -> bytes:
        try:
            return self._data[digest]
        except KeyError:
            raise StoreError(
                f"blob {digest} is not in this process's memory: deleted, or from another store"
            ) from None

    def keep_only(self, digests: Container[str]) -> int:
        """Delete all blobs except the given ones, and return the number of bytes freed."""
        unneeded = [digest for digest in [*self._data] if digest not in digests]
        return sum(len(self._data.pop(digest)) for digest in unneeded)


_DIGEST = re.compile(rb'"([0-9a-f]{64})"')


def _digests(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the hash of each blob that the given journal lines refer to."""
    for line in lines:
        yield from map(bytes.decode, _DIGEST.findall(line))
