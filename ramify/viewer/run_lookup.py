"""Resolve the addresses of runs and files.

An address names a run or file in one of the places (folders, files and stores) that the viewer was
given.

    20260301-142501-5gk0x7m-which-host      a run in the first place, which is a store
    p2:20260301-…                           a run in place 2, also a store
    p3/rollouts/step-000010.jsonl:7         line 7 of a file of trajectories in place 3
    20261126-211500-map-1a2b3c4d5e:7        question 7 of a map in the first place

A store need not have files; a ``MemoryStore`` is a place, too. No address can reach a file outside
the places. The first line of a file decides its kind: a journal (one run, one event per line), a
file of trajectories (one run per line, as training saves rollouts), or the record of an evaluation
(a plan, then one outcome per line).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError, StoreError
from ramify.maps.map_journal import TableMapStore
from ramify.maps.map_table import DirectRowAsRun, StoredTableMap
from ramify.maps.stored_maps import OpenMapTableCache
from ramify.store.base import RunStore
from ramify.store.folder_store import Store
from ramify.store.journal import FileStoredRun
from ramify.store.store_opening import open_store
from ramify.store.stored_run import StoredRun
from ramify.types.trajectory import SCHEMA_VERSION

Kind = Literal["journal", "trajectory", "evaluation"]
_JOURNAL_BEGINS = b'{"type":"RunStarted"'
_MAX_FIRST_LINE = 1 << 26
"""Maximum length of the first line in bytes. A trajectory with token ids may be long."""


class LocatedRun(NamedTuple):
    """A run, the address under which it was found, and the journal or line that contains it."""

    key: str
    run: StoredRun
    line: int | None = None
    """Line number in a file of trajectories, from 1. None for a journal."""
    store: RunStore | None = None
    """The run's store, if the run was found through one."""


def detect_file_kind(path: Path) -> Kind | str:
    """Determine a file's kind from its first line: journal, trajectory or evaluation.

    For any other file, return a sentence that says why it is not a run.
    """
    with path.open("rb") as file:
        line = file.readline(_MAX_FIRST_LINE).strip()
    if line.startswith(_JOURNAL_BEGINS) or (line and _JOURNAL_BEGINS.startswith(line)):
        return "journal"  # perhaps one whose first line is still being written
    if not line:
        return f"{path} is empty: not a run (yet)"
    if len(line) == _MAX_FIRST_LINE:
        return f"{path} is not a run: its first line is longer than {_MAX_FIRST_LINE >> 20} MiB"
    try:
        first: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return f"{path} is not a run: its first line is not JSON"
    if isinstance(first, dict):
        if first.get("type") == "RunStarted":
            return "journal"
        if "calls" in first and "question" in first:
            return "trajectory"
        if first.get("type") == "plan":
            return "evaluation"
    return (
        f"{path} is not a run: its first line is neither a RunStarted event, nor a trajectory, nor "
        "the plan of an evaluation"
    )


def newer_schema_error(path: Path, number: int, version: int) -> str:
    """Return the error message for line ``number`` of a file that was written with a newer schema
    version."""
    return (
        f"{path}, line {number} was written by a newer Ramify (schema {version}; this one reads up "
        f"to {SCHEMA_VERSION}): pip install -U ramify"
    )


MAX_DEPTH = 4
"""Maximum depth to which the viewer searches the subfolders of a folder that it was given."""
_NOT_SEARCHED = ("checkpoints", "policy", "blobs", "reference")


class ViewerSource(NamedTuple):
    """A store, file or folder that the viewer was asked to show."""

    number: int
    path: Path | None
    """Path of the store, file or folder. None for a store without files."""
    store: RunStore | None

    def __str__(self) -> str:
        return str(self.path or self.store)

    def key_of_run(self, id: str) -> str:
        """Return the address of the run ``id`` in the store of this source."""
        return id if self.number == 0 else f"p{self.number}:{id}"

    def key_of_path(self, path: Path) -> str:
        """Return the address of a file or folder that belongs to this source.

        The address of a journal in a store is that of its run.
        """
        assert self.path is not None  # the caller found the file there
        relative = path.relative_to(self.path)
        if self.store is not None and relative.parent == Path("runs"):
            return self.key_of_run(path.stem)
        return f"p{self.number}/{'' if relative == Path() else relative.as_posix()}"


class ViewerSources:
    """All stores, files and folders that the viewer was asked to show, in order.

    The default is the user's store.
    """

    def __init__(self, places: Sequence[str | Path | RunStore] = ()) -> None:
        """Check and open the given paths and stores.

        Raises ConfigError for a path that does not exist.
        """
        places = places or [open_store()]
        self._all = [_to_viewer_source(number, place) for number, place in enumerate(places)]
        self._maps = OpenMapTableCache()

    def __iter__(self) -> Iterator[ViewerSource]:
        return iter(self._all)

    def find_run(self, key: str) -> LocatedRun:
        """Find the run with address ``key``.

        Raises StoreError if it does not exist.
        """
        place, name, is_file = self._split(key)
        if place is None:
            raise StoreError(f"unknown run {key!r}: choose one from the list")
        if not is_file:
            if place.store is None:
                raise StoreError(f"{place} has no run {key!r}")
            map_id, colon, number = name.rpartition(":")
            if colon and number.isdecimal():
                return LocatedRun(key, DirectRowAsRun(self.load_map(place, map_id), int(number)))
            return LocatedRun(key, place.store.stored(name), store=place.store)
        file_name, colon, number = name.rpartition(":")
        is_line = bool(colon) and number.isdigit()
        path = _resolve_inside(place, file_name if is_line else name)
        return LocatedRun(key, FileStoredRun(path), int(number) if is_line else None)

    def stored_maps(self) -> Iterator[tuple[ViewerSource, StoredTableMap]]:
        """Yield every stored map and the source that contains it, including the map's latest
        results.

        A map asks one question about many rows. Unreadable maps are skipped.
        """
        for place in self._all:
            if isinstance(place.store, Store):
                for path in TableMapStore(place.store.root).paths():
                    with contextlib.suppress(StoreError, OSError):
                        yield place, self._maps.get_table(path)

    def find_map(self, key: str) -> tuple[ViewerSource, StoredTableMap]:
        """Find the map (one question asked about many rows) at address ``key``, and return it with
        its source.

        Raises StoreError if the map does not exist.
        """
        place, name, is_file = self._split(key)
        if place is None or is_file:
            raise StoreError(f"unknown map {key!r}: choose one from the list")
        return place, self.load_map(place, name)

    def load_map(self, place: ViewerSource, id: str) -> StoredTableMap:
        """Return the map ``id`` (one question asked about many rows) from the store at ``place``.

        Raises StoreError if it does not exist.
        """
        store = place.store
        path = TableMapStore(store.root).find_journal_path(id) if isinstance(store, Store) else None
        if path is None:
            raise StoreError(f"{place} has no map {id!r}")
        return self._maps.get_table(path)

    def path(self, key: str) -> Path | None:
        """Return the path of the file or folder with address ``key``.

        Returns None if ``key`` is the address of something else.

        Raises StoreError if the file or folder no longer exists.
        """
        place, name, is_file = self._split(key)
        return _resolve_inside(place, name) if place is not None and is_file else None

    def key_of_path(self, path: Path) -> str | None:
        """Return the address of the file or folder ``path``.

        Returns None if it is outside the places that the viewer was given.
        """
        for place in self._all:
            if place.path is not None and path.is_relative_to(place.path):
                return place.key_of_path(path)
        return None

    def key_of_run(self, store: RunStore, id: str) -> str | None:
        """Return the address of the run ``id`` in ``store``.

        Returns None if the viewer was not given this store.
        """
        path = store.stored(id).path
        if path is not None:
            return self.key_of_path(path)
        return next((place.key_of_run(id) for place in self._all if place.store is store), None)

    def _split(self, key: str) -> tuple[ViewerSource | None, str, bool]:
        """Split an address into its place (a store, file or folder) and the path or run id within
        that place.

        For example, ``p3/a.jsonl:7`` is the path ``a.jsonl:7`` in place 3.

        The last value returned is True if the rest is a path.
        """
        for mark in (":", "/"):
            head, separator, tail = key.partition(mark)
            if separator and head[:1] == "p" and head[1:].isdecimal() and "/" not in head:
                number = int(head[1:])
                return self._all[number] if number < len(self._all) else None, tail, mark == "/"
        return self._all[0], key, False


def walk(
    folder: Path,
    matches: Callable[[str], bool],
    failed: Callable[[Path, OSError], None] | None = None,
    depth: int = 0,
    folders: list[Path] | None = None,
) -> Iterator[Path]:
    """Yield the files below ``folder`` whose name satisfies ``matches``, ordered by name.

    Folders of checkpoints are skipped. If a folder cannot be read, ``failed`` is called with it
    and the error. All searched folders are appended to the list ``folders``, if it is given.
    """
    if folders is not None:
        folders.append(folder)
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        if failed is not None:
            failed(folder, error)
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth < MAX_DEPTH and entry.name not in _NOT_SEARCHED:
                yield from walk(Path(entry.path), matches, failed, depth + 1, folders)
        elif matches(entry.name) and not (entry.is_symlink() and Path(entry.path).is_dir()):
            yield Path(entry.path)


def _to_viewer_source(number: int, name: str | Path | RunStore) -> ViewerSource:
    if isinstance(name, RunStore):
        return ViewerSource(number, name.root if isinstance(name, Store) else None, name)
    path = Path(name).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"{name} is neither a file nor a folder, nor the name of a run")
    return ViewerSource(number, path, Store(path) if (path / "runs").is_dir() else None)


def _resolve_inside(place: ViewerSource, name: str) -> Path:
    """Return the path of the file or folder ``name`` inside a place given to the viewer.

    Raises StoreError if the name points outside the place.
    """
    if "\0" in name or place.path is None:
        raise StoreError(f"{place} has no {name!r}")
    path = (place.path / name).resolve() if name else place.path
    if not path.is_relative_to(place.path) or not path.exists():
        raise StoreError(f"{place} has no {name!r}")
    if not path.is_file() and not path.is_dir():
        raise StoreError(f"{path} is not a regular file")  # opening a pipe would block
    return path
