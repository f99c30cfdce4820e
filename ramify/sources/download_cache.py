"""A cache of remote files on this machine.

It decides which copies are kept, where, and for how long.

    ROOT/<hash of the URL>/entry.json    version (ETag), type and name of the newest copy
    ROOT/<hash of the URL>/<hash>.data   its bytes; an older copy may still be in use

ROOT is ``$RAMIFY_HOME/downloads`` or the platform's folder for caches, and only its user may access
it. A copy is used only after the server has confirmed its version. Copies without a version, and
those that the server forbids to keep, are not used again. Once all copies together take more than
10 GB, those that were not used for a day are removed, the oldest first. URLs are not stored,
because they may contain keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ramify.errors import SourceError
from ramify.sources.url_recognition import RemoteFileInfo
from ramify.user_folders import user_folder

MAX_CACHE_BYTES = 10 << 30
_SPARED_S = 24 * 3600.0
"""Seconds for which a copy is kept after its last use, because a run may still query it."""


class CachedDownload(msgspec.Struct, frozen=True):
    """The copy of one remote file on this machine."""

    path: Path
    num_bytes: int
    head: RemoteFileInfo
    """The server's description of the file."""


class _Entry(msgspec.Struct):
    file: str
    num_bytes: int
    head: RemoteFileInfo


class DownloadCache:
    """A folder in which copies of remote files are cached.

    Raises SourceError if the folder cannot be written.
    """

    def __init__(self, root: Path | None = None, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._root = root if root is not None else _default_root()
        self._max_bytes = max_bytes

    def find(self, url: str) -> CachedDownload | None:
        """Return the newest cached copy of the file at ``url``.

        Returns None if there is none whose version the server can confirm.
        """
        folder = self._folder(url)
        try:
            entry = msgspec.json.decode((folder / "entry.json").read_bytes(), type=_Entry)
            path = folder / entry.file
            if path.stat().st_size != entry.num_bytes or not entry.head.version:
                return None
        except (OSError, msgspec.MsgspecError):
            return None
        return CachedDownload(path, entry.num_bytes, entry.head)

    def mark_used(self, url: str) -> None:
        """Mark the cached copy of ``url`` as just used, so that it is kept longer."""
        with contextlib.suppress(OSError):
            os.utime(self._folder(url) / "entry.json")

    @contextlib.contextmanager
    def open_for_writing(self, url: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Create a cache file for a download, and open it for writing until the ``with`` block
        ends.

        Calling ``keep`` makes it the copy of ``url``. If an error is raised, the file is removed.
        """
        folder = self._folder(url)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self._root, 0o700)
            folder.mkdir(mode=0o700, exist_ok=True)
            path = folder / f"{secrets.token_hex(8)}.data"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SourceError(
                f"downloads cannot be written below {self._root}: {error.strerror}; set "
                "RAMIFY_HOME to another folder"
            ) from None
        try:
            with open(fd, "wb") as file:
                yield path, file
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def keep(self, url: str, path: Path, head: RemoteFileInfo) -> CachedDownload:
        """Make a downloaded file the cached copy of ``url``, and delete older copies that are no
        longer needed."""
        size = path.stat().st_size
        copy = CachedDownload(path, size, head)
        kept = head if head.may_keep else msgspec.structs.replace(head, version="")
        # The URL after redirects may have keys.
        kept = msgspec.structs.replace(kept, final_url="")
        entry = path.parent / "entry.json"
        new = path.with_suffix(".json")
        new.write_bytes(msgspec.json.encode(_Entry(path.name, size, kept)))
        os.replace(new, entry)
        for other in path.parent.glob("*.data"):
            if other != path and time.time() - other.stat().st_mtime > _SPARED_S:
                other.unlink(missing_ok=True)
        return copy

    def prune(self) -> None:
        """Remove the least recently used copies if the cache is too large."""
        now = time.time()
        found = []
        with contextlib.suppress(OSError):
            found = [(_last_used(each), each, _size(each)) for each in self._root.iterdir()]
        total = sum(size for _, _, size in found)
        for used, folder, size in sorted(found):
            if total <= self._max_bytes or now - used < _SPARED_S:
                return
            shutil.rmtree(folder, ignore_errors=True)
            total -= size

    def _folder(self, url: str) -> Path:
        return self._root / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _default_root() -> Path:
    home = os.environ.get("RAMIFY_HOME")
    if home:
        return Path(home).expanduser() / "downloads"
    return user_folder("cache") / "downloads"


def _last_used(folder: Path) -> float:
    """Return the Unix time at which the cached copy in a folder was last used."""
    with contextlib.suppress(OSError):
        return max(each.stat().st_mtime for each in (folder, *folder.iterdir()))
    return 0.0


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(each.stat().st_size for each in folder.iterdir())
    return 0
