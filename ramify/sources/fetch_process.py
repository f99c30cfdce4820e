"""Fetch remote files in a separate process.

This module contains the code of that process and the host's handle of it.

    FetchProcess                                the process
    list_files("s3://bucket/logs/")         ──> [RemoteFileEntry, …]
    open_file(url, version)                 ──> RemoteFileInfo
    read(url)  read(url)  …                 ──> the next bytes, and b"" at the end
    close_file(url)

Each answer has a time limit. If a client library hangs, its process is killed, and the next request
starts another. A hostile server can attack only this process. The process has the environment of
the host, since the clients of buckets take their credentials from it, and it writes no files.
Limits on bytes and the cache are in ``remote_files.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from ramify.actors.child_process import kill_and_reap
from ramify.actors.helper_process import answer_requests, ask, start_python_process
from ramify.actors.message_encoding import decode, encode
from ramify.sources.loaded_sources import UnreadableSourceError
from ramify.sources.url_recognition import RemoteFileEntry, RemoteFileInfo, is_web

if TYPE_CHECKING:
    from ramify.http_client.http_transport import HttpConnectionPool
    from ramify.sources.bucket_files import BucketObjectReader
    from ramify.sources.http_download import OpenDownload

ANSWER_S = 60.0
"""Time limit in seconds for each answer: a file's description, or its next bytes."""
LIST_S = 180.0
"""Time limit for listing files, in seconds."""
_START_S = 20.0
_READ_BYTES = 1 << 20
_READ_S = 5.0
"""Maximum time of a read in seconds, after which it returns the bytes that have arrived, even if
they are few."""


class FetchRequest(msgspec.Struct, frozen=True):
    """A request to the process that fetches remote files."""

    what: str
    """Requested operation: ``list``, ``open``, ``read`` or ``close``."""
    url: str
    version: str = ""
    """For ``open``, the version of a copy that was fetched earlier; empty if there was none."""
    allow_private: bool = False
    """True if web addresses may resolve to private network addresses."""


class FetchAnswer(msgspec.Struct, frozen=True):
    """The reply of the process that fetches remote files to one ``FetchRequest``.

    If the request failed, ``reason`` is not empty.
    """

    files: list[RemoteFileEntry] = []
    head: RemoteFileInfo | None = None
    data: bytes = b""
    reason: str = ""
    remedy: str = ""


class FetchProcess:
    """The host's handle to the process that fetches remote files.

    The first request starts the process, which is killed at the end. Every method raises
    UnreadableSourceError if its request fails.
    """

    def __init__(self, allow_private: bool = False, answer_s: float = ANSWER_S) -> None:
        self._allow_private = allow_private
        self._answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FetchProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._end()

    def list_files(self, url: str) -> list[RemoteFileEntry]:
        return self._ask("list", url, limit_s=max(LIST_S, self._answer_s)).files

    def open_file(self, url: str, version: str = "") -> RemoteFileInfo:
        """Open a remote file and return its description.

        ``version`` identifies a copy that is already on this machine, or is empty.
        """
        head = self._ask("open", url, version).head
        assert head is not None
        return head

    def read(self, url: str) -> bytes:
        """Return the next bytes of an open remote file, or b"" at its end."""
        return self._ask("read", url).data

    def close_file(self, url: str) -> None:
        self._ask("close", url)

    def _ask(
        self, what: str, url: str, version: str = "", limit_s: float | None = None
    ) -> FetchAnswer:
        limit_s = limit_s or self._answer_s
        start_s = 0.0
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process, start_s = start_python_process(f"{__name__}:serve"), _START_S
        request = encode(FetchRequest(what, url, version, self._allow_private))
        try:
            (data,) = ask(self._process, [request], limit_s + start_s)
            answer: FetchAnswer = decode(data, FetchAnswer)
        except TimeoutError:
            self._end()
            raise UnreadableSourceError(
                f"cannot be fetched (no answer within {limit_s:g} s)", "try again later"
            ) from None
        except (EOFError, OSError, msgspec.MsgspecError):
            self._end()
            raise UnreadableSourceError(
                "crashed the process that fetched it", "fetch it with another program"
            ) from None
        except (
            BaseException
        ):  # Ctrl-C: the pending answer would be taken for that of the next request
            self._end()
            raise
        if answer.reason:
            raise UnreadableSourceError(answer.reason, answer.remedy)
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_and_reap(process)


# --- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer fetch requests from standard input until it is closed.

    This is the main function of the child process.
    """
    with asyncio.Runner() as runner:
        opened = _OpenFiles(runner)
        answer_requests(
            lambda request: [encode(_answer_request(decode(request[0], FetchRequest), opened))]
        )


def _answer_request(asked: FetchRequest, opened: _OpenFiles) -> FetchAnswer:
    try:
        match asked.what:
            case "list":
                from ramify.sources.bucket_files import list_bucket

                return FetchAnswer(files=list_bucket(asked.url))
            case "open":
                return FetchAnswer(head=opened.open(asked))
            case "read":
                return FetchAnswer(data=opened.read(asked.url))
            case _:
                opened.close(asked.url)
                return FetchAnswer()
    except UnreadableSourceError as error:
        return FetchAnswer(reason=error.reason, remedy=error.remedy)


class _OpenFiles:
    """The remote files that the fetch process has open, keyed by URL.

    A client library is imported when it is first used.
    """

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._pool: HttpConnectionPool | None = None
        self._web: dict[str, OpenDownload] = {}
        self._buckets: dict[str, BucketObjectReader] = {}

    def open(self, asked: FetchRequest) -> RemoteFileInfo:
        self.close(asked.url)
        if is_web(asked.url):
            from ramify.sources.http_download import new_pool, open_download

            if self._pool is None:
                self._pool = new_pool(asked.allow_private)
            download = self._web[asked.url] = self._runner.run(
                open_download(self._pool, asked.url, asked.version, asked.allow_private)
            )
            return download.head
        from ramify.sources.bucket_files import open_file

        opened = self._buckets[asked.url] = open_file(asked.url, asked.version)
        return opened.head

    def read(self, url: str) -> bytes:
        if is_web(url):
            return self._runner.run(_read_block(self._web[url]))
        return self._buckets[url].read()

    def close(self, url: str) -> None:
        if (download := self._web.pop(url, None)) is not None:
            self._runner.run(download.close())
        if (opened := self._buckets.pop(url, None)) is not None:
            opened.close()


async def _read_block(download: OpenDownload) -> bytes:
    """Return the next block of a download, which is about a megabyte long.

    It is shorter if data arrives slowly. The result is empty only at the end of the file.
    """
    data = bytearray(await download.read())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_S):
            while data and len(data) < _READ_BYTES and (more := await download.read()):
                data += more
    return bytes(data)
