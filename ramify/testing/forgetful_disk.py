"""A test double of a disk that loses all unsynced data in a simulated power failure.

    disk = ForgetfulDisk(folder)
    store = Store(folder / "store", fsync=disk.fsync)
    …                                      # runs, and then the power fails:
    disk.lose_power(elsewhere)
    Store(elsewhere / "store")             # has only the synced data

After a power failure, a file has the content of its last ``fsync``. It has its name only if its
folder was synced after the file got that name. Files that exist when the double is created count as
synced.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path


class ForgetfulDisk:
    """A simulated disk that loses all unsynced data in a power failure.

    It covers the files in one folder.

    Example:
        store = ramify.Store(folder / "store", fsync=testing.ForgetfulDisk(folder).fsync)
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._files: dict[int, bytes] = {}
        """Inode -> content on the disk."""
        self._folders: dict[int, dict[str, tuple[int, bool]]] = {}
        """Maps the inode of each folder to its entries on the disk: name to (inode, True for a
        folder).
        """
        self._changed = threading.Condition()
        for folder, _, files in os.walk(self.root):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                fd = os.open(path, os.O_RDONLY)
                try:
                    self.fsync(fd)
                finally:
                    os.close(fd)

    def fsync(self, fd: int) -> None:
        """Sync an open file or folder to the simulated disk.

        Pass this method to the code under test in place of ``os.fsync``.
        """
        status = os.fstat(fd)
        with self._changed:
            if stat.S_ISDIR(status.st_mode):
                self._folders[status.st_ino] = {
                    entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(fd)
                }
            else:
                self._files[status.st_ino] = _read_all(fd, status.st_size)
            self._changed.notify_all()

    def wait_for(self, is_synced: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        """Wait until ``is_synced`` returns True, checking it after every ``fsync``.

        Returns False after ``timeout_s`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(is_synced, timeout_s)

    def content(self, path: str | Path) -> bytes:
        """Return a file's content on the simulated disk, which is empty if the file was never
        synced.
        """
        return self._files.get(os.stat(path).st_ino, b"")

    def names(self, folder: str | Path) -> list[str]:
        """Return the names of a folder's files and folders on the simulated disk."""
        return [*self._folders.get(os.stat(folder).st_ino, {})]

    def lose_power(self, to: str | Path) -> None:
        """Simulate a power failure by copying only the synced data to the new folder ``to``."""
        with self._changed:
            self._copy(self.root.stat().st_ino, Path(to))

    def _copy(self, folder: int, to: Path) -> None:
        to.mkdir(0o700)
        for name, (inode, is_folder) in self._folders.get(folder, {}).items():
            if is_folder:
                self._copy(inode, to / name)
            else:
                (to / name).write_bytes(self._files.get(inode, b""))
                (to / name).chmod(0o600)


def _read_all(fd: int, size: int) -> bytes:
    """Return all bytes of an open file, even if it is open only for writing."""
    again = os.open(f"/dev/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(again, size, 0)
    finally:
        os.close(again)
