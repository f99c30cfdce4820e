"""Carry a run out: everything open as long as it lasts, from the beginning or from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from ramify.build.preflight import check_folder
from ramify.build.recipe import with_defaults
from ramify.build.run_parts import RunParts
from ramify.errors import ConfigError
from ramify.train.backends import launch
from ramify.train.checkpoint import FOLDER, CheckpointState, check_config, find, read_state, verify
from ramify.train.config import Run, plain
from ramify.train.lock import locked
from ramify.train.metrics import StepMetrics
from ramify.train.trackers.base import RunTrackers
from ramify.train.training_loop import TrainingLoop

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
"""Fields of a run that a resumed one may have otherwise: they change no weight, but for how long it
is trained."""
_PARTS = ("teachers", "rollout_workers", "client", "trained", "services", "hosts")
"""Of ``RunParts``, in the order in which they are closed: who asks before who is asked."""
_SWITCH_S = 5e-4
"""How long one thread may keep the interpreter from another: the loop's, which speaks to sessions,
waits for the engine's after each system call. At Python's 5 ms a step of rollouts takes a fifth
longer."""


def train(
    run: Run,
    out: str | Path,
    *,
    resume: str | Path | None = None,
    listener: Callable[[StepMetrics], None] | None = None,
    say: Callable[[str], None] = print,
    on_stall: Callable[[str], None] | None = None,
    inform: Callable[[str], None] = print,
) -> CheckpointState:
    """Carry ``run`` out in the folder ``out``, from the beginning or from a checkpoint; where it
    stands at the end.

    ``resume`` is a run's folder or one of its checkpoints. Raises RunInUse while another process
    trains in ``out``, ConfigError for what is wrong with the run before anything is trained,
    StoreError for a damaged checkpoint, and TrainError where training cannot go on. ``on_stall`` is
    told where nothing moves for ``run.stall_s``: an error follows, but a stuck thread may keep this
    from returning. ``say`` is told what a person should know, ``inform`` what is worth knowing
    where all is well."""
    launch.follow_if_told()
    out = Path(out)
    with locked(out):
        return _train(
            run, out, Path(resume) if resume is not None else None, listener, say, on_stall, inform
        )


def _train(
    run: Run,
    out: Path,
    resume: Path | None,
    listener: Callable[[StepMetrics], None] | None,
    say: Callable[[str], None],
    on_stall: Callable[[str], None] | None,
    inform: Callable[[str], None],
) -> CheckpointState:
    """``train`` for the process that holds the folder's lock."""
    checkpoint = find(resume) if resume is not None else None
    if checkpoint is not None:
        verify(checkpoint)
        state = read_state(checkpoint)
        known = msgspec.structs.replace(state, config=with_defaults(state.config))
        check_config(known, plain(run), FREE)
    is_of_out = checkpoint is not None and checkpoint.resolve().parent == (out / FOLDER).resolve()
    if not is_of_out and any(out.glob(f"{FOLDER}/step-*")):
        raise ConfigError(f"{out} holds a run already: resume it, or give another folder")
    check_folder(out)

    trackers = RunTrackers(run.trackers, run.tracker_options, say)
    resumed_at = read_state(checkpoint).step if checkpoint is not None else None

    def measured(each: StepMetrics) -> None:
        trackers(each)
        if listener is not None:
            listener(each)

    async def carry_out() -> CheckpointState:
        async with building(
            run, out, checkpoint, listener=measured, say=say, on_stall=on_stall, inform=inform
        ) as loop:
            with trackers.opened(run.name, out, plain(run), resumed_at):
                return await loop.run(checkpoint)

    return asyncio.run(carry_out())


@contextlib.asynccontextmanager
async def building(
    run: Run,
    out: Path,
    checkpoint: Path | None = None,
    *,
    listener: Callable[[StepMetrics], None] | None = None,
    say: Callable[[str], None] = print,
    on_stall: Callable[[str], None] | None = None,
    inform: Callable[[str], None] = print,
) -> AsyncIterator[TrainingLoop]:
    """The loop of ``run``, with all that it needs open as long as the block lasts. All checks are
    done here, also that it can go on from ``checkpoint``."""
    made = RunParts(run, say)
    interval = sys.getswitchinterval()
    async with closing({part: partial(_close, made, part) for part in _PARTS}, say):
        if checkpoint is not None:
            made.check_fits(checkpoint)
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        # demonstrations and their rows stay: to look through them again and again would cost a
        # tenth of a step
        gc.freeze()
        try:
            await made.start(out)
            async with made.rlm:
                yield made.loop(out, listener, on_stall, inform)
        finally:
            gc.unfreeze()
            sys.setswitchinterval(interval)


@contextlib.asynccontextmanager
async def closing(
    parts: Mapping[str, Callable[[], object]], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Close ``parts`` when the block is over, in their order, whatever becomes of it and of each of
    them. What failed first is raised; what fails after it is said."""
    async with contextlib.AsyncExitStack() as stack:
        for part, close in reversed([*parts.items()]):
            await stack.enter_async_context(_closed(part, close, say))
        yield


@contextlib.asynccontextmanager
async def _closed(
    part: str, close: Callable[[], object], say: Callable[[str], None]
) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        try:
            await _done(close())
        except Exception as error:  # noqa: BLE001 (there is one already that says more)
            say(f"{part} could not be closed: {type(error).__name__}: {error}")
        raise
    await _done(close())


async def _done(result: object) -> None:
    if inspect.isawaitable(result):
        await result


def _close(made: RunParts, part: str) -> object:
    """Nothing is done where it was not opened."""
    opened = getattr(made, part)
    return opened.close() if opened is not None else None
