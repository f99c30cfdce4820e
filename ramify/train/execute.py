"""Execute a training run from the beginning or from a checkpoint, and manage its resources."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ramify.errors import ConfigError
from ramify.log_handlers import RUN_LOG, FileLogHandler
from ramify.logging import ComponentLogger, run_log
from ramify.progress import track_progress
from ramify.step_time_accounting import PARTS, ROLLOUTS, WAITING
from ramify.train.backends import launch
from ramify.train.build_trainer import opened_trainer
from ramify.train.checkpoint import (
    FOLDER,
    CheckpointedProgress,
    CheckpointStore,
    hold_run_lock,
    read_state,
)
from ramify.train.config import Run, to_plain_data
from ramify.train.load_run_parts import assemble
from ramify.train.metrics import StepMetrics
from ramify.train.policy_dependent_defaults import report_policy_defaults
from ramify.train.preflight import check_folder
from ramify.train.resolve_run import resolve
from ramify.train.stall_watchdog import StoppedBySignal
from ramify.train.trainer import Trainer

_log = ComponentLogger("train")
_IN_LOG = (
    "loss",
    "reward",
    "validation/reward",
    "test/reward",
    "failed_rollouts",
    "work_s",
    "learn_s",
    "time/step_s",
    "time/overhead",
    *(f"time/{part}_s" for part in (*PARTS, ROLLOUTS, WAITING)),
)
"""Names of the metrics that run.log repeats. The file metrics.jsonl has all metrics."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which a run saves a checkpoint and ends."""
_SAME_S = 1.0
"""Seconds within which a second signal counts as the same one, in case several processes send
it."""


def train(
    run: Run,
    out: str | Path,
    *,
    resume: str | Path | None = None,
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
) -> CheckpointedProgress:
    """Train ``run`` in the folder ``out``, from the beginning or from a checkpoint.

    Returns the final state.

    ``resume`` is the folder of a run or one of its checkpoints; some fields of ``run`` may differ
    from the resumed run (``lineage.py``). Raises RunInUse while another process trains in ``out``,
    ConfigError for mistakes in the run before anything is trained, StoreError for a damaged
    checkpoint, and TrainError if training cannot continue.

    In the main thread, SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) first save the
    steps so far, and then raise KeyboardInterrupt or SystemExit; a second signal ends the run at
    once. ``on_stall`` is called if nothing progresses for ``run.stall_s`` seconds. An error
    follows, but a stuck thread may keep this function from returning. Records of the ``ramify``
    loggers are also written to ``OUT/run.log``.

    Example:
        state = train.train(train.load_recipe("recipes/tiny.py"), "runs/tiny")
        state.step
    """
    launch.run_follower_rank()
    out = Path(out)
    with hold_run_lock(out), run_log(out / RUN_LOG, out.resolve().name) as log:
        if log.path.exists():
            log.release_held_records()
        try:
            state = _train(
                run, out, Path(resume) if resume is not None else None, listener, on_stall, log
            )
        except StoppedBySignal as stopped:
            _log.info(
                "run_stopped", _stop_message(out, str(stopped)), shown=True, signal=stopped.by
            )
            if stopped.by == signal.SIGINT.name:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + signal.Signals[stopped.by]) from None
        except KeyboardInterrupt:
            text = _stop_message(out, "the run was ended by SIGINT")
            _log.warning("run_stopped", text, shown=True)
            raise
        except BaseException as error:
            _log.error("run_failed", f"the run ended: {_reason(error)}", error=error)
            raise
        _log.info("run_ended", f"the run has ended after step {state.step}", step=state.step)
        return state


def _train(
    run: Run,
    out: Path,
    resume: Path | None,
    listener: Callable[[StepMetrics], None] | None,
    on_stall: Callable[[str], None] | None,
    log: FileLogHandler,
) -> CheckpointedProgress:
    """Check the run and train it in this process.

    The caller holds the lock of the run's folder.
    """
    resolved = resolve(run, resume)
    run, checkpoint, trackers = resolved.run, resolved.checkpoint, resolved.trackers
    is_of_out = checkpoint is not None and checkpoint.resolve().parent == (out / FOLDER).resolve()
    if not is_of_out and any(out.glob(f"{FOLDER}/step-*")):
        raise ConfigError(
            f"{out} already contains a run: resume it with ramify train --resume {out}, give "
            f"another folder, or remove this one to start again: rm -r {shlex.quote(str(out))}"
        )
    check_folder(out)
    resumed_at = read_state(checkpoint).step if checkpoint is not None else None

    def measured(metrics: StepMetrics) -> None:
        values: dict[str, Any] = {
            name: value for name, value in metrics.values.items() if name in _IN_LOG
        }
        text = f"{metrics.stage}: step {metrics.step}, after {metrics.at_s:.0f} s"
        _log.info("step", text, step=metrics.step, stage=metrics.stage, **values)
        if run.trackers:
            trackers(metrics)
        if listener is not None:
            listener(metrics)

    trainers: list[Trainer] = []

    async def execute() -> CheckpointedProgress:
        with (
            track_progress("preparing", note="task, demonstrations and policy"),
            _reported_interrupt(),
        ):
            parts = assemble(resolved)
        report_policy_defaults(resolved.given, run, resumed=checkpoint is not None)
        async with opened_trainer(
            parts,
            out,
            checkpoint,
            listener=measured,
            on_stall=on_stall,
            on_start=log.release_held_records,
        ) as trainer:
            parts.save_sft_rows(out)
            trainers.append(trainer)
            with (
                trackers.open_all(run.name, out, to_plain_data(run), resumed_at),
                _stopped_by_signals(trainer),
            ):
                return await trainer.run(checkpoint)

    def stop() -> bool:
        for trainer in trainers:
            trainer.stop(signal.SIGINT.name)
        return bool(trainers)

    return _in_new_loop(execute(), stop)


def _in_new_loop(
    work: Coroutine[Any, Any, CheckpointedProgress], stop: Callable[[], bool]
) -> CheckpointedProgress:
    """Run a coroutine to completion in a new event loop, even if this thread already runs a loop.

    If this thread already runs a loop, as in a notebook, use a new thread. In the latter case an
    interrupt calls ``stop`` in the new loop. A second interrupt cancels ``work``, and so does the
    first one if ``stop`` returns False because there is nothing to stop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def begin() -> CheckpointedProgress:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    is_stopped = False

    def interrupted(task: asyncio.Task[Any]) -> None:
        nonlocal is_stopped
        if is_stopped or not stop():
            task.cancel()
        is_stopped = True

    with ThreadPoolExecutor(1, "ramify train") as pool:
        done = pool.submit(contextvars.copy_context().run, asyncio.run, begin())
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:
                loop, task = begun.result()
                assert task is not None
                with contextlib.suppress(RuntimeError):  # it has ended by itself
                    loop.call_soon_threadsafe(interrupted, task)
            except CancelledError:
                raise KeyboardInterrupt from None


@contextlib.contextmanager
def _reported_interrupt() -> Iterator[None]:
    """Log an interrupt at once, although it takes effect when the preparation is done.

    A second one ends the run at once. Signals are handled only in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    context = contextvars.copy_context()
    text = "SIGINT: stopping when the run is prepared; a second one ends it at once"
    log = partial(_log.info, "stopping", text, shown=True)

    def arrived(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        # In a thread, as this one may hold the lock of a log's output.
        threading.Thread(None, context.run, "report of an interrupt", (log,)).start()
        before(number, frame)

    signal.signal(signal.SIGINT, arrived)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _stopped_by_signals(trainer: Trainer) -> Iterator[None]:
    """Stop ``trainer`` at the first termination signal that arrives inside the ``with`` block.

    The trainer saves a checkpoint when it stops. A second signal has its original effect. Signals
    are handled only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    stopped_at: float | None = None

    def arrived(number: signal.Signals) -> None:
        nonlocal stopped_at
        if stopped_at is None:
            stopped_at = time.monotonic()
            _log.info(
                "stopping",
                f"{number.name}: stopping; a step that is being learned from is finished and saved "
                "first; a second signal ends the run at once",
                shown=True,
            )
            trainer.stop(number.name)
        elif time.monotonic() - stopped_at > _SAME_S:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    for number in before:
        loop.add_signal_handler(number, arrived, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _stop_message(out: Path, how: str) -> str:
    """Return a message that tells the user how to continue a stopped run.

    It says up to which step the run is saved, and how to continue it.
    """
    latest = CheckpointStore(out).latest()
    if latest is None:
        return f"{how} before its first checkpoint, so there is nothing to resume"
    step = read_state(latest).step
    return f"{how}; it is saved at step {step}; continue with: ramify train --resume {out}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
