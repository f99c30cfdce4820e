"""Tracks runs that a stopped server left unfinished, so that they can be resumed.

Each run in progress has an empty file as its marker, because a server may be killed at any time,
and two servers may share a store. Only a store in a folder has such markers. How a run continues is
defined in ``RLM.restart``.
"""

from __future__ import annotations

import contextlib
import re

from ramify.errors import RamifyError
from ramify.http_server.rejections import RequestRejected
from ramify.store.base import RunStore
from ramify.store.durable_files import FILE_MODE, make_folder
from ramify.store.folder_store import Store
from ramify.store.recorded_replies import RunEventIndex
from ramify.types.trajectory import Trajectory

_ID = re.compile(r"[\w-]+")


class UnfinishedRunMarkers:
    """Keeps a marker file for each run in progress, so that a restarted server can resume it.

    They show a restarted server which runs are unfinished.
    """

    def __init__(self, store: RunStore | None) -> None:
        self._store = store
        self._folder = make_folder(store.root / "serving") if isinstance(store, Store) else None

    def mark_started(self, run: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):  # without its mark a run still works
                (self._folder / run).touch(FILE_MODE)

    def unmark_run(self, run: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / run).unlink(missing_ok=True)

    def resumable_runs(self) -> list[str]:
        """Return the ids of the resumable runs that a stopped server left unfinished.

        The oldest comes first. Marks of finished runs are removed.
        """
        if self._folder is None or self._store is None:
            return []
        runs = []
        for name in sorted(each.name for each in self._folder.iterdir()):
            try:
                self._store.check_free(name)
                if RunEventIndex(self._store.events(name)).ended is None:
                    runs.append(name)
                else:
                    self.unmark_run(name)
            except RamifyError:  # in progress in another process, removed, or damaged
                continue
        return runs

    def run_to_continue(self, run: str, caller: str) -> Trajectory:
        """Return the recorded run that an API client asks to continue.

        Raises RequestRejected if the run was started by another caller.
        """
        if self._store is not None and _ID.fullmatch(run):
            with contextlib.suppress(RamifyError):
                recorded = self._store.load(run)
                if recorded.id == run and recorded.metadata.get("served") == {"key": caller}:
                    return recorded
        raise RequestRejected(
            f"this key has no run {run!r:.80} in this server's store: ask without ramify.resume",
            status=404,
            param="ramify.resume",
        )
