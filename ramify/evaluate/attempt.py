"""Run one attempt at a task item through the engine, and score the answer.

Evaluation and training both use this module.

    prepare ──▶ RLM (sessions, children, a model) ──▶ on_end ──▶ score
        ──▶ Trajectory with rewards, or with errors and no rewards
        ──▶ the run's journal, if there is a store

This module applies the timeouts and decides what counts as a failure. An attempt that ends in an
error outside the model's control records it in ``errors`` and gets no reward. What the model caused
itself (an empty reply, a prompt longer than its window, a session killed three times) is scored
like any other answer. Only bugs and cancellations are raised. If a task scores all attempts of a
training step together, the attempts end without rewards, and ``score_attempts`` scores them later.
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.clients.base import Sampling
from ramify.clients.model_config import Model
from ramify.engine.answer_strategies import Mode
from ramify.engine.branch_search import BranchSearch
from ramify.engine.event_loop_thread import run_in_daemon_thread
from ramify.engine.limits import Limits
from ramify.engine.question import DirectChoice
from ramify.engine.rlm import RLM
from ramify.engine.run_handle import RunHandle
from ramify.engine.run_result import Result, as_text
from ramify.errors import (
    ConfigError,
    RamifyError,
    ReplayDiverged,
    ReplyFiltered,
    RequestRefusedError,
    SessionDied,
    user_line_of_error,
)
from ramify.logging import ComponentLogger
from ramify.tasks.base import Item, RolloutInitialState, Task
from ramify.tasks.batch_scoring import score_batch_with_timeout
from ramify.tasks.score_with_timeout import score_with_timeout
from ramify.types.event import score_events
from ramify.types.fork_segment import first_segment, path_trajectory
from ramify.types.trajectory import Call, Stop, Trajectory

_log = ComponentLogger("evaluate")
DOES_NOT_FIT = "not fitting"
"""Reason recorded for an attempt that has no answer because its prompt exceeds the model's
window."""
UNANSWERED = "unanswered"
"""Key of trajectory metadata that gives a short reason for a missing answer, if ``stop`` does not
show the reason."""
GRACE_S = 30.0
"""Seconds to wait after an attempt's own deadline (``limits.max_seconds``) before it counts as
stalled. The same limit applies to a task's ``prepare``, ``on_end`` and ``score``."""


async def attempt(
    rlm: RLM,
    task: Task,
    item: Item,
    *,
    name: str = "",
    sampling: Sampling | None = None,
    metadata: Mapping[str, Any] | None = None,
    grace_s: float = GRACE_S,
    direct: DirectChoice = False,
    mode: Mode | None = None,
    resume: str = "",
    on_start: Callable[[str], object] | None = None,
    max_cost: float | None = None,
    search: BranchSearch | None = None,
    limits: Limits | None = None,
    is_scored: bool = True,
    refuse: Callable[[RolloutInitialState], str] | None = None,
    model: Model | None = None,
) -> Trajectory:
    """Run one attempt at a task item and return its trajectory.

    The trajectory has ``rewards`` if it could be scored, and ``errors`` otherwise. If the attempt
    does not end in time, its stack traces are logged.

    Args:
        name: Replaces the id of the run.
        sampling: Sampling of this attempt alone, so that attempts can differ in their seed.
        metadata: Stored with the run.
        direct: Whether one plain call may answer a short context, as in ``ask``. By default, each
            root call has a session, since that is what is trained and measured.
        mode: Decides instead of ``direct`` (see ``RunOptions.mode``).
        resume: Id of a stored run that began this attempt. The run is continued, or only scored if
            it has ended. If it cannot be continued, the attempt is made again.
        on_start: Called with the id of the stored run before its first request.
        max_cost: Limit in dollars, which replaces the one of ``rlm``.
        search: Where the attempt forks. Each path from the question to one of its ends is then
            scored as a separate attempt: ``call_rewards`` has the rewards of each path under its
            last call, and ``rewards`` has their means, weighted by the share of each path.
        limits: Replaces all limits of ``rlm``.
        is_scored: False if the caller scores the trajectory later (``score_attempts``).
        refuse: Returns the reason why an item is not asked, or an empty string. An item that is not
            asked scores 0.
        model: Replaces the model of ``rlm``, for example with one that a meter counts.
    """
    if max_cost is not None:
        limits = msgspec.structs.replace(limits or rlm.limits, max_cost=max_cost)
    try:
        start = await _in_time(lambda: task.prepare(item), task, item, "prepare", grace_s)
    except RamifyError as error:
        return _not_asked(name, item, str(error))
    if refuse is not None and (why := refuse(start)):
        if start.on_end is not None:
            start.on_end(None)
        return _scored_0(name, item, why)
    shown = f"{name} item {item.id}".strip()
    about = {**(metadata or {}), "task": item.id, **_gold(item)}
    options: dict[str, Any] = {"sampling": sampling, "limits": limits, "model": model}
    begin = functools.partial(
        rlm.start,
        start,
        item.question,
        metadata=about,
        direct=direct if mode is None else True,
        mode=mode,
        retry_empty=False,
        cache=False,
        search=search,
        **options,
    )
    try:
        if search is not None:
            _check_forkable(start)
        ran = await _continue_run(rlm, resume, shown, start, options, grace_s) if resume else None
        trajectory, result = ran or await _run(shown, begin, grace_s, on_start)
        failure = _failure(result)
        if why := _no_answer_reason(result):
            trajectory.metadata = {**trajectory.metadata, UNANSWERED: why}
    except BaseException as error:
        if start.on_end is not None:
            start.on_end(None)
        if not isinstance(error, ConfigError):
            raise
        # The engine cannot ask this item; others it may.
        return _not_asked(name, item, f"task '{task.name}', item {item.id}: {error}")
    run = trajectory.id
    trajectory.id, trajectory.task = name or trajectory.id, item.id
    try:
        if start.on_end is not None:
            end = functools.partial(run_in_daemon_thread, start.on_end, trajectory.answer)
            trajectory.metadata = {
                **trajectory.metadata,
                **await _in_time(end, task, item, "on_end", grace_s),
            }
        if failure is None and not is_scored:
            trajectory.awaits_score = True
        elif failure is None:
            try:
                await _score(task, item, trajectory, grace_s, every_line=search is not None)
            except RamifyError as error:
                _note_score_error(trajectory, task, item, error)
                raise
            if rlm.store is not None:
                await asyncio.to_thread(
                    rlm.store.append,
                    run,
                    score_events(trajectory, time.time() - trajectory.started_at),
                )
    except RamifyError as error:
        failure = failure or str(error)
    if failure is not None:
        trajectory.errors.append(failure)
    return trajectory


async def _score(
    task: Task, item: Item, trajectory: Trajectory, grace_s: float, *, every_line: bool
) -> None:
    """Let the task score a finished attempt at one of its items.

    If the attempt has forked and ``every_line`` is true, score each path through it separately.
    """
    lines = _scored_paths(trajectory, every_line)
    for line in lines:
        await run_in_daemon_thread(score_with_timeout, task, item, line.trajectory, grace_s)
    _merge_lines(trajectory, lines)


class AttemptAwaitingScore(NamedTuple):
    """A finished attempt that has not been scored yet, because its task scores several attempts at
    once."""

    item: Item
    trajectory: Trajectory
    every_line: bool = False
    """True if each path through a forked attempt is scored separately, as when ``attempt`` was
    given a ``search``."""


async def score_attempts(
    task: Task, attempts: Sequence[AttemptAwaitingScore], grace_s: float = GRACE_S
) -> None:
    """Score several finished attempts with one call of their task, within ``grace_s`` seconds.

    Each trajectory gets its rewards, or the reason in ``errors`` if it could not be scored.
    """
    lines = [_scored_paths(each.trajectory, each.every_line) for each in attempts]
    rollouts = [
        (each.item, line.trajectory)
        for each, own in zip(attempts, lines, strict=True)
        for line in own
    ]
    if not rollouts:
        return
    problems = iter(await run_in_daemon_thread(score_batch_with_timeout, task, rollouts, grace_s))
    for each, own in zip(attempts, lines, strict=True):
        each.trajectory.awaits_score = False
        failed = [problem for _ in own if (problem := next(problems)) is not None]
        if failed:
            each.trajectory.errors.append(str(failed[0]))
            _note_score_error(each.trajectory, task, each.item, failed[0])
        else:
            _merge_lines(each.trajectory, own)


def _note_score_error(trajectory: Trajectory, task: Task, item: Item, error: RamifyError) -> None:
    """Store in a trajectory the reason why it could not be scored."""
    text = str(error)
    for named in (f"task '{task.name}', item {item.id}: ", f"task '{task.name}': "):
        text = text.removeprefix(named)
    trajectory.score_error = text


class _Line(NamedTuple):
    """One path through an attempt and its forks, from the start to one end.

    An attempt has several paths if its session was forked.
    """

    end: Call | None
    """Last call of the path; None if the trajectory has no forks."""
    share: float
    trajectory: Trajectory


def _scored_paths(trajectory: Trajectory, every_line: bool) -> list[_Line]:
    """Return the paths through an attempt and its forks that are scored separately.

    If the attempt has forked and ``every_line`` is true, there is one path for each end. Otherwise,
    the whole trajectory is the only path.
    """
    ends = list(first_segment(trajectory).path_ends()) if every_line and trajectory.calls else []
    if len(ends) < 2:
        return [_Line(None, 1.0, trajectory)]
    return [_Line(end, share, path_trajectory(trajectory, end)) for end, share in ends]


def _merge_lines(trajectory: Trajectory, lines: Sequence[_Line]) -> None:
    """Combine the scores of a forked attempt's paths into the scores of its trajectory.

    Each is the average over the paths, weighted by each path's share of the attempt.
    """
    of_children: dict[str, dict[str, list[float]]] = {}
    for end, share, line in lines:
        if end is None:
            return
        trajectory.call_rewards[end.id] = line.rewards
        for sums, values in (
            (trajectory.rewards, line.rewards),
            (trajectory.metrics, line.metrics),
        ):
            for reward, value in values.items():
                sums[reward] = sums.get(reward, 0.0) + share * value
        for call, rewards in line.call_rewards.items():
            if call != trajectory.root.id:
                for reward, value in rewards.items():
                    of_children.setdefault(call, {}).setdefault(reward, []).append(value)
    # A call before a fork is in several lines, which may score it differently.
    for call, by_name in of_children.items():
        trajectory.call_rewards[call] = {name: fmean(each) for name, each in by_name.items()}


def _not_asked(name: str, item: Item, why: str) -> Trajectory:
    return Trajectory(name, item.question, task=item.id, errors=[why], stop=Stop.ERROR)


def _scored_0(name: str, item: Item, why: str) -> Trajectory:
    """Return the trajectory of an attempt that never called the model and counts as a wrong
    answer."""
    return Trajectory(
        name,
        item.question,
        task=item.id,
        rewards={"correct": 0.0},
        stop=Stop.ERROR,
        cost=0.0,
        metadata={UNANSWERED: why},
    )


def _check_forkable(start: RolloutInitialState) -> None:
    """Raise ConfigError if the task keeps state outside the session, which a fork would not
    copy."""
    if start.on_end is not None or start.conduct is not None:
        raise ConfigError(
            "it keeps state outside the session (RolloutInitialState.on_end or conduct), which "
            "forks do not copy: set rl.rollout.branch=null and choose an estimator without forks"
        )


MAX_GOLD = 2_000
"""Maximum characters of an expected answer that is stored with a run."""


def _gold(item: Item) -> dict[str, str]:
    """Return the expected answer as text, to be stored with the run for people who read it later.

    Empty if the item has no expected answer.
    """
    gold = item.gold if item.right is None else item.right
    text = as_text(gold)
    if len(text) > MAX_GOLD:
        text = text[: MAX_GOLD - 1] + "…"
    return {} if gold is None else {"gold": text}


async def check_task_start(task: Task, item: Item, grace_s: float = GRACE_S) -> None:
    """Check that the task can begin an attempt, by preparing one and ending it at once without
    calling a model.

    Raises RamifyError, which names the task and the item, if the task's own code fails.
    """
    start = await _in_time(lambda: task.prepare(item), task, item, "prepare", grace_s)
    if start.on_end is not None:
        await _in_time(
            functools.partial(run_in_daemon_thread, start.on_end, None),
            task,
            item,
            "on_end",
            grace_s,
        )


RootKind = Literal["session", "plain call", "conversations"]


async def choose_root_kind(
    rlm: RLM, task: Task, item: Item, *, direct: bool = False, grace_s: float = GRACE_S
) -> RootKind:
    """Return how an attempt starts: in a session, as a plain call, or in the task's own code.

    A plain call is possible only if ``direct`` is true. If the item cannot be prepared, the result
    is a session, and the attempts themselves will report the reason.
    """
    try:
        start = await _in_time(lambda: task.prepare(item), task, item, "prepare", grace_s)
        try:
            if start.conduct is not None:
                return "conversations"
            is_plain = direct and await rlm.is_direct(start, item.question)
            return "plain call" if is_plain else "session"
        finally:
            if start.on_end is not None:
                end = functools.partial(run_in_daemon_thread, start.on_end, None)
                await _in_time(end, task, item, "on_end", grace_s)
    except RamifyError:
        return "session"


async def _in_time(
    work: Callable[[], Awaitable[Any]], task: Task, item: Item, what: str, grace_s: float
) -> Any:
    """Run a callback of the task with a timeout and return its result.

    Raises RamifyError, which names the task and the item, if the code fails or takes too long.
    """
    where = f"task '{task.name}', item {item.id}: its {what}"
    try:
        async with asyncio.timeout(grace_s):
            return await work()
    except TimeoutError:
        raise RamifyError(f"{where} took more than {grace_s:g} s") from None
    except RamifyError:
        raise
    except Exception as error:
        raise RamifyError(f"{where} raised {error!r}{user_line_of_error(error)}") from error


async def _run(
    name: str,
    begin: Callable[[], RunHandle],
    grace_s: float,
    on_start: Callable[[str], object] | None = None,
) -> tuple[Trajectory, Result | str]:
    """Start a run and wait until it ends or times out.

    Return its trajectory with its result, or with the reason why the result is missing.
    """
    running = begin()
    if on_start is not None and running.recorder.is_stored:
        on_start(running.id)
    ending = asyncio.ensure_future(running.result())
    max_seconds = running.max_seconds
    try:
        await asyncio.wait([ending], timeout=max_seconds + grace_s)
        if ending.done():
            return ending.result().trajectory, ending.result()
        _log.warning(
            "stall",
            f"{name} (run {running.id}) did not end in time; tasks wait at:\n{_stacks()}",
            shown=True,
            attempt=name,
            attempt_run=running.id,
        )
        return (
            running.recorder.trajectory,
            f"it did not end within {max_seconds:g} s and was cancelled",
        )
    except RamifyError as error:  # before it started: no session or no model
        return running.recorder.trajectory, str(error)
    except asyncio.CancelledError as error:
        if not ending.cancelled():
            raise
        # Nothing here cancelled it. This attempt is lost, and not the others.
        place = "".join(traceback.format_tb(error.__traceback__)[-3:])
        _log.error(
            "stray_cancellation",
            f"{name} (run {running.id}) was cancelled from within, at:\n{place}",
            shown=True,
            attempt=name,
            attempt_run=running.id,
        )
        return running.recorder.trajectory, "it was cancelled from within (a bug; see the log)"
    finally:
        running.cancel()
        await asyncio.wait([ending], timeout=grace_s)


async def _continue_run(
    rlm: RLM,
    run: str,
    name: str,
    start: RolloutInitialState,
    options: Mapping[str, Any],
    grace_s: float,
) -> tuple[Trajectory, Result | str] | None:
    """Continue the stored run of an interrupted attempt.

    Return None if it cannot be continued and the attempt must be made again.
    """
    try:
        result = rlm.recorded(run)
        has_more = (
            options["limits"] is not None and result is not None and result.stop is Stop.MAX_COST
        )
        if result is not None and not has_more:
            return result.trajectory, result
        begin = functools.partial(rlm.restart, run, prompt=start, **options)
        trajectory, outcome = await _run(name, begin, grace_s)
        failure = outcome.failure if isinstance(outcome, Result) else None
        if not isinstance(failure, ReplayDiverged):
            return trajectory, outcome
        problem = str(failure)
    except RamifyError as error:
        problem = str(error)
    _log.warning("attempt_again", f"{name} is made again: {problem}", attempt_run=run)
    return None


def _no_answer_reason(result: Result | str) -> str:
    """Return a short reason for a missing answer that the model caused, such as a filtered reply.

    The other causes are a session that died and a prompt that does not fit the window. Empty in all
    other cases.
    """
    match None if isinstance(result, str) else result.failure:
        case SessionDied():
            return "session died"
        case ReplyFiltered():
            return "reply filtered"
        case RequestRefusedError(too_long=True):
            return DOES_NOT_FIT
    return ""


def _failure(result: Result | str) -> str | None:
    """Return the reason why an attempt's result cannot be scored, or None if it can be."""
    if isinstance(result, str):
        return result
    if result.stop not in (Stop.ERROR, Stop.SUSPENDED) or _no_answer_reason(result):
        return None
    return result.error or "it ended in an unknown error"


def _stacks() -> str:
    """Describe where the asyncio tasks of this event loop are waiting, for the log.

    Each place is listed with its number of tasks, most frequent first.
    """
    places = Counter(" > ".join(_frames(task.get_coro())) for task in asyncio.all_tasks())
    return "\n".join(f"{count} x {place}" for place, count in places.most_common())


def _frames(waiting: Any) -> Iterator[str]:
    """Yield the file, line and function of each coroutine in a chain of suspended awaits."""
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        waiting = waiting.cr_await
