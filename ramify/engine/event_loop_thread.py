"""Manage the engine's threads: the event loop of the synchronous API, and the watchdog of runs.

One runs the event loop of the synchronous API, and each call of a user's function gets another. A
watchdog ends runs whose event loop is blocked past their deadline.

The event loop runs in one thread for the whole process, so the synchronous API also works where the
caller has a running loop (a notebook). Ctrl-C cancels the work that the caller waits for. If that
work blocks the loop past its deadline, the caller gets the error and later work gets another loop.

    run starts ── watch ──> watchdog: sleeps until the deadline, then posts a beat to the loop
      loop is blocked for ``stall_s``         ──> ``on_blocked``, in another thread
      loop advances, but the run does not end ──> ``on_overdue``, on the loop, which cancels it
      nor then, for another ``stall_s``       ──> ``on_blocked``

A blocked loop cannot do this itself, because its timers are blocked too. One watchdog serves all
loops of the process and sleeps until the first deadline. Time in which the whole process was
stopped does not count. How a run is then ended is decided in ``run_handle.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar, cast

from ramify.errors import ConfigError, EventLoopBlockedError
from ramify.logging import calling_line, warnings_at_line

on_blocked: ContextVar[Callable[[EventLoopBlockedError], object] | None] = ContextVar(
    "on_blocked", default=None
)
"""Callback for a run that was ended because its event loop is blocked. It is called in another
thread with the error. It releases the waiting caller, or ends the process."""
_LOOKS = 4
"""Minimum number of checks of the event loop within ``stall_s`` seconds."""
_STANDARD = os.path.dirname(os.__file__) + os.sep


class RunStallWatch:
    """One run that the watchdog thread observes.

    It detects that the run's event loop is blocked, or that the run has not ended by its deadline.
    """

    def __init__(
        self,
        deadline_s: float,
        stall_s: float,
        on_blocked: Callable[[str], object],
        on_overdue: Callable[[], object],
    ) -> None:
        """Start to watch the run on the current event loop, which must end within ``deadline_s``
        seconds.

        ``on_blocked`` is called with the source line at which the event loop is blocked, or with an
        empty string if the loop still advances.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._stall_s = stall_s
        self._on_blocked = on_blocked
        self._on_overdue = on_overdue
        self._looked_s = self.due_s = time.monotonic() + deadline_s
        """Times of the last check and of the next one, in seconds of ``time.monotonic``. Both are
        initially the run's deadline."""
        self._is_alive = True
        """True if the event loop has answered the last message of the watchdog thread."""
        self._past_s = self._blocked_s = 0.0
        """Seconds by which the run has exceeded its deadline, and seconds for which the event loop
        has been blocked since then."""
        self._is_reported = False
        _watchdog.add(self)

    def end(self) -> None:
        """Stop watching the run, because it has ended."""
        _watchdog.remove(self)

    def check_liveness(self) -> None:
        """Check that the run's event loop still responds and that the run is not overdue.

        The watchdog thread calls this when the check is due.
        """
        now, step_s = time.monotonic(), min(1.0, self._stall_s / _LOOKS)
        # A process that was stopped sees one long step, in which its loop could not answer either.
        passed_s, self._looked_s = min(now - self._looked_s, 2 * step_s), now
        self.due_s = now + step_s
        self._past_s += passed_s
        self._blocked_s = 0.0 if self._is_alive else self._blocked_s + passed_s
        is_blocked = self._blocked_s >= self._stall_s
        if is_blocked or (self._past_s >= 2 * self._stall_s + step_s and self._is_reported):
            _watchdog.remove(self)
            place = _describe_frame(sys._current_frames().get(self._thread)) if is_blocked else ""
            threading.Thread(target=self._on_blocked, args=(place,), daemon=True).start()
        elif self._is_alive:
            self._beat()

    def _beat(self) -> None:
        is_overdue = self._past_s >= self._stall_s and not self._is_reported
        self._is_alive, self._is_reported = False, self._is_reported or is_overdue
        try:
            self._loop.call_soon_threadsafe(self._mark_alive, is_overdue)
        except RuntimeError:  # the loop is closed
            _watchdog.remove(self)

    def _mark_alive(self, is_overdue: bool) -> None:
        self._is_alive = True
        if is_overdue:
            self._on_overdue()


class _Watchdog:
    """Checks all watched runs of this process from one background thread.

    Each run is checked at its own time. The thread starts when the first run is added.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[RunStallWatch] = set()
        self._thread: threading.Thread | None = None
        self._wakes_s = 0.0

    def add(self, watch: RunStallWatch) -> None:
        with self._changed:
            self._watched.add(watch)
            if self._thread is None or not self._thread.is_alive():  # none survives a fork
                self._thread = threading.Thread(
                    target=self._work, name="ramify watchdog", daemon=True
                )
                self._thread.start()
            elif watch.due_s < self._wakes_s:
                self._changed.notify()

    def remove(self, watch: RunStallWatch) -> None:
        with self._changed:
            self._watched.discard(watch)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._wakes_s = min((watch.due_s for watch in self._watched), default=float("inf"))
                wait_s = self._wakes_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                due = [watch for watch in self._watched if watch.due_s <= time.monotonic()]
            for watch in due:
                watch.check_liveness()


_watchdog = _Watchdog()


def _describe_frame(frame: FrameType | None) -> str:
    """Describe the line that a thread is executing, for an error message.

    The innermost caller outside the standard library is named, too.
    """
    if frame is None:
        return "a thread that has ended"
    frames = traceback.extract_stack(frame)
    own = [each for each in frames if not each.filename.startswith(("<", _STANDARD))]
    places = [f"{each.filename}:{each.lineno} in {each.name}" for each in (frames[-1], *own[-1:])]
    return ", called from ".join(dict.fromkeys(places))


def innermost_await(task: asyncio.Task[Any]) -> str:
    """Return the file, line and function at which ``task`` is currently waiting.

    They are those of the innermost coroutine.
    """
    place: str = "its end"
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        waiting = waiting.cr_await
    return place


T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _discard_loop() -> None:
    """Discard the synchronous API's event loop in a forked child, such as a ``multiprocessing``
    worker.

    The loop's thread does not exist there, so the next call starts another loop.
    """
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_discard_loop)


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the synchronous API.

    The first call starts it in a background thread.
    """
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ramify", daemon=True).start()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine ``work`` on the background event loop, wait for it, and return its result.

    If the wait is interrupted, ``work`` is cancelled. Raises EventLoopBlockedError if ``work``
    blocks the loop past its deadline.
    """
    if _is_here():
        work.close()
        raise ConfigError(
            "a callback on the event loop cannot make a blocking call: use the async form, or a "
            "thread"
        )
    used, answer = background_loop(), Future[T]()

    def release(error: EventLoopBlockedError) -> None:
        _abandon(used)
        _settle(answer, None, error)

    # A blocked loop never completes its own future, so the caller waits for a second one.
    with warnings_at_line(calling_line()):
        context = contextvars.copy_context()
    context.run(on_blocked.set, release)
    future = context.run(asyncio.run_coroutine_threadsafe, work, used)
    future.add_done_callback(lambda done: _copy(done, answer))
    try:
        return answer.result()
    except BaseException:
        future.cancel()
        raise


def _copy(done: Future[T], answer: Future[T]) -> None:
    if done.cancelled():
        _settle(answer, None, CancelledError())
    else:
        error = done.exception()
        _settle(answer, None if error else done.result(), error)


def _settle(answer: Future[T], value: T | None, error: BaseException | None) -> None:
    """Set the result or the exception of the future ``answer``, unless it already has one."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("T", value))


def _abandon(blocked: asyncio.AbstractEventLoop) -> None:
    """Abandon the event loop of the synchronous API, because it is blocked.

    Its thread continues to run, but later work gets a new loop.
    """
    global _loop
    with _lock:
        if _loop is blocked:
            _loop = None


def spawn(work: Coroutine[Any, Any, object], on: asyncio.AbstractEventLoop | None = None) -> None:
    """Schedule the coroutine ``work`` on an event loop without waiting for it.

    The loop is ``on`` if given, otherwise the loop of the synchronous API. If that loop does not
    exist, ``work`` is discarded.

    This is meant for finalizers: the garbage collector may call one at any line, even in the loop's
    own thread, where waiting would deadlock.
    """
    # Without the lock, which this thread may hold when the garbage collector interrupts it.
    used = on or _loop
    if used is None or used.is_closed():
        work.close()
    else:
        asyncio.run_coroutine_threadsafe(work, used)


class SyncLoopResources:
    """Keeps resources open on the event loop between calls of the synchronous API.

    If the loop is blocked by a call, the next call opens the resources again on a new loop.
    """

    def __init__(
        self, pin: Callable[[], object], unpin: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        """Store the functions that open (``pin``) and close (``unpin``) the event loop's resources.

        Both functions are called on the event loop.
        """
        self._pin = pin
        self._unpin = unpin
        self._pinned: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the event loop of the synchronous API, and return its result.

        The resources are opened first if they are not yet open on this loop.
        """
        if self._pinned is not _loop or _loop is None:
            try:
                run(self._open())
            except BaseException:
                work.close()
                raise
        return run(work)

    async def _open(self) -> None:
        self._pin()
        self._pinned = asyncio.get_running_loop()

    def close(self, *, waits: bool = True) -> bool:
        """Close the resources kept open between calls, and return True if they were open.

        If ``waits`` is False or the loop is blocked, they are closed in the background.
        """
        pinned, self._pinned = self._pinned, None
        if pinned is not None and pinned is _loop and waits:
            run(self._unpin())
        elif pinned is not None:
            spawn(self._unpin(), pinned)
        return pinned is not None


def _is_here() -> bool:
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


async def run_in_daemon_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Run a user's function in a separate thread that is never joined, and return its result.

    If the function never returns, it blocks only its caller, not the event loop's thread pool or
    the end of the process. If the wait is cancelled, the result is discarded.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(
                RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            )

    def target() -> None:
        value, error = None, None
        try:
            value = context.run(work, *args)
        except BaseException as raised:  # noqa: BLE001 -- raised again by the waiting caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is waiting
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(
        target=target, daemon=True, name=f"ramify {getattr(work, '__name__', 'task')}"
    ).start()
    return await done
