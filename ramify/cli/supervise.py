"""``ramify train --restarts N``: run the trainer in a child process and restart it after a failure.

    trainer ends ─┬─ success, or stopped by the user ──────────▶ return its exit code
                  ├─ failed before its first measurement:
                  │  the run itself is wrong ──────────────────▶ return its exit code
                  └─ killed, lost a rank, stalled, an error ───▶ restart from the last checkpoint
                                                                 after a pause; give up after N
                                                                 failures without progress

This file decides whether a restart is worthwhile. Not here: the state that a restarted run loads
(see train/checkpoint.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ramify.actors.child_process import ForegroundProcess, exit_reason
from ramify.actors.restarts import RestartCount
from ramify.cli.parser import ExitCode, UsageError
from ramify.cli.terminal_text import error_line
from ramify.log_outputs import RUN_LOG, run_log
from ramify.logging import RoomLogger
from ramify.train.lock import holder
from ramify.train.metrics import FILE, read_metrics

_log = RoomLogger("cli")


def supervise(
    words: Sequence[str],
    options: Sequence[str],
    folder: Path,
    resume: str | None,
    restarts: int,
) -> int:
    """Train in ``folder`` with restarts, and return the exit code of the last trainer.

    ``options`` are passed to each trainer.
    """
    if restarts < 1:
        raise UsageError(f"--restarts {restarts}: give at least 1, or leave it out")
    if os.environ.get("WORLD_SIZE"):
        raise UsageError("--restarts does not work under torchrun: use torchrun --max-restarts")
    since, furthest, name = time.time(), -1, folder.resolve().name
    losses = RestartCount(restarts, _log, "trainer")
    command = [sys.executable, "-m", "ramify", "train", *words, "--out", str(folder), *options]
    with run_log(folder / RUN_LOG, name) as log, ForegroundProcess() as trainer:
        log.begin()
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
                return code  # another run holds the folder, so its files are not this run's
            step = _step(folder, since)
            if step is None and furthest < 0 and code > 0:
                return code  # the trainer has already printed the reason
            if step is not None and step > furthest:
                losses.succeeded(name)
            furthest = max(furthest, step or 0)
            how = exit_reason(code)
            attempt = losses.num_losses(name) + 1
            if attempt > restarts:
                text = (
                    f"the trainer {how} at step {furthest}: failure {attempt} in a row without "
                    f"progress, so it is not restarted (--restarts {restarts})"
                )
                _log.error("trainer_lost", text, step=furthest, attempt=attempt)
                error_line(text)
                return ExitCode.ERROR
            checkpoint = _checkpoint(folder, since)
            resume = str(checkpoint) if checkpoint is not None else resume
            losses.failed(
                name,
                f"the trainer {how} after step {furthest}",
                f"restarting from {resume or 'the beginning'}",
                step=furthest,
            )
            trainer.pause(losses.pause_s(name))
            losses.started(name)


def _step(folder: Path, since: float) -> int | None:
    """Last step that was measured since the time ``since``; None if there is none."""
    path = folder / FILE
    if not path.is_file() or path.stat().st_mtime < since:
        return None
    return max((measured.step for measured in read_metrics(folder)), default=None)


def _checkpoint(folder: Path, since: float) -> Path | None:
    """Latest complete checkpoint since the time ``since``; None if there is none.

    An earlier checkpoint may belong to a run that was later resumed from before it.
    """
    states = [
        path
        for path in folder.glob("checkpoints/step-*/state.json")
        if path.stat().st_mtime >= since
    ]
    return max((path.parent for path in states), default=None)
