"""Child processes of this process: each has its own session and log, and ends when its parent ends.

    child = ChildProcess(command, log=…)
    child.poll()         exit status, or None while it runs
    child.log_tail()     end of its log, without secrets
    child.end(10.0)      SIGTERM, then SIGKILL for it and everything it started

Not here: which commands are run, and when one is restarted (see their callers), and sandbox
sessions, which ignore signals and are forked (see ``sandbox/``).
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
"""Seconds that a killed process may take to disappear."""
_QUOTED = 600
"""Characters of the log that are quoted in an error."""
_READ = 1 << 14
"""Bytes that are read from the end of the log. More than is quoted, so that a secret cut by the
quote is still recognised and redacted."""
_FOLLOW = """
import ctypes, os, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
if os.getppid() != parent:  # it was killed before it was asked for
    os._exit(1)
os.execvp(command[0], command)
"""


class ChildProcess:
    """One child process. Safe to use from any thread, but it ends when the thread that created it
    ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path | None = None,
        follow: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Start ``command``.

        ``environment`` is added to the environment of this process. Output is appended to ``log``,
        which is created with its folder; without a log, only stderr is shown, on the stderr of this
        process. The child runs in ``folder`` if that exists. ``follow`` is the signal that it
        receives when its parent ends. Raises OSError if it cannot be started.
        """
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
        """Return the exit status, negative for a signal, or None while the process runs.

        Does not reap the process, so its id still identifies the process group of what it started.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread has just reaped it
            return self._process.wait()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def wait(self) -> int:
        """Wait until the process has ended and return its exit status. Processes that it started
        are not stopped."""
        return self._process.wait()

    def log_tail(self) -> str:
        """Return the end of the log on one line, without the secrets of the environment."""
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
        """Send ``number`` to the process group of the child unless the child was reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to ``timeout_s``, then kill the child and everything it started.
        Idempotent."""
        end_all([self], timeout_s)


def end_all(children: Iterable[ChildProcess], timeout_s: float) -> None:
    """Do the same as ``ChildProcess.end`` for several children at the same time."""
    alive = [child for child in children if child._process.returncode is None]
    until = time.monotonic() + timeout_s
    for child in alive:
        if child.poll() is None:
            child.signal(signal.SIGTERM)
    for child in alive:
        while child.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        child.kill()  # also ends processes that it left behind
    for child in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child._process.wait(_KILLED_S)


def following(command: Sequence[str], number: signal.Signals) -> list[str]:
    """Return ``command`` wrapped so that the kernel sends it ``number`` when the starting thread
    ends. On systems other than Linux the command is returned unchanged. Raises FileNotFoundError if
    the program does not exist.

    A small program sets the signal and then becomes the command. Setting it between fork and exec
    (``preexec_fn``) sometimes deadlocks a process with several threads, because a lock held by
    another thread stays locked in the child.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid()), str(int(number)), *command]
