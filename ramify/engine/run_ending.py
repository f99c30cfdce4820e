"""Decide when and how a run ends: at its deadline, early on request, or by suspension.

``RunStopper.end_work_early`` ends work early, at the deadline or on the user's request: requests in
flight are cancelled and charged as possibly billed, running cells are interrupted, and only final
requests ("last words") are still sent.

``RunStopper.suspend`` ends a run that a person must help: nothing more is sent, the replies on
their way are recorded, and then the run's task is cancelled.

Limits on tokens, calls and dollars are enforced by ``limits.py``. The end of each call is recorded
by ``shared_run_state.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Set
from typing import Any, NoReturn

from ramify.engine.event_loop_thread import innermost_await
from ramify.engine.event_recorder import EventRecorder
from ramify.engine.limits import Limits
from ramify.errors import EventLoopBlockedError, LimitReached, RamifyError
from ramify.sandbox.base import Session
from ramify.types.trajectory import Stop

_CUT = "cut by close_in"
_SUSPENDED = "suspended"
_LEAST_LAST_WORD_S = 5.0
"""Minimum seconds kept for the final reply, even if the model answers at once."""
_REPLIES_KEPT = 2.0
"""Time kept for the final reply, as a multiple of the slowest reply so far."""


class RunStopper:
    """Ends a run by its deadline, or earlier if it is asked to finish or is suspended.

    The run is the asyncio task that creates this object. All methods must be called on its event
    loop.
    """

    def __init__(self, limits: Limits, recorder: EventRecorder, unrecorded: Set[object]) -> None:
        """Create a stopper for the run of the current asyncio task.

        ``unrecorded`` is the set of requests that may have been sent and whose outcome is not
        recorded yet; it changes during the run. A run that is being suspended waits until the set
        is empty.
        """
        self.closing: Stop | None = None
        """Why the run is ending early; None if it is not."""
        self.suspension: RamifyError | None = None
        """Why the run is being suspended; None if it is not."""
        self.last_word_s = limits.last_word_s
        """Seconds before the deadline that are kept for the root's final reply."""
        self._limits = limits
        self._recorder = recorder
        self._unrecorded = unrecorded
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._deadline = self._loop.time() + limits.max_seconds
        self._alarm: asyncio.TimerHandle | None = None
        self._slowest_s = 0.0
        """Longest time, in seconds, that the root's model has taken to reply so far."""
        self._in_flight: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a model's reply, except those of final requests."""
        self._sessions: set[Session] = set()
        recorder.on_trouble = self.suspend

    def schedule_early_end(self) -> None:
        """Schedule the end of the run early enough that the root call can still give a final
        answer."""
        when = self._deadline - self.last_word_s
        self._alarm = self._loop.call_at(when, self.end_work_early, Stop.DEADLINE)

    def cancel_timer(self) -> None:
        """Cancel the timer of the run, because the run has finished."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._main = None

    def seconds_left(self) -> float:
        """Return the number of seconds until the deadline."""
        return self._deadline - self._loop.time()

    def record_reply_time(self, seconds: float) -> None:
        """Adjust the time reserved for the root's final reply to its model's slowest reply so far.

        ``seconds`` is the duration of the latest reply. Before the first reply, a tenth of the
        run's time is kept.
        """
        if seconds <= self._slowest_s:
            return
        self._slowest_s = seconds
        least = min(self._limits.last_word_s, _LEAST_LAST_WORD_S)
        last_word_s = min(max(least, _REPLIES_KEPT * seconds), self._limits.max_seconds / 2)
        if last_word_s == self.last_word_s:
            return
        self.last_word_s = last_word_s
        if self.closing is None and self._main is not None and self._alarm is not None:
            self._alarm.cancel()
            self.schedule_early_end()

    # --- ending early -----------------------------------------------------------------------------

    def end_work_early(self, stop: Stop) -> None:
        """End all work now: cancel requests in flight and interrupt running code.

        Time remains for the root call to give a final answer. ``stop`` is the reason.
        """
        if self.closing is not None:
            return
        self.closing = stop
        for task in self._in_flight:
            task.cancel(_CUT)
        for session in self._sessions:
            session.interrupt(str(stop))

    def register_session(self, session: Session) -> None:
        """Register ``session``, so that its code is interrupted when the run ends early."""
        self._sessions.add(session)

    def unregister_session(self, session: Session) -> None:
        """Unregister ``session``, so that its code is no longer interrupted when the run ends
        early."""
        self._sessions.discard(session)

    @contextlib.asynccontextmanager
    async def cancel_when_run_ends(self) -> AsyncIterator[None]:
        """In an ``async with`` block, raise LimitReached as soon as the run ends early.

        It sets no timer, because thousands of tasks may wait in this way.
        """
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        self._in_flight.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Only our own cancellation becomes LimitReached: the caller may cancel the task too.
            if self.closing is not None and task.uncancel() <= cancels:
                raise closing_error(self.closing) from None
            raise
        finally:
            self._in_flight.discard(task)

    @contextlib.asynccontextmanager
    async def deadline_scope(self) -> AsyncIterator[None]:
        """Limit an ``async with`` block to the run's deadline, at which LimitReached is raised.

        The final request is then cancelled.
        """
        try:
            async with asyncio.timeout_at(self._deadline) as scope:
                yield
        except TimeoutError:
            # A TimeoutError from inside the block is not the deadline.
            if not scope.expired():
                raise
            raise closing_error(Stop.DEADLINE) from None

    # --- suspending -------------------------------------------------------------------------------

    def suspend(self, error: RamifyError) -> None:
        """Suspend the run because of ``error``, and cancel it once pending replies are recorded.

        No further requests are sent.
        """
        self.suspension = self.suspension or error
        self.finish_suspension_if_idle()

    def finish_suspension_if_idle(self) -> None:
        """Cancel the run if it is being suspended and no more replies are expected."""
        if self.suspension is not None and not self._unrecorded:
            # Later, because a task that cancels itself as it ends would end cancelled.
            asyncio.get_running_loop().call_soon(self._cancel_main)

    async def suspend_and_wait(self, error: RamifyError) -> NoReturn:
        """Suspend the run because of ``error``, and wait until the current task is cancelled.

        Session code that is waiting for a reply therefore never sees the error.
        """
        self.suspend(error)
        await asyncio.Future()
        raise AssertionError

    def cancel_overdue_run(self, error: RamifyError | None = None) -> None:
        """Cancel a run that has not ended by its deadline.

        ``error`` is given if the event loop was blocked. Otherwise, a new error says what the run
        is waiting for.
        """
        main, stall_s = self._main, self._limits.stall_s
        if main is not None and error is None:
            error = EventLoopBlockedError(
                f"the run did not end within {stall_s:g} s of its deadline; it waits at "
                f"{innermost_await(main)}",
                self._recorder.id if self._recorder.is_stored else "",
            )
        self.suspension = self.suspension or error
        self._cancel_main()

    def _cancel_main(self) -> None:
        main, self._main = self._main, None
        if main is not None:
            main.cancel(_SUSPENDED)


def closing_error(stop: Stop) -> LimitReached:
    """Create the LimitReached error for a request that is cut off because the run ends early.

    Such a request is refused or cancelled. ``stop`` is the reason why the run ends.
    """
    why = {Stop.DEADLINE: "the run's time is up", Stop.CANCELLED: "the run was asked to finish"}
    return LimitReached(why.get(stop, f"the run is closing ({stop})"), stop)
