"""Server limits that depend on the machine: how many connections and runs fit into the free file
descriptors, memory and processes.

    raise_descriptor_limit()     at the start of a command that serves
    max_connections()            so that runs keep descriptors for their journals and sessions
    max_runs()                   default of --max-runs

A server that exceeds its machine's resources fails with status 500 in the middle of a run. A server
that knows its limits answers 429 before the run begins, and the client tries again.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

MOST_DESCRIPTORS = 1 << 16
"""Upper bound to which the open-file limit is raised. Some programs loop over every possible
descriptor, so it should not be too large."""
MOST_CONNECTIONS = 4096
MOST_RUNS = 256
DESCRIPTORS_OF_A_RUN = 8
"""Number of file descriptors that one run needs in a jailed sandbox, as measured: for its journal,
and for the pipes and in-memory files of its sessions."""
_RESERVE = 48
"""File descriptors that the process itself needs for libraries, logs and the fork server."""
MEMORY_OF_A_RUN = 64 << 20
"""Bytes of memory for a run with one session, in this process and in its sandbox."""
PROCESSES_OF_A_RUN = 3


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit on open files as far as allowed, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)


def max_connections() -> int:
    """Return the default maximum number of connections to a server.

    It is a third of the file descriptors that the process may open.
    """
    return max(16, min(MOST_CONNECTIONS, (descriptor_limit() - _RESERVE) // 3))


def max_runs() -> int:
    """Return the number of runs that this machine can execute at once, at most ``MOST_RUNS``."""
    descriptors = descriptor_limit() - _RESERVE - max_connections()
    bounds = [MOST_RUNS, descriptors // DESCRIPTORS_OF_A_RUN]
    if memory := free_memory():
        bounds.append(memory // MEMORY_OF_A_RUN)
    if processes := free_processes():
        bounds.append(processes // PROCESSES_OF_A_RUN)
    return max(1, min(bounds))


def free_memory() -> int | None:
    """Return how many bytes of memory this process may still allocate, or None if unknown."""
    found = [
        _available_memory(),
        _unused_limit(Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    ]
    known = [each for each in found if each is not None]
    return min(known) if known else None


def free_processes() -> int | None:
    """Return how many more processes this user may start, or None if unlimited."""
    found = [_unused_limit(Path("/sys/fs/cgroup"), "pids.max", "pids.current")]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        found.append(max(0, soft - _num_own_processes()))
    known = [each for each in found if each is not None]
    return min(known) if known else None


def _available_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _unused_limit(folder: Path, most: str, current: str) -> int | None:
    """Return how much of a cgroup limit is unused, or None if it is unlimited.

    ``most`` and ``current`` name the files with the limit and the current use.
    """
    with contextlib.suppress(OSError, ValueError):
        return max(0, int((folder / most).read_text()) - int((folder / current).read_text()))
    return None


def _num_own_processes() -> int:
    """Return the number of the current user's processes, counting each thread, or 0 if unknown.

    Threads are counted because the system's process limit counts them.
    """
    num = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == os.getuid():
                        num += len(os.listdir(f"/proc/{entry.name}/task"))
    return num
