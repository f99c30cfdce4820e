"""The memory budget of all sessions of a sandbox together.

Decides which memory counts (a session's private pages, beyond those it was forked with; its folder,
output and shared buffers; its frames in the host), how often it is measured, and that the session
that uses the most is ended if the budget is exceeded. Not
here: the limit of each session, which the kernel enforces. Sixteen sessions may each stay within
their limits and still use more memory than the machine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

_EVERY_S = 0.25
_SHARE = 0.75
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class KillableSession(Protocol):
    def kill(self, reason: str) -> None: ...

    def host_bytes(self) -> int:
        """Memory that the session uses outside its process and its folder."""
        ...


def machine_bytes() -> int:
    """Return the memory of this machine, or of the container that this process runs in."""
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for path in _CGROUP:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))
    return total


class JailBudgetWatcher:
    """Watches the memory of sessions, while there are any."""

    def __init__(self, limit_bytes: int, ask_folders: Callable[[], Awaitable[None]]) -> None:
        """``ask_folders``: asks for the sizes of the sessions' folders; it calls
        ``note_folder``."""
        self._ask_folders = ask_folders
        self._asking: asyncio.Future[None] | None = None
        self._folders: dict[KillableSession, int] = {}
        self._limit = limit_bytes or int(machine_bytes() * _SHARE)
        self._sessions: dict[KillableSession, tuple[int, int]] = {}
        """Session -> (process id, number of private pages at the start)."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, session: KillableSession, pid: int) -> None:
        self._sessions[session] = (pid, _own_pages(pid))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._look)

    def forget(self, session: KillableSession) -> None:
        self._sessions.pop(session, None)
        self._folders.pop(session, None)
        if not self._sessions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def note_folder(self, session: KillableSession, num_bytes: int) -> None:
        if session in self._sessions:
            self._folders[session] = num_bytes

    def _look(self) -> None:
        started = time.perf_counter()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask_folders())
        used = {
            session: max(_own_pages(pid) - before, 0) * mmap.PAGESIZE
            + session.host_bytes()
            + self._folders.get(session, 0)
            for session, (pid, before) in self._sessions.items()
        }
        if sum(used.values()) > self._limit:
            largest = max(used, key=lambda session: used[session])
            largest.kill(
                f"all sessions together used {sum(used.values()) >> 20:,} MB of "
                f"{self._limit >> 20:,} MB, "
                f"this one most of it ({used[largest] >> 20:,} MB)"
            )
        pause_s = max(_EVERY_S, 20 * (time.perf_counter() - started))
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)


def _own_pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            words = file.read().split()
        return int(words[1]) - int(words[2])
    except (OSError, IndexError, ValueError):
        return 0
