"""Send the list of runs to a page, column by column.

After the first time, only changes since the page's last request are sent.

    page ── since="" ──────> {"version": "k3-7", "num": 10000, "columns": {"key": […], …}, …}
    page ── since="k3-7" ──> {"version": "k3-7", "num": 0}                     nothing changed
    page ── since="k3-7" ──> {"version": "k3-8", "num": 1, "columns": …, "gone": [keys], …}

A column whose values are all the same is sent as one value. Evaluations, training folders, problems
and places are all sent again when any of them changed. A page with an unknown version, such as that
of an earlier server, receives everything. run_catalog.py reads the list.
"""

from __future__ import annotations

import os
import threading
from operator import attrgetter
from typing import Any

import msgspec

from ramify.viewer.run_catalog import RunCatalog, RunListRow

_UNUSED = ("rewards", "requests", "verdicts")
_FIELDS = tuple(name for name in RunListRow.__struct_fields__ if name not in _UNUSED)
"""Columns of the list, which are the fields that the page shows or filters by."""
_MAX_GONE = 10_000
"""Number of deleted runs to remember. A page that missed more receives the whole list."""


class VersionedRunList:
    """The list of runs with the version at which each row changed, so that a page can request only
    the changes.

    Safe for use by several threads.
    """

    def __init__(self, library: RunCatalog) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._start = os.urandom(3).hex()
        self._version = 0
        self._rows: dict[str, tuple[int, RunListRow]] = {}
        self._gone: dict[str, int] = {}
        """For each deleted run, by key, the version of the list in which it is missing for the
        first time.
        """
        self._oldest = 0
        """Oldest version since which all changes are known. For an older one, the whole list is
        sent.
        """
        self._others: dict[str, Any] = {}
        self._others_version = 0

    def full_listing(self) -> dict[str, Any]:
        """Return the rows of all runs, and the rest of the viewer's listing, such as
        evaluations."""
        with self._lock:
            runs, others = self._read_listing()
            return {"runs": runs, **others}

    def changes(self, since: str) -> dict[str, Any]:
        """Return the changes to the list since version ``since``.

        If that version is unknown, return the whole list.
        """
        with self._lock:
            self._refresh()
            start, _, number = since.partition("-")
            known = int(number) if start == self._start and number.isdecimal() else -1
            is_whole = not self._oldest <= known <= self._version
            if is_whole:
                known = -1
            changed = [row for version, row in self._rows.values() if version > known]
            told: dict[str, Any] = {
                "version": f"{self._start}-{self._version}",
                "num": len(changed),
            }
            if is_whole:
                told["whole"] = True
            if changed:
                told["columns"] = {name: _column(changed, name) for name in _FIELDS}
            gone = [key for key, version in self._gone.items() if version > known]
            if gone and not is_whole:
                told["gone"] = gone
            if self._others_version > known:
                told |= self._others
            return told

    def _read_listing(self) -> tuple[list[RunListRow], dict[str, Any]]:
        runs, evaluations, problems = self._library.listing()
        return runs, {
            "evaluations": evaluations,
            "matrices": self._library.matrices(),
            "problems": problems,
            "trainings": self._library.trainings(),
            "places": self._library.location_names,
        }

    def _refresh(self) -> None:
        runs, others = self._read_listing()
        after = self._version + 1
        found = {run.key: run for run in runs}
        for key, run in found.items():
            known = self._rows.get(key)
            if known is None or not _is_same(known[1], run):
                self._rows[key] = after, run
                self._gone.pop(key, None)
                self._version = after
        for key in [key for key in self._rows if key not in found]:
            del self._rows[key]
            self._gone[key] = self._version = after
        if len(self._gone) > _MAX_GONE:
            self._gone.clear()
            self._oldest = self._version
        plain = msgspec.to_builtins(others)
        if not _is_same(plain, self._others):
            self._others = plain
            self._others_version = self._version = after


def _is_same(known: Any, found: Any) -> bool:
    """Return True if the newly found value equals the known one.

    NaN counts as equal to itself, so that it is not sent again and again.
    """
    return known is found or bool(known == found) or repr(known) == repr(found)


def _column(rows: list[RunListRow], name: str) -> Any:
    values = list(map(attrgetter(name), rows))
    first = values[0]
    if isinstance(first, tuple | dict):
        return [value or None for value in values]
    return first if values.count(first) == len(values) else values
