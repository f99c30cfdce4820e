"""Set up a session's process: its signals, descriptors and limits.

The process also dies with its parent.

These functions run in the fork server and its children, and use the standard library only. They are
called by ``forkserver.py``; isolation from the rest of the machine is done in ``jail/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import sys
from typing import Any

MAX_FILE_BYTES = 256 << 20
"""Maximum size of a file that a session may write, including its raw output."""
MAX_FILES = 256
_OUT_OF_REACH = 8
"""Number of file descriptor numbers, above the limit for cells, that only the guest can use."""
GUEST_BYTES = 32 << 20
"""Address space in bytes that is reserved for the guest, so that it can continue when a cell has
used up its limit."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc: Any = None
_signal: Any = sys.modules["_signal"]
_SIGCHLD, _SIG_DFL = int(signal.SIGCHLD), int(signal.SIG_DFL)


def adopt_orphans() -> None:
    """Make this process the parent (subreaper) of its orphaned descendants.

    Also raise its limit on open files to the maximum, because descriptors that are being sent over
    sockets count, too.
    """
    global _libc
    import ctypes

    _libc = ctypes.CDLL(None)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reset_sigchld() -> None:
    """Restore the default handling of SIGCHLD in a newly forked process.

    The wakeup file descriptor is cleared. The C module ``_signal`` is used because ``signal`` would
    create enums, and so write to memory pages that sessions share.
    """
    _signal.set_wakeup_fd(-1)
    _signal.signal(_SIGCHLD, _SIG_DFL)


def nonblocking_pipe() -> tuple[int, int]:
    ends = os.pipe()  # os.pipe2 does not exist everywhere; both ends are closed in children
    for end in ends:
        os.set_blocking(end, False)
    return ends


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


def tie_to_parent(parent: int) -> None:
    """Make this process die with its parent, even if the parent is killed.

    Also adopt the orphans that its children leave.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)


def close_and_renumber_descriptors(fds: list[int]) -> list[int]:
    """Close all descriptors except the given ones, which get high numbers instead.

    Loops in user code that close descriptors do not reach them there. Returns the new numbers.

    Standard output and error are redirected to the output file. Standard input is opened again,
    since sessions would otherwise share its flags with the server.
    """
    at = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8)
    moved = []
    for fd in fds:
        moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, at))
        at = moved[-1] + 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(moved[1], 1)
    os.dup2(moved[1], 2)
    start = 3
    for fd in moved:
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 1 << 30)
    return moved


def set_limits(
    memory_bytes: int, mapped: int, max_file_bytes: int = MAX_FILE_BYTES
) -> tuple[int, int]:
    """Set the resource limits of one session's process, such as its memory.

    Returns two limits on address space in bytes: one that applies while a cell runs, and a higher
    one for the guest itself. Both include the ``mapped`` bytes inherited in the fork. No file may
    become larger than ``max_file_bytes``.
    """
    memory = mapped + memory_bytes
    for name, limit in {"CORE": 0, "FSIZE": max_file_bytes, "AS": memory + GUEST_BYTES}.items():
        _set_limit(getattr(resource, f"RLIMIT_{name}"), limit, limit)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    return (
        (memory, memory + GUEST_BYTES)
        if most == resource.RLIM_INFINITY
        else (min(memory, most), most)
    )


def limit_open_files() -> None:
    """Limit the number of files that this session's process may have open.

    This must be the last step of the setup, because the kernel also counts the user's descriptors
    in transit to the host.
    """
    _set_limit(resource.RLIMIT_NOFILE, MAX_FILES, MAX_FILES + _OUT_OF_REACH)


def _set_limit(number: int, soft: int, hard: int) -> None:
    most = resource.getrlimit(number)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(number, (soft, hard))


def map_file(fd: int, num_bytes: int) -> memoryview:
    """Map the start of a file into memory, read-only and for the lifetime of this process.

    Its children inherit the mapping. Unlike ``mmap.mmap``, this keeps no descriptor open, because
    sessions have few.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(num_bytes)
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_longlong(0))
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(at)).cast("B").toreadonly()


def address_space_bytes(proc: int | None = None) -> int:
    """Return the size of this process's address space in bytes, or 0 if it cannot be read.

    ``proc`` is a descriptor of /proc, for a process that cannot open /proc by its path.
    """
    try:
        fd = os.open(
            "/proc/self/statm" if proc is None else "self/statm",
            os.O_RDONLY | os.O_CLOEXEC,
            dir_fd=proc,
        )
        try:
            return int(os.read(fd, 256).split()[0]) * mmap.PAGESIZE
        finally:
            os.close(fd)
    except OSError:
        return 0
