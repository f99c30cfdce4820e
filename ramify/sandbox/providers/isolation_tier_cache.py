"""Caches the tier, or level of isolation, that the jail reached on this machine.

A file keeps it for later processes.

Testing the isolation takes a considerable part of the time of a short question. A result is
therefore used again if it was found since the last boot, by the same user, on the same kernel, with
the same rights and the same files of this package. It only decides that a run may begin: each fork
server tests its own isolation before its first session, and a session whose isolation is weaker
than the run accepts does not open. The tier is determined in ``jail.py``.

The result is kept in a folder of the user. A folder or file that another user owns, or can write
to, is not used: that user could claim isolation that does not exist.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator

import msgspec

from ramify.sandbox.host.forkserver_process import JAIL_MODULES
from ramify.sandbox.host.guest_module_files import FOLDER

_FILE = "walls.json"
_MOST_BYTES = 1 << 16
_FACTS = (
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/sys/user/max_user_namespaces",
    "/sys/kernel/security/lsm",
    "/proc/self/attr/current",
)
_SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_RIGHTS = ("Uid:", "Gid:", "Cap", "NoNewPrivs:")
_UNFILTERED = "Seccomp:\t0"
"""Line of /proc/self/status in a process without a system call filter. Test results are read and
kept only by such processes."""


class ProbedIsolationTier(msgspec.Struct, frozen=True):
    """The strongest isolation level that works on this machine, and why stronger ones do not."""

    tier: str | None
    """The tier: A, B, C, or None if not even C works."""
    missing: dict[str, str]
    """Stronger tier -> what the kernel refused."""
    landlock: int = 0
    """Version of Landlock in use; 0 for none."""


class _KeptTier(msgspec.Struct, frozen=True):
    """A cached result of the isolation test, and the machine properties for which it is valid."""

    conditions: list[str]
    """Properties of the machine on which the result depends."""
    found: ProbedIsolationTier


def kept_tier() -> ProbedIsolationTier | None:
    """Return the isolation tier that an earlier process cached under the same conditions, or
    None."""
    if _UNFILTERED not in _content("/proc/self/status"):
        return None
    with contextlib.suppress(OSError, ValueError), _opened_folder() as folder:
        file = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            _check_private(os.fstat(file), stat.S_ISREG)
            kept = msgspec.json.decode(os.read(file, _MOST_BYTES), type=_KeptTier)
        finally:
            os.close(file)
        if kept.conditions == _isolation_conditions():
            return kept.found
    return None


def keep_tier(found: ProbedIsolationTier) -> None:
    """Cache the result of an isolation test for later processes, if a private folder can be used.

    A result is not kept if some tier was unavailable, because the cause may be fixed before the
    next process starts.
    """
    if found.tier is None or found.missing or _UNFILTERED not in _content("/proc/self/status"):
        return
    with contextlib.suppress(OSError), _opened_folder(makes=True) as folder:
        data = msgspec.json.encode(_KeptTier(_isolation_conditions(), found))
        name = f"{_FILE}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            os.write(file, data)
        finally:
            os.close(file)
        os.rename(name, _FILE, src_dir_fd=folder, dst_dir_fd=folder)


def forget_tier() -> None:
    """Delete the cached result of an isolation test, because it turned out to be wrong."""
    with contextlib.suppress(OSError), _opened_folder() as folder:
        os.unlink(_FILE, dir_fd=folder)


@contextlib.contextmanager
def _opened_folder(makes: bool = False) -> Iterator[int]:
    """Open the private folder in which the result of the isolation test is cached.

    Raises PermissionError if another user can write to it.
    """
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(above, "ramify")
    if makes:
        os.makedirs(above, 0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    _check_parent(os.stat(above))
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_private(os.fstat(folder), stat.S_ISDIR)
        yield folder
    finally:
        os.close(folder)


def _check_private(found: os.stat_result, is_kind: object) -> None:
    assert callable(is_kind)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not is_kind(found.st_mode):
        raise PermissionError("other users can write to it")


def _check_parent(found: os.stat_result) -> None:
    """Raise PermissionError if another user could replace the cache folder of the isolation
    test."""
    is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or is_shared:
        raise PermissionError("other users can write to it")


def _isolation_conditions() -> list[str]:
    """Return the properties of this machine that determine which isolation it can reach.

    Only properties that can be read quickly are included.
    """
    conditions = [sys.executable, sys.version, *map(str, os.uname())]
    for path in _FACTS:
        conditions.append(f"{path}: {_content(path)}")
    for space in _SPACES:
        with contextlib.suppress(OSError):
            conditions.append(os.readlink(f"/proc/self/ns/{space}"))
    conditions += [
        line for line in _content("/proc/self/status").splitlines() if line.startswith(_RIGHTS)
    ]
    for name in JAIL_MODULES:
        path = f"{FOLDER}/{name}"
        found = os.stat(path if os.path.isdir(path) else f"{path}.py")
        conditions.append(f"{name}: {found.st_size} {found.st_mtime_ns}")
    return conditions


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES).strip()
    except OSError:
        return ""
