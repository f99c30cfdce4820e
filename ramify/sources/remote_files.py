"""Loads web pages, files on the web and files in cloud buckets as sources.

Files are listed with their sizes, checked against the limits and downloaded, and then read like
local files.

    URLs ── list ──> files and sizes ── check the limit ── fetch ──> FetchedFile ── load_sources.py
                     (a bucket's listing,   nothing was             in DownloadCache, unless the
                     a page's head)         fetched so far          server says that it is unchanged

The host fetches the files, because sessions have no network. Each download has limits on its size,
on the time without data, and on how slow it may be. A URL that cannot be fetched becomes a
``UnreadableSource``, or an error if it is the only source. The protocols are implemented in
``http_download.py`` and ``bucket_files.py``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ramify.errors import SourceError
from ramify.progress import ProgressReporter, track_progress
from ramify.sources.archives import is_hidden
from ramify.sources.download_cache import CachedDownload, DownloadCache
from ramify.sources.fetch_process import FetchProcess
from ramify.sources.file_kinds import BINARY_SUFFIXES
from ramify.sources.http_content_type import file_name, to_utf8
from ramify.sources.loaded_sources import MORE, SourceCollector, UnreadableSourceError, size_text
from ramify.sources.url_recognition import (
    RemoteFileEntry,
    RemoteFileInfo,
    check_url,
    is_web,
    redact_url_for_display,
)

MAX_FILES = 200_000
_MOST_HEADS = 100
"""Maximum number of web URLs for which the server is asked for headers before the first download
starts."""
_SLOW_S, _SLOW_BYTES = 60.0, 60_000
"""A download is abandoned if fewer than ``_SLOW_BYTES`` bytes arrive in ``_SLOW_S`` seconds."""
_BEGIN_BYTES = 512


class FetchedFile(msgspec.Struct, frozen=True):
    """A copy of a remote file on this machine, ready to be read."""

    shown: str
    """URL of the file without secrets, for error messages."""
    label: str
    """Name of the file in the context."""
    path: Path
    is_named: bool
    """True if the user named this URL itself, rather than a folder or pattern that contains it."""


class _Wanted(NamedTuple):
    file: RemoteFileEntry
    label: str
    is_named: bool
    head: RemoteFileInfo | None = None


def fetch_files(
    urls: Sequence[str],
    loading: SourceCollector,
    *,
    is_alone: bool,
    allow_private: bool = False,
    cache: DownloadCache | None = None,
) -> list[FetchedFile]:
    """Download all files that the URLs refer to, within the remaining size limit.

    The limit is the number of bytes that the load may still read. ``is_alone`` is True if there are
    no other sources. In that case, a URL that cannot be downloaded raises SourceError.
    """
    asked = list(dict.fromkeys(map(check_url, urls)))
    cache = cache or DownloadCache()
    is_single = is_alone and len(asked) == 1
    with FetchProcess(allow_private) as process:
        fetching = _Fetching(process, cache, loading, is_single)
        wanted = fetching.listed(asked)
        total = _check_total(wanted, loading)
        with track_progress("fetching", total=total or None, unit="bytes") as work:
            found = [each for one in wanted if (each := fetching.fetched(one, work))]
    cache.prune()
    return found


class _Fetching:
    """Lists and downloads the remote files among the sources of a context."""

    def __init__(
        self, process: FetchProcess, cache: DownloadCache, loading: SourceCollector, is_single: bool
    ) -> None:
        self._process = process
        self._cache = cache
        self._loading = loading
        self._is_single = is_single
        self._left = loading.remaining_bytes

    def listed(self, urls: Sequence[str]) -> list[_Wanted]:
        """List the files at the given URLs, and report those that cannot be loaded.

        Files that are too large or of an unsupported kind are left out.
        """
        wanted: list[_Wanted] = []
        for number, url in enumerate(urls):
            try:
                if not is_web(url):
                    wanted += self._listed_bucket(url)
                elif number >= _MOST_HEADS:
                    wanted.append(_Wanted(RemoteFileEntry(url, ""), "", True))
                else:
                    head = self._open_url(url)
                    self._check_size(head.num_bytes)
                    wanted.append(_Wanted(RemoteFileEntry(url, "", head.num_bytes), "", True, head))
            except UnreadableSourceError as error:
                self._report_failure(url, error)
        return wanted

    def _listed_bucket(self, url: str) -> list[_Wanted]:
        files = self._process.list_files(url)
        if len(files) > MAX_FILES:
            raise UnreadableSourceError(
                f"has {len(files):,} files, more than {MAX_FILES:,}", "name a narrower prefix"
            )
        is_named = len(files) == 1 and files[0].url == url
        place = redact_url_for_display(url).partition("://")[2].rstrip("/")
        if pattern := re.search(r"[*?\[]", place):
            place = place[: pattern.start()].rpartition("/")[0]
        wanted = []
        for file in files:
            inside = place if is_named else f"{place}/{file.name}"
            label = file.name if self._is_single else inside
            if not is_named and is_hidden(file.name):
                self._loading.leave_out(label, "hidden")
            elif not is_named and Path(file.name).suffix.lower() in BINARY_SUFFIXES:
                self._loading.report_problem(label, "is binary")
            else:
                try:
                    self._check_size(file.num_bytes)
                    wanted.append(_Wanted(file, label, is_named))
                except UnreadableSourceError as error:
                    self._report_failure(file.url, error, is_named=is_named)
        return wanted

    def fetched(self, wanted: _Wanted, work: ProgressReporter) -> FetchedFile | None:
        """Download one remote file, or take it from the cache.

        On failure, report a problem and return None.
        """
        url = wanted.file.url
        try:
            copy = self._fetch_copy(wanted, work)
        except UnreadableSourceError as error:
            self._report_failure(url, error, is_named=wanted.is_named)
            return None
        except OSError as error:
            raise SourceError(
                f"{redact_url_for_display(url)} cannot be stored: {error.strerror}; free "
                "some space, or set "
                "RAMIFY_HOME to another folder"
            ) from None
        label = wanted.label
        if is_web(url):
            with copy.path.open("rb") as file:
                label = file_name(url, copy.head, file.read(_BEGIN_BYTES))
            if not self._is_single:
                label = _web_label(url, label)
        return FetchedFile(redact_url_for_display(url), label, copy.path, wanted.is_named)

    def _open_url(self, url: str) -> RemoteFileInfo:
        copy = self._cache.find(url)
        return self._process.open_file(url, copy.head.version if copy else "")

    def _fetch_copy(self, wanted: _Wanted, work: ProgressReporter) -> CachedDownload:
        url, note = wanted.file.url, redact_url_for_display(wanted.file.url)
        copy = self._cache.find(url)
        head = wanted.head or self._open_url(url)
        if head.is_unchanged and copy is not None:
            self._process.close_file(url)
            self._cache.mark_used(url)
            self._spend(copy.num_bytes)
            work.set_progress(work.done + copy.num_bytes, note)
            return copy
        self._check_size(head.num_bytes)
        with self._cache.open_for_writing(url) as (path, out):
            num_bytes, slow_from, slow_bytes = 0, time.monotonic(), 0
            while data := self._process.read(url):
                out.write(data)
                num_bytes += len(data)
                slow_bytes += len(data)
                self._spend(len(data))
                work.set_progress(work.done + len(data), note)
                if time.monotonic() - slow_from > _SLOW_S:
                    if slow_bytes < _SLOW_BYTES:
                        raise UnreadableSourceError("arrives too slowly", "try again later")
                    slow_from, slow_bytes = time.monotonic(), 0
            if head.num_bytes not in (-1, num_bytes):
                raise UnreadableSourceError(
                    f"was cut off after {num_bytes:,} of {head.num_bytes:,} bytes",
                    "try again later",
                )
        self._process.close_file(url)
        if is_web(url):
            to_utf8(path, head.content_type)
        return self._cache.keep(url, path, head)

    def _spend(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise UnreadableSourceError(
                f"brings the downloads over the limit of {size_text(self._loading.max_bytes)}",
                MORE,
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._loading.max_bytes:
            raise UnreadableSourceError(
                f"has {size_text(num_bytes)}, over the limit of "
                f"{size_text(self._loading.max_bytes)}",
                MORE,
            )

    def _report_failure(
        self, url: str, error: UnreadableSourceError, *, is_named: bool = True
    ) -> None:
        shown = redact_url_for_display(url)
        if self._is_single and is_named:
            remedy = error.remedy or "check the URL"
            raise SourceError(f"{shown} {error.reason}: {remedy}") from None
        self._loading.report_problem(shown, str(error))


def _check_total(wanted: Sequence[_Wanted], loading: SourceCollector) -> int:
    """Return the total size of the planned downloads if it is within the limit.

    The size is in bytes. Files of unknown size are not counted. Raises SourceError before the first
    download if the total exceeds the limit.
    """
    total = sum(max(0, each.file.num_bytes) for each in wanted)
    if total > loading.remaining_bytes:
        raise SourceError(
            f"the {len(wanted):,} files at {redact_url_for_display(wanted[0].file.url)}"
            f"{' and elsewhere' if len(wanted) > 1 else ''} have {size_text(total)}, over the "
            f"limit of {size_text(loading.remaining_bytes)}; nothing was fetched: name "
            f"fewer, or {MORE}"
        )
    return total


def _web_label(url: str, name: str) -> str:
    """Return a label for a web page that also names the host and the folder of its URL.

    Several pages can have the same file name.
    """
    place = redact_url_for_display(url).partition("://")[2].rstrip("/")
    folder = place.rpartition("/")[0] if "/" in place else place
    return f"{folder}/{name}"
