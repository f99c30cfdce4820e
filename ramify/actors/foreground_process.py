"""A process in place of this one: it has the same terminal, and gets the signals of this one.

    with ForegroundProcess() as trainer:
        status = trainer.run(command)
        if not trainer.was_stopped: …     it failed, and was not ended by Ctrl-C or SIGTERM

Not here: whether it is run again (see ``restarts.py`` and ``cli/supervise.py``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from ramify.actors.child_process import ChildProcess


class ForegroundProcess:
    """Context manager that runs commands in turn, and passes on SIGINT, SIGTERM and SIGHUP."""

    def __init__(self) -> None:
        self.was_stopped = False
        self._process: ChildProcess | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> ForegroundProcess:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._process is not None:
            self._process.end(0.0)

    def run(self, command: Sequence[str]) -> int:
        """Run ``command`` on the standard streams of this process; returns its exit status,
        negative for a signal."""
        self._process = ChildProcess(command, files=(0, 1, 2))
        if self.was_stopped:  # by a signal that came before there was a process
            self._process.signal(signal.SIGTERM)
        while (code := self._process.wait(1.0)) is None:
            pass
        return code

    def pause(self, seconds: float) -> None:
        """Wait. Raises KeyboardInterrupt after a signal."""
        until = time.monotonic() + seconds
        while not self.was_stopped and time.monotonic() < until:
            time.sleep(0.05)
        if self.was_stopped:
            raise KeyboardInterrupt

    def _stop(self, number: int, _: object) -> None:
        """Pass the signal on to the process, which has a separate session."""
        self.was_stopped = True
        if self._process is not None:
            self._process.signal(number)
