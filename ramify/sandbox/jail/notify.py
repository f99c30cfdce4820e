"""The host's answers to a session's requests to create a process: refused, except once when the
host itself has requested a fork.

A grant is used up by one request, from the right process while it has one thread. All sessions of a
fork tree send their requests to one listener, so each process has a separate grant. A system call
filter cannot do this alone, since it cannot count. After a fork, both processes ask for a wire (a
socket to the host), and the host puts it into the process that asked: nothing that both processes
share could give it to only one of them.

The listener also handles aborts. A session may not send signals, not even to itself, so the host
sends SIGABRT to the process that asks, and to no other. Not here: when a fork is granted (see
``jail_transport.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import struct
from typing import Protocol

from ramify.errors import SandboxError

_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
_TAKE_WIRE = (180, 42)
"""On x86-64 and aarch64: the number of a removed system call, with which both processes of a fork
ask for their wires."""
_REQUEST_BYTES = 80
_CONTINUE = 1
_EPERM = 1
_TGKILL = (234, 131)
"""On x86-64 and aarch64; neither number creates processes."""
_PATIENCE = 32
"""Number of refusals that are answered at once; each further one is delayed slightly longer, so
that a session cannot keep the host busy."""
_SLOWEST_S = 0.05


class GrantedFork(Protocol):
    """One fork, as the listener sees it."""

    def begin(self) -> None:
        """Called when the process is about to fork; it is blocked until this returns."""

    def wire_for(self, pid: int) -> int:
        """Return a descriptor of the wire for ``pid``, or -1 if it gets none."""

    def took(self, pid: int) -> None:
        """Called when ``pid`` has its wire."""


class ForkRequestListener:
    """Receives and answers the requests for processes of a session and its branches."""

    __slots__ = ("_fd", "_forks", "_granted", "_holders", "_loop", "_refused", "branches")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._granted: set[int] = set()
        self._forks: dict[int, GrantedFork] = {}
        """Process id -> its fork in progress."""
        self._refused = 0
        self._holders = 1
        self.branches: set[int] = set()
        """Processes that were created with a grant."""
        self._loop.add_reader(fd, self._readable)

    def grant_one(self, pid: int, fork: GrantedFork) -> None:
        """Allow process ``pid`` (as seen by the host) to create one process. Raises
        SandboxError."""
        if not _can_add_fd(self._fd):
            raise SandboxError("the session cannot be forked: that needs Linux 5.9 or later")
        self._granted.add(pid)
        self._forks[pid] = fork

    def withdraw(self, pid: int) -> bool:
        """Withdraw the grant of ``pid``; returns True if it was unused."""
        is_unused = pid in self._granted
        self._granted.discard(pid)
        self._forks.pop(pid, None)
        return is_unused

    def hold(self) -> None:
        """Add a branch, whose requests arrive here too."""
        self._holders += 1

    def drop(self) -> None:
        """Remove a session of the tree that has ended."""
        self._holders -= 1
        if not self._holders:
            self.close()

    def _readable(self) -> None:
        request = bytearray(_REQUEST_BYTES)
        try:
            fcntl.ioctl(self._fd, _RECEIVE, request)
        except OSError:
            if not _is_alive(self._fd):
                self._stop_reading()
            return
        id, pid, _, number = struct.unpack_from("<QIIi", request)
        if number in _TAKE_WIRE:
            self._hand_over(id, pid)
            return
        if pid in self._granted and _has_one_thread(pid):
            self._granted.discard(pid)
            self._forks[pid].begin()
            self._answer(id, 0, _CONTINUE)
            return
        answer = -_EPERM
        if number in _TGKILL and pid:  # it waits for the answer, so its pid is still valid
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
                answer = 0
        self._refused += 1
        if self._refused <= _PATIENCE:
            self._answer(id, answer, 0)
        else:
            wait_s = min((self._refused - _PATIENCE) * 0.001, _SLOWEST_S)
            self._loop.call_later(wait_s, self._answer, id, answer, 0)

    def _hand_over(self, id: int, pid: int) -> None:
        """Put its wire into the process that asks."""
        origin = pid if pid in self._forks else parent_of(pid)
        fork = self._forks.get(origin)
        wire = -1
        is_new = pid == origin or pid not in self.branches
        if fork is not None and origin not in self._granted and is_new:
            wire = fork.wire_for(pid)
        if fork is None or wire < 0:
            self._answer(id, -_EPERM, 0)
            return
        try:
            number = fcntl.ioctl(
                self._fd, _ADD_FD, bytearray(struct.pack("<QIIII", id, 0, wire, 0, os.O_CLOEXEC))
            )
        except OSError as error:
            self._answer(id, -(error.errno or _EPERM), 0)
            return
        if self._answer(id, 0, 0, number):  # or a signal came first, and it asks again
            fork.took(pid)

    def _answer(self, id: int, error: int, flags: int, value: int = 0) -> bool:
        """Return True if the process that asked has received the answer."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._fd, _SEND, struct.pack("<QqiI", id, value, error, flags))
                return True
        return False

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._stop_reading()
            os.close(self._fd)
            self._fd = -1


def _can_add_fd(fd: int) -> bool:
    """Return True if this kernel (5.9 and later) can put descriptors into a process that asks."""
    try:
        fcntl.ioctl(fd, _ADD_FD, bytearray(struct.pack("<QIIII", 0, 0, fd, 0, 0)))
    except OSError as error:
        return error.errno == errno.ENOENT  # the call exists: it only found no such request
    return True


def _is_alive(fd: int) -> bool:
    """Return True if any process is left to which the filter applies."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not any(event & select.POLLHUP for _, event in poll.poll(0))


def _has_one_thread(pid: int) -> bool:
    """Return True if ``pid`` has one thread: a second one could use the grant, or be lost in the
    branch."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """Return the parent of ``pid``, or -1 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def pid_of(pidfd: int) -> int:
    """Return the process id (as seen by the host), or -1 if the process has ended."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)
    except OSError:
        return -1
