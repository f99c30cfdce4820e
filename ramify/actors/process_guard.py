"""A small program that runs one command, and later ends it together with all its descendants.

    parent ── socket ── guard ── command ── whatever the command starts
       │                  ├── the parent ends, or asks for it: SIGTERM, then SIGKILL
       │                  ├── the command ends: what it left behind is killed
       └── "ended 3 0" ───┘   (status, number of processes left); then the guard ends

The guard uses the standard library alone, so it starts within some hundredths of a second.
It is the reaper of all descendants of the command (``PR_SET_CHILD_SUBREAPER``), so it finds
those that moved to another session or process group. It sees the parent's end by a descriptor of
the parent (pidfd) and by the socket. The parent's threads and the copies of the socket in its other
children do not matter. The command ends if the guard is killed (``PR_SET_PDEATHSIG``). This is set
between fork and exec, which is safe here: the guard has one thread.

``child_process.py`` starts the guard and is the other end of the socket.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

ORPHAN_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a command whose parent process has ended."""
_LEFT_S = 1.0
"""Seconds between SIGTERM and SIGKILL for processes that the command left behind."""
_SWEEP_S = 10.0
"""Seconds to wait for killed processes to disappear."""
_TICK_S = 1.0
_SOCKET = 0
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RESTORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
"""Signals that get their default action back before the command runs. A shell script, for
example, starts its background jobs with SIGINT and SIGQUIT ignored."""


class ProcessTreeGuard:
    """Starts a command, and watches it and its descendants until all have exited."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._parent: int = spec["parent"]
        self._stopped_s: float | None = spec["stopped_s"]
        """Seconds that the command may be stopped (SIGSTOP) before it is killed."""
        self._left_s: float = spec["left_s"]
        """Seconds that processes which the command left behind may take to end by themselves."""
        self._num_left = 0
        self._status: int | None = None
        self._reason = ""
        self._kill_at: float | None = None
        self._stopped_for_s: float | None = None
        """Seconds for which the command has been stopped; None while it runs."""
        self._is_ending = False
        self._prctl = _prctl()
        self._prctl(_SET_CHILD_SUBREAPER, 1)
        self._wake = self._watch_signals()
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(_SOCKET, select.POLLIN)
        self._parent_fd = self._watch_parent()
        self._pid = self._start(spec)

    def run_until_all_exit(self) -> None:
        """Watch the command until it and all its descendants have exited.

        Then report the command's exit status to the parent process.
        """
        try:
            while self._status is None:
                self._step()
        except BaseException:
            self._is_ending = True
            raise
        finally:
            self._end_remaining_processes()
        _report(f"ended {self._status} {self._num_left} {self._reason}")

    def _step(self) -> None:
        began = time.monotonic()
        for descriptor, _ in self._poll.poll(self._wait_ms()):
            if descriptor == self._wake:
                self._pass_on_signals()
            elif descriptor == _SOCKET:
                self._take_requests()
            else:
                self._end_as_orphan()
        if self._stopped_for_s is not None:
            # At most a tick: the guard may have been stopped, too, with its machine or its job.
            self._stopped_for_s += min(_TICK_S, time.monotonic() - began)
        self._reap()
        self._kill_if_due()

    # --- start

    def _start(self, spec: dict[str, Any]) -> int:
        guard = os.getpid()
        failed, failure = os.pipe()
        pid = os.fork()
        if not pid:
            with contextlib.suppress(OSError):
                self._exec_command(spec, guard, failure)
            os._exit(127)
        os.close(failure)
        for each in spec["files"]:
            os.close(each)
        error = os.read(failed, 100)
        os.close(failed)
        if error:
            os.waitpid(pid, 0)
            _report(f"failed {error.decode()}")
            sys.exit(1)
        _report(f"started {pid}")
        return pid

    def _exec_command(self, spec: dict[str, Any], guard: int, failure: int) -> NoReturn:
        """Replace the forked child process with the command (``exec``).

        If that fails, write the error number to the file descriptor ``failure``, which a successful
        exec closes.
        """
        os.setsid()  # signals for the command go to its process group
        self._prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:  # the guard was killed before the line above
            os._exit(1)
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        for at, descriptor in enumerate(spec["files"]):  # the descriptors are above 2
            os.dup2(descriptor, at)
            os.close(descriptor)
        try:
            if spec["folder"]:
                os.chdir(spec["folder"])
            os.execvpe(spec["command"][0], spec["command"], spec["environment"])
        except (OSError, ValueError) as error:  # ValueError: a null character in a word
            code = error.errno if isinstance(error, OSError) else None
            os.write(failure, str(code or errno.EINVAL).encode())
        os._exit(127)

    def _watch_signals(self) -> int:
        wake, written = os.pipe()
        for descriptor in (wake, written):
            os.set_blocking(descriptor, False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        return wake

    def _watch_parent(self) -> int:
        descriptor = _SOCKET
        with contextlib.suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(self._parent)
            self._poll.register(descriptor, select.POLLIN)
        if os.getppid() != self._parent:
            sys.exit(1)
        return descriptor

    # --- while it runs

    def _wait_ms(self) -> int | None:
        waits = [] if self._kill_at is None else [self._kill_at - time.monotonic()]
        if self._stopped_for_s is not None and self._stopped_s is not None:
            waits.append(min(_TICK_S, self._stopped_s - self._stopped_for_s))
        return max(0, int(min(waits) * 1000) + 1) if waits else None

    def _pass_on_signals(self) -> None:
        for number in os.read(self._wake, 1000):
            if number != signal.SIGCHLD:
                self._signal(number)

    def _take_requests(self) -> None:
        """Handle the requests that the parent process has sent, one per line.

        ``s NUMBER`` sends a signal to the command, and ``e SECONDS`` ends it.
        """
        with contextlib.suppress(ConnectionResetError):
            if text := os.read(_SOCKET, 4000):
                for kind, value in (line.split() for line in text.decode().splitlines()):
                    if kind == "s":
                        self._signal(int(value))
                    else:
                        self._end(float(value))
                return
        self._end_as_orphan()

    def _end_as_orphan(self) -> None:
        for descriptor in (_SOCKET, self._parent_fd):
            with contextlib.suppress(KeyError):  # the other one was seen first
                self._poll.unregister(descriptor)
        self._end(ORPHAN_S)

    def _end(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        if timeout_s <= 0:
            self._signal(signal.SIGKILL)
        elif not self._is_ending:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process acts on nothing else
        self._kill_at = until if self._kill_at is None else min(until, self._kill_at)
        self._is_ending = True

    def _kill_if_due(self) -> None:
        now = time.monotonic()
        if self._status is not None:
            return
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + _SWEEP_S
            self._signal(signal.SIGKILL)
        limit_s, stopped_for_s = self._stopped_s, self._stopped_for_s
        if limit_s is not None and stopped_for_s is not None and stopped_for_s >= limit_s:
            self._stopped_for_s = None
            self._reason = f"it was stopped for {limit_s:g} s"
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
                pid, status = os.waitpid(-1, options)
                if not pid:
                    return
                if pid != self._pid:
                    continue
                was_stopped = os.WIFSTOPPED(status)
                self._stopped_for_s = 0.0 if was_stopped else None
                if not was_stopped and not os.WIFCONTINUED(status):
                    self._status = os.waitstatus_to_exitcode(status)

    # --- end

    def _end_remaining_processes(self) -> None:
        """End every process that the command started and that is still running.

        If the command ended by itself, they first have time to end too, and then get SIGTERM before
        SIGKILL.
        """
        if not self._is_ending:
            self._num_left = self._await_left()
        began = time.monotonic()
        number = signal.SIGKILL if self._is_ending else signal.SIGTERM
        while (waited_s := time.monotonic() - began) < _SWEEP_S:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:  # no descendant is left: orphans become children of the guard
                return
            if waited_s > _LEFT_S:
                number = signal.SIGKILL
            # Listed again each time, since a process may have forked before the signal reached it.
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            time.sleep(0.01)

    def _await_left(self) -> int:
        """Wait briefly for the command's leftover processes to end, and count those still
        running."""
        began = time.monotonic()
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return 0
            if time.monotonic() - began >= self._left_s:
                return sum(1 for _ in _descendants(os.getpid()))
            time.sleep(0.01)


def _prctl() -> Any:
    """Return the C function ``prctl``, which exists only on Linux.

    On systems other than Linux, return a function that does nothing.
    """
    if sys.platform != "linux":
        return lambda *_: 0
    import ctypes

    return ctypes.CDLL(None).prctl


def _descendants(root: int) -> Iterator[int]:
    """Yield the ids of all descendants of the process ``root``.

    Yields nothing on systems without ``/proc``.
    """
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    remaining = [root]
    while remaining:
        below = children.get(remaining.pop(), [])
        yield from below
        remaining += below


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        os.write(_SOCKET, text.encode() + b"\n")


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (block := os.read(_SOCKET, size - len(data))):
            sys.exit(1)
        data += block
    return data


if __name__ == "__main__":
    ProcessTreeGuard(marshal.loads(_read(int.from_bytes(_read(4), "little")))).run_until_all_exit()
