"""Processes that this one starts: in sessions of their own, with a log, and gone when whoever
started them is.

    Child(command, log=…)  ->  poll: how it ended    said: the end of its log    end: SIGTERM, then SIGKILL

What a child starts itself ends with it. Leaves out what is started, and who starts it again.
Sessions of a sandbox, which obey no signal and are forked, have a way of their own (``sandbox/``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ramify.secrets import SecretRedactor

_POLL_S = 0.01
_KILLED_S = 10.0
"""In which one that was killed must be gone."""
_QUOTED = 600
"""Characters of a log that are told."""
_READ = 1 << 14
"""Bytes that are read for them: a secret at their beginning is seen whole."""
_FOLLOW = """
import ctypes, os, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
if os.getppid() != parent:  # it was killed before it was asked for
    os._exit(1)
os.execvp(command[0], command)
"""


class ChildProcess:
    """One process. For any thread, but the one that makes it must last: the child ends with it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path | None = None,
        follow: signal.Signals = signal.SIGKILL,
    ) -> None:
        """``environment`` is added to this process's. ``log`` is appended to, and made with its
        folder; without one only what it says on stderr is seen, on this process's. It works in
        ``folder``, where that is there. ``follow`` is sent to it when its starter ends. Raises
        OSError where it cannot be started."""
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        with contextlib.ExitStack() as stack:
            out = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                following(command, follow),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stderr=out,
                stdout=subprocess.DEVNULL if out is None else out,
                start_new_session=True,
                cwd=folder if folder is not None and folder.is_dir() else None,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. It is not reaped: its number
        still stands for what it started itself."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread has just reaped it
            return self._process.wait()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def wait(self) -> int:
        """Its exit status, once it has ended. What it started is left alone."""
        return self._process.wait()

    def said(self) -> str:
        """The end of its log on one line, without the secrets of its environment."""
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            text = SecretRedactor(environ=self._environment).redact(
                file.read().decode(errors="replace")
            )[-_QUOTED:]
            return " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return ""

    def signal(self, number: int) -> None:
        """Send it to the child and to what it started, as long as it was not reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        """Let it end for so long, and see to it that it and what it started does. Idempotent."""
        end_all([self], timeout_s)


def end_all(children: Iterable[ChildProcess], timeout_s: float) -> None:
    """As ``ChildProcess.end``, of all at the same time."""
    alive = [child for child in children if child._process.returncode is None]
    until = time.monotonic() + timeout_s
    for child in alive:
        if child.poll() is None:
            child.signal(signal.SIGTERM)
    for child in alive:
        while child.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        child.kill()  # also for what it left behind
    for child in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child._process.wait(_KILLED_S)


def following(command: Sequence[str], number: signal.Signals) -> list[str]:
    """``command`` so that the kernel sends it ``number`` when the thread that starts it ends; where
    there is no Linux, as it is. Raises FileNotFoundError where there is none.

    A small program asks for that and becomes the command. Asked for between fork and exec
    (``preexec_fn``), a process of several threads stands still for ever now and then: what another
    thread had locked stays locked in the child."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid()), str(int(number)), *command]
