"""Keeps the full-text search indexes of this process.

Each index covers the texts of one context, and runs in a separate process with a private temporary
folder.

    get_or_build_index(digest, …) ──> SearchIndexProcess ──> ask(query, k)
                                      the same one for equal contexts; it ends when none needs it

When an index is built, and from which texts, is decided in ``text_search.py``, which imports this
module only then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ramify.actors.child_process import kill_and_reap
from ramify.actors.helper_process import ask, start_python_process
from ramify.actors.message_encoding import decode, encode
from ramify.sources.query_process import ProcessValueOrError
from ramify.sources.search_index_process import SearchProcessRequest
from ramify.sources.search_units import replace_surrogates

BLOCK_S = 60.0
"""Time limit in seconds for indexing the texts of one request, and for finishing the index."""
QUERY_S = 30.0
_BYTES_PER_CHAR = 3
"""Maximum size of an index, in bytes per character of the context."""
_SPARE_BYTES = 256 << 20
"""Number of bytes added to the maximum size of every index, so that small contexts can be indexed.
The disk must have this much free space plus half a byte per character."""
_STALE_S = 2 * 86400
_PREFIX = "ramify-search-"
_KEPT = 2
"""Number of unused indexes that are kept for later contexts with the same texts."""


class SearchIndexProcess:
    """The host's handle to a process that holds the search index of one context.

    The process ends and its folder is deleted together with this object.
    """

    def __init__(
        self, num_chars: int, requests: Callable[[], Iterator[SearchProcessRequest]]
    ) -> None:
        """Start a process and build the index of a context in it.

        Takes about a minute per gigabyte. Raises ValueError if the index cannot be built.
        """
        _remove_stale()
        most = _BYTES_PER_CHAR * num_chars + _SPARE_BYTES
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < num_chars // 2 + _SPARE_BYTES:
            raise ValueError(
                f"the disk of {tempfile.gettempdir()} has only {free / 1e6:,.0f} MB left, too "
                "little for the index"
            )
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        self._process = start_python_process(
            "ramify.sources.search_index_process:serve", is_bare=True
        )
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _remove, self._process, folder)
        self._place = {"folder": folder, "max_bytes": min(most, free - _SPARE_BYTES // 2)}
        # This request fits into the pipe's buffer, so the child learns its folder even if this
        # process is killed now.
        try:
            self._ask_process(SearchProcessRequest("open"), BLOCK_S)
            for request in requests():
                self._ask_process(request, BLOCK_S)
            self._ask_process(SearchProcessRequest("commit"), BLOCK_S * 5)
        except BaseException:
            self._close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, query: str, k: int) -> list[tuple[float, int]]:
        """Return the scores and positions of the ``k`` passages that best match the query."""
        found: list[tuple[float, int]] = self._ask_process(
            SearchProcessRequest("ask", query=replace_surrogates(query), k=k), QUERY_S
        )
        return found

    def _ask_process(self, request: SearchProcessRequest, limit_s: float) -> Any:
        whole = msgspec.structs.replace(request, **self._place)
        with self._lock:
            try:
                (data,) = ask(self._process, [encode(whole)], limit_s)
            except TimeoutError:
                self._close()
                raise ValueError(f"it was stopped after {limit_s:g} s") from None
            except (EOFError, OSError):
                self._close()
                raise ValueError("its process ended, perhaps for lack of memory") from None
        answer: ProcessValueOrError = decode(data, ProcessValueOrError)
        if answer.kind:
            raise ValueError(answer.text)
        return answer.value


_sharing = threading.Lock()
_indexes: weakref.WeakValueDictionary[str, SearchIndexProcess] = weakref.WeakValueDictionary()
"""Digest of a context -> its index, for as long as something uses the index."""
_kept: deque[SearchIndexProcess] = deque(maxlen=_KEPT)


def get_or_build_index(
    digest: str, num_chars: int, requests: Callable[[], Iterator[SearchProcessRequest]]
) -> SearchIndexProcess:
    """Return the search index for the context with this hash, and build it first if necessary.

    Raises ValueError if it cannot be built.

    Only one index is built at a time, because building uses two cores.
    """
    with _sharing:
        found = _indexes.get(digest)
        if found is None or found.has_ended:
            found = _indexes[digest] = SearchIndexProcess(num_chars, requests)
            _kept.append(found)
        return found


def _remove(process: subprocess.Popen[bytes], folder: str) -> None:
    kill_and_reap(process)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_stale() -> None:
    """Delete the folders that killed index processes have left behind."""
    for entry in os.scandir(tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == (
                os.getuid()
            ):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age > _STALE_S:
                    shutil.rmtree(entry.path, ignore_errors=True)
