"""Deletes runs, evaluations and stored token ids, and the blobs that no journal refers to.

Blobs are contexts and long outputs, stored by their hash.

A blob is needed if a journal refers to it: every quoted string of 64 hexadecimal digits counts as
a reference. Just before a run refers to a blob, it stores the blob, or updates its modification
time if it is already stored. Therefore a blob is kept if it was stored after the end of the run
that is deleted, or, while any run is being written, if it was stored within the last hour.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.durable_files import (
    EVALUATIONS,
    MATRIX,
    TOKENIZED,
    BlobStore,
    StoreSizeMonitor,
    remove_file,
)
from ramify.store.journal import find_writer_process, open_locked, writer_process_file
from ramify.store.live_replies import delete_if_unfollowed, live_reply_file_path
from ramify.store.repair import backups
from ramify.store.reviews import review_file

GRACE_S = 3600.0
"""Age in seconds below which a blob is never deleted while any run is being written."""
SETTLE_S = 60.0
"""Age in seconds below which an unreferenced blob is never deleted."""
_NAME = re.compile(rb'"([0-9a-f]{64})"')


class StorePruneResult(msgspec.Struct):
    """The runs and evaluations that pruning a store has deleted."""

    runs: list[str]
    """Ids of the deleted runs, oldest first."""
    evaluations: list[str]
    """Ids of the deleted evaluations, oldest first."""


class StorePruner:
    """Deletes runs and other data from one store."""

    def __init__(self, root: Path, runs: Path, blobs: BlobStore, size: StoreSizeMonitor) -> None:
        self._root = root
        self._runs = runs
        self._blobs = blobs
        self._size = size

    def remove(self, path: Path) -> int:
        """Delete the journal at ``path`` and the blobs that no other journal refers to.

        Returns the number of bytes freed. Raises StoreError while a process is writing the journal.
        """
        stat, candidates = _delete(path)
        return stat.st_size + self._delete_tokens() + self._delete_unreferenced(candidates)

    def prune(
        self,
        newest_first: list[Path],
        older_than_s: float | None,
        keep_last: int | None,
        max_bytes: int | None,
    ) -> StorePruneResult:
        """Delete runs and evaluations that exceed a limit on age, number or size, and return their
        ids.

        The limits apply to runs and to evaluations separately.
        """
        # Their names begin with their time.
        records = sorted((self._root / EVALUATIONS).glob("*.jsonl"), reverse=True)
        records = records[keep_last or 0 :][::-1]
        oldest_first = [
            path
            for path in newest_first[keep_last or 0 :][::-1]
            if find_writer_process(path) is None
        ]
        if older_than_s is None:
            takes_all = keep_last is not None and max_bytes is None
            old_runs, old_records = (oldest_first, records) if takes_all else ([], [])
        else:
            old_runs, old_records = (
                _older_than(paths, older_than_s) for paths in (oldest_first, records)
            )
        removed = StorePruneResult(
            self._remove_all(old_runs), [path.stem for path in old_records if _delete_record(path)]
        )
        self._sweep()
        if max_bytes is not None:
            deleted = {*removed.runs, *removed.evaluations}
            remaining = [path for path in (*oldest_first, *records) if path.stem not in deleted]
            self._prune_to_size(
                max_bytes, sorted(remaining, key=lambda path: path.stat().st_mtime), removed
            )
        if removed.evaluations:
            self._delete_matrices()
        return removed

    def _delete_matrices(self) -> None:
        """Delete each comparison matrix whose evaluations have all been deleted.

        A matrix is a table that compares evaluations.
        """
        folder = self._root / EVALUATIONS
        for path in folder.glob(f"*{MATRIX}"):
            if not any(folder.glob(f"{path.name.removesuffix(MATRIX)}-*.jsonl")):
                remove_file(path)

    def _remove_all(self, journals: list[Path]) -> list[str]:
        """Delete several journals, and the blobs to which no other journal refers.

        Returns the ids of the deleted runs.

        The remaining journals are scanned only once. A journal is kept if a process has started to
        write it again.
        """
        removed, candidates = [], dict[str, float]()
        for path in journals:
            try:
                _, named = _delete(path)
            except StoreError:
                continue
            removed.append(path.stem)
            self._delete_tokens()
            candidates |= {
                name: max(ended, candidates.get(name, 0.0)) for name, ended in named.items()
            }
        self._delete_unreferenced(candidates)
        return removed

    def _delete_tokens(self) -> int:
        """Delete the cached token ids of all conversations, since some may come from a deleted run.

        Returns the number of bytes freed. Training computes them again when needed.
        """
        return sum(map(remove_file, (self._root / TOKENIZED).glob("*")))

    def _prune_to_size(
        self, max_bytes: int, oldest_first: list[Path], removed: StorePruneResult
    ) -> None:
        """Delete the oldest runs and evaluations until the store has at most ``max_bytes`` bytes.

        They are added to ``removed``.
        """
        size = self._size.measure()
        for path in oldest_first:
            if size <= max_bytes:
                break
            if path.parent.name == EVALUATIONS:
                num_bytes = path.stat().st_size
                if _delete_record(path):
                    size -= num_bytes
                    removed.evaluations.append(path.stem)
                continue
            try:
                size -= self.remove(path)
            except StoreError:
                continue
            removed.runs.append(path.stem)

    def _sweep(self) -> None:
        """Delete blobs that no journal needs, and files that killed processes have left behind."""
        settled, stale = time.time() - SETTLE_S, time.time() - GRACE_S
        candidates = {}
        for path, stat in self._blobs.list_files():
            if not path.name.startswith("."):
                candidates[path.name] = settled
            elif stat.st_mtime < stale:
                remove_file(path)
        self._delete_unreferenced(candidates)
        for path in self._runs.glob("*.writer"):
            if not path.with_suffix(".jsonl").exists() and path.stat().st_mtime < stale:
                remove_file(path)
        for path in self._runs.glob("*.live"):
            delete_if_unfollowed(path)

    def _delete_unreferenced(self, candidates: dict[str, float]) -> int:
        """Delete the given blobs if no journal needs them, and return the number of bytes freed.

        ``candidates`` maps the hash of each blob to a time. A blob that was stored after that time
        is kept.
        """
        if not candidates:
            return 0
        # A run stores a blob just before its journal refers to it, so recent blobs may be needed.
        # Checked before the journals are read: meanwhile, a run may name a blob and end.
        writing = any(
            find_writer_process(path.with_suffix(".jsonl")) for path in self._runs.glob("*.writer")
        )
        latest = time.time() - GRACE_S if writing else float("inf")
        unnamed = dict(candidates)
        for path in self._runs.glob("*.jsonl"):
            for name in _blob_digests(path):
                unnamed.pop(name, None)
        return sum(self._blobs.delete(name, min(spare, latest)) for name, spare in unnamed.items())


def _delete(path: Path) -> tuple[os.stat_result, dict[str, float]]:
    """Delete the journal of a run and the files that belong to it.

    Raises StoreError if the journal is being written or cannot be deleted.

    Returns the attributes of the deleted file, and a dict from the digest of each blob that the
    journal referred to, to the time of the journal's last write. A blob that is newer may belong
    to another run.
    """
    try:
        fd = open_locked(path, 0)
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        named = dict.fromkeys(_blob_digests(path), stat.st_mtime)
        remove_file(path)
        remove_file(writer_process_file(path))
        remove_file(review_file(path))
        remove_file(live_reply_file_path(path))
        for backup in backups(path):
            remove_file(backup)
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
    return stat, named


def _older_than(paths: list[Path], than_s: float) -> list[Path]:
    return [path for path in paths if time.time() - path.stat().st_mtime > than_s]


def _delete_record(path: Path) -> bool:
    """Delete the stored record of an evaluation, unless a process is still writing it.

    Returns True if it was deleted.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_file(path)
    except (BlockingIOError, StoreError):
        return False
    finally:
        os.close(fd)
    return True


def _blob_digests(path: Path) -> Iterator[str]:
    """Yield the hash of each blob to which a journal file refers."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for match in _NAME.finditer(data):
                    yield match[1].decode()
    except FileNotFoundError:
        return
