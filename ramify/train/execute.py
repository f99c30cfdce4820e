"""Execute a run: open everything that it needs, and train from scratch or from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.logging import RUN_LOG, LogFile, RoomLogger, run_log
from ramify.progress import report_progress
from ramify.train.assemble import RunParts
from ramify.train.backends import launch
from ramify.train.checkpoint import FOLDER, CheckpointState, check_config, find, read_state, verify
from ramify.train.config import Run, plain
from ramify.train.lock import locked
from ramify.train.metrics import StepMetrics
from ramify.train.preflight import check_folder
from ramify.train.recipe import with_defaults
from ramify.train.trackers.base import RunTrackers
from ramify.train.training_loop import TrainingLoop

_log = RoomLogger("train")
_IN_LOG = (
    "loss",
    "reward",
    "validation/reward",
    "test/reward",
    "failed_rollouts",
    "work_s",
    "learn_s",
)
"""Metrics that run.log repeats; metrics.jsonl has all."""
FREE = (
    "schedule.",
    "compute.shard.",
    "evaluate.",
    "guard.",
    "inference",
    "name",
    "placement",
    "sft.task.validate",
    "stall_s",
    "task.validate",
    "tracker",
)
"""Fields that may differ when a run is resumed: they only change how long it is trained, not
how."""
_PARTS = ("teachers", "rollout_workers", "client", "trained", "services", "hosts")
"""Parts of ``RunParts`` in the order in which they are closed: callers before the parts they
call."""
_SWITCH_S = 5e-4
"""How long one thread may keep the interpreter from another. The event loop's thread, which talks
to sessions, waits for the engine's thread after each system call; with Python's 5 ms, a step of
rollouts takes a fifth longer."""


def train(
    run: Run,
    out: str | Path,
    *,
    resume: str | Path | None = None,
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
) -> CheckpointState:
    """Train ``run`` in the folder ``out``, from the beginning or from a checkpoint; returns the
    final state.

    ``resume`` is a run's folder or one of its checkpoints. Raises RunInUse while another process
    trains in ``out``, ConfigError for mistakes in the run before anything is trained, StoreError
    for a damaged checkpoint, and TrainError if training cannot continue. ``on_stall`` is called if
    nothing progresses for ``run.stall_s``: an error follows, but a stuck thread may keep this
    function from returning. Records of the ``ramify`` loggers are also written to ``OUT/run.log``.

    Example:
        state = train.train(train.load_recipe("recipes/tiny.py"), "runs/tiny")
        state.step
    """
    launch.follow_if_told()
    out = Path(out)
    with locked(out), run_log(out / RUN_LOG, out.resolve().name) as log:
        if log.path.exists():
            log.begin()
        try:
            state = _train(
                run, out, Path(resume) if resume is not None else None, listener, on_stall, log
            )
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
    log: LogFile,
) -> CheckpointState:
    """``train`` in the process that holds the folder's lock."""
    checkpoint = find(resume) if resume is not None else None
    if checkpoint is not None:
        verify(checkpoint)
        state = read_state(checkpoint)
        recorded = msgspec.structs.replace(state, config=with_defaults(state.config))
        check_config(recorded, plain(run), FREE)
    is_of_out = checkpoint is not None and checkpoint.resolve().parent == (out / FOLDER).resolve()
    if not is_of_out and any(out.glob(f"{FOLDER}/step-*")):
        raise ConfigError(f"{out} already contains a run: resume it, or give another folder")
    check_folder(out)

    trackers = RunTrackers(run.trackers, run.tracker_options)
    resumed_at = read_state(checkpoint).step if checkpoint is not None else None

    def measured(metrics: StepMetrics) -> None:
        values: dict[str, Any] = {
            name: value for name, value in metrics.values.items() if name in _IN_LOG
        }
        text = f"{metrics.stage}: step {metrics.step}, after {metrics.at_s:.0f} s"
        _log.info("step", text, step=metrics.step, stage=metrics.stage, **values)
        trackers(metrics)
        if listener is not None:
            listener(metrics)

    async def execute() -> CheckpointState:
        async with building(
            run, out, checkpoint, listener=measured, on_stall=on_stall, on_start=log.begin
        ) as loop:
            with trackers.opened(run.name, out, plain(run), resumed_at):
                return await loop.run(checkpoint)

    return asyncio.run(execute())


@contextlib.asynccontextmanager
async def building(
    run: Run,
    out: Path,
    checkpoint: Path | None = None,
    *,
    listener: Callable[[StepMetrics], None] | None = None,
    on_stall: Callable[[str], None] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[TrainingLoop]:
    """The training loop of ``run``, with everything that it needs open inside the block. All checks
    are done here, including that it can continue from ``checkpoint``. ``on_start`` is called when
    they have passed."""
    with report_progress("preparing", note="task, demonstrations and policy"):
        parts = RunParts(run)
    interval = sys.getswitchinterval()
    async with closing({part: partial(_close, parts, part) for part in _PARTS}):
        if checkpoint is not None:
            parts.check_fits(checkpoint)
        on_start()
        _log.info(
            "run_started",
            f"the run {f'continues from {checkpoint}' if checkpoint else 'begins'}",
            name=run.name,
            folder=out,
            process=os.getpid(),
        )
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        # Demonstrations and their rows stay in memory: scanning them in every garbage collection
        # would cost a tenth of a step.
        gc.freeze()
        try:
            with report_progress("preparing", note="engine and sandbox"):
                await parts.start(out)
            async with parts.rlm:
                yield parts.loop(out, listener, on_stall)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)


@contextlib.asynccontextmanager
async def closing(parts: Mapping[str, Callable[[], object]]) -> AsyncIterator[None]:
    """Close ``parts`` in order when the block ends, whatever happens in it and to each of them. The
    first failure is raised; later ones are logged."""
    async with contextlib.AsyncExitStack() as stack:
        for part, close in reversed([*parts.items()]):
            await stack.enter_async_context(_closed(part, close))
        yield


@contextlib.asynccontextmanager
async def _closed(part: str, close: Callable[[], object]) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        try:
            await _done(close())
        except Exception as error:  # noqa: BLE001 (the first error is raised)
            text = f"{part} could not be closed: {type(error).__name__}: {error}"
            _log.warning("close_failed", text, shown=True, part=part)
        raise
    await _done(close())


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


async def _done(result: object) -> None:
    if inspect.isawaitable(result):
        await result


def _close(parts: RunParts, part: str) -> object:
    """Close a part if it was opened."""
    opened = getattr(parts, part)
    return opened.close() if opened is not None else None
