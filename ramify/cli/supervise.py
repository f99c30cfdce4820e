"""``ramify train --restarts N``: the trainer in a process of its own, started again where it ends
by a fault.

    trainer ends ── well, or by whoever stopped it ─────────────────────────────▶ so do we
                 ├─ before it measured anything at all: the run itself is wrong ─▶ its exit code
                 └─ killed, lost a rank, stood still, an error ─▶ from the last checkpoint again, after a pause; given up
                                                                  after N times in a row without getting further

Decides when it is worth trying again. What a resumed run does over is in its checkpoint
(``train/checkpoint.py``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ramify.child import following
from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import UsageError
from ramify.cli.stderr_notes import error_line
from ramify.train.lock import holder
from ramify.train.metrics import FILE, read

_LONGEST_PAUSE_S = 30.0


def supervise(
    words: Sequence[str],
    options: Sequence[str],
    folder: Path,
    resume: str | None,
    restarts: int,
    say: Callable[[str], None],
) -> int:
    """Carry a run out in the folder ``folder``; the exit code of the trainer that ended it.
    ``options`` are passed on."""
    if restarts < 1:
        raise UsageError(f"--restarts {restarts}: give at least 1, or leave it out")
    if os.environ.get("WORLD_SIZE"):
        raise UsageError("--restarts is not for processes of torchrun, which has --max-restarts")
    since, furthest, failed = time.time(), -1, 0
    command = [sys.executable, "-m", "ramify", "train", *words, "--out", str(folder), *options]
    with _Trainer() as trainer:
        while True:
            code = trainer.run([*command, *(("--resume", resume) if resume else ())])
            if (
                code == ExitCode.ANSWERED
                or trainer.was_stopped
                or code in (ExitCode.STOPPED, -signal.SIGINT)
            ):
                return (
                    ExitCode.STOPPED if code == -signal.SIGINT else 128 - code if code < 0 else code
                )
            if code == ExitCode.USAGE and holder(folder) is not None:
                return code  # another run has the folder: what is written there is not of this one
            step = _step(folder, since)
            if step is None and furthest < 0 and code > 0:
                return code  # it said why
            failed = 1 if step is not None and step > furthest else failed + 1
            furthest = max(furthest, step or 0)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            if failed > restarts:
                error_line(
                    f"the trainer {how} at step {furthest}, for the {failed}th time without "
                    "getting further; it is not started "
                    "again (--restarts)"
                )
                return ExitCode.ERROR
            checkpoint = _checkpoint(folder, since)
            resume = str(checkpoint) if checkpoint is not None else resume
            say(
                f"the trainer {how} after step {furthest}; it goes on from "
                f"{resume or 'the beginning'}"
            )
            trainer.pause(min(_LONGEST_PAUSE_S, 2.0**failed / 2))


class _Trainer:
    """The process that trains; as a context, signals that end this one end it."""

    def __init__(self) -> None:
        self.was_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Trainer:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def run(self, command: Sequence[str]) -> int:
        self._process = subprocess.Popen(following(command, signal.SIGTERM))
        return self._process.wait()

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.was_stopped and time.monotonic() < until:
            time.sleep(0.05)
        if self.was_stopped:
            raise KeyboardInterrupt

    def _stop(self, number: int, _: object) -> None:
        """Ctrl-C reaches the trainer by itself, which is in the same group of the terminal."""
        self.was_stopped = True
        if self._process is not None and number == signal.SIGTERM:
            self._process.terminate()


def _step(folder: Path, since: float) -> int | None:
    """The last step that was measured since then; None for none."""
    path = folder / FILE
    if not path.is_file() or path.stat().st_mtime < since:
        return None
    return max((measured.step for measured in read(folder)), default=None)


def _checkpoint(folder: Path, since: float) -> Path | None:
    """The latest whole one that was written since then. Those before may be of a run that was gone
    back from."""
    states = [
        path
        for path in folder.glob("checkpoints/step-*/state.json")
        if path.stat().st_mtime >= since
    ]
    return max((path.parent for path in states), default=None)
