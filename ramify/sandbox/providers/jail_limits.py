"""Watches the sessions of a jail: their requests to create processes and their total memory.

Requests are refused, unless the host itself has requested a fork. It then grants one request, and
only to the right process while that has a single thread. All sessions of a fork tree send their
requests to one listener, so each process has a separate grant. A system call filter cannot do this
alone, since it cannot count.

After the fork, both processes ask for a new connection (a socket to the host, with new files) and
are blocked until the answer. The host gives one only to a process that has one thread and no
descriptor, and inserts all descriptors itself. If a signal interrupts the process meanwhile, the
request is gone and nothing that was verified counts. The listener also handles aborts. A session
may not send signals, not even to itself, so the host sends SIGABRT to the process that asks, and to
no other.

The memory budget counts a session's private pages, beyond those it was forked with; its folder,
output and shared buffers; and its messages in the host. Memory is measured some times a second, and
if the budget is exceeded, the session that uses the most is ended. Sixteen sessions may each stay
within their limits, which the kernel enforces, and still use more memory than the machine has. When
a fork is granted is decided in ``jail_transport.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ramify.errors import SandboxError
from ramify.sandbox.host.process_transport import read_proc
from ramify.sandbox.jail import seccomp_requests
from ramify.sandbox.jail.seccomp_requests import CONTINUE, FORKS_APART, SeccompNotification

if TYPE_CHECKING:
    from ramify.sandbox.host.session import GuestSessionProxy
    from ramify.sandbox.providers.jail_fork_connections import JailForkInProgress

_EVERY_S = 0.25
_SHARE = 0.75
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes.

    In a container with a lower memory limit, return that limit.
    """
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for path in _CGROUP:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))
    return total


class JailMemoryBudgetWatcher:
    """Limits the total memory of all sessions in a jail.

    It measures the memory regularly while there are sessions. If the memory exceeds the budget, it
    ends the largest session.
    """

    def __init__(self, limit_bytes: int, ask_folders: Callable[[], Awaitable[None]]) -> None:
        """Create a watcher of a memory budget, with no sessions yet.

        ``limit_bytes`` is the budget of all sessions together; 0 means three quarters of the
        machine's memory. ``ask_folders`` requests the sizes of the sessions' folders, which are
        passed to ``record_folder_size``.
        """
        self._ask_folders = ask_folders
        self._asking: asyncio.Future[None] | None = None
        self._folders: dict[GuestSessionProxy, int] = {}
        self._limit = limit_bytes or int(machine_memory_bytes() * _SHARE)
        self._sessions: dict[GuestSessionProxy, tuple[int, int]] = {}
        """Session -> (process id, number of private memory pages at its start)."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, session: GuestSessionProxy, pid: int) -> None:
        self._sessions[session] = (pid, _own_pages(pid))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._check_memory_use)

    def forget(self, session: GuestSessionProxy) -> None:
        self._sessions.pop(session, None)
        self._folders.pop(session, None)
        if not self._sessions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def record_folder_size(self, session: GuestSessionProxy, num_bytes: int) -> None:
        if session in self._sessions:
            self._folders[session] = num_bytes

    def _check_memory_use(self) -> None:
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
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._check_memory_use)


def _own_pages(pid: int) -> int:
    try:
        words = read_proc(f"/proc/{pid}/statm").split()
        # Pages in memory, without those of files and shared memory.
        return int(words[1]) - int(words[2])
    except (OSError, IndexError, ValueError):
        return 0


# System call numbers on x86-64 and aarch64
_CLONE, _TGKILL = (56, 220), (234, 131)
_EPERM = 1
_MOST_FILES = 264
"""Upper bound of a session's descriptor numbers (see ``process_setup.limit_open_files``)."""
_PATIENCE = 32
"""Number of refusals that are sent without delay. Later ones are delayed, so that a session cannot
keep the host busy."""
_SLOWEST_S = 0.05


class ProcessCreationGate:
    """Decides whether a session and its branches may create processes.

    It refuses them, except for a single one after the host has requested a fork.
    """

    __slots__ = (
        "_counts",
        "_fd",
        "_forks",
        "_granted",
        "_holders",
        "_loop",
        "_refused",
        "branches",
    )

    def __init__(self, fd: int, *, counts: bool = True) -> None:
        """Start to handle the requests that the system call filter forwards to the descriptor
        ``fd``.

        With ``counts``, use the kernel's count of a process's open descriptors, if this kernel
        reports it.
        """
        self._fd = fd
        self._counts = counts and _COUNTS_DESCRIPTORS
        self._loop = asyncio.get_running_loop()
        self._granted: set[int] = set()
        self._forks: dict[int, JailForkInProgress] = {}
        """Process id -> its fork in progress."""
        self._refused = 0
        self._holders = 1
        self.branches: set[int] = set()
        """Process ids of branches that have taken a connection and have not ended."""
        self._loop.add_reader(fd, self._on_readable)

    def grant_one(self, pid: int, fork: JailForkInProgress) -> None:
        """Allow one process to create a single new process.

        ``pid`` is its id on the host. Raises SandboxError if the kernel is too old or the process
        is not the leader of its session.
        """
        if not seccomp_requests.can_insert_descriptors(self._fd):
            raise SandboxError("the session cannot be forked: that needs Linux 5.9 or later")
        # Otherwise the processes that it creates could not be recognized by their session id.
        if session_id(pid) != pid:
            raise SandboxError(
                "the session cannot be forked: its code has changed the process that runs it"
            )
        self._granted.add(pid)
        self._forks[pid] = fork

    def withdraw(self, pid: int) -> bool:
        """Withdraw a process's permission to create a new process.

        Returns True if the permission was unused.
        """
        is_unused = pid in self._granted
        self._granted.discard(pid)
        self._forks.pop(pid, None)
        return is_unused

    def add_holder(self) -> None:
        """Register one more branch whose requests arrive at this listener."""
        self._holders += 1

    def release(self) -> None:
        """Unregister an ended session or branch from this listener.

        After the last one, the listener closes.
        """
        self._holders -= 1
        if not self._holders:
            self.close()

    def _on_readable(self) -> None:
        try:
            request = seccomp_requests.receive_seccomp_notification(self._fd)
        except OSError:
            # A listener without processes stays readable: the loop would call this without end.
            if not _is_alive(self._fd):
                self._stop_reading()
            return
        id, pid, number, _ = request
        if seccomp_requests.is_branch_connection_request(request):
            self._hand_over(request)
        elif self._is_granted(request):
            # Before the fork, because the branch could otherwise speak over it as the session.
            self._forks[pid].close_origin_connection()
            if self._answer(id, flags=CONTINUE):  # or a signal came first, and it asks again
                self._granted.discard(pid)
        # Only calls with SIGABRT are reported: abort() sends it, and a session may send no signal.
        elif number in _TGKILL and pid:  # it waits for the answer, so its pid is still valid
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
            self._refuse(id, error=0)
        else:
            self._refuse(id)

    def _is_granted(self, request: SeccompNotification) -> bool:
        # The flags of clone are not in memory, where they could change after this check. The kernel
        # reads only the lower half of them.
        return (
            request.pid in self._granted
            and request.number in _CLONE
            and request.arguments[0] & 0xFFFFFFFF in FORKS_APART
            and has_one_thread(request.pid)
        )

    def _refuse(self, id: int, *, error: int = _EPERM) -> None:
        self._refused += 1
        if self._refused <= _PATIENCE:
            self._answer(id, error=error)
            return
        wait_s = min((self._refused - _PATIENCE) * 0.001, _SLOWEST_S)
        self._loop.call_later(wait_s, lambda: self._answer(id, error=error))

    def _hand_over(self, request: SeccompNotification) -> None:
        """Hand a forked process its new connection to the host, if it is entitled to one.

        It gets the connection, or an error if it may not have one.
        """
        pid = request.pid
        origin = pid if pid in self._forks else session_id(pid)
        fork = self._forks.get(origin)
        is_due = origin not in self._granted and (pid == origin or pid not in self.branches)
        wire = fork.wire_for(pid) if fork is not None and is_due and has_one_thread(pid) else -1
        if fork is None or wire < 0:
            self._refuse(request.id)
            return
        if pid != origin:
            self.branches.add(pid)
        if self._insert_connection(request, wire):
            fork.record_taken(pid)
        else:  # it has other descriptors; or a signal came first, and it asks again
            self.branches.discard(pid)
            self._refuse(request.id)

    def _insert_connection(self, request: SeccompNotification, wire: int) -> bool:
        """Insert a connection to the host into a waiting process as its only open descriptor.

        Returns False if the process has other descriptors, or no longer waits.
        """
        number = request.arguments[0]
        with contextlib.suppress(OSError):
            if self._counts:  # in one step, since each insertion waits for the process
                if not has_no_descriptors(request.pid):
                    return False
                seccomp_requests.insert_descriptor(self._fd, request.id, wire, number, answers=True)
                return True
            with open(os.devnull, "rb") as null:
                for each in range(_MOST_FILES):
                    seccomp_requests.insert_descriptor(self._fd, request.id, null.fileno(), each)
            seccomp_requests.insert_descriptor(self._fd, request.id, wire, number)
            return self._answer(request.id)
        return False

    def _answer(self, id: int, *, error: int = 0, flags: int = 0) -> bool:
        """Answer a confined process whose system call waits for the host's decision.

        Returns True if the requesting process has received the answer.
        """
        return self._fd >= 0 and seccomp_requests.answer_seccomp_notification(
            self._fd, id, error=error, flags=flags
        )

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._stop_reading()
            os.close(self._fd)
            self._fd = -1


def _is_alive(fd: int) -> bool:
    """Return True if any process that this system call filter confines is still alive."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not any(event & select.POLLHUP for _, event in poll.poll(0))


# ------------------------------------------------------------------------------------------------
# the state of a process, as the kernel reports it

_COUNTS_DESCRIPTORS = os.path.isdir("/proc/self/fd") and os.stat("/proc/self/fd").st_size > 0
"""True if the kernel reports a process's number of descriptors, as Linux 6.2 and later do.

On other kernels, the host first replaces every descriptor that the process could have.
"""


def has_one_thread(pid: int) -> bool:
    """Return True if the process has exactly one thread.

    A second thread could use the permission to fork, or would be missing in the forked session.
    """
    return _status(pid)[_NUM_THREADS] == b"1"


def has_no_descriptors(pid: int) -> bool:
    """Return True if a process has no open descriptor.

    This requires a kernel that reports the number of descriptors.
    """
    try:
        return os.stat(f"/proc/{pid}/fd").st_size == 0
    except OSError:
        return False


def session_id(pid: int) -> int:
    """Return the session id of a process, as set by ``setsid``, or -1 if there is no such process.

    A forked process keeps its parent's session id until it has become a branch.
    """
    return int(_status(pid)[_SESSION])


_SESSION, _NUM_THREADS = 3, 17
_GONE = [b"X"] + [b"-1"] * _NUM_THREADS


def _status(pid: int | str) -> list[bytes]:
    """Read the status fields of a process from /proc, such as its state and its parent.

    These are the fields after the process name. The name is skipped because it may contain any
    bytes.
    """
    try:
        return read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split() or _GONE
    except OSError:
        return _GONE


def kill_strays(origin: int, known: set[int]) -> None:
    """Kill all processes that a session has created, except its known branches."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in {origin, *known}:
            status = _status(entry)
            if int(status[_SESSION]) == origin:
                with contextlib.suppress(OSError):
                    os.kill(int(entry), signal.SIGKILL)
