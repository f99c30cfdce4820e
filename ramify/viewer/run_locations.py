"""The places that were named, and how what lies in them is addressed.

    20260301-142501-5gk0x7m-which-host      a run of the first store
    p2:20260301-…                           of the place with number 2
    p3/rollouts/step-000010.jsonl:7         line 7 of a file of trajectories under place 3

Nothing outside of the places is ever given, whatever an address says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ramify.errors import ConfigError, StoreError
from ramify.store.store import Store
from ramify.viewer.run_kinds import LocatedRun

MAX_DEPTH = 4
"""Folders below a named one that are searched."""
_NOT_SEARCHED = ("checkpoints", "policy", "blobs", "reference")


class RunLocation(NamedTuple):
    """A store, a file, or a folder."""

    number: int
    path: Path
    store: Store | None

    def key(self, path: Path) -> str:
        """How a file or folder below is addressed; a run of the store by its id."""
        rest = path.relative_to(self.path)
        if self.store is not None and rest.parent == Path("runs"):
            return path.stem if self.number == 0 else f"p{self.number}:{path.stem}"
        return f"p{self.number}/{'' if rest == Path() else rest.as_posix()}"


class RunLocations:
    """In the order in which they were named; without any, the default store."""

    def __init__(self, paths: Sequence[str | Path] = ()) -> None:
        """Raises ConfigError for a path that is not there."""
        self._all = [_place(number, path) for number, path in enumerate(paths)]
        if not paths:
            store = Store()
            self._all = [RunLocation(0, store.root, store)]

    def __iter__(self) -> Iterator[RunLocation]:
        return iter(self._all)

    def run(self, key: str) -> LocatedRun:
        """The run that ``key`` names. Raises StoreError where there is none."""
        place, rest, is_file = self._split(key)
        if place is None:
            raise StoreError(f"there is no run {key!r} here: the list has those that are")
        if not is_file:
            if place.store is None:
                raise StoreError(f"there is no run {key!r} in {place.path}")
            return LocatedRun(key, place.store.path(rest), None)
        name, colon, number = rest.rpartition(":")
        is_line = bool(colon) and number.isdigit()
        path = _below(place, name if is_line else rest)
        return LocatedRun(key, path, int(number) if is_line else None)

    def path(self, key: str) -> Path | None:
        """The file or folder that ``key`` names; None for what is no such address. Raises
        StoreError where it is gone."""
        place, rest, is_file = self._split(key)
        return _below(place, rest) if place is not None and is_file else None

    def key(self, path: Path) -> str | None:
        """How ``path`` is addressed, where it lies in a place."""
        for place in self._all:
            if path.is_relative_to(place.path):
                return place.key(path)
        return None

    def _split(self, key: str) -> tuple[RunLocation | None, str, bool]:
        """(place, what of it, whether that is a path); ``p3/a.jsonl:7`` -> (place 3, ``a.jsonl:7``,
        True)."""
        for mark in (":", "/"):
            head, found, tail = key.partition(mark)
            if found and head[:1] == "p" and head[1:].isdecimal() and "/" not in head:
                number = int(head[1:])
                return self._all[number] if number < len(self._all) else None, tail, mark == "/"
        return self._all[0], key, False


def walk(
    folder: Path,
    wanted: Callable[[str], bool],
    failed: Callable[[Path, OSError], None] | None = None,
    depth: int = 0,
) -> Iterator[Path]:
    """Files below ``folder`` in order of name; checkpoints of a policy are not looked into.
    ``failed`` is told of a folder that cannot be read."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        if failed is not None:
            failed(folder, error)
        return
    for entry in entries:
        if entry.is_dir():
            if depth < MAX_DEPTH and entry.name not in _NOT_SEARCHED and not entry.is_symlink():
                yield from walk(entry, wanted, failed, depth + 1)
        elif wanted(entry.name):
            yield entry


def _place(number: int, given: str | Path) -> RunLocation:
    path = Path(given).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"there is no file or folder {given}, and no run of that name")
    return RunLocation(number, path, Store(path) if (path / "runs").is_dir() else None)


def _below(place: RunLocation, rest: str) -> Path:
    """Never outside of the place, whatever the address says."""
    path = (place.path / rest).resolve() if rest else place.path
    if not path.is_relative_to(place.path) or not path.exists():
        raise StoreError(f"there is no {rest!r} in {place.path}")
    if not path.is_file() and not path.is_dir():
        raise StoreError(f"{path} is no regular file")  # a pipe would be waited for
    return path
