"""Deleting runs, evaluations, and the blobs that nothing names any more.

Which blobs are needed is read from the journals: every quoted string of 64 hexadecimal digits
counts as a name. A run that is about to name a blob has put it (which renews the blob's time) a
moment before; so a blob is spared that was put after the run it is deleted with had ended, or
within the last hour where some run is being written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.store.blobs import BlobStore
from ramify.store.journal import open_locked, writer, writer_file
from ramify.store.private_files import EVALUATIONS, FILE_MODE, remove_file

DEFAULT_MAX_BYTES = 20 << 30
"""Above this a store warns; ``$RAMIFY_STORE_MAX_BYTES`` sets another cap."""
GRACE_S = 3600.0
"""A blob put more recently is not litter while runs are being written."""
SETTLE_S = 60.0
"""Nor is one put more recently that no run has named yet, whether or not one is being written."""
_STALE_S = 3600.0
"""How old a measurement of the store's size may be before it is taken again."""
_NAME = re.compile(rb'"([0-9a-f]{64})"')


class PruneResult(msgspec.Struct):
    """What was deleted, oldest first."""

    runs: list[str]
    """Their ids."""
    evaluations: list[str]
    """Theirs."""


class _Size(msgspec.Struct):
    num_bytes: int
    at: float


class StorePruner:
    """Deletes from one store, and watches its size."""

    def __init__(self, root: Path, runs: Path, blobs: BlobStore) -> None:
        self._root = root
        self._runs = runs
        self._blobs = blobs
        self._warned = False

    def remove(self, path: Path) -> int:
        """Delete this journal and what only it named; the bytes freed. StoreError where it is being
        written."""
        stat, candidates = _delete(path)
        return stat.st_size + self._collect(candidates)

    def prune(
        self,
        newest_first: list[Path],
        older_than_s: float | None,
        keep_last: int | None,
        max_bytes: int | None,
    ) -> PruneResult:
        """The ids of the runs and of the evaluations that are gone. Both go by the same rules, each
        counted by itself."""
        records = sorted(
            (self._root / EVALUATIONS).glob("*.jsonl"), reverse=True
        )  # their names begin with their time
        records = records[keep_last or 0 :][::-1]
        oldest_first = [
            path for path in newest_first[keep_last or 0 :][::-1] if writer(path) is None
        ]
        if older_than_s is None:
            takes_all = keep_last is not None and max_bytes is None
            going, leaving = (oldest_first, records) if takes_all else ([], [])
        else:
            going, leaving = (_older(paths, older_than_s) for paths in (oldest_first, records))
        removed = PruneResult(
            self._remove_all(going), [path.stem for path in leaving if _delete_record(path)]
        )
        self._sweep()
        if max_bytes is not None:
            gone = {*removed.runs, *removed.evaluations}
            left = [path for path in (*oldest_first, *records) if path.stem not in gone]
            self._fit(max_bytes, sorted(left, key=lambda path: path.stat().st_mtime), removed)
        return removed

    def measure(self) -> int:
        """Bytes under the root, remembered for ``warn_if_full``."""
        total = sum(_walk(self._root))
        data = msgspec.json.encode(_Size(total, time.time()))
        try:
            fd = os.open(
                self._root / "size.json",
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                FILE_MODE,
            )
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        except OSError:
            pass  # it is only a memory: the next one measures again
        return total

    def warn_if_full(self) -> None:
        """Warn, once per store object, when the store is over its cap. Measures at most once an
        hour."""
        if self._warned:
            return
        size = self._remembered()
        cap = max_store_bytes()
        if size > cap:
            self._warned = True
            warnings.warn(
                f"the store {self._root} holds {size / 1e9:.1f} GB, over its cap of "
                f"{cap / 1e9:.1f} GB: "
                "prune old runs, or set RAMIFY_STORE_MAX_BYTES",
                stacklevel=4,
            )

    def _remembered(self) -> int:
        try:
            size = msgspec.json.decode((self._root / "size.json").read_bytes(), type=_Size)
        except (OSError, msgspec.DecodeError):
            return self.measure()
        return size.num_bytes if abs(time.time() - size.at) < _STALE_S else self.measure()

    def _remove_all(self, journals: list[Path]) -> list[str]:
        """As ``remove``, with one scan for all; journals that somebody has begun to write again
        stay."""
        removed, candidates = [], dict[str, float]()
        for path in journals:
            try:
                _, named = _delete(path)
            except StoreError:
                continue
            removed.append(path.stem)
            candidates |= {
                name: max(ended, candidates.get(name, 0.0)) for name, ended in named.items()
            }
        self._collect(candidates)
        return removed

    def _fit(self, max_bytes: int, oldest_first: list[Path], removed: PruneResult) -> None:
        """Delete until the store fits, and add to ``removed``."""
        size = self.measure()
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
        """Delete every blob that no journal names, and files that a killed writer left behind."""
        settled, stale = time.time() - SETTLE_S, time.time() - GRACE_S
        candidates = {}
        for path, stat in self._blobs.list():
            if not path.name.startswith("."):
                candidates[path.name] = settled
            elif stat.st_mtime < stale:
                remove_file(path)
        self._collect(candidates)
        for path in self._runs.glob("*.writer"):
            if not path.with_suffix(".jsonl").exists() and path.stat().st_mtime < stale:
                remove_file(path)

    def _collect(self, candidates: dict[str, float]) -> int:
        """Delete the candidates (digest -> spare it if put after this time) that no journal names;
        bytes freed."""
        if not candidates:
            return 0
        writing = any(writer(path.with_suffix(".jsonl")) for path in self._runs.glob("*.writer"))
        latest = time.time() - GRACE_S if writing else float("inf")
        unnamed = dict(candidates)
        for path in self._runs.glob("*.jsonl"):
            for name in _names(path):
                unnamed.pop(name, None)
        return sum(self._blobs.delete(name, min(spare, latest)) for name, spare in unnamed.items())


def max_store_bytes() -> int:
    given = os.environ.get("RAMIFY_STORE_MAX_BYTES")
    if not given:
        return DEFAULT_MAX_BYTES
    try:
        return int(float(given))
    except ValueError:
        raise ConfigError(
            f"RAMIFY_STORE_MAX_BYTES is {given!r}: give a number of bytes, such as 20e9"
        ) from None


def _delete(path: Path) -> tuple[os.stat_result, dict[str, float]]:
    """Delete a journal that nobody writes; what it was, and the digests it named -> when it
    ended."""
    try:
        fd = open_locked(path, 0)
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        named = dict.fromkeys(_names(path), stat.st_mtime)
        remove_file(path)
        remove_file(writer_file(path))
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
    return stat, named


def _older(paths: list[Path], than_s: float) -> list[Path]:
    return [path for path in paths if time.time() - path.stat().st_mtime > than_s]


def _delete_record(path: Path) -> bool:
    """Delete an evaluation's file that nobody writes; whether it is gone."""
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


def _names(path: Path) -> Iterator[str]:
    """The digests that a journal names."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for found in _NAME.finditer(data):
                    yield found[1].decode()
    except FileNotFoundError:
        return


def _walk(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
