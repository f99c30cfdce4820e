"""Start processes on this machine, each with its own session and log.

When this process ends, each of them is ended too, together with everything that it started.

    child = ChildProcess(command, log=…)
    child.poll()           exit status, or None while it runs
    child.exit_reason()    "ended with status 1; its log ends: …", without secrets
    child.end(10.0)        SIGTERM, then SIGKILL for it and everything it started

Each child has a guard (``process_guard.py``), a small process between the child and this process,
which ends the child whichever of the processes is killed first. A child also ends when its
``ChildProcess`` is garbage-collected. Other modules restart processes (``restarts.py``), start them
on other machines (``launcher.py``), and fork sandbox sessions (``sandbox/``).

``HelperProcessPool`` keeps small processes without a guard, such as those that answer SQL queries.
A ``ForegroundProcess`` is in place of this one: it has the same terminal, and gets its signals.

    with ForegroundProcess() as trainer:
        status = trainer.run(command)
        if not trainer.was_stopped: …     it failed, and was not ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ramify.secret_redaction import SecretRedactor

_GUARD = Path(__file__).with_name("process_guard.py")
_START_S = 60.0
"""Seconds that a guard process may take to start its command."""
_KILLED_S = 15.0
"""Seconds to wait for killed processes to disappear."""
_POLL_S = 0.02
_ENDS_S = 1.0
_QUOTED = 600
"""Maximum number of characters of a log that an error quotes."""
_READ = 1 << 14
"""Number of bytes read from the end of a log. It exceeds what is quoted, so that a secret that
is cut off by the quote is still recognised and redacted."""


class ProcessHandle(Protocol):
    """A running process that this process started, on this machine or on another one.

    Its methods are thread-safe.
    """

    pid: int
    """Process id; 0 if it runs on another machine."""
    where: str
    """Description for messages, such as ``process 4711 on node-2``."""

    def poll(self) -> int | None:
        """Return the exit status of the process, or None while it runs.

        If a signal killed the process, the status is the negative signal number.
        """
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process and its process group.

        Does nothing if the process has ended.
        """
        ...

    def end(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to ``timeout_s`` seconds, then kill the process and everything it
        started.

        Calling this again has no effect.
        """
        ...

    def exit_reason(self) -> str:
        """Describe how the process ended, for an error message: "ended with status 1; its log
        ends: …"."""
        ...


class ChildProcess:
    """A process on this machine that ends when this process ends; implements ``ProcessHandle``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path | None = None,
        files: tuple[int | None, int | None, int | None] = (None, None, None),
        stdin: bytes = b"",
        stopped_s: float | None = None,
        inherits: bool = True,
        left_s: float = 0.0,
    ) -> None:
        """Start ``command`` as a child process, and wait until it is running.

        Raises OSError, which names the program, if the command cannot be started.

        The child gets the environment of this process with ``environment`` added to it; if
        ``inherits`` is False, it gets ``environment`` alone. Output is appended to ``log``, which
        is created with its folder; without a log, only stderr is shown, on the stderr of this
        process. The child runs in ``folder`` if that exists. ``files`` are descriptors to use as
        its stdin, stdout and stderr instead. ``stdin`` holds a few bytes for the child's standard
        input, such as a key, which neither its environment nor its command line then shows. A child
        that is stopped (SIGSTOP) for ``stopped_s`` seconds is killed. Processes that the command
        leaves behind get ``left_s`` seconds to end by themselves; ``num_left`` counts those that
        do not.
        """
        self._log = log
        self._environment = {**(os.environ if inherits else {}), **(environment or {})}
        self.num_left = 0
        """Number of processes that the child left behind and that had to be killed."""
        self._status: int | None = None
        self._reason = ""
        self._received = b""
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._socket = ours.detach()
        spec = {
            "command": list(command),
            "environment": self._environment,
            "folder": str(folder) if folder is not None and folder.is_dir() else "",
            "parent": os.getpid(),
            "stopped_s": stopped_s,
            "left_s": left_s,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            if stdin:
                files = (_pipe_with(stdin, stack), *files[1:])
            files_given = [
                _duplicate(each, stack) for each in self._open_standard_streams(files, stack)
            ]
            self._guard = subprocess.Popen(
                # Isolated and without site-packages: the guard starts fast, and no user setting
                # affects it.
                [sys.executable, "-I", "-S", str(_GUARD)],
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=files_given[2],
                pass_fds=files_given,
                start_new_session=True,
            )
            # Registered before the command is sent: from here on, no failure leaves the guard
            # running.
            weakref.finalize(self, _end_orphaned_child, self._guard, self._socket)
            data = marshal.dumps({**spec, "files": files_given})
            self._send(len(data).to_bytes(4, "little") + data)
            os.set_blocking(self._socket, False)
        self.pid = self._await_start(command[0])
        self.where = f"process {self.pid} on {os.uname().nodename}"

    def poll(self) -> int | None:
        """Return the exit status of the process, or None while it runs.

        The status is negative if a signal killed the process. By the time a status is returned,
        everything that the process started has ended, too.
        """
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the process to end, and return its exit status, or None if it still runs.

        The wait takes at most ``timeout_s`` seconds. The status is the negative signal number if a
        signal killed the process. A timeout of None waits forever.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._status is None and self._is_readable(until):
            with self._lock:  # another thread may have read the line
                if self._status is None and (line := self._read_guard_line()) is not None:
                    self._set_ended(line)
        return self._status

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable once the process has ended.

        A selector or an event loop can wait for it; ``poll`` then returns the exit status.
        """
        return self._socket

    def log_tail(self) -> str:
        """Return the end of the process's log as one line.

        Secrets from the process's environment are redacted.
        """
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            text = SecretRedactor(environ=self._environment).redact(
                file.read().decode(errors="replace")
            )[-_QUOTED:]
            return " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return ""

    def exit_reason(self) -> str:
        """Describe how the process ended, and quote the end of its log, for an error message.

        If its connections have only just closed, the process first gets a moment to end.
        """
        status = self.wait(_ENDS_S)
        return exit_reason(status, self._reason, self.log_tail() if self._log else None)

    def signal(self, number: int) -> None:
        self._send(b"s %d\n" % number)

    def end(self, timeout_s: float) -> None:
        end_all([self], timeout_s)

    # --- the guard

    def _open_standard_streams(
        self, files: Sequence[int | None], stack: contextlib.ExitStack
    ) -> tuple[int, int, int]:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        out, errors = null, 2
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            out = errors = stack.enter_context(self._log.open("ab")).fileno()
        defaults = (null, out, errors)
        first, second, third = (
            default if given is None else given
            for given, default in zip(files, defaults, strict=True)
        )
        return first, second, third

    def _await_start(self, program: str) -> int:
        """Wait until the guard process has started the command, and return the command's process
        id.

        Raises OSError if the command cannot be started.
        """
        line, until = None, time.monotonic() + _START_S
        while line is None and self._is_readable(until):
            line = self._read_guard_line()
        kind, _, value = (line or "").partition(" ")
        if kind == "started":
            return int(value)
        self._guard.kill()
        self._guard.wait()
        self._status = 127
        if kind == "failed":
            raise OSError(int(value), os.strerror(int(value)), program)
        raise OSError(errno.ETIMEDOUT, f"it was not started within {_START_S:g} s", program)

    def _is_readable(self, until: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        left_s = 1e6 if until is None else max(0.0, until - time.monotonic())
        return bool(poll.poll(left_s * 1000))

    def _read_guard_line(self) -> str | None:
        """Return the next line from the guard process, or None if no complete line has arrived yet.

        An empty string means that the guard has ended.
        """
        try:
            block = os.read(self._socket, 1000)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            block = b""
        line, end, rest = (self._received + block).partition(b"\n")
        self._received = rest if end else line
        return line.decode() if end else None if block else ""

    def _set_ended(self, line: str) -> None:
        """Record the exit status from the last line that the guard process sent: ``ended STATUS
        NUM_LEFT REASON``.

        If the guard was killed, the line is empty. The child was then killed with the guard, but
        other processes of the child's group may still run, so they are killed here."""
        _, _, rest = line.partition(" ")
        status, _, rest = rest.partition(" ")
        num_left, _, self._reason = rest.partition(" ")
        self.num_left = int(num_left or 0)
        if not status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._reason = "its guard was killed"
        self._guard.wait()
        self._status = int(status or -signal.SIGKILL)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # the guard has ended
            while view:
                view = view[os.write(self._socket, view) :]


_KEPT = ("LD_LIBRARY_PATH", "PATH")
"""Environment variables of this process that a guard process gets; all others are left out."""


def end_all(children: Iterable[ChildProcess], timeout_s: float) -> None:
    """End several child processes at the same time.

    Each gets SIGTERM and up to ``timeout_s`` seconds to end. After that, it is killed with
    everything it started.
    """
    alive = [child for child in children if child.poll() is None]
    until = time.monotonic() + timeout_s + _KILLED_S
    for child in alive:
        child._send(b"e %f\n" % timeout_s)
    for child in alive:
        if child.wait(max(0.0, until - time.monotonic())) is None:  # its guard is stopped
            child._guard.kill()
            child.wait(_KILLED_S)


def wait_then_kill(processes: Sequence[ProcessHandle], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` seconds for processes to exit, then kill the rest."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
    for process in processes:
        process.end(0.0)


def exit_reason(status: int | None, reason: str = "", log_tail: str | None = None) -> str:
    """Describe how a process ended, such as "was killed by signal 9", for an error message.

    ``log_tail`` is the end of the process's log, or None if it has no log.
    """
    if status is None:
        how = "still runs"
    elif status < 0:
        how = f"was killed by signal {-status}"
    else:
        how = f"ended with status {status}"
    how += f" ({reason})" if reason else ""
    return how if log_tail is None else f"{how}; its log ends: {log_tail or '(it is empty)'}"


def pythonpath_environment() -> dict[str, str]:
    """Return an environment in which ``PYTHONPATH`` makes child processes import this copy of
    Ramify."""
    inherited = os.environ.get("PYTHONPATH", "")
    package = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package, inherited]))}


def _duplicate(descriptor: int, stack: contextlib.ExitStack) -> int:
    """Duplicate a file descriptor to a number above those of the standard streams (0 to 2).

    The copy is closed when ``stack`` ends.
    """
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    stack.callback(os.close, copy)
    return copy


def _pipe_with(data: bytes, stack: contextlib.ExitStack) -> int:
    """Create a pipe that contains ``data``, and return its read end.

    The data must not exceed ``select.PIPE_BUF`` bytes, so that writing it cannot block.
    """
    assert len(data) <= select.PIPE_BUF, "more would block"
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    os.write(writing, data)
    os.close(writing)
    return reading


def _end_orphaned_child(guard: subprocess.Popen[bytes], descriptor: int) -> None:
    """End a child process whose ``ChildProcess`` object was garbage-collected.

    Closing the socket to its guard process makes the guard end the child.
    """
    os.close(descriptor)
    with contextlib.suppress(RuntimeError):  # at the end of the interpreter
        threading.Thread(target=guard.wait, daemon=True, name="ramify guard").start()


class HelperProcessPool:
    """A pool of small helper processes, each of which answers one request at a time.

    Processes are started on demand, kept while idle, and ended with this process.

        with processes.lend_process() as process:
            …    a request and its answer; a process that was left by an exception is killed
    """

    def __init__(self, start: Callable[[], subprocess.Popen[Any]]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[Any]] = []
        atexit.register(self.close)

    @contextlib.contextmanager
    def lend_process(self) -> Iterator[subprocess.Popen[Any]]:
        """Lend a process from the pool for the duration of a ``with`` block.

        No other caller uses the process in the meantime.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:
            kill_and_reap(process)  # it ended while it was idle: close its pipes
            process = None
        if process is None:
            process = self._start()
        try:
            yield process
        except BaseException:
            kill_and_reap(process)
            raise
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            kill_and_reap(process)


def kill_and_reap(process: subprocess.Popen[Any]) -> None:
    """Kill a process that no guard process watches, reap it, and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


class ForegroundProcess:
    """Runs commands in the terminal one by one, and forwards SIGINT, SIGTERM and SIGHUP to them.

    It is a context manager.
    """

    def __init__(self) -> None:
        self.was_stopped = False
        self._process: ChildProcess | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> ForegroundProcess:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._forward_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._process is not None:
            self._process.end(0.0)

    def run(self, command: Sequence[str]) -> int:
        """Run a command on the standard streams of this process, and wait for it.

        Returns its exit status, which is negative if a signal killed the command.
        """
        self._process = ChildProcess(command, files=(0, 1, 2))
        if self.was_stopped:  # by a signal that came before there was a process
            self._process.signal(signal.SIGTERM)
        while (code := self._process.wait(1.0)) is None:
            pass
        return code

    def sleep_until_interrupted(self, seconds: float) -> None:
        """Sleep for ``seconds``, unless this process receives a signal first.

        Raises KeyboardInterrupt if this process has received a signal, either before or during the
        sleep.
        """
        until = time.monotonic() + seconds
        while not self.was_stopped and time.monotonic() < until:
            time.sleep(0.05)
        if self.was_stopped:
            raise KeyboardInterrupt

    def _forward_signal(self, number: int, _: object) -> None:
        """Handle a signal by forwarding it to the running command.

        The command has a separate session, so it does not receive the terminal's signals itself.
        """
        self.was_stopped = True
        if self._process is not None:
            self._process.signal(number)
